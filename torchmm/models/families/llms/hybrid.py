"""LLMs whose layers differ in kind: most have a gated delta net, the others attention with a gate.

Qwen3-Next and Qwen3.5, with one feed-forward part or with experts, beside which one shared expert
sees all tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.layers.attention import PACKED
from torchmm.models.layers.delta_net import pack_delta_nets


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
    )
    pack_delta_nets(model.model.layers)
    return model


_DELTA_STYLES = {  # Hugging Face's plan computes delta nets whole on every rank
    "linear_attn": "delta_net",
    "linear_attn.in_proj_qkv": "",  # part of the style of what contains it
    "linear_attn.in_proj_z": "colwise",
    "linear_attn.in_proj_b": "colwise",
    "linear_attn.in_proj_a": "colwise",
    "linear_attn.out_proj": "rowwise",
}
_INTERLEAVED_STYLES = {  # rows of a key head are neighbours
    "linear_attn": "delta_net",
    "linear_attn.in_proj_qkvz": "colwise",
    "linear_attn.in_proj_ba": "colwise",
    "linear_attn.out_proj": "rowwise",
}
_EXPERT_STYLES = {
    "mlp": "experts",
    "mlp.experts": "",
    "mlp.experts.gate_up_proj": "",
    "mlp.experts.down_proj": "",
    # Part of the style of what contains them, as they share its input and its sum over ranks.
    "mlp.shared_expert.gate_proj": "",
    "mlp.shared_expert.up_proj": "",
    "mlp.shared_expert.down_proj": "",
}

QWEN3_5 = LlmFamily(
    build=_build,
    norm_weight_float32=True,
    output_gate=True,
    tensor_parallel=_DELTA_STYLES,
)
QWEN3_5_MOE = replace(QWEN3_5, tensor_parallel=_DELTA_STYLES | _EXPERT_STYLES)
QWEN3_NEXT = replace(QWEN3_5, tensor_parallel=_INTERLEAVED_STYLES | _EXPERT_STYLES)
