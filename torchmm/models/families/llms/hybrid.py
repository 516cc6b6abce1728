"""Hybrid LLMs: few layers have attention, and most have a mixer with a smaller state.

Qwen3-Next and Qwen3.5 have gated delta nets and attention with an output gate. Their MLPs are
dense, or have routed experts and one shared expert. LFM2 has short convolutions.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from torchmm.common.errors import ConfigError
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.layers.attention import PACKED
from torchmm.models.layers.delta_net import pack_delta_nets
from torchmm.models.layers.short_conv import pack_short_convolutions


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
    )
    pack_delta_nets(model.model.layers)
    pack_short_convolutions(model.model.layers)
    return model


def _build_lfm2(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    if (
        "kwargs" not in signature(Lfm2ShortConv.forward).parameters
    ):  # layers do not pass keyword arguments
        raise ConfigError(
            f"[model] lfm2: layers of transformers {transformers.__version__} do not pass "
            "sample boundaries to their convolutions; install 5.23"
        )
    return _build(config, dtype)


_DELTA_STYLES = {  # the Hugging Face plan replicates delta nets
    "linear_attn": "delta_net",
    "linear_attn.in_proj_qkv": "",  # included in the style of the parent
    "linear_attn.in_proj_z": "colwise",
    "linear_attn.in_proj_b": "colwise",
    "linear_attn.in_proj_a": "colwise",
    "linear_attn.out_proj": "rowwise",
}
_INTERLEAVED_STYLES = {  # rows of a key head are adjacent
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
    # Included in the style of the parent, which shares its input and its reduction.
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
LFM2 = LlmFamily(
    build=_build_lfm2,
    norms=("operator_norm", "ffn_norm"),
    final_norm="embedding_norm",
    tensor_parallel={
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.out_proj": "rowwise",
        "self_attn.q_layernorm": "replicated_with_grad_allreduce",
        "self_attn.k_layernorm": "replicated_with_grad_allreduce",
        "conv": "short_convolution",
        "conv.in_proj": "",  # included in the style of the parent
        "conv.out_proj": "rowwise",
        "feed_forward.w1": "colwise",
        "feed_forward.w3": "colwise",
        "feed_forward.w2": "rowwise",
    },
)
