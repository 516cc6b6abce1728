"""From a recipe to planned sizes and back; the script that prints and writes them."""

import re
import runpy
from pathlib import Path

import pytest
import tomli

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.forecasts.dry_run import describe_run
from torchmm.balance.search import placement
from torchmm.balance.search.disaggregated import orchestration_problem
from torchmm.balance.search.placement import orchestrated
from torchmm.balance.search.space import with_memory_limit
from torchmm.common.errors import ConfigError
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import resolved_unit_sizes
from torchmm.recipe.read import load_recipe
from torchmm.recipe.recipe import Recipe

ROOT = Path(__file__).parents[4]
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
    monkeypatch.setattr(placement, "EFFORT", 10_000)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe.model_validate(tomli.loads(RECIPE))


def test_problem_has_modules_of_recipe(recipe):
    problem = orchestration_problem(recipe, 12, PROFILE)
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


def test_recipes_that_leave_sizes_open_get_those_of_a_plan_for_all_ranks(recipe):
    parallel = ParallelConfig(
        placement="disaggregated", schedule="1f1b", auto_sizes=True, sequence_parallel=True
    )
    asked = recipe.model_copy(update={"parallel": parallel})
    found = orchestrated(asked, 6)
    assert not found.parallel.auto_sizes
    assert sum(own.ranks for own in resolved_unit_sizes(found, 6).values()) == 6
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
    asked = ["--parallel.placement", "disaggregated", "--parallel.auto_sizes", "true"]
    asked += ["--parallel.schedule", "1f1b", "--training.global_batch_size", "4", *changes]
    if "--parallel.virtual_stages" not in changes:
        asked += ["--parallel.virtual_stages", "1"]
    loaded = load_recipe(recipe_file, asked, world_size).recipe
    found = orchestrated(loaded, world_size)
    assert sum(own.ranks for own in resolved_unit_sizes(found, world_size).values()) == world_size
    with pytest.raises(ConfigError):
        load_recipe(recipe_file, [*asked, "--parallel.auto_sizes", "false"], world_size)


def test_layers_are_tuned_to_what_counts_as_fitting(recipe):
    """A recipe may tune to more; a plan that takes it would not count."""

    def limit(given: str) -> str:
        own = recipe.activation_checkpoint.model_copy(update={"memory_limit": given})
        asked = recipe.model_copy(update={"activation_checkpoint": own})
        return with_memory_limit(asked, 80 * 2**30).activation_checkpoint.memory_limit

    assert [limit(given) for given in ("97%", "90%", "85%", "60 GiB", "75 GiB")] == [
        "90%", "90%", "85%", "60 GiB", "90%",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "--gpus = 0"),
        (["--device", "abacus"], "--device: unknown device or profile 'abacus'"),
        (["--training.microbatch_size", "5"], "must be a multiple"),
        (["--training.dtype", "float64"], "training.dtype"),
        (
            ["--training.sequence_length", "4000000", "--gpus", "2"],
            "no plan fits on 2 devices",
        ),
    ],
)
def test_bad_input_gets_one_clear_error(recipe_file, capsys, arguments, words):
    assert PLAN(["--config", str(recipe_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(words, error), error
