"""The table of planners: the planner of a recipe, and the interface of all planners."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from torchmm.common.extensions import find_entries
from torchmm.planning.planner import Planner
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.recipe.check import find_problems
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import SCHEDULES
from torchmm.recipe.training_section import ActivationCheckpointConfig
from torchmm.training.planners import registry, single, static
from torchmm.training.planners.registry import PLANNERS, find_planner

CLASSES = {"single": single.SinglePlanner, "static": static.StaticPlanner}
METHODS = ("plan", "plan_ahead", "observe_step", "close")


def recipe_with(mode="none", **parallel) -> Recipe:
    checkpointing = ActivationCheckpointConfig(mode=mode)
    return Recipe(parallel=ParallelConfig(**parallel), activation_checkpoint=checkpointing)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if not SCHEDULES[name].planned])
def test_core_planner_follows_pipeline_size(schedule, monkeypatch):
    monkeypatch.setattr(registry, "find_entries", lambda table: ())
    run = ResolvedRecipe(recipe_with(schedule=schedule), 1, MeshSizes(1, 1, 1, 1), {})
    assert find_planner(run, 1).name == "single"
    assert find_planner(run, 2).name == "static"


@pytest.mark.parametrize("name", ["single", "static"])
def test_table_factory_returns_planner(name):
    entry = next(entry for entry in PLANNERS if entry.name == name)
    planner = CLASSES[name]
    signature = inspect.signature(entry.load())
    assert list(signature.parameters) == ["run", "pipeline", "mesh", "logger"]
    assert signature.return_annotation == planner.__name__
    for method in METHODS:
        expected = inspect.signature(getattr(Planner, method)).parameters
        assert list(inspect.signature(getattr(planner, method)).parameters) == list(expected)


class RecordingPipeline:
    """Pipeline that returns the number of the call as a plan."""

    calls = 0

    def plan(self, metas):
        self.calls += 1
        return self.calls


def test_single_planner_reuses_plan_of_equal_metadata():
    first, second = (SimpleNamespace(task_meta=name) for name in "ab")
    planner = single.SinglePlanner(RecordingPipeline(), data_parallel_rank=1)
    planner.plan_ahead(lambda: [["other rank"], ["a", "b"]])
    assert planner.plan(1, [first, second]).plan == 1
    assert planner.plan(2, [first, second]).plan == 2  # a plan is used once
    planner.plan_ahead(lambda: [["other rank"], ["b", "a"]])
    assert planner.plan(3, [first, second]).plan == 4  # a different order of microbatches
    planner.plan_ahead(lambda: None)
    assert planner.plan(4, [first]).plan == 5


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        (recipe_with(schedule="searched"), 'parallel.schedule = "searched"'),
        (recipe_with(schedule="optimus"), 'parallel.schedule = "optimus"'),
        (recipe_with(replan_threshold=0.1), "parallel.replan_threshold = 0.1"),
        (recipe_with(mode="auto"), 'activation_checkpoint.mode = "auto"'),
    ],
)
def test_missing_extension_is_reported(recipe, key, monkeypatch):
    message = f'{key}: the extension "balance" is not installed'
    installed = "\n".join(map(str, find_problems(recipe, 1)))
    assert message not in installed or not find_entries("planners")
    monkeypatch.setattr("torchmm.recipe.check.find_entry", lambda table, name: None)
    assert message in "\n".join(map(str, find_problems(recipe, 1)))
