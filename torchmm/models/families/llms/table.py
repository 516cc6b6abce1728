"""The table of causal LMs: what each family has of its own.

Plain ones (Llama's layers) are a line.
"""

from __future__ import annotations

from dataclasses import replace

from torchmm.models.families.llms.family import GEMMA_NORMS, LlmFamily
from torchmm.models.families.llms.gemma4 import GEMMA4

_GEMMA = LlmFamily(norms=GEMMA_NORMS, norm_place="around", norm_weight_float32=True)
_OLMO2 = LlmFamily(
    norm_place="behind",
    norm_weight_float32=True,
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    # Hugging Face's plan computes attention whole on every rank, for its norms of all heads.
    tensor_parallel={
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.q_norm": "sharded_norm",
        "self_attn.k_norm": "sharded_norm",
        "self_attn.o_proj": "rowwise",
    },
)
_PHI3 = LlmFamily(
    packed_qkv=True,
    tensor_parallel={
        "self_attn.qkv_proj": "",  # part of the style of what contains it
        "mlp.gate_up_proj": "",
        "self_attn": "packed_qkv",
        "self_attn.o_proj": "rowwise",
        "mlp": "packed_gate_up",
        "mlp.down_proj": "rowwise",
    },
)
_QWEN3_MOE = LlmFamily(
    tensor_parallel={  # each rank has some of the experts
        "mlp": "experts",
        "mlp.experts": "",
        "mlp.experts.gate_up_proj": "",
        "mlp.experts.down_proj": "",
    },
)

LLM_FAMILIES = {
    "llama": LlmFamily(),
    "gemma": LlmFamily(norm_weight_float32=True),
    "mistral": LlmFamily(),
    "qwen2": LlmFamily(),
    "qwen3": LlmFamily(),
    "smollm3": LlmFamily(),  # some layers without rotary positions
    "gemma2": replace(_GEMMA, own_logits=True),  # capped scores, every other layer with a window
    "gemma3_text": _GEMMA,
    "gemma4_text": GEMMA4,
    "qwen3_moe": _QWEN3_MOE,
    "granite": LlmFamily(multiplier="embedding_multiplier", own_logits=True),
    "olmo2": _OLMO2,
    "phi3": _PHI3,
    "starcoder2": LlmFamily(gated_ffn=False),  # GPT's layers: LayerNorm, biases, no gate
}
"""Supported families by Hugging Face model_type. One is supported when its parity test passes."""
