"""Tests of the choice of `data.reorder` and `data.balance` for "auto"."""

from pathlib import Path

import pytest

from torchmm.balance.costs.model import CostModel
from torchmm.balance.recipe_simulation.dry_run import describe_run
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.balance.run_costs import load_simulated_profile
from torchmm.balance.search.plan_space import CandidatePlan, apply_plan
from torchmm.balance.search.recipe_completion import complete_reordering
from torchmm.common.errors import ConfigError
from torchmm.planning.resolved_recipe import ResolvedRecipe, resolve_recipe
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

RECIPES = Path(__file__).parents[4] / "recipes"
VLM_S = RECIPES / "papers" / "pipeweaver_vlm_s.toml"
GPUS = 16
PLAIN = {
    "parallel.pipeline": 1, "parallel.tensor": 1, "parallel.replicate": 2, "parallel.shard": -1,
    "parallel.schedule": "1f1b", "parallel.gradient_reduction": "microbatch",
    "training.global_batch_size": 64, "activation_checkpoint.mode": "full",
}  # fmt: skip
EQUAL_IMAGES = "[{images = [8, 8]}]"


def read(**changes: object) -> Recipe:
    """Read the recipe of the paper without a pipeline and with changes ("__" denotes a dot)."""
    overrides = PLAIN | {name.replace("__", "."): value for name, value in changes.items()}
    return load_recipe(VLM_S, [f"--{key}={value}" for key, value in overrides.items()], GPUS).recipe


@pytest.fixture(scope="module")
def sample() -> StepSample:
    return StepSample(read())


def forecaster(recipe: Recipe, sample: StepSample | None = None) -> StepSimulator:
    return StepSimulator(recipe, GPUS, load_simulated_profile(recipe), sample=sample)


def chosen_values(run: ResolvedRecipe) -> tuple[str, str]:
    return run.recipe.data.reorder, run.recipe.data.balance


def test_auto_chooses_fastest_simulated_step(sample):
    simulator = forecaster(read(), sample)
    assert chosen_values(simulator.run)[1] == "images"
    times_ms = {
        (reorder, balance): forecaster(
            read(data__reorder=reorder, data__balance=balance), sample
        ).simulate_schedule().iteration_ms
        for reorder in ("none", "intra")
        for balance in ("none", "images")
    }  # fmt: skip
    chosen_ms = times_ms[chosen_values(simulator.run)]
    assert simulator.simulate_schedule().iteration_ms == chosen_ms == min(times_ms.values())
    without_ms = times_ms[simulator.run.recipe.data.reorder, "none"]
    text = f"images (simulated step with it {chosen_ms:,.1f} ms, without it {without_ms:,.1f} ms)"
    assert simulator.run.choices["data.balance"] == text
    # All ranks choose the same values, with the model that they have built.
    run = complete_reordering(resolve_recipe(read(), GPUS), sample.model)
    assert (chosen_values(run), run.choices) == (
        chosen_values(simulator.run),
        simulator.run.choices,
    )


def test_auto_keeps_equal_images():
    recipe = read(simulation__sequences=EQUAL_IMAGES)
    assert chosen_values(forecaster(recipe).run) == ("none", "none")
    fixed = forecaster(read(simulation__sequences=EQUAL_IMAGES, data__reorder="intra")).run
    assert chosen_values(fixed) == ("intra", "none")
    assert fixed.choices.keys() == {"data.balance"}


def test_auto_considers_exchange_time(sample, monkeypatch):
    monkeypatch.setattr(CostModel, "transfer_times_ms", lambda self, sent, links: [1e6] * len(sent))
    run = forecaster(read(parallel__replicate=1), sample).run
    assert chosen_values(run) == ("intra", "none")


@pytest.mark.parametrize(
    ("changes", "expected", "reason"),
    [
        ({"parallel.pipeline": 2}, ("none", "none"), "parallel.pipeline = 2 is not supported"),
        ({"parallel.llm.context": 2}, ("intra", "none"), "parallel.llm.context = 2"),
        ({"data.producers.addresses": "['localhost:7411']"}, ("intra", "none"), "producers"),
        ({"data.sources": "[{path='.', streaming=true}]"}, ("none", "none"), "streamed"),
        (
            {"parallel.replicate": 1, "parallel.shard": 1, "parallel.tensor": 16},
            ("none", "none"),
            "one data-parallel rank",
        ),
        ({"simulation.device": "missing.json"}, ("none", "none"), "no profile of"),
    ],
)
def test_auto_is_none_for_unsupported_recipes(sample, changes, expected, reason):
    overrides = [f"--{key}={value}" for key, value in (PLAIN | changes).items()]
    recipe = load_recipe(VLM_S, overrides).recipe
    run = complete_reordering(resolve_recipe(recipe, GPUS), sample.model)
    assert chosen_values(run) == expected
    assert reason in run.choices["data.balance"]


def test_auto_does_not_change_router_losses(sample, monkeypatch):
    recipe = read(training__microbatch_size=2)
    assert chosen_values(forecaster(recipe, sample).run)[0] == "intra"
    monkeypatch.setattr(sample.model.llm, "balance", object())
    run = forecaster(recipe, sample).run
    assert chosen_values(run)[0] == "none"
    assert "load-balancing loss" in run.choices["data.reorder"]
    assert chosen_values(forecaster(read(), sample).run)[0] == "intra"


def test_auto_requires_a_simulation(sample, monkeypatch):
    def fail(self: StepSimulator) -> None:
        raise ConfigError("data.sources: no sizes")

    monkeypatch.setattr(StepSimulator, "simulate_schedule", fail)
    run = complete_reordering(resolve_recipe(read(), GPUS), sample.model)
    assert chosen_values(run) == ("none", "none")
    assert "no simulation: data.sources: no sizes" in run.choices["data.balance"]


def test_dry_run_shows_the_choice():
    lines = describe_run(read(), GPUS).splitlines()
    [line] = [line for line in lines if line.startswith("data.balance")]
    assert "auto: images (simulated step with it" in line


def test_plan_search_compares_both_values(sample):
    recipe = read()
    plan = CandidatePlan("fsdp", GPUS, {"activation_checkpoint.mode": "full"})
    forecasts = {
        value: forecaster(
            apply_plan(recipe, plan.with_changes(data__balance=value, data__reorder="intra")),
            sample,
        ).simulate_schedule()
        for value in ("none", "images")
    }
    assert forecasts["images"].iteration_ms < 0.9 * forecasts["none"].iteration_ms
