"""From a recipe to planned sizes and back; the script that prints and writes them."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import tomli

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.simulation.simulator import SimulatedStep
from torchmm.common.errors import ConfigError
from torchmm.planning.dry_run import describe_run
from torchmm.planning.encoder_sizes import Colocated, refined, with_pipelines
from torchmm.planning.forecast import Forecast, Forecaster
from torchmm.planning.open_sizes import orchestrated
from torchmm.planning.placement import (
    _colocated,
    _with_parallel,
    choose_placement,
    orchestration_problem,
    plan_recipe,
    planned_recipe,
    usable_devices,
)
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import units_of
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

ROOT = Path(__file__).parents[3]
PLAN = runpy.run_path(str(ROOT / "scripts/plan.py"))["main"]
PROFILE = load_profile("a800")
RECIPE = """
name = "tiny"
[model.llm.config]
model_type = "llama"
vocab_size = 4096
hidden_size = 1024
intermediate_size = 2816
num_hidden_layers = 12
num_attention_heads = 8
num_key_value_heads = 8
[model.encoders.vision.config]
model_type = "siglip_vision_model"
image_size = 256
patch_size = 16
hidden_size = 512
intermediate_size = 2048
num_hidden_layers = 8
num_attention_heads = 8
[parallel]
pipeline = 2
sequence_parallel = true
virtual_stages = 2
schedule = "interleaved_1f1b"
[training]
sequence_length = 4096
global_batch_size = 32
microbatch_size = 1
dtype = "bfloat16"
[simulation]
device = "a800"
gpus = 12
[simulation.images.vision]
patches = 256
tokens = 256
[[simulation.sequences]]
images = [0, 8]
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe.model_validate(tomli.loads(RECIPE))


@pytest.fixture(scope="module")
def planned(recipe):
    return plan_recipe(recipe, 12, PROFILE)


def test_problems_have_the_recipes_modules_and_sizes(recipe, planned):
    problem = planned.problem
    assert [unit.name for unit in problem.units] == ["vision", "llm"]
    assert [unit.layers for unit in problem.units] == [8, 12]
    assert (problem.devices, problem.global_batch_size, problem.microbatch_size) == (12, 32, 1)
    assert problem.memory_bytes < PROFILE.device.memory_bytes
    assert set(problem.units[0].seconds) == {1, 2, 4, 8}
    freeze = recipe.freeze.model_copy(update={"modules": ["vision"]})
    frozen = recipe.model_copy(update={"freeze": freeze})
    less = orchestration_problem(frozen, 12, PROFILE).units[0]
    assert less.seconds[1] < 0.6 * problem.units[0].seconds[1]
    assert not less.sharded_bytes > problem.units[0].sharded_bytes / 2


def test_the_best_plan_beats_the_others(planned):
    best = planned.found.best
    assert best.fits and best.devices <= 12 and 0 < planned.mfu(best) < 1
    assert planned.found.bound_s <= best.step_s
    assert len(planned.baselines) == 3
    for other in (*planned.found.alternatives, *planned.baselines.values()):
        assert isinstance(other, str) or other.step_s >= best.step_s


def test_planned_recipes_pass_dry_runs(recipe, planned, tmp_path):
    best = planned.found.best
    own = planned_recipe(recipe, best)
    assert own.parallel.placement == "disaggregated" and own.data.reorder == "both"
    sizes = {unit.name: unit.sizes for unit in best.units}
    assert own.parallel.pipeline == sizes["llm"].pipeline
    assert own.parallel.shard == sizes["llm"].data
    assert own.parallel.sizes_given("vision") == {
        "pipeline": sizes["vision"].pipeline, "replicate": 1, "shard": sizes["vision"].data,
        "tensor": sizes["vision"].tensor,
    }  # fmt: skip
    assert own.parallel.sequence_parallel and own.parallel.virtual_stages == 1
    text = describe_run(own, best.devices)
    assert f"{best.devices} = {sizes['vision'].devices} for vision" in text


def test_recipes_that_leave_sizes_open_get_those_of_a_plan_for_all_ranks(recipe):
    parallel = ParallelConfig(
        placement="disaggregated", schedule="1f1b", orchestrate=True, sequence_parallel=True
    )
    asked = recipe.model_copy(update={"parallel": parallel})
    found = orchestrated(asked, 6)
    assert not found.parallel.orchestrate
    assert sum(own.ranks for own in units_of(found, 6).values()) == 6
    assert "6 = " in describe_run(asked, 6)
    three = asked.model_copy(
        update={"training": asked.training.model_copy(update={"global_batch_size": 1})}
    )
    with pytest.raises(ConfigError, match=r"none of the best plans uses all 160 ranks; start \d+"):
        orchestrated(three, 160)


def test_placements_are_simulated_and_sorted(recipe, planned):
    found = choose_placement(recipe, planned, PROFILE)
    assert {"disaggregated", "interleaved"} <= {c.placement for c in found}
    assert [c.step_ms for c in found] == sorted(c.step_ms for c in found)
    for candidate in found:
        assert candidate.recipe.parallel.placement == candidate.placement
        assert candidate.recipe.parallel.schedule == candidate.forecast.schedule


def test_colocated_encoders_are_tried_in_all_pipelines(recipe):
    forecaster = Forecaster(recipe, 4, PROFILE)
    ranks = forecaster.run.llm.pipeline
    found = list(_colocated(recipe, forecaster, 4, "sizes", "optimus"))
    pipelines = [c.recipe.parallel.sizes_given("vision")["pipeline"] for c in found]
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    assert pipelines[: len(divisors)] == divisors and len(divisors) > 1
    assert all(c.forecast.step and c.recipe.parallel.placement == "colocated" for c in found)
    assert found[0].sizes == "sizes, vision pipeline 1"
    # One more, if anything else than their pipelines makes the step shorter.
    plain, more = found[: len(divisors)], found[len(divisors) :]
    best = min(plain, key=lambda c: c.step_ms)
    assert len(more) <= 1
    for candidate in more:
        assert candidate.step_ms < best.step_ms and candidate.sizes.startswith(f"{best.sizes}, ")


def test_choices_of_colocated_encoders_are_played_one_after_the_other(recipe):
    """By a simulator to which each of some changes makes the step shorter, and others longer."""
    real = Forecaster(recipe, 4, PROFILE)
    own = with_pipelines(
        _with_parallel(recipe, schedule="optimus", placement="colocated"), {"vision": 1}
    )

    def forecast(parallel: ParallelConfig) -> Forecast:
        images = parallel.sub_microbatch_images("vision")
        points = {None: 0, 4: -1, 2: 1, 1: -1}[images]
        points += {"interleaved_1f1b": 0, "zero_bubble": 2}.get(parallel.llm_schedule, -1)
        points -= 3 * bool(parallel.slices("vision"))
        step = SimpleNamespace(makespan_ms=100.0 - points, fits=parallel.llm_schedule != "gpipe")
        return Forecast("optimus", cast(SimulatedStep, step))

    forecaster = SimpleNamespace(run=real.run, modules=real.modules, forecast_parallel=forecast)
    best = refined(forecaster, Colocated(own, forecast(own.parallel)))
    assert best.words == ("LLM zero_bubble", "2 images at once")
    assert best.recipe.parallel.llm_schedule == "zero_bubble"
    assert best.recipe.parallel.sub_microbatch_images("vision") == 2
    assert best.recipe.parallel.slices("vision") is None
    assert best.forecast.step.makespan_ms == 97


@pytest.mark.parametrize(
    ("sizes", "devices", "usable"),
    [
        ({"pipeline": 2}, 12, 8),  # 4 data-parallel ranks divide the batch of 32, 5 and 6 do not
        ({"pipeline": 2, "replicate": 3, "shard": 1}, 12, 6),
        ({"pipeline": 2, "replicate": 3, "shard": 1}, 5, 0),
        ({"pipeline": 8, "tensor": 2}, 12, 0),
        ({"replicate": 2, "shard": -1}, 7, 4),
    ],
)
def test_other_placements_use_what_their_sizes_allow(recipe, sizes, devices, usable):
    parallel = recipe.parallel.model_copy(update={"replicate": 1, **sizes})
    assert usable_devices(recipe.model_copy(update={"parallel": parallel}), devices) == usable


@pytest.mark.parametrize("placement", ["disaggregated", "auto"])
def test_the_script_writes_a_recipe_that_says_what_it_printed(
    recipe_file, tmp_path, capsys, placement
):
    out = tmp_path / "out" / "planned.toml"
    command = ["--config", recipe_file, "--gpus", "12", "--device", "a800", "--placement"]
    command += [placement, "--global-batch-size", "16", "--out", out, "--training.steps", "7"]
    assert PLAN([str(argument) for argument in command]) == 0
    printed = capsys.readouterr().out
    for word in ("best of all plans on 12 x a800", "next 1", "rigid", "FLOP ratio", str(out)):
        assert word in printed
    devices = tomli.loads(out.read_text())["simulation"]["gpus"]
    loaded = load_recipe(out, (), devices).recipe
    assert loaded.training.steps == 7 and loaded.training.global_batch_size == 16
    if placement == "disaggregated":
        assert loaded.parallel.placement == "disaggregated"
    assert describe_run(loaded, devices)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "1"], "1 devices for 2 units"),
        (["--gpus", "0"], "--gpus 0"),
        (["--device", "abacus"], "--device: no device or profile 'abacus'"),
        (["--training.microbatch_size", "5"], "microbatches of 5"),
        (["--training.dtype", "float64"], "training.dtype"),
        (["--simulation.sequences", "[{images=[0, 0]}]"], "none of 128 .* for 'vision'"),
        (["--training.sequence_length", "4000000", "--gpus", "2"], "no plan fits on 2 devices"),
    ],
)
def test_bad_input_gets_one_clear_error(recipe_file, capsys, arguments, words):
    assert PLAN(["--config", str(recipe_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(words, error), error


def test_a_model_of_one_module_has_nothing_to_place(recipe):
    model = recipe.model.model_copy(update={"encoders": {}})
    with pytest.raises(ConfigError, match="no module besides the LLM"):
        plan_recipe(recipe.model_copy(update={"model": model}), 4, PROFILE)
