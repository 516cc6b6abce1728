"""Tests of the settings of small copies of LLMs."""

import pytest
from transformers import DeepseekV3Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from torchmm.models.families.small_configs import shrink_llm_settings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # The default head size, hidden_size / heads, stays the default: 32 / 4.
        (LlamaConfig(hidden_size=1024, num_attention_heads=16), {"head_dim": 8}),
        # Another head size stays different from the default.
        (
            Qwen3Config(hidden_size=1024, num_attention_heads=16, head_dim=128),
            {"head_dim": 16},
        ),
        # Heads of latent attention have separate sizes with and without rotation.
        (DeepseekV3Config(), {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}),
        # Multi-head, grouped-query and multi-query attention.
        (LlamaConfig(num_attention_heads=32, num_key_value_heads=32), {"num_key_value_heads": 4}),
        (LlamaConfig(num_attention_heads=32, num_key_value_heads=8), {"num_key_value_heads": 2}),
        (LlamaConfig(num_attention_heads=32, num_key_value_heads=1), {"num_key_value_heads": 1}),
        # Some or all groups of experts are chosen.
        (DeepseekV3Config(n_group=8, topk_group=4), {"topk_group": 1}),
        (DeepseekV3Config(n_group=8, topk_group=8), {"topk_group": 2}),
    ],
)
def test_small_copies_have_the_same_structure(
    config: PreTrainedConfig, expected: dict[str, int]
) -> None:
    small = shrink_llm_settings(config, 3)
    assert {name: small[name] for name in expected} == expected
    assert (small["num_hidden_layers"], small["num_attention_heads"]) == (3, 4)
