"""Tests of modules that tensor parallelism cannot shard."""

import pytest
from model_cases import LLMS, build

from torchmm.parallel.tensor.apply import tensor_problems
from torchmm.recipe.model_section import LlmConfig, ModelConfig


@pytest.mark.parametrize(
    ("llm", "changes", "size", "expected"),
    [
        ("llama", {}, 2, []),
        ("llama", {}, 4, []),  # two ranks share each of the 2 key and value heads
        ("llama", {"num_attention_heads": 6, "hidden_size": 48}, 4, ["must divide the attention"]),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96},
            4,
            ["heads=12, kv_heads=6"],
        ),
        ("olmo2", {}, 2, []),
        ("olmo2", {}, 4, ["above the 2 key and value heads of 'llm'"]),
        ("qwen3_5", {}, 2, []),
        ("qwen3_5", {}, 4, ["must divide the 2 key heads of the delta nets"]),
        ("qwen3_moe", {}, 2, []),
        ("qwen3_moe", {}, 4, ["must divide the 6 experts"]),
    ],
)
def test_sizes_that_cannot_be_sharded_are_rejected(llm, changes, size, expected):
    module = build(ModelConfig(llm=LlmConfig(config={**LLMS[llm], **changes}))).llm
    problems = tensor_problems(module, size)
    assert len(problems) == len(expected)
    for problem, words in zip(problems, expected, strict=True):
        assert f"tensor = {size}" in problem and words in problem


def test_experts_are_not_sharded_with_async_tensor_parallelism():
    for llm, count in (("llama", 0), ("qwen3_moe", 1)):
        module = build(ModelConfig(llm=LlmConfig(config=LLMS[llm]))).llm
        problems = tensor_problems(module, 2, overlaps=True)
        assert len(problems) == count and all("async_tensor_parallel" in p for p in problems)
