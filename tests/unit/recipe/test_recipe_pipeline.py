"""Tests of pipeline keys of recipes: tables by module name, and mistakes with a fix."""

from pathlib import Path

import pytest
from installed import needs_extension
from recipe_problems import problems_of

from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.check_parallel import check_pipeline
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import dump_recipe, load_recipe
from torchmm.recipe.recipe import Recipe

MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_hidden_layers = 6
[model.encoders.vision.config]
model_type = "siglip_vision_model"
num_hidden_layers = 4
[training]
global_batch_size = 8
[[data.sources]]
path = "."
"""


def test_module_tables_override_pipeline_settings(recipe: Path) -> None:
    recipe.write_text(MODEL + "[parallel]\npipeline = 2\n[parallel.vision]\nsegments = 2\n")
    arguments = ["--parallel.vision.sub_microbatch_images", "3", "--parallel.virtual_stages=3"]
    loaded = load_recipe(recipe, arguments, 4).recipe
    assert {name: loaded.parallel.segments(name) for name in ("vision", "llm")} == {
        "vision": 2,
        "llm": 3,
    }
    assert loaded.parallel.sub_microbatch_images("vision") == 3
    (recipe.parent / "again.toml").write_text(dump_recipe(loaded))
    assert load_recipe(recipe.parent / "again.toml").recipe == loaded


def test_defaults_follow_the_schedule() -> None:
    separated = ParallelConfig(pipeline=2, virtual_stages=2)
    assert (separated.segments("llm"), separated.segments("vision")) == (2, 1)
    assert separated.sub_microbatch_images("vision") == 4
    assert ParallelConfig(schedule="csv:x").sub_microbatch_images("vision") == 4
    assert ParallelConfig(schedule="1f1b").sub_microbatch_images("vision") is None


@pytest.mark.parametrize(
    "arguments",
    [
        "--parallel.pipeline 4",
        "--parallel.pipeline 2 --parallel.virtual_stages 3",
        "--parallel.pipeline 4 --parallel.schedule megatron_balanced --parallel.virtual_stages 2",
        "--parallel.pipeline 2 --parallel.schedule megatron --parallel.virtual_stages 3",
        "--parallel.pipeline 2 --parallel.tensor 2 --parallel.reshard_after_forward never",
        "--parallel.pipeline 2 --parallel.llm.segments 3 --parallel.vision.segments 2",
    ],
)
def test_valid_pipeline_recipes_are_accepted(recipe: Path, arguments: str) -> None:
    load_recipe(recipe, arguments.split(), 4)


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        ("--parallel.pipeline 3", "parallel: ", "pipeline 3 x replicate 1 x shard -1"),
        ("--parallel.schedule 1f1", "parallel.schedule", 'did you mean "1f1b"'),
        ("--parallel.schedule csv:gone.csv", "parallel.schedule", "no such file"),
        ("--parallel.placement scattered", "parallel.placement", "must be one of interleaved"),
        ("--parallel.virtual_stages 2", "parallel.virtual_stages", "parallel.pipeline > 1"),
        (
            "--parallel.pipeline 2 --parallel.schedule 1f1b --parallel.virtual_stages 2",
            "parallel.virtual_stages",
            "interleaved_1f1b",
        ),
        (
            "--parallel.pipeline 2 --parallel.reshard_after_forward always",
            "parallel.reshard_after_forward",
            'use "default"',
        ),
        (
            "--parallel.pipeline 2 --parallel.gradient_reduction microbatch",
            "parallel.gradient_reduction",
            'use "step"',
        ),
        (
            "--parallel.gradient_reduction microbatch --parallel.reshard_after_forward never",
            "parallel.reshard_after_forward",
            'use "default"',
        ),
        pytest.param(
            "--parallel.gradient_reduction microbatch --parallel.placement colocated "
            "--parallel.schedule optimus",
            "parallel.gradient_reduction",
            '"interleaved"',
            marks=needs_extension("balance"),
        ),
        (
            "--parallel.pipeline 2 --parallel.schedule zero_bubble --compile.enabled true",
            "parallel.schedule",
            "compile.enabled = false",
        ),
        ("--parallel.tensr 2", "parallel.tensr", "did you mean parallel.tensor?"),
        ("--parallel.visoin.segments 2", 'parallel = "visoin"', 'did you mean "vision"'),
        ("--parallel.vision.segmnts 2", "parallel.vision.segmnts", "parallel.vision.segments?"),
        ("--parallel.vision.segments 0", "parallel.vision.segments", ">= 1"),
        ("--parallel.vision.segments 2", "parallel.vision.segments", "parallel.pipeline > 1"),
        (
            "--parallel.pipeline 2 --parallel.schedule megatron --parallel.vision.segments 2",
            "parallel.vision.segments",
            'use "separated"',
        ),
        (
            "--parallel.llm.sub_microbatch_images 2",
            "parallel.llm.sub_microbatch_images",
            "for an encoder",
        ),
        ("--data.pipeline 2", "data.pipeline", "did you mean parallel.pipeline?"),
        ("--data.anything 2", "data.anything", "valid names"),
        (
            "--parallel.pipeline 4 --parallel.vision.segments 2",
            "parallel.pipeline",
            "vision has 4 layers, but 4 pipeline ranks x 2 stages per rank = 8",
        ),
        (
            "--parallel.pipeline 4 --parallel.virtual_stages 2",
            "parallel.pipeline",
            "llm has 6 layers",
        ),
        (
            "--parallel.pipeline 4 --parallel.schedule megatron --parallel.virtual_stages 2",
            "parallel.pipeline",
            "llm has 6 layers",
        ),
        (
            "--parallel.pipeline 4 --parallel.schedule gpipe --parallel.virtual_stages 3",
            "parallel.pipeline",
            "all modules together have 10 layers",
        ),
        (
            "--parallel.pipeline 4 --model.encoders.vision.feature_layer -2",
            "parallel.pipeline",
            "vision has 3 layers",
        ),
    ],
)
def test_pipeline_mistakes_name_key_and_fix(
    recipe: Path, arguments: str, key: str, text: str
) -> None:
    problems = problems_of(recipe, *arguments.split(), world_size=4)
    assert len(problems) == 1, problems
    assert f": {key}" in problems[0]
    assert text in problems[0]


def test_encoder_names_must_not_match_keys(recipe: Path) -> None:
    recipe.write_text(MODEL.replace("encoders.vision", "encoders.tensor"))
    (problem,) = problems_of(recipe, world_size=4)
    assert 'model.encoders = "tensor": conflicts with a key of [parallel]' in problem


@pytest.mark.parametrize(
    ("config", "vision"),
    [
        ({"model_type": "llava", "vision_config": {"num_hidden_layers": 4}}, None),
        (
            {
                "model_type": "llava",
                "vision_config": {"num_hidden_layers": 4},
                "vision_feature_layer": -2,
            },
            3,
        ),
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 4}}, 4),
    ],
)
def test_pipeline_checks_layers_of_composites(config: dict, vision: int | None) -> None:
    content = {"model": {"config": {**config, "text_config": {"num_hidden_layers": 9}}}}
    content["parallel"] = {"pipeline": 9}
    problems = [str(problem) for problem in check_pipeline(Recipe.model_validate(content))]
    assert problems == ([] if vision is None else problems)
    assert not any("llm" in problem for problem in problems)
    assert any(f"vision has {vision} layers" in problem for problem in problems) == bool(vision)


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        ("shard = 2\nexpert = 3", 2, "must divide the 2 ranks of parallel.shard"),
        ("shard = 2\nexpert = 2\ntensor = 2", 4, "is not supported with tensor parallelism"),
        ("shard = 2\nexpert = 2\npipeline = 2", 4, 'schedule = "1f1b"'),
        ('expert = 2\nplacement = "disaggregated"', 4, 'with "disaggregated" modules'),
        ("shard = 2\nexpert = 2\n[compile]\nenabled = true", 2, "cannot be compiled"),
        (
            'shard = 2\nexpert = 2\n[activation_checkpoint]\nmode = "auto"',
            2,
            "the same recomputation on all ranks",
        ),
    ],
)
def test_invalid_expert_parallelism_is_rejected(recipe, keys, ranks, message) -> None:
    recipe.write_text(f"{MODEL}\n[parallel]\n{keys}\n")
    assert any(
        "expert" in problem and message in problem
        for problem in problems_of(recipe, world_size=ranks)
    )


GENERATOR = "[model.generator]\nconfig = {num_layers = 1}"


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        (
            "shard = 2\n[parallel.llm]\ncontext = 3",
            2,
            "must divide the 2 ranks of parallel.shard",
        ),
        ("[parallel.vision]\ncontext = 2", 2, "set parallel.llm.context"),
        (
            "[parallel.vision]\ndynamic_context = true",
            2,
            "set parallel.llm.dynamic_context",
        ),
        ("[parallel.llm]\ndynamic_context = true", 2, "a power of two above 1 for"),
        ("[parallel.llm]\ncontext = 6\ndynamic_context = true", 6, "(found 6)"),
        (
            "auto_sizes = true\n[parallel.llm]\ncontext = 2",
            2,
            "by the search for parallelism degrees",
        ),
        (
            'placement = "colocated"\nschedule = "optimus"\ntensor = 2\n'
            "vision.tensor = 1\nllm.context = 2",
            4,
            "a smaller tensor-parallel degree",
        ),
        ('placement = "disaggregated"\n[parallel.llm]\ncontext = 2', 2, 'with "disaggregated"'),
        (f"[parallel.llm]\ncontext = 2\n{GENERATOR}", 2, "with a generator"),
        ("[parallel.llm]\ncontext = 2\n[compile]\nenabled = true", 2, "cannot be compiled"),
        (
            '[parallel.llm]\ncontext = 2\n[activation_checkpoint]\nmode = "auto"',
            2,
            "the same recomputation",
        ),
    ],
)
def test_invalid_context_parallelism_is_rejected(recipe, keys, ranks, message) -> None:
    recipe.write_text(f"{MODEL}\n[parallel]\n{keys}\n")
    problems = problems_of(recipe, world_size=ranks)
    assert any("context" in problem and message in problem for problem in problems), problems


def test_dynamic_context_requires_one_sequence_per_microbatch(recipe: Path) -> None:
    recipe.write_text(f"{MODEL}\n[parallel.llm]\ncontext = 2\ndynamic_context = true\n")
    loaded = load_recipe(recipe, ["--training.microbatch_size=1"], 2).recipe
    assert loaded.parallel.dynamic_context
    [problem] = problems_of(recipe, "--training.microbatch_size=2", world_size=2)
    assert "parallel.llm.dynamic_context" in problem and "training.microbatch_size = 1" in problem


def test_context_ranks_count_once_in_batch(recipe: Path) -> None:
    recipe.write_text(f"{MODEL}\n[parallel.llm]\ncontext = 2\n")
    odd = ["--training.global_batch_size=2", "--training.microbatch_size=1"]
    assert resolve_recipe(load_recipe(recipe, odd, 4).recipe, 4).data_parallel_size == 2
    [problem] = problems_of(recipe, odd[1], "--training.global_batch_size=3", world_size=4)
    assert "data-parallel ranks / parallel.llm.context x microbatch_size = 2 x 1" in problem


def test_expert_parallelism_supports_1f1b_pipelines(recipe: Path) -> None:
    recipe.write_text(f'{MODEL}\n[parallel]\nexpert = 2\npipeline = 2\nschedule = "1f1b"\n')
    assert load_recipe(recipe, [], 4).recipe.parallel.expert == 2
