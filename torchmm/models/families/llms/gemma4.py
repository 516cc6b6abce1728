"""Gemma 4: global layers with heads of their own size, and experts beside the feed-forward part.

Most layers attend within a window; every sixth to everything, with larger heads, fewer of them for
keys, and in large models with keys for values. In the mixture every layer has experts *and* a
feed-forward part, whose outputs are added.

The small models (E2B, E4B) are refused: their last layers attend to keys and values of earlier
layers, and every layer adds a second embedding of the tokens. Both would have to travel with the
hidden states from stage to stage, and a message between stages of an LLM is one tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchmm.common.errors import ConfigError
from torchmm.models.families.llms.family import GEMMA_NORMS, LlmFamily

_EXPERT_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


def _choose(family: LlmFamily, config: Any) -> LlmFamily:
    problems = []
    if config.hidden_size_per_layer_input:
        problems.append(
            f"hidden_size_per_layer_input = {config.hidden_size_per_layer_input} (Gemma 4 "
            "E2B, E4B): per-layer embeddings are not supported; use a model with 0 (31B, "
            "26B-A4B)"
        )
    if config.num_kv_shared_layers:
        problems.append(
            f"num_kv_shared_layers = {config.num_kv_shared_layers} (Gemma 4 E2B, E4B): layers "
            "that share keys and values are not supported; use a model with 0 (31B, 26B-A4B)"
        )
    if config.use_bidirectional_attention == "all":
        problems.append(
            "use_bidirectional_attention = 'all' is not supported; override it with 'vision' "
            "(images only) or remove it"
        )
    if problems:
        raise ConfigError([f"[model] gemma4_text: {problem}" for problem in problems])
    if not config.enable_moe_block:
        return family
    return replace(
        family,
        norms=(*family.norms, *_EXPERT_NORMS),
        more_norms=len(_EXPERT_NORMS),
        norms_of_same=1,  # "pre_feedforward_layernorm" and its second, as the router's own
        router_norm=True,
        tensor_parallel={
            "router": "sequence",
            "router.proj": "sequence",
            "experts": "experts_alone",
            "experts.gate_up_proj": "",
            "experts.down_proj": "",
        },
    )


GEMMA4 = LlmFamily(
    norms=GEMMA_NORMS,
    norm_place="around",
    norm_weight_float32=True,
    choose=_choose,
)
