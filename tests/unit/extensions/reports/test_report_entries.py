"""Entries of the extension in the tables of the core: keys, checks, hooks and trackers."""

import logging
import sys
from types import SimpleNamespace

import pytest

from torchmm.common.extensions import find_entries
from torchmm.recipe import check
from torchmm.recipe.check import find_problems
from torchmm.recipe.recipe import Recipe
from torchmm.training import run as run_module
from torchmm.training.hooks.registry import HOOKS, order_hooks
from torchmm.training.tracking.trackers import TrackedRun, start_trackers


def problems_of(metrics: dict) -> dict[str, str]:
    recipe = Recipe.model_validate({"metrics": metrics, "training": {"steps": 5}})
    return {problem.key: str(problem) for problem in find_problems(recipe, None)}


@pytest.mark.parametrize("key", ["timeline_step", "profile_step", "memory_snapshot_step"])
def test_diagnostics_hook_runs_first_if_used(key):
    for step in (0, 3):
        metrics = {"timeline_step": 0, key: step}
        run = SimpleNamespace(recipe=Recipe.model_validate({"metrics": metrics}))
        entries = order_hooks(HOOKS, find_entries("hooks"))
        names = [entry.name for entry in entries if entry.is_used(run)]
        assert ("diagnostics" in names) == (step > 0)
        assert not step or names[0] == "diagnostics"


def test_snapshot_after_last_step_is_rejected():
    assert (
        "is after the last step, training.steps = 5"
        in problems_of({"memory_snapshot_step": 6})["metrics.memory_snapshot_step"]
    )
    assert "metrics.memory_snapshot_step" not in problems_of({"memory_snapshot_step": 5})


def test_missing_tracker_packages_are_rejected(monkeypatch):
    for package in ("tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problems = problems_of({"tensorboard": True, "trackio": True})
    assert "TensorBoard is not installed" in problems["metrics.tensorboard"]
    assert "pip install trackio" in problems["metrics.trackio"]


def test_profile_without_extension_is_rejected(monkeypatch):
    monkeypatch.setattr(check, "find_entry", lambda table, name: None)
    assert (
        'the extension "reports" is not installed'
        in problems_of({"profile_step": 3})["metrics.profile_step"]
    )


@pytest.mark.parametrize("page", [True, False])
def test_html_report_is_written_during_and_after_run(page, tmp_path):
    recipe = Recipe.model_validate({"metrics": {"html_report": page}})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    run = TrackedRun(recipe.metrics, tmp_path, "run", {}, logging.getLogger("torchmm"), 0)
    for tracker in start_trackers(run):
        tracker.emit({"step": 1, "loss": 1.0})
        tracker.close()
    assert (tmp_path / "index.html").exists() == page
    (tmp_path / "index.html").unlink(missing_ok=True)
    calls = []
    directory = SimpleNamespace(
        path=tmp_path / "checkpoints",
        is_locked_by_this_run=lambda: True,
        release=lambda: calls.append((tmp_path / "index.html").exists()),
    )
    run_module._finish_run(recipe, directory, rank=0)
    assert calls == [page]
