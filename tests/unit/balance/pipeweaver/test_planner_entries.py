"""Tests of planner entry points of the extension: conditions and interface."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from torchmm.balance.optimus.llm_schedules import INTERLEAVED, SEARCHED
from torchmm.balance.pipeweaver import measuring_planner, planners
from torchmm.common.extensions import find_entries
from torchmm.planning.planner import Planner
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import SCHEDULES, LlmSchedule, Schedule
from torchmm.recipe.training_section import ActivationCheckpointConfig
from torchmm.training.planners.registry import find_planner

CLASSES = {
    "tuned": planners.TunedPlanner,
    "measuring": measuring_planner.MeasuringPlanner,
    "background": planners.BackgroundPlanner,
}
METHODS = ("plan", "plan_ahead", "observe_step", "close")
TUNED = ActivationCheckpointConfig(mode="auto")


def planner_name(recipe: Recipe, pipeline_size: int) -> str:
    return find_planner(ResolvedRecipe(recipe, 1, MeshSizes(1, 1, 1, 1), {}), pipeline_size).name


@pytest.mark.parametrize("schedule", [*SCHEDULES, "csv:order.csv"])
def test_planner_follows_schedule_drift_and_background(schedule):
    plain = Recipe(parallel=ParallelConfig(schedule=schedule))
    drift = Recipe(parallel=ParallelConfig(schedule=schedule, replan_threshold=0.1))
    synchronous = Recipe(parallel=ParallelConfig(schedule=schedule, search={"background": False}))
    is_searched = schedule in ("searched", "optimus")
    assert planner_name(plain, 1) == planner_name(drift, 1) == "single"
    assert planner_name(plain, 2) == ("measuring" if is_searched else "background")
    assert planner_name(drift, 2) == "measuring"
    assert planner_name(synchronous, 2) == ("measuring" if is_searched else "static")


def test_schedule_of_other_extension_is_not_searched(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "timed", Schedule("separated", planned=True))
    parallel = ParallelConfig().model_copy(update={"schedule": "timed"})
    assert planner_name(Recipe(parallel=parallel), 2) == "background"


def test_all_planned_schedules_have_entries():
    planned = {name for name, schedule in SCHEDULES.items() if schedule.planned}
    assert {entry.name for entry in find_entries("schedules")} == planned
    assert {INTERLEAVED, SEARCHED} <= set(get_args(LlmSchedule))


def test_tuned_layers_use_planners_of_extension():
    search = {"background": False}
    recipe = Recipe(parallel=ParallelConfig(search=search), activation_checkpoint=TUNED)
    assert planner_name(recipe, 1) == "tuned"
    assert planner_name(recipe, 2) == "background"


@pytest.mark.parametrize("entry", find_entries("planners"), ids=lambda entry: entry.name)
def test_entry_returns_planner(entry):
    planner = CLASSES[entry.name]
    signature = inspect.signature(entry.load())
    assert list(signature.parameters) == ["run", "pipeline", "mesh", "logger"]
    assert signature.return_annotation == planner.__name__
    for method in METHODS:
        expected = inspect.signature(getattr(Planner, method)).parameters
        assert list(inspect.signature(getattr(planner, method)).parameters) == list(expected)
