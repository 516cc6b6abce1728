"""Tests of recipe keys of disaggregated modules: degrees for the world size, and mistakes."""

import pytest
from recipe_problems import UNITS_MODEL, problems_of

from torchmm.common.errors import ConfigError
from torchmm.recipe.mesh_sizes import MeshSizes, replica_groups
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import resolve_units

MODEL = (
    UNITS_MODEL
    + """\
[parallel]
placement = "disaggregated"
"""
)
NAMES = ["vision", "llm", "generator"]


@pytest.mark.parametrize(
    ("sizes", "world_size", "units"),
    [
        ({}, 5, [(1, 1, 1, 1), (1, 1, 3, 1), (1, 1, 1, 1)]),
        ({"vision": {"shard": 3}, "pipeline": 2}, 8, [(1, 1, 3, 1), (2, 1, 2, 1), (1, 1, 1, 1)]),
        (
            {"llm": {"tensor": 2, "shard": 1}, "vision": {"replicate": -1}},
            6,
            [(1, 3, 1, 1), (1, 1, 1, 2), (1, 1, 1, 1)],
        ),
        (
            {"shard": 2, "generator": {"pipeline": 2, "shard": 3}, "vision": {"tensor": 2}},
            10,
            [(1, 1, 1, 2), (1, 1, 2, 1), (2, 1, 3, 1)],
        ),
    ],
)
def test_disaggregated_degrees_match_world_size(sizes, world_size, units) -> None:
    parallel = ParallelConfig.model_validate({"placement": "disaggregated", **sizes})
    degrees = resolve_units(parallel, NAMES, world_size)
    assert degrees == {name: MeshSizes(*unit) for name, unit in zip(NAMES, units, strict=True)}
    assert sum(layout.ranks for layout in degrees.values()) == world_size


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        (
            {"shard": 2},
            5,
            "vision (1 rank), llm (shard 2), generator (1 rank) require 4 ranks, not 5",
        ),
        ({"vision": {"shard": -1}}, 4, "parallel.vision.shard and parallel.shard are -1"),
        ({"pipeline": 2}, 5, "3 of 5 ranks remain for llm, which requires a multiple of 2"),
        ({"vision": {"shard": 4}}, 4, "ranks remain for llm"),
        ({"llm": {"replicate": 0}}, 4, "a parallelism degree is 0"),
    ],
)
def test_mismatched_disaggregated_degrees_are_rejected(sizes, world_size, message) -> None:
    parallel = ParallelConfig.model_validate({"placement": "disaggregated", **sizes})
    with pytest.raises(ConfigError) as error:
        resolve_units(parallel, NAMES, world_size)
    assert message in str(error.value)


def test_replica_groups_use_common_divisor() -> None:
    def units(*sizes: int) -> dict[str, MeshSizes]:
        return {str(size): MeshSizes(1, 1, size, 1) for size in sizes}

    assert replica_groups(units(3, 2)) == 1
    assert replica_groups(units(8, 4, 6)) == 2
    assert replica_groups(units(4, 4)) == 4


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        ("--parallel.schedule megatron", "parallel.schedule", "use one of gpipe, 1f1b"),
        ("--parallel.vision.shard 4", "parallel", "ranks remain for llm"),
        ("--training.global_batch_size 7", "training.global_batch_size", "use 6 or 9"),
        ("--parallel.vision.tensor 3", "model.encoders.vision.config.num_attention_heads", "split"),
        ("--parallel.vision.pipeline 6", "parallel.vision.pipeline", "vision has 5 layers"),
        (
            "--parallel.virtual_stages 2 --parallel.schedule 1f1b --parallel.pipeline 3",
            "parallel.virtual_stages",
            'schedule = "interleaved_1f1b"',
        ),
        (
            "--parallel.virtual_stages 3 --parallel.schedule gpipe --parallel.pipeline 3",
            "parallel.pipeline",
            "llm has 6 layers, but 3 pipeline ranks x 3",
        ),
        ("--parallel.reshard_after_forward always", "parallel.reshard_after_forward", "default"),
        (
            "--parallel.schedule zero_bubble --compile.enabled true",
            "parallel.schedule",
            "compile.enabled = false",
        ),
        ("--parallel.visoin.shard 2", "parallel", "visoin"),
    ],
)
def test_disaggregated_mistakes_name_key_and_fix(recipe, arguments, key, message) -> None:
    problems = problems_of(recipe, *arguments.split(), world_size=4)
    assert any(f": {key}" in problem and message in problem for problem in problems), problems
