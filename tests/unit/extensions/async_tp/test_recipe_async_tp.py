"""Recipes that `parallel.async_tensor_parallel` rejects."""

from pathlib import Path

import pytest
from recipe_problems import problems_of

MODEL = """
[model]
tokenizer = "gpt2"
[model.llm.config]
model_type = "llama"
num_attention_heads = 6
[[data.sources]]
path = "."
"""


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        (
            "--adapters.a.modules ['llm'] --parallel.async_tensor_parallel true "
            "--parallel.sequence_parallel true --parallel.tensor 2",
            "parallel.async_tensor_parallel",
            "not supported with adapters",
        ),
        (
            "--parallel.async_tensor_parallel true --parallel.tensor 2",
            "parallel.async_tensor_parallel",
            "sequence_parallel = true",
        ),
        (
            "--parallel.async_tensor_parallel true --parallel.sequence_parallel true",
            "parallel.async_tensor_parallel",
            "tensor > 1",
        ),
        (
            "--parallel.async_tensor_parallel true --parallel.sequence_parallel true "
            "--parallel.tensor 2 --parallel.pipeline 2 --parallel.schedule zero_bubble",
            "parallel.async_tensor_parallel",
            "another parallel.schedule",
        ),
        (
            "--parallel.async_tensor_parallel true --parallel.sequence_parallel true "
            "--parallel.tensor 2 --training.device cpu "
            "--parallel.async_tensor_backend symmetric_memory",
            "parallel.async_tensor_backend",
            "requires CUDA",
        ),
    ],
)
def test_async_tensor_parallel_is_rejected(
    recipe: Path, arguments: str, key: str, text: str
) -> None:
    (problem,) = problems_of(recipe, *arguments.split(), world_size=4)
    assert f": {key}" in problem
    assert text in problem
