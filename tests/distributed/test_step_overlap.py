"""Order of host work in a training step: it runs before the step waits for its device."""

from itertools import pairwise
from types import ModuleType

import pytest
from launch import run_distributed
from tiny_recipe import records, tiny_recipe, weights

from torchmm.recipe.recipe import Recipe
from torchmm.training import trainer
from torchmm.training.metrics import StepMeter
from torchmm.training.pipeline import Pipeline
from torchmm.training.planners.single import SinglePlanner
from torchmm.training.run import train
from torchmm.training.step import TrainStep

pytestmark = pytest.mark.slow
STEPS = 4


def log_calls(owner: type | ModuleType, method: str, log: list[str]) -> None:
    """Append the name of the function to the log whenever it returns."""
    original = getattr(owner, method)

    def logged(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        log.append(method)
        return result

    setattr(owner, method, logged)


def check_order(recipe: Recipe) -> None:
    log: list[str] = []
    for owner, method in (
        (TrainStep, "run"),
        (StepMeter, "count"),
        (Pipeline, "plan"),
        (trainer, "check_losses"),
    ):
        log_calls(owner, method, log)
    train(recipe)
    expected = ["plan", *["run", "count", "plan", "check_losses"] * STEPS]
    # Planning ahead requires that the loader has planned the next step. It may be late.
    late = [name for name in log if name != "plan"]
    assert late == [name for name in expected if name != "plan"]
    before_check = sum(a == "plan" and b == "check_losses" for a, b in pairwise(log))
    assert before_check >= STEPS - 1, log


def plan_late(recipe: Recipe) -> None:
    SinglePlanner.plan_ahead = lambda self, upcoming: None
    train(recipe)


def plan_other_steps_ahead(recipe: Recipe) -> None:
    """Announce the microbatches of the next step in another order."""
    original = SinglePlanner.plan_ahead

    def plan_ahead(self, upcoming):
        def reversed_metas():
            replicas = upcoming()
            return replicas and [list(metas)[::-1] for metas in replicas]

        original(self, reversed_metas)

    SinglePlanner.plan_ahead = plan_ahead
    train(recipe)


def test_step_counts_and_plans_before_it_waits(tmp_path, real_data):
    recipe = tiny_recipe(tmp_path / "run", real_data, training__steps=STEPS, data__workers=1)
    run_distributed(check_order, 1, recipe)


def test_planning_ahead_keeps_losses_and_weights(tmp_path, real_data):
    by_change = {}
    for change in (train_only, plan_late, plan_other_steps_ahead):
        run_dir = tmp_path / change.__name__
        recipe = tiny_recipe(
            run_dir, real_data, training__steps=STEPS, data__workers=1, checkpoint__interval=STEPS
        )
        run_distributed(change, 1, recipe)
        metrics = [(r["loss"], r["grad_norm"]) for r in records(run_dir)]
        by_change[change] = metrics, weights(run_dir)
    expected, saved = by_change[train_only]
    assert len(expected) == STEPS
    for metrics, other in by_change.values():
        assert metrics == expected
        assert other.keys() == saved.keys()
        assert all(other[name].equal(tensor) for name, tensor in saved.items())


def train_only(recipe: Recipe) -> None:
    train(recipe)
