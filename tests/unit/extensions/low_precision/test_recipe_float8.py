"""Recipes that float8 rejects: scales that depend on parallelism, and unnecessary work."""

from pathlib import Path

import pytest
from recipe_problems import problems_of

from torchmm.planning.converters import find_converters
from torchmm.recipe.read import load_recipe

MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_hidden_layers = 6
[model.encoders.vision.config]
model_type = "siglip_vision_model"
num_hidden_layers = 4
[[data.sources]]
path = "."
[float8]
scaling = "rowwise"
emulate = true
"""
VISION = "--float8.modules ['llm','vision'] "


@pytest.mark.parametrize(
    "arguments",
    [
        "--parallel.shard 4",
        "--parallel.pipeline 2 --parallel.schedule 1f1b",
        "--parallel.schedule zero_bubble",  # without a pipeline
        "--parallel.tensor 2",
        "--parallel.tensor 2 --parallel.sequence_parallel true",
        "--parallel.tensor 2 --float8.scaling tensorwise --float8.modules []",
        "--float8.emulate false --training.dtype bfloat16",
        VISION + "--parallel.shard 4",
        "--parallel.llm.context 2",
    ],
)
def test_valid_float8_recipe_loads(recipe: Path, arguments: str) -> None:
    load_recipe(recipe, arguments.split(), 4)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ["Float8Converter"]),
        ("--float8.scaling none", []),
        ("--float8.scaling none --quantization.quant_type nf4", ["QuantizationConverter"]),
    ],
)
def test_recipe_selects_converters(recipe: Path, arguments: str, expected: list[str]) -> None:
    loaded = load_recipe(recipe, arguments.split()).recipe
    assert [type(converter).__name__ for converter in find_converters(loaded)] == expected


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        (
            "--parallel.tensor 2 --float8.scaling tensorwise",
            "parallel.tensor",
            "ranks share one scale in 'llm'",
        ),
        (
            "--parallel.tensor 2 --parallel.sequence_parallel true "
            "--parallel.async_tensor_parallel true",
            "parallel.async_tensor_parallel",
            "linear layers of 'llm' in this case",
        ),
        (
            "--parallel.llm.context 2 --float8.scaling tensorwise",
            "parallel.llm.context",
            "sequences of one scale",
        ),
        ("--parallel.pipeline 2 --parallel.schedule zero_bubble", "float8.scaling", "zero_bubble"),
        ("--float8.emulate false", "float8.scaling", 'training.dtype = "bfloat16"'),
        ("--float8.modules ['visoin']", "float8.modules", 'did you mean "vision"'),
        (
            VISION + "--parallel.pipeline 2",
            "float8.modules",
            "images that share a scale in 'vision'",
        ),
        ("--freeze.modules ['llm']", "float8.modules", "compute its weight gradients"),
    ],
)
def test_unsupported_float8_recipe_is_rejected(
    recipe: Path, arguments: str, key: str, text: str
) -> None:
    actual = problems_of(recipe, *arguments.split(), world_size=4)
    assert any(key in problem and text in problem for problem in actual), actual


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        ("--training.parameter_dtype bfloat16", "training.parameter_dtype", "training.dtype"),
        (
            "--parallel.gradient_reduction microbatch --training.dtype bfloat16 "
            "--training.parameter_dtype bfloat16 --parallel.shard 4",
            "parallel.gradient_reduction",
            "in bfloat16",
        ),
    ],
)
def test_bfloat16_parameters_are_rejected(
    recipe: Path, arguments: str, key: str, text: str
) -> None:
    actual = problems_of(recipe, *arguments.split(), world_size=4)
    assert any(f": {key}" in problem and text in problem for problem in actual), actual
