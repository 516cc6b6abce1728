"""Tests of the choice of open parallelism degrees of colocated encoders."""

from itertools import product
from pathlib import Path

import pytest
import tomli
from simulated_parts import ENCODER, LLM

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.dry_run import describe_run
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.balance.search.plan_space import apply_plan
from torchmm.balance.search.recipe_completion import complete_sizes, search_encoder_sizes
from torchmm.balance.search.recipe_plans import base_recipe, open_keys, recipe_plans
from torchmm.balance.search.report import describe_optimality
from torchmm.balance.search.result import PlanSearchResult, SimulatedPlan, find_best
from torchmm.common.errors import ConfigError
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.recipe.recipe import Recipe

RECIPE = f"""
name = "tiny"
{LLM}
[parallel]
pipeline = 4
placement = "colocated"
schedule = "optimus"
auto_sizes = true
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
    text = RECIPE.replace("auto_sizes = true\n", "auto_sizes = true\n" + parallel)
    text += "".join(ENCODER.format(name=name) for name in encoders)
    return Recipe.model_validate(tomli.loads(text))


def sizes_of(recipe: Recipe, devices: int = 8) -> list[tuple[object, ...]]:
    """Return pipeline and tensor parallelism of all encoders, for each listed plan."""
    sample = StepSample(recipe)
    keys = ("pipeline", "tensor")
    names = [module.name for module in sample.modules if module.kind == "encoder"]
    return sorted(
        tuple(plan.changes.get(f"parallel.{name}.{key}") for name in names for key in keys)
        for plan in recipe_plans("colocated", recipe, devices, sample)
    )


def search(recipe: Recipe) -> PlanSearchResult:
    """Run the search of a run or dry run, for the device of the recipe."""
    profile = load_profile(recipe.simulation.device)
    return search_encoder_sizes(StepSimulator(recipe, 8, profile))


def with_memory(directory: Path, nbytes: float) -> str:
    file = directory / "small.toml"
    file.write_text(f'base = "a100"\n[device]\nmemory_bytes = {nbytes}\n')
    return str(file)


def test_encoder_plans_combine_open_sizes():
    one = recipe_of("vision", parallel="tensor = 2\n")
    assert sizes_of(one) == sorted(product((1, 2, 4), (1, 2)))
    partly_open = recipe_of(
        "vision", "scans", parallel="tensor = 2\nvision = {tensor = 1, pipeline=2}\n"
    )
    assert sizes_of(partly_open) == sorted(
        (2, 1, pipeline, tensor) for pipeline, tensor in product((1, 2, 4), (1, 2))
    )
    assert "parallel.vision.tensor" not in open_keys(
        "colocated", partly_open, StepSample(partly_open)
    )
    assert "parallel.vision.segments" in open_keys(
        "colocated", partly_open, StepSample(partly_open)
    )


def test_smaller_encoder_sizes_divide_tensor_size_and_heads():
    recipe = recipe_of("vision", parallel="tensor = 6\n")  # 4 heads
    assert {tensor for _, tensor in sizes_of(recipe, 24)} == {6, 2, 1}


@pytest.mark.parametrize("parallel", ["", "tensor = 2\n"])
def test_encoder_sizes_are_the_fastest_combination(parallel):
    recipe = recipe_of("vision", parallel=parallel)
    result = search(recipe)
    sample, profile = StepSample(recipe), load_profile("a100")
    steps_ms = []
    for plan in recipe_plans("colocated", recipe, 8, sample):
        candidate = apply_plan(base_recipe(recipe, "colocated"), plan)
        forecast = StepSimulator(candidate, 8, profile, sample=sample).simulate_schedule()
        if forecast.step is not None and forecast.step.fits:
            steps_ms.append(forecast.iteration_ms)
    assert len(steps_ms) > 2
    assert result.best.step_ms <= min(steps_ms)
    assert complete_sizes(recipe, 8).parallel == result.best.recipe.parallel
    assert result.complete


def test_encoder_sizes_in_the_recipe_are_kept():
    parallel = "tensor = 2\nvision = {pipeline = 2, segments = 2, sub_microbatch_images = 2}\n"
    recipe = recipe_of("vision", "scans", parallel=parallel)
    chosen = complete_sizes(recipe, 8).parallel
    vision = chosen.modules["vision"]
    assert (vision.pipeline, vision.segments, vision.sub_microbatch_images) == (2, 2, 2)
    for key in ("tensor", "pipeline", "virtual_stages", "llm_schedule", "schedule"):
        assert getattr(chosen, key) == getattr(recipe.parallel, key), key
    assert not chosen.auto_sizes


def test_encoder_sizes_fit_into_memory(tmp_path):
    recipe = recipe_of("vision")
    free = search(recipe).best
    peak_bytes = max(free.report.step.peak_bytes)

    def with_device(nbytes: float) -> Recipe:
        simulation = recipe.simulation.model_copy(update={"device": with_memory(tmp_path, nbytes)})
        return recipe.model_copy(update={"simulation": simulation})

    device_bytes = peak_bytes / 0.95  # the fastest plan would use 95 %
    result = search(with_device(device_bytes))
    tight = result.best
    assert isinstance(tight, SimulatedPlan)
    assert max(tight.report.step.peak_bytes) <= USABLE_MEMORY_FRACTION * device_bytes
    assert "plans may use 90% of the memory of a device" in describe_optimality(result)
    assert tight.recipe.activation_checkpoint == recipe.activation_checkpoint
    with pytest.raises(ConfigError, match="no plan fits on 8 devices"):
        find_best(search(with_device(1e5)), 8)


def test_dry_run_and_search_choose_the_same_sizes():
    recipe = recipe_of("vision")
    best = search(recipe).best
    text = " ".join(describe_run(recipe, 8).split())
    assert f"chosen {best.sizes} (" in text
    assert f"first step {best.step_ms:,.1f} ms" in text


def test_recipe_without_open_sizes_is_unchanged():
    recipe = recipe_of("vision")
    parallel = recipe.parallel.model_copy(update={"auto_sizes": False})
    recipe = recipe.model_copy(update={"parallel": parallel})
    assert complete_sizes(recipe, 8) is recipe
