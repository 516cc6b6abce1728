"""Tests of recipe keys of colocated encoders: derived degrees, and messages about mistakes."""

from pathlib import Path

import pytest
import tomli
from recipe_problems import problems_of

from torchmm.balance.schedules import OPTIMUS_SCHEDULE
from torchmm.common.errors import ConfigError
from torchmm.pipelining.schedules.layouts import ModuleLayers
from torchmm.recipe.explain import without_removed_keys
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import encoder_mesh_sizes
from torchmm.recipe.read import changed_values, dump_recipe, load_recipe
from torchmm.training.export import checkpoint

MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_hidden_layers = 6
[model.encoders.vision.config]
model_type = "siglip_vision_model"
num_hidden_layers = 5
[training]
global_batch_size = 8
[[data.sources]]
path = "."
[parallel]
placement = "colocated"
schedule = "optimus"
pipeline = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe with `MODEL`."""
    file = tmp_path / "recipe.toml"
    file.write_text(MODEL)
    return file


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({}, (1, 2, 12, 2)),
        ({"pipeline": 2}, (2, 2, 6, 2)),
        ({"pipeline": 4, "tensor": 2}, (4, 2, 3, 2)),
        ({"pipeline": 4, "tensor": 1}, (4, 2, 6, 1)),
        ({"replicate": 8}, (1, 8, 3, 2)),
        ({"shard": 1}, (1, 24, 1, 2)),
        ({"pipeline": 2, "replicate": 3, "shard": 4}, (2, 3, 4, 2)),
    ],
)
def test_encoder_degrees_are_derived(degrees, expected):
    parallel = ParallelConfig(vision=degrees)
    assert encoder_mesh_sizes(parallel, "vision", MeshSizes(4, 2, 3, 2)) == expected


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"pipeline": 3}, "use one of 1, 2, 4"),
        ({"tensor": 4}, "use one of 1, 2"),
        ({"replicate": 5}, "is not equal to the 48 ranks of the LLM"),
        ({"shard": 7}, "is not equal to the 48 ranks of the LLM"),
        ({"replicate": 0}, "is not equal to the 48 ranks of the LLM"),
        ({"replicate": 4, "shard": 4}, "replicate 4 x shard 4"),
    ],
)
def test_mismatched_encoder_degrees_are_rejected(degrees, text):
    with pytest.raises(ConfigError, match=text):
        encoder_mesh_sizes(ParallelConfig(vision=degrees), "vision", MeshSizes(4, 2, 3, 2))


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--parallel.vision.pipeline 2 --parallel.vision.segments 2",
        "--parallel.vision.pipeline 4 --parallel.bubble_granularity coarse "
        "--parallel.llm_schedule gpipe",
        "--parallel.vision.replicate 8 --parallel.vision.shard 1",
        "--parallel.pipeline 1",
        "--parallel.pipeline 2 --parallel.tensor 2 --parallel.vision.tensor 1 "
        "--parallel.tp_comm_fraction 0.2",
        "--parallel.pipeline 2 --parallel.tensor 2 --parallel.tp_comm_fraction 0.2",
    ],
)
def test_valid_colocated_recipes_are_accepted(recipe, arguments):
    load_recipe(recipe, arguments.split(), 8)


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        ("--parallel.placement interleaved", "parallel.schedule", 'placement = "colocated"'),
        ("--parallel.schedule separated", "parallel.placement", '"optimus"'),
        ("--parallel.vision.pipeline 3", "parallel.vision.pipeline", "use one of 1, 2, 4"),
        ("--parallel.vision.tensor 2", "parallel.vision.tensor", "use one of 1"),
        ("--parallel.vision.replicate 3", "parallel.vision", "remaining ranks"),
        ("--parallel.tp_comm_fraction 0.2", "parallel.tp_comm_fraction", "tensor > 1"),
        ("--parallel.bubble_pieces false", "parallel.bubble_pieces", "delete the key"),
        (
            "--parallel.pipeline 2 --parallel.tensor 2 --parallel.tp_comm_fraction 0.2 "
            "--compile.enabled true",
            "parallel.tp_comm_fraction",
            "compile.enabled = false",
        ),
        (
            "--parallel.pipeline 2 --parallel.tensor 2 --parallel.tp_comm_fraction 0.2 "
            "--parallel.sequence_parallel true --parallel.async_tensor_parallel true",
            "parallel.tp_comm_fraction",
            "async_tensor_parallel = false",
        ),
        (
            "--parallel.llm.pipeline 2",
            "parallel.llm.pipeline",
            "the parallelism degrees of [parallel]",
        ),
        ("--parallel.vision.segments 6", "parallel.vision.segments", "has 5 layers"),
        (
            "--parallel.vision.pipeline 2 --parallel.vision.segments 3",
            "parallel.vision.segments",
            "2 pipeline ranks x 3",
        ),
        (
            "--parallel.llm_schedule 1f1b --parallel.virtual_stages 2 --parallel.pipeline 2",
            "parallel.virtual_stages",
            "one stage per rank",
        ),
        (
            "--parallel.llm_schedule zero_bubble --compile.enabled true",
            "parallel.llm_schedule",
            "compile.enabled = false",
        ),
    ],
)
def test_invalid_colocated_recipes_name_a_fix(recipe, arguments, key, text):
    problems = problems_of(recipe, *arguments.split(), world_size=8)
    assert [p for p in problems if key in p and text in p], problems


SECOND = """
[model.encoders.audio.config]
model_type = "siglip_vision_model"
num_hidden_layers = 5
"""


@pytest.fixture
def two_encoders(recipe):
    recipe.write_text(recipe.read_text().replace("[training]", SECOND + "[training]"))
    return recipe


def test_encoders_with_different_tensor_degrees(two_encoders):
    sizes = "--parallel.pipeline 2 --parallel.tensor 4 --parallel.vision.tensor 2"
    for audio, mirrors in ((1, 4), (2, 2), (4, 2)):
        arguments = [*sizes.split(), f"--parallel.audio.tensor={audio}"]
        parallel = load_recipe(two_encoders, arguments, 8).recipe.parallel
        assert parallel.mirrors == mirrors
        degrees = [parallel.encoder_mirrors(name) for name in ("vision", "audio", "llm")]
        assert degrees == [2 * mirrors // 4, audio * mirrors // 4, mirrors]
    pieces = "--parallel.tp_comm_fraction 0.2"
    arguments = f"{sizes} --parallel.audio.tensor 1 {pieces}"
    problems = problems_of(two_encoders, *arguments.split(), world_size=8)
    assert [
        p
        for p in problems
        if "parallel.vision.tensor = 2" in p and "run the same encoder action" in p
    ]
    uniform = [*sizes.split(), "--parallel.audio.tensor=2", *pieces.split()]
    assert load_recipe(two_encoders, uniform, 8).recipe.parallel.mirrors == 2


def test_encoder_degrees_need_not_divide_each_other():
    parallel = ParallelConfig(
        placement="colocated", tensor=6, vision={"tensor": 3}, audio={"tensor": 2}
    )
    assert parallel.mirrors == 6
    assert [parallel.encoder_mirrors(name) for name in ("vision", "audio")] == [3, 2]


def test_colocated_model_requires_encoders(recipe):
    before, _, after = MODEL.partition("[model.encoders.vision.config]")
    recipe.write_text(before + "[training]" + after.partition("[training]")[2])
    with pytest.raises(ConfigError, match="no encoders"):
        load_recipe(recipe, [], 4)


def test_stages_are_layers_unless_configured():
    modules = [
        ModuleLayers("vision", "encoder", (1.0,) * 6, sub_microbatched=True),
        ModuleLayers("llm", "llm", (1.0,) * 4),
    ]

    def sizes(**vision: int) -> list[int]:
        config = ParallelConfig(
            pipeline=2, placement="colocated", schedule="optimus", vision=vision
        )
        stages = OPTIMUS_SCHEDULE.layout(config, modules).stages
        return [s.stop - s.start for s in stages if s.module == "vision"]

    assert sizes() == sizes(pipeline=2) == [1] * 6
    assert sizes(segments=2) == [3, 3]
    assert sizes(pipeline=2, segments=1) == [3, 3]


@pytest.mark.parametrize(("pieces", "share"), [("true", 0.2), ("false", 0.0)])
def test_stored_recipe_with_removed_key_is_read(recipe, tmp_path, monkeypatch, pieces, share):
    options = ["--parallel.pipeline=2", "--parallel.tensor=2", "--parallel.tp_comm_fraction=0.2"]
    stored = dump_recipe(load_recipe(recipe, options).recipe)
    key = f"tp_comm_fraction = 0.2\nbubble_pieces = {pieces}"
    (tmp_path / "recipe.toml").write_text(stored.replace("tp_comm_fraction = 0.2", key))
    with pytest.raises(ConfigError, match="delete the key"):  # a recipe of the user
        load_recipe(tmp_path / "recipe.toml", world_size=8)
    (tmp_path / "STATUS.json").write_text("{}")  # a run directory
    loaded = load_recipe(tmp_path / "recipe.toml", world_size=8).recipe
    assert loaded.parallel.tp_comm_fraction == share
    tables = tomli.loads((tmp_path / "recipe.toml").read_text())
    assert changed_values(tables).get("parallel.tp_comm_fraction", 0.0) == share  # run report
    monkeypatch.setattr(checkpoint, "read_manifest", lambda _: {"recipe": tables})
    assert checkpoint.read_checkpoint_recipe(tmp_path).parallel.tp_comm_fraction == share  # export
    for broken in ({}, {"parallel": 1}, {"parallel": {"bubble_pieces": []}}):
        without_removed_keys(broken)
