"""Entries of the extension in the tables of the core: keys, checks and hooks."""

from types import SimpleNamespace

import pytest

from torchmm.common.extensions import find_entries
from torchmm.extensions.evaluation.benchmark_hook import BenchmarkHook
from torchmm.extensions.evaluation.sample_hook import SampleHook
from torchmm.extensions.evaluation.section import BenchmarksConfig
from torchmm.recipe import check_model
from torchmm.recipe.check import find_problems
from torchmm.recipe.recipe import Recipe
from torchmm.training.hooks.registry import HOOKS, order_hooks


def used_hooks(validation: dict) -> dict[str, object]:
    """Return the hooks of a run in order."""
    run = SimpleNamespace(recipe=Recipe.model_validate({"validation": validation}))
    entries = order_hooks(HOOKS, find_entries("hooks"))
    return {entry.name: entry.load() for entry in entries if entry.is_used(run)}


@pytest.mark.parametrize("key", ["num_samples", "generated_images"])
def test_samples_are_generated_before_recording(key):
    hooks = used_hooks({"interval": 2, key: 1})
    assert hooks["generated_samples"] is SampleHook
    names = list(hooks)
    assert names.index("validation") < names.index("generated_samples") < names.index("recording")


@pytest.mark.parametrize("validation", [{"interval": 2}, {"num_samples": 1}])
def test_unused_hooks_are_not_built(validation):
    assert not {"generated_samples", "benchmarks"} & set(used_hooks(validation))


def test_benchmarks_run_after_checkpoints():
    hooks = used_hooks({"benchmarks": {"interval": 2}})
    assert hooks["benchmarks"] is BenchmarkHook
    assert list(hooks)[-1] == "benchmarks"


def test_scores_are_recorded_once_they_are_available():
    hook = BenchmarkHook.__new__(BenchmarkHook)
    evaluations = iter([None, SimpleNamespace(scores={"mmmu": 0.25})])
    hook._processes = SimpleNamespace(poll=lambda: next(evaluations))
    assert hook._pop_scores() == {}
    assert hook._pop_scores() == {"scores": {"mmmu": 0.25}}


def test_benchmarks_without_tasks_are_rejected():
    recipe = Recipe.model_validate({"validation": {"benchmarks": {"interval": 2, "python": "no"}}})
    assert BenchmarksConfig.from_parent(recipe.validation).interval == 2
    keys = {problem.key for problem in find_problems(recipe, None)}
    assert {"validation.benchmarks.interval", "validation.benchmarks.python"} <= keys


def test_samples_without_extension_are_rejected(monkeypatch):
    monkeypatch.setattr(check_model, "find_entry", lambda table, name: None)
    recipe = Recipe.model_validate({"validation": {"interval": 2, "num_samples": 3}})
    problems = {problem.key: str(problem) for problem in find_problems(recipe, None)}
    assert 'the extension "evaluation" is not installed' in problems["validation.num_samples"]
