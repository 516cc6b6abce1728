"""From a recipe to planned sizes and back; the script that prints and writes them."""

import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import tomli

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.simulation.simulator import SimulatedStep
from torchmm.common.errors import ConfigError
from torchmm.planning import placement
from torchmm.planning.apart.problem import orchestration_problem, with_recompute
from torchmm.planning.dry_run import describe_run
from torchmm.planning.forecast import Forecast, Forecaster, StepSample
from torchmm.planning.placement import choose_placement, orchestrated, plan_recipe
from torchmm.planning.placement_report import recipe_text
from torchmm.planning.together.encoder_sizes import (
    PROMISE_MARGIN,
    Colocated,
    refined,
    with_pipelines,
)
from torchmm.planning.together.search import (
    Sized,
    _Search,
    _sizes,
    search_together,
    usable_devices,
    with_parallel,
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


@pytest.fixture(autouse=True)
def few_plans(monkeypatch):
    """Some are enough here: `test_plan_search` holds the search against all plans."""
    monkeypatch.setattr(placement, "EFFORT_AT_START", 10_000)


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
    return plan_recipe(recipe, 12, PROFILE, effort=15_000)


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
    best = planned.judged.best
    assert best.devices <= 12 and 0 < best.forecast.mfu < 1
    assert 1e3 * planned.judged.bound_s <= best.step_ms
    assert len(planned.baselines) == 3
    for other in (*planned.judged.candidates, *planned.baselines.values()):
        assert isinstance(other, str) or other.step_ms >= best.step_ms


def test_planned_recipes_dry_run_to_the_figures_they_were_chosen_for(planned, tmp_path):
    """Through a file, as anyone would who got one: same time, same memory."""
    best = planned.judged.best
    path = tmp_path / "planned.toml"
    path.write_text(recipe_text(best, "tiny.toml", "a800"))
    own = load_recipe(path, (), best.devices).recipe
    assert own.parallel.placement == "disaggregated"
    text = describe_run(own, best.devices)
    step = best.forecast.step
    assert f"first step {best.forecast.iteration_ms:,.1f} ms on a800" in re.sub(" +", " ", text)
    assert f"{max(step.peak_bytes) / 2**30:.2f} GiB, simulated" in text
    again = Forecaster(own, best.devices, PROFILE).forecast_parallel(own.parallel)
    assert again.iteration_ms == best.forecast.iteration_ms
    assert again.step.peak_bytes == step.peak_bytes


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
    # Batch 1: 8 x 8 ranks of the encoder and 8 x 12 of the LLM are the most there may be.
    with pytest.raises(ConfigError, match=r"no plan uses all 161 ranks; start \d+"):
        orchestrated(three, 161)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        # The 4 ranks that the LLM would have by default do not divide the batch.
        (5, ("--parallel.pipeline", "1", "--training.global_batch_size", "6")),
        (6, ("--parallel.tensor", "8")),  # the planner's to say
        (6, ("--parallel.pipeline", "5", "--parallel.virtual_stages", "4")),
        (6, ("--parallel.vision.tensor", "3")),  # 8 heads
    ],
)
def test_sizes_that_will_be_planned_are_not_held_against_the_ranks(
    recipe_file, world_size, changes
):
    asked = ["--parallel.placement", "disaggregated", "--parallel.orchestrate", "true"]
    asked += ["--parallel.schedule", "1f1b", "--training.global_batch_size", "4", *changes]
    if "--parallel.virtual_stages" not in changes:
        asked += ["--parallel.virtual_stages", "1"]
    loaded = load_recipe(recipe_file, asked, world_size).recipe
    found = orchestrated(loaded, world_size)
    assert sum(own.ranks for own in units_of(found, world_size).values()) == world_size
    with pytest.raises(ConfigError):
        load_recipe(recipe_file, [*asked, "--parallel.orchestrate", "false"], world_size)


def test_placements_are_simulated_and_sorted(recipe, planned):
    found = choose_placement(recipe, planned, PROFILE)
    assert {"disaggregated", "interleaved"} <= {c.placement for c in found}
    assert [c.step_ms for c in found] == sorted(c.step_ms for c in found)
    for candidate in found:
        assert candidate.recipe.parallel.placement == candidate.placement
        assert candidate.recipe.parallel.schedule == candidate.forecast.schedule


def test_every_family_is_tried_and_fits_as_it_says(recipe):
    sample = StepSample(recipe)
    found = search_together(recipe, 4, PROFILE, sample, tensors=(1, 2), pipelines=(1, 2, 4))
    schedules = {candidate.forecast.schedule for candidate in found}
    assert {"1f1b", "interleaved_1f1b", "zero_bubble", "searched", "optimus"} <= schedules
    assert {c.recipe.parallel.virtual_stages for c in found} >= {1, 2, 4}
    for candidate in found:
        own = candidate.recipe
        assert own.parallel.placement == candidate.placement and candidate.devices == 4
        tensor, data, pipeline = map(int, candidate.sizes.partition(",")[0].split("x"))
        assert (tensor, pipeline) == (own.parallel.tensor, own.parallel.pipeline)
        assert tensor * data * pipeline == 4
        again = Forecaster(own, 4, PROFILE, sample=sample).forecast_parallel(own.parallel)
        assert again.step is not None and again.iteration_ms == candidate.forecast.iteration_ms
    # Everything is kept where that fits, so no schedule but one that is searched is tuned.
    assert all(
        own.forecast.schedule in ("searched", "optimus")
        for own in found
        if own.recipe.activation_checkpoint.mode == "tuned"
    )


def test_layers_are_tuned_to_what_counts_as_fitting(recipe):
    """A recipe may tune to more; a plan that takes it would not count."""

    def limit(given: str) -> str:
        own = recipe.activation_checkpoint.model_copy(update={"memory_limit": given})
        asked = recipe.model_copy(update={"activation_checkpoint": own})
        tuned = with_recompute(asked, "tuned").activation_checkpoint
        assert tuned.mode == "tuned"
        return tuned.memory_limit

    assert [limit(given) for given in ("97%", "90%", "85%", "60 GiB")] == [
        "90%", "90%", "85%", "60 GiB",
    ]  # fmt: skip


def test_sizes_are_tried_by_their_surveys(recipe):
    """The best by its survey does not fit; three others are tried, or fewer where the survey says
    that they take longer than what was found."""
    surveys_ms = {"a": 10.0, "b": 11.0, "c": 12.0, "d": 13.0, "e": 14.0, "f": float("inf")}
    steps_ms = {"a": float("inf"), "b": 12.0, "c": 11.9, "d": 30.0, "e": 1.0}
    sizes = [Sized(recipe, 4, words) for words in reversed(surveys_ms)]

    def tried(family: str) -> tuple[list[str], float]:
        search, order = _Search(PROFILE, StepSample(recipe), 1), []

        def plans(sized: Sized):
            order.append(sized.words)
            yield SimpleNamespace(step_ms=steps_ms[sized.words])

        search.run(family, sizes, lambda sized: surveys_ms[sized.words], plans)
        return order, search.best_ms

    assert tried("chains") == (["a", "b", "c", "d"], 11.9)
    assert tried("bubbles") == (["a", "b", "c"], 11.9)


def test_layers_are_tuned_where_keeping_everything_does_not_fit(recipe):
    small = replace(PROFILE, device=replace(PROFILE.device, memory_bytes=2 * 2**30))
    (sized,) = _sizes(recipe, 4, (), ())
    of_all = list(_Search(PROFILE, StepSample(recipe), 1).chains(sized))
    of_small = list(_Search(small, StepSample(recipe), 1).chains(sized))
    modes = [(c.forecast.schedule, c.recipe.activation_checkpoint.mode) for c in of_small]
    assert {c.recipe.activation_checkpoint.mode for c in of_all} == {"none"}
    assert ("1f1b", "none") in modes and ("1f1b", "tuned") in modes
    assert min(c.step_ms for c in of_all) < min(c.step_ms for c in of_small) < float("inf")


def test_choices_of_colocated_encoders_are_played_one_after_the_other(recipe):
    """By a simulator to which each of some changes makes the step shorter, and others longer."""
    real = Forecaster(recipe, 4, PROFILE)
    own = with_pipelines(
        with_parallel(recipe, schedule="optimus", placement="colocated"), {"vision": 1}
    )

    def forecast(parallel: ParallelConfig) -> Forecast:
        images = parallel.sub_microbatch_images("vision")
        points = {None: 0, 4: -1, 2: 1, 1: -1}[images]
        points += {"interleaved_1f1b": 0, "zero_bubble": 2}.get(parallel.llm_schedule, -1)
        points -= 3 * bool(parallel.slices("vision"))
        step = SimpleNamespace(makespan_ms=100.0 - points, fits=parallel.llm_schedule != "gpipe")
        return Forecast("optimus", cast(SimulatedStep, step))

    forecaster = SimpleNamespace(
        run=real.run,
        modules=real.modules,
        typical=real.typical,
        forecast_parallel=forecast,
        promised_ms=lambda parallel: 1.0,
    )
    best = refined(forecaster, Colocated(own, forecast(own.parallel)))
    assert best.words == ("LLM zero_bubble", "2 images at once")
    assert best.recipe.parallel.llm_schedule == "zero_bubble"
    assert best.recipe.parallel.sub_microbatch_images("vision") == 2
    assert best.recipe.parallel.slices("vision") is None
    assert best.forecast.step.makespan_ms == 97
    # What is promised to take longer is not played.
    long_ms = 1.01 * PROMISE_MARGIN
    forecaster.promised_ms = lambda parallel: (
        long_ms if parallel.llm_schedule == "zero_bubble" else 1.0
    )
    assert refined(forecaster, Colocated(own, forecast(own.parallel))).words == (
        "2 images at once",
    )


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
    command += [placement, "--global-batch-size", "16", "--effort", "0.01", "--out", out]
    command += ["--training.steps", "7"]
    assert PLAN([str(argument) for argument in command]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for word in (
        "best plan on 12 x a800",
        "of any plan",
        "plans simulated",
        "rigid",
        "FLOP ratio",
        str(out),
    ):
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
        (
            ["--training.sequence_length", "4000000", "--gpus", "2"],
            "(no plan fits|none of .* fits)",
        ),
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
