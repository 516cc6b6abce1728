"""Tests of step simulation with disaggregated modules."""

from pathlib import Path

import pytest
from recipe_problems import UNITS_MODEL

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.dry_run import describe_run
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.search.plan_search import compare_schedules
from torchmm.recipe.read import load_recipe
from torchmm.recipe.schedules import schedules_for

MODEL = (
    UNITS_MODEL
    + """\
[simulation]
device = "a100"
[simulation.images.vision]
patches = 196
tokens = 49
[[simulation.sequences]]
samples = 2
images = [1, 3]
[parallel]
placement = "disaggregated"
"""
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(MODEL)
    return file


def test_dry_run_shows_ranks_and_simulated_step(recipe) -> None:
    loaded = load_recipe(recipe, ["--parallel.vision.shard", "2", "--parallel.pipeline", "2"], 10)
    text = " ".join(describe_run(loaded.recipe, 10).split())
    assert "10 = 2 for vision + 8 for llm" in text
    assert "ranks of llm pipeline 2 x shard 4" in text
    assert "2 with replicas: 1 of vision, 2 of llm" in text
    assert "first step" in text


def test_all_disaggregated_schedules_are_simulated(recipe) -> None:
    loaded = load_recipe(recipe, ["--parallel.vision.shard", "3"], 5)
    forecaster = StepSimulator(loaded.recipe, 5, load_profile("a100"))
    plans = compare_schedules(loaded.recipe, 5, forecaster.profile, forecaster.sample, budget_s=1.0)
    forecasts = [plan.report for plan in plans.values()]
    assert [forecast.schedule for forecast in forecasts] == list(schedules_for("disaggregated"))
    for forecast in forecasts:
        assert forecast.step is not None, forecast.problem
        assert len(forecast.step.peak_bytes) == 5
        assert 0 < forecast.mfu < 1
