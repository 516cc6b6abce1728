"""Tests of the path from a recipe to planned degrees, and of the planning script."""

import re
import runpy
from pathlib import Path

import pytest
import tomli

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.recipe_simulation.dry_run import describe_run
from torchmm.balance.search import recipe_completion
from torchmm.balance.search.disaggregated import orchestration_problem
from torchmm.balance.search.plan_space import with_memory_limit
from torchmm.balance.search.recipe_completion import complete_sizes
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
    """Reduce the search effort. `test_plan_search` compares the search with all plans."""
    monkeypatch.setattr(recipe_completion, "MAX_ACTIONS", 10_000)


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
    frozen_unit = orchestration_problem(frozen, 12, PROFILE).units[0]
    assert frozen_unit.seconds[1] < 0.6 * problem.units[0].seconds[1]
    assert not frozen_unit.sharded_bytes > problem.units[0].sharded_bytes / 2


def with_open_sizes(recipe: Recipe) -> Recipe:
    parallel = ParallelConfig(
        placement="disaggregated", schedule="1f1b", auto_sizes=True, sequence_parallel=True
    )
    return recipe.model_copy(update={"parallel": parallel})


def test_open_sizes_are_planned_for_all_ranks(recipe):
    open_recipe = with_open_sizes(recipe)
    planned = complete_sizes(open_recipe, 6)
    assert not planned.parallel.auto_sizes
    assert sum(unit.ranks for unit in resolved_unit_sizes(planned, 6).values()) == 6
    assert "6 = " in describe_run(open_recipe, 6)


def test_unusable_number_of_ranks_is_rejected(recipe):
    open_recipe = with_open_sizes(recipe)
    single_sample = open_recipe.model_copy(
        update={"training": open_recipe.training.model_copy(update={"global_batch_size": 1})}
    )
    # For a batch of 1, the maximum is 8 x 8 ranks of the encoder and 8 x 12 ranks of the LLM.
    with pytest.raises(ConfigError, match=r"no plan uses all 161 ranks; start \d+"):
        complete_sizes(single_sample, 161)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        # The default of 4 LLM ranks does not divide the batch.
        (5, ("--parallel.pipeline", "1", "--training.global_batch_size", "6")),
        (6, ("--parallel.tensor", "8")),  # chosen by the planner
        (6, ("--parallel.pipeline", "5", "--parallel.virtual_stages", "4")),
        (6, ("--parallel.vision.tensor", "3")),  # 8 heads
    ],
)
def test_auto_sizes_skip_world_size_check(recipe_file, world_size, changes):
    overrides = ["--parallel.placement", "disaggregated", "--parallel.auto_sizes", "true"]
    overrides += ["--parallel.schedule", "1f1b", "--training.global_batch_size", "4", *changes]
    if "--parallel.virtual_stages" not in changes:
        overrides += ["--parallel.virtual_stages", "1"]
    loaded = load_recipe(recipe_file, overrides, world_size).recipe
    planned = complete_sizes(loaded, world_size)
    assert (
        sum(unit.ranks for unit in resolved_unit_sizes(planned, world_size).values()) == world_size
    )
    with pytest.raises(ConfigError):
        load_recipe(recipe_file, [*overrides, "--parallel.auto_sizes", "false"], world_size)


def test_memory_limit_is_capped_for_planning(recipe):
    """Check that layers are tuned to at most the fraction of memory that plans can use."""

    def limit(memory_limit: str) -> str:
        section = recipe.activation_checkpoint.model_copy(update={"memory_limit": memory_limit})
        limited = recipe.model_copy(update={"activation_checkpoint": section})
        return with_memory_limit(limited, 80 * 2**30).activation_checkpoint.memory_limit

    assert [limit(memory_limit) for memory_limit in ("97%", "90%", "85%", "60 GiB", "75 GiB")] == [
        "90%", "90%", "85%", "60 GiB", "90%",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "--gpus = 0 is not positive"),
        (["--budget-s", "-1"], "--budget-s = -1.0 is negative"),
        (["--device", "abacus"], "--device: unknown device or profile 'abacus'"),
        (["--training.microbatch_size", "5"], "must be a multiple"),
        (["--training.dtype", "float64"], "training.dtype"),
        (
            ["--training.sequence_length", "4000000", "--gpus", "2"],
            "no plan fits on 2 devices",
        ),
    ],
)
def test_invalid_arguments_print_one_error(recipe_file, capsys, arguments, words):
    assert PLAN(["--config", str(recipe_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(words, error), error


def test_zero_budget_is_accepted(recipe_file, capsys):
    PLAN(["--config", str(recipe_file), "--gpus", "4", "--budget-s", "0"])
    printed = capsys.readouterr()
    assert "--budget-s" not in printed.err
