"""Encoder plans chosen where a recipe leaves them open, and what fits into memory."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli
from simulated_parts import ENCODER, LLM

from torchmm.balance.costs.profiles import load_profile
from torchmm.common.errors import ConfigError
from torchmm.planning.dry_run import describe_run
from torchmm.planning.forecast import Forecaster
from torchmm.planning.placement import orchestrated
from torchmm.planning.search.encoder_sizes import (
    PROMISE_MARGIN,
    choose_encoders,
    encoder_combinations,
    least_promise_ms,
    with_pipelines,
)
from torchmm.recipe.recipe import Recipe

RECIPE = f"""
name = "tiny"
{LLM}
[parallel]
pipeline = 4
placement = "colocated"
schedule = "optimus"
orchestrate = true
[training]
sequence_length = 512
global_batch_size = 16
steps = 10
dtype = "bfloat16"
[simulation]
device = "a100"
gpus = 8
"""


def recipe_of(*encoders: str, parallel: str = "") -> Recipe:
    text = RECIPE.replace("orchestrate = true\n", "orchestrate = true\n" + parallel)
    text += "".join(ENCODER.format(name=name) for name in encoders)
    return Recipe.model_validate(tomli.loads(text))


def forecaster_of(recipe: Recipe, device: str = "a100") -> Forecaster:
    return Forecaster(recipe, 8, load_profile(device))


def with_memory(directory: Path, nbytes: float) -> str:
    file = directory / "small.toml"
    file.write_text(f'base = "a100"\n[device]\nmemory_bytes = {nbytes}\n')
    return str(file)


def test_the_fastest_of_all_pipelines_is_taken():
    choice = choose_encoders(forecaster_of(recipe_of("vision")))
    assert {t.pipelines["vision"] for t in choice.tried} <= {1, 2, 4}
    assert 2 <= len(choice.tried) == 3 - choice.promised_longer
    times_ms = [t.forecast.step.makespan_ms for t in choice.tried]
    assert times_ms == sorted(times_ms) and choice.left_out == 0
    best = choice.tried[0].pipelines["vision"]
    assert choice.recipe.parallel.sizes_given("vision") == {"pipeline": best}
    assert orchestrated(recipe_of("vision"), 8).parallel == choice.recipe.parallel
    lines = list(choice.lines())
    count = len(choice.tried) + bool(choice.promised_longer)
    assert len(lines) == count + (choice.refined is not None)
    if choice.refined is not None:
        assert choice.refined.forecast.step.makespan_ms < times_ms[0]
        assert lines[len(choice.tried)].startswith("the first with ")


def test_images_at_once_and_stages_are_chosen_where_they_make_the_step_shorter():
    """By a simulator to which two images at once do, in stages of four layers."""
    recipe = recipe_of("vision", parallel="vision = {pipeline = 1}\n")
    forecaster = forecaster_of(recipe)
    real = forecaster.forecast_parallel

    def forecast(parallel):
        found = real(parallel)
        factor = {2: 0.5}.get(parallel.sub_microbatch_images("vision"), 1.0)
        factor *= {1: 0.5}.get(parallel.slices("vision"), 1.0)
        times = SimpleNamespace(
            makespan_ms=factor * found.step.makespan_ms,
            fits=found.step.fits,
            peak_bytes=found.step.peak_bytes,
        )
        return replace(found, step=times)

    forecaster.forecast_parallel = forecast
    forecaster.promised_ms = lambda parallel: 1.0
    choice = choose_encoders(forecaster)
    found = choice.recipe.parallel
    assert found.sub_microbatch_images("vision") == 2 and found.slices("vision") == 1
    assert choice.refined.words[0] == "2 images at once"
    assert choice.refined.words[1].startswith("encoder stages of ")
    given = recipe_of(
        "vision", parallel="vision = {pipeline = 1, sub_microbatch_images = 4, segments = 2}\n"
    )
    assert choose_encoders(forecaster_of(given)).refined is None


def test_sizes_that_are_promised_to_take_longer_are_not_simulated():
    recipe = recipe_of("vision", parallel="tensor = 2\n")
    forecaster = forecaster_of(recipe)
    promised_ms, simulated = forecaster.promised_ms, []
    real = forecaster.forecast_parallel

    def forecast(parallel):
        simulated.append(promised_ms(parallel))
        return real(parallel)

    forecaster.forecast_parallel = forecast
    choice = choose_encoders(forecaster)
    promises_ms = [
        promised_ms(with_pipelines(recipe, {"vision": size}, tensor=tensor).parallel)
        for tensor in (1, 2)
        for size in (1, 2, 4)
    ]
    fine = [ms for ms in sorted(promises_ms) if ms <= PROMISE_MARGIN * min(promises_ms)]
    assert simulated[: len(choice.tried)] == fine and 1 < len(fine) < len(promises_ms)
    assert choice.promised_longer == len(promises_ms) - len(fine)
    assert f"{choice.promised_longer} more that the bubble scheduler" in [*choice.lines()][-1]
    assert least_promise_ms(forecaster) == min(promises_ms)
    best_ms = choice.tried[0].forecast.step.makespan_ms
    forecaster.promised_ms = lambda parallel: 1.0  # the same for all: everything is simulated
    every = choose_encoders(forecaster)
    assert len(every.tried) == len(promises_ms) and every.promised_longer == 0
    assert every.tried[0].forecast.step.makespan_ms == best_ms


def test_promises_go_on_until_one_of_them_fits():
    """The two best promises do not fit; the third does, and bounds what comes after."""
    recipe = recipe_of("vision", parallel="tensor = 2\n")
    forecaster = forecaster_of(recipe)
    promises_ms = {(1, 1): 10.0, (1, 2): 11.0, (1, 4): 20.0, (2, 1): 20.9, (2, 2): 21.1}
    real = forecaster.forecast_parallel

    def sizes(parallel):
        own = parallel.sizes_given("vision")
        return own["tensor"], own["pipeline"]

    def forecast(parallel):
        found = real(parallel)
        fits = promises_ms.get(sizes(parallel), 30.0) > 11.0
        ms = 2.0 if fits else 1.0
        return replace(
            found, step=SimpleNamespace(makespan_ms=ms, fits=fits, peak_bytes=found.step.peak_bytes)
        )

    forecaster.forecast_parallel = forecast
    forecaster.promised_ms = lambda parallel: promises_ms.get(sizes(parallel), 30.0)
    choice = choose_encoders(forecaster)
    tried = [(each.tensor, each.pipelines["vision"]) for each in choice.tried]
    assert sorted(tried) == [(1, 1), (1, 2), (1, 4), (2, 1)]
    assert tried[0] in ((1, 4), (2, 1)) and choice.promised_longer == 2
    # Where one size alone is left, it is still that one: the recipe's own would be 2.
    forecaster.promised_ms = lambda parallel: 1.0 if sizes(parallel) == (1, 4) else 9.0
    (only,) = choose_encoders(forecaster).tried
    assert only.tensor == 1 and sizes(only.recipe.parallel) == (1, 4)
    assert "vision 4, tensor 1" in only.sizes


def test_given_sizes_stay_and_every_encoder_has_its_own():
    recipe = recipe_of("vision", "scans", parallel="vision = {pipeline = 2}\n")
    found = list(encoder_combinations(forecaster_of(recipe)))
    assert found == [{"vision": 2, "scans": n} for n in (1, 2, 4)]
    assert choose_encoders(forecaster_of(recipe)).recipe.parallel.sizes_given("vision") == {
        "pipeline": 2
    }


def test_tensor_parallel_sizes_are_tried_too():
    forecaster = forecaster_of(recipe_of("vision", parallel="tensor = 2\n"))
    forecaster.promised_ms = lambda parallel: 1.0
    choice = choose_encoders(forecaster)
    tried = [(found.tensor, found.pipelines["vision"]) for found in choice.tried]
    assert sorted(tried) == [(tensor, size) for tensor in (1, 2) for size in (1, 2, 4)]
    best = choice.tried[0]
    sizes = {"tensor": best.tensor, "pipeline": best.pipelines["vision"]}
    assert choice.recipe.parallel.sizes_given("vision") == sizes
    assert all("tensor" in line for line in [*choice.lines()][: len(tried)])
    given = recipe_of("vision", parallel="tensor = 2\nvision = {tensor = 1}\n")
    choice = choose_encoders(forecaster_of(given))
    only = choice.tried
    assert len(only) + choice.promised_longer == 3 and {found.tensor for found in only} == {None}
    assert {found.recipe.parallel.encoder_tensor("vision") for found in only} == {1}


def test_encoders_may_have_different_tensor_parallel_sizes():
    """One from the recipe; both open, by a simulator to which scans with 1 are faster."""
    given = recipe_of("vision", "scans", parallel="tensor = 2\nvision = {tensor = 2}\n")
    choice = choose_encoders(forecaster_of(given))
    assert {found.tensor for found in choice.tried} == {1, 2}
    assert choice.recipe.parallel.sizes_given("vision")["tensor"] == 2
    forecaster = forecaster_of(recipe_of("vision", "scans", parallel="tensor = 2\n"))
    real = forecaster.forecast_parallel

    def forecast(parallel):
        found = real(parallel)
        sizes = [parallel.sizes_given(name).get("tensor", 2) for name in ("vision", "scans")]
        times = SimpleNamespace(
            makespan_ms={(2, 1): 1.0, (2, 2): 2.0}.get(tuple(sizes), 3.0),
            fits=True,
            peak_bytes=found.step.peak_bytes,
        )
        return replace(found, step=times)

    forecaster.forecast_parallel = forecast
    forecaster.promised_ms = lambda parallel: 1.0
    choice = choose_encoders(forecaster)
    assert choice.refined.words == ("scans tensor 1",)
    found = choice.recipe.parallel
    assert [found.sizes_given(name)["tensor"] for name in ("vision", "scans")] == [2, 1]


def test_copies_that_do_not_fit_on_the_fullest_rank_are_left_out(tmp_path):
    recipe = recipe_of("vision")
    parallel = [with_pipelines(recipe, {"vision": pipeline}).parallel for pipeline in (1, 2, 4)]
    every = [forecaster_of(recipe).forecast_parallel(own).step for own in parallel]
    peaks = sorted(max(step.peak_bytes) for step in every)
    assert peaks[0] < peaks[-1]
    tight = with_memory(tmp_path, (peaks[0] + peaks[-1]) / 2)
    step = choose_encoders(forecaster_of(recipe, tight)).tried[0].forecast.step
    assert step.fits and max(step.peak_bytes) < peaks[-1]
    with pytest.raises(ConfigError, match=r"GiB"):
        choose_encoders(forecaster_of(recipe, with_memory(tmp_path, peaks[0] * 0.7)))
    with pytest.raises(ConfigError, match="no encoder plan fits"):
        choose_encoders(forecaster_of(recipe, with_memory(tmp_path, 1e5)))


def test_dry_runs_tell_what_was_tried():
    text = describe_run(recipe_of("vision"), 8)
    longer = re.search(r"(\d) more that the bubble scheduler expects to be slower", text)
    assert text.count("pipeline ranks of vision") == 3 - int(longer[1] if longer else 0) >= 2
    assert re.search(r"ranks of vision +pipeline \d x replicate 1 x shard", text)


def test_recipes_that_do_not_ask_stay_as_they_are():
    recipe = recipe_of("vision")
    recipe.parallel.__dict__["orchestrate"] = False
    assert orchestrated(recipe, 8) is recipe
