"""Gemma 4: global layers with a different head size, and experts in addition to a dense MLP.

Most layers have sliding-window attention. Every sixth layer attends to all tokens, with larger
heads and fewer key heads. In large models these layers use keys as values. In the
mixture-of-experts model, each layer adds the outputs of experts and of a dense MLP.

The small models (E2B, E4B) are not supported. Their last layers attend to keys and values of
preceding layers, and each layer adds a second token embedding. Pipeline stages would have to send
both with the hidden states, but a message between LLM stages is one tensor.
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
        extra_norms=len(_EXPERT_NORMS),
        norms_sharing_input=1,  # both pre-feedforward norms and the router norm read one input
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
    choose_variant=_choose,
)
