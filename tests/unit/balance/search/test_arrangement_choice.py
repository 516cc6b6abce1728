"""Values of `data.reorder` and `data.balance` that are chosen for "auto"."""

from pathlib import Path

import pytest

from torchmm.balance.costs.model import CostModel
from torchmm.balance.forecasts.dry_run import describe_run
from torchmm.balance.forecasts.forecast import Forecaster, StepSample
from torchmm.balance.run_costs import simulated_profile
from torchmm.balance.search.placement import with_arrangement
from torchmm.balance.search.space import Plan, planned_recipe
from torchmm.common.errors import ConfigError
from torchmm.planning.resolved import Resolved, resolve
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
ALIKE = "[{images = [8, 8]}]"


def read(**changes: object) -> Recipe:
    """The paper's recipe without a pipeline, and with further changes ("__" for a dot)."""
    given = PLAIN | {name.replace("__", "."): value for name, value in changes.items()}
    return load_recipe(VLM_S, [f"--{key}={value}" for key, value in given.items()], GPUS).recipe


@pytest.fixture(scope="module")
def sample() -> StepSample:
    return StepSample(read())


def forecaster(recipe: Recipe, sample: StepSample | None = None) -> Forecaster:
    return Forecaster(recipe, GPUS, simulated_profile(recipe), sample=sample)


def chosen(run: Resolved) -> tuple[str, str]:
    return run.recipe.data.reorder, run.recipe.data.balance


def test_auto_chooses_the_fastest_forecast(sample):
    found = forecaster(read(), sample)
    assert chosen(found.run)[1] == "images"
    times_ms = {
        (reorder, balance): forecaster(
            read(data__reorder=reorder, data__balance=balance), sample
        ).forecast().iteration_ms
        for reorder in ("none", "intra")
        for balance in ("none", "images")
    }  # fmt: skip
    own_ms = times_ms[chosen(found.run)]
    assert found.forecast().iteration_ms == own_ms == min(times_ms.values())
    without_ms = times_ms[found.run.recipe.data.reorder, "none"]
    text = f"images (simulated step with it {own_ms:,.1f} ms, without it {without_ms:,.1f} ms)"
    assert found.run.choices["data.balance"] == text
    # Any rank chooses the same, with the model that it has built.
    run = with_arrangement(resolve(read(), GPUS), sample.model)
    assert (chosen(run), run.choices) == (chosen(found.run), found.run.choices)


def test_auto_keeps_images_that_are_alike():
    recipe = read(simulation__sequences=ALIKE)
    assert chosen(forecaster(recipe).run) == ("none", "none")
    fixed = forecaster(read(simulation__sequences=ALIKE, data__reorder="intra")).run
    assert chosen(fixed) == ("intra", "none")
    assert fixed.choices.keys() == {"data.balance"}


def test_auto_follows_the_cost_of_the_exchange(sample, monkeypatch):
    monkeypatch.setattr(CostModel, "transfers_ms", lambda self, sent, links: [1e6] * len(sent))
    run = forecaster(read(parallel__replicate=1), sample).run
    assert chosen(run) == ("intra", "none")


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
    given = [f"--{key}={value}" for key, value in (PLAIN | changes).items()]
    recipe = load_recipe(VLM_S, given).recipe
    run = with_arrangement(resolve(recipe, GPUS), sample.model)
    assert chosen(run) == expected
    assert reason in run.choices["data.balance"]


def test_auto_does_not_change_losses_of_routers(sample, monkeypatch):
    recipe = read(training__microbatch_size=2)
    assert chosen(forecaster(recipe, sample).run)[0] == "intra"
    monkeypatch.setattr(sample.model.llm, "balance", object())
    run = forecaster(recipe, sample).run
    assert chosen(run)[0] == "none"
    assert "load-balancing loss" in run.choices["data.reorder"]
    assert chosen(forecaster(read(), sample).run)[0] == "intra"


def test_auto_needs_a_forecast(sample, monkeypatch):
    def fail(self: Forecaster) -> None:
        raise ConfigError("data.sources: no sizes")

    monkeypatch.setattr(Forecaster, "forecast", fail)
    run = with_arrangement(resolve(read(), GPUS), sample.model)
    assert chosen(run) == ("none", "none")
    assert "no simulation: data.sources: no sizes" in run.choices["data.balance"]


def test_dry_run_shows_the_choice():
    lines = describe_run(read(), GPUS).splitlines()
    [line] = [line for line in lines if line.startswith("data.balance")]
    assert "auto: images (simulated step with it" in line


def test_search_compares_both_values(sample):
    recipe = read()
    plan = Plan("fsdp", GPUS, {"activation_checkpoint.mode": "full"})
    forecasts = {
        value: forecaster(
            planned_recipe(recipe, plan.changed(data__balance=value, data__reorder="intra")), sample
        ).forecast()
        for value in ("none", "images")
    }
    assert forecasts["images"].iteration_ms < 0.9 * forecasts["none"].iteration_ms
