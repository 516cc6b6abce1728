"""The registered families of causal LMs and their differences from the defaults.

Models with Llama layers need only one line.
"""

from __future__ import annotations

from dataclasses import replace

from torchmm.models.families.llms.family import GEMMA_NORMS, LlmFamily
from torchmm.models.families.llms.gemma4 import GEMMA4
from torchmm.models.families.llms.hybrid import LFM2, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

_GEMMA = LlmFamily(norms=GEMMA_NORMS, norm_place="around", norm_weight_float32=True)
_OLMO2 = LlmFamily(
    norm_place="behind",
    norm_weight_float32=True,
    rotary_float32=True,
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    # The Hugging Face plan replicates attention, because norms are over all heads.
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
        "self_attn.qkv_proj": "",  # included in the style of the parent
        "mlp.gate_up_proj": "",
        "self_attn": "packed_qkv",
        "self_attn.o_proj": "rowwise",
        "mlp": "packed_gate_up",
        "mlp.down_proj": "rowwise",
    },
)
_QWEN3_MOE = LlmFamily(
    tensor_parallel={  # experts are divided among ranks
        "mlp": "experts",
        "mlp.experts": "",
        "mlp.experts.gate_up_proj": "",
        "mlp.experts.down_proj": "",
    },
)

_EXPERTS_OF_BLOCKS = (  # names in Mixtral files
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
)
_GLM_STYLES = {
    "mlp.gate_up_proj": "",
    "mlp": "packed_gate_up",
    "mlp.down_proj": "rowwise",
}
_GLM4_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)
_SHARED_EXPERTS = {  # included in the style of the parent
    **_QWEN3_MOE.tensor_parallel,
    "mlp.shared_experts.gate_proj": "",
    "mlp.shared_experts.up_proj": "",
    "mlp.shared_experts.down_proj": "",
}
_HEAD_NORMS = {  # missing in the Hugging Face plan
    "self_attn.q_norm": "replicated_with_grad_allreduce",
    "self_attn.k_norm": "replicated_with_grad_allreduce",
}
_LATENT = {
    "self_attn": "latent_heads",
    "self_attn.q_proj": "",
    "self_attn.q_b_proj": "",
    "self_attn.kv_a_proj_with_mqa": "",
    "self_attn.kv_b_proj": "",
    "self_attn.o_proj": "rowwise",
}
_GPT_OSS = LlmFamily(
    norm_weight_float32=True,
    activation="clamped_silu",
    stacked_experts=True,
    tensor_parallel={
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "self_attn": "head_scores",
        **_QWEN3_MOE.tensor_parallel,
    },
)

LLM_FAMILIES = {
    "llama": LlmFamily(),
    "gemma": LlmFamily(norm_weight_float32=True),
    "mistral": LlmFamily(),
    "ministral3": LlmFamily(),  # queries are scaled by position in the sample
    "qwen2": LlmFamily(),
    "qwen3": LlmFamily(),
    "smollm3": LlmFamily(),  # some layers have no rotary positions
    "gemma2": _GEMMA,  # soft capping, sliding window in every second layer
    "gemma3_text": _GEMMA,
    "gemma4_text": GEMMA4,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "lfm2": LFM2,
    "granite": LlmFamily(embedding_scale_attribute="embedding_multiplier"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,  # sliding window in three of four layers
    "phi3": _PHI3,
    "glm": LlmFamily(tensor_parallel=_GLM_STYLES),
    "glm4": LlmFamily(norms=_GLM4_NORMS, norm_place="around", tensor_parallel=_GLM_STYLES),
    # Attention and MLP read the same norm. Some layers have no rotary positions.
    "cohere2": LlmFamily(
        norms=("input_layernorm",),
        norm_kind="centered",
        norm_place="shared",
        norm_weight_float32=True,
        rotary_float32=True,
    ),
    "mixtral": replace(_QWEN3_MOE, legacy_names=_EXPERTS_OF_BLOCKS),
    "glm4_moe": LlmFamily(
        tensor_parallel={**_SHARED_EXPERTS, **_HEAD_NORMS}
    ),  # the first layers are dense
    "deepseek_v3": LlmFamily(tensor_parallel={**_SHARED_EXPERTS, **_LATENT}),
    "minicpm3": LlmFamily(
        embedding_scale_attribute="embedding_multiplier", tensor_parallel=_LATENT
    ),
    "gpt_oss": _GPT_OSS,  # attention sinks, windows; experts with biases
    "starcoder2": LlmFamily(gated_ffn=False),  # GPT layers: LayerNorm, biases, no gate
}
"""Registered LLM families by Hugging Face model_type. Each has a parity test."""
