"""The table of planners: which planner a recipe gets, and the interface of all planners."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from torchmm.balance.pipeweaver.measuring import MeasuringPlanner
from torchmm.planning.planner import Planner
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.schedules import SCHEDULES
from torchmm.training.planners.single import SinglePlanner
from torchmm.training.planners.static import StaticPlanner
from torchmm.training.planners.table import PLANNERS, find_planner

CLASSES = {"single": SinglePlanner, "measuring": MeasuringPlanner, "static": StaticPlanner}
METHODS = ("plan", "plan_ahead", "learn", "close")


@pytest.mark.parametrize("schedule", [*SCHEDULES, "csv:order.csv"])
def test_planner_follows_schedule_ranks_and_drift(schedule):
    # model_construct skips the checks of whole recipes: only these two keys matter.
    config = ParallelConfig.model_construct(schedule=schedule, replan_drift=0.0)
    drift = ParallelConfig.model_construct(schedule=schedule, replan_drift=0.1)
    is_searched = schedule in ("searched", "optimus")
    assert find_planner(config, 1) == find_planner(drift, 1) == "single"
    assert find_planner(config, 2) == ("measuring" if is_searched else "static")
    assert find_planner(drift, 2) == "measuring"


@pytest.mark.parametrize("name", PLANNERS)
def test_table_factory_returns_planner(name):
    module, factory = PLANNERS[name].factory.split(":")
    planner = CLASSES[name]
    signature = inspect.signature(getattr(import_module(module), factory))
    assert list(signature.parameters) == ["run", "pipeline", "mesh", "logger"]
    assert signature.return_annotation == planner.__name__
    for method in METHODS:
        expected = inspect.signature(getattr(Planner, method)).parameters
        assert list(inspect.signature(getattr(planner, method)).parameters) == list(expected)
