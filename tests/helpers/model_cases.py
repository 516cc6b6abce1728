"""Tiny models of every supported family, and packed microbatches for them."""

from collections.abc import Callable
from itertools import pairwise
from math import prod

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.models.build import build_model
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.recipe.model_section import EncoderConfig, FreezeConfig, LlmConfig, ModelConfig

IMAGE_TOKEN_ID = 63
_LLM = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLMS = {
    "llama": {"model_type": "llama", **_LLM},
    "llama_tied": {"model_type": "llama", **_LLM, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_LLM},
    "qwen3": {"model_type": "qwen3", **_LLM, "head_dim": 16},
    "granite": {
        "model_type": "granite",
        **_LLM,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
    },
    "starcoder2": {"model_type": "starcoder2", **_LLM},
    "mistral": {"model_type": "mistral", **_LLM, "sliding_window": 4},
    "olmo2": {"model_type": "olmo2", **_LLM},
    "gemma": {"model_type": "gemma", **_LLM, "head_dim": 16},
    "phi3": {"model_type": "phi3", **_LLM, "sliding_window": None},
    "smollm3": {"model_type": "smollm3", **_LLM, "no_rope_layer_interval": 2},
    "gemma2": {
        "model_type": "gemma2",
        **_LLM,
        "head_dim": 16,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_LLM,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_LLM,
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
_DELTA = {
    **_LLM,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
LLMS |= {
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        **_DELTA,
        "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.25},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **{k: v for k, v in _DELTA.items() if k != "intermediate_size"},
        **_SHARED_EXPERT,
        "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.25},
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_DELTA,
        **_SHARED_EXPERT,
        "mlp_only_layers": [1],
    },
}
DELTA = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
LLMS |= {
    "olmo3": {
        "model_type": "olmo3",
        **_LLM,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm": {"model_type": "glm", **_LLM, "head_dim": 16, "attention_bias": True},
    "glm4": {"model_type": "glm4", **_LLM, "head_dim": 16, "attention_bias": True},
    "cohere2": {
        "model_type": "cohere2",
        **_LLM,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": {
        "model_type": "mixtral",
        **_LLM,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_LLM,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "swiglu_limit": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_SHARED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_RANKS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
LLMS |= {
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_LLM,
        **_SHARED,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **_LLM, **_SHARED, **_RANKS},
    "deepseek_v3_dense_queries": {
        "model_type": "deepseek_v3",
        **_LLM,
        **_SHARED,
        **_RANKS,
        "q_lora_rank": None,
        "attention_bias": True,
    },
    "minicpm3": {"model_type": "minicpm3", **_LLM, **_RANKS},
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    **_LLM,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "tie_word_embeddings": False,
}
LLMS |= {
    "gemma4": {**_GEMMA4, "attention_k_eq_v": False},
    "gemma4_moe": {
        **_GEMMA4,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
LLMS |= {
    "lfm2": {
        "model_type": "lfm2",
        **_LLM,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 8,
    },
    "ministral3": {
        "model_type": "ministral3",
        **_LLM,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
}
EXPERTS = (
    "gemma4_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v3_dense_queries",
)
BASIC_LLMS = ("llama", "llama_tied", "qwen2", "qwen3", "granite", "starcoder2")
"""Families for tests of behavior that does not depend on the family."""
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
ENCODERS = {
    "clip": {"model_type": "clip_vision_model", **_VISION},
    "siglip": {"model_type": "siglip_vision_model", **_VISION},
    "siglip2": {
        "model_type": "siglip2_vision_model",
        **{k: v for k, v in _VISION.items() if k != "image_size"},
        "num_patches": 16,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}
ENCODERS |= {
    "dinov2": {
        "model_type": "dinov2",
        **{k: v for k, v in _VISION.items() if k != "intermediate_size"},
        "mlp_ratio": 2,
    },
    "dinov2_gated": {
        "model_type": "dinov2",
        **{k: v for k, v in _VISION.items() if k != "intermediate_size"},
        "mlp_ratio": 2,
        "use_swiglu_ffn": True,
    },
    "internvl": {
        "model_type": "internvl_vision",
        **_VISION,
        "attention_bias": True,
        "use_mask_token": True,
    },
    "internvl_norms": {
        "model_type": "internvl_vision",
        **_VISION,
        "use_qk_norm": True,
        "norm_type": "rms_norm",
        "use_mean_pooling": False,
    },
    "idefics3": {"model_type": "idefics3_vision", **_VISION},
    "smolvlm": {"model_type": "smolvlm_vision", **_VISION},
    "qwen2_vl": {
        "model_type": "qwen2_vl_vision",
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 32,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
    },
}
ENCODERS |= {
    "qwen3_vl": {
        "model_type": "qwen3_vl_vision",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
    },
}
ENCODERS["qwen3_vl_moe"] = {**ENCODERS["qwen3_vl"], "model_type": "qwen3_vl_moe_vision"}
for _name in ("qwen3_5", "qwen3_5_moe"):
    ENCODERS[_name] = {**ENCODERS["qwen3_vl"], "model_type": f"{_name}_vision"}
    del ENCODERS[_name]["deepstack_visual_indexes"]
ENCODERS |= {
    _name: {
        "model_type": f"{_name}_vision",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "image_size": 20,
        "patch_size": 4,
    }
    for _name in ("glm4v", "glm4v_moe")
}
ENCODERS |= {
    "whisper": {
        "model_type": "whisper",
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "max_source_positions": 16,
    },
}
_WAVES = {
    "model_type": "wav2vec2",
    **{k: _VISION[k] for k in ("hidden_size", "intermediate_size")},
    **{k: _VISION[k] for k in ("num_hidden_layers", "num_attention_heads")},
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    **dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout"), 0.0),
    "layerdrop": 0.0,
}
STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
ENCODERS |= {"wav2vec2": _WAVES, "wav2vec2_stable": {**_WAVES, **STABLE}}
ENCODERS |= {
    "gemma4": {
        "model_type": "gemma4_vision",
        **{k: v for k, v in _VISION.items() if k != "image_size"},
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    },
}
ENCODERS |= {
    "metaclip_2": {"model_type": "metaclip_2_vision_model", **_VISION},
    "dinov3": {"model_type": "dinov3_vit", **_VISION, "num_register_tokens": 2},
    "dinov3_gated": {"model_type": "dinov3_vit", **_VISION, "use_gated_mlp": True},
    "aimv2": {"model_type": "aimv2_vision_model", **_VISION},
    "aimv2_native": {
        "model_type": "aimv2_vision_model",
        **_VISION,
        "is_native": True,
        "use_head": False,
    },
    "pixtral": {"model_type": "pixtral", **_VISION},
}
_RADIO = {
    "model_type": "radio",
    **{k: v for k, v in _VISION.items() if k != "intermediate_size"},
    "mlp_ratio": 1.5,
    "max_img_size": 32,
    "num_cls_tokens": 2,
    "num_registers": 3,
}
ENCODERS |= {"radio": _RADIO, "radio_gated": {**_RADIO, "use_swiglu_ffn": True}}
REGISTERS = {"dinov3": 2, "dinov3_gated": 0, "radio": 5, "radio_gated": 5}
"""Number of register tokens before the patches, in addition to a class token."""
ENCODERS |= {
    "qwen3_omni_vision": {
        **ENCODERS["qwen3_vl"],
        "model_type": "qwen3_omni_moe_vision_encoder",
    },
    "qwen3_omni_sound": {  # chunks of 100 mel frames, 13 positions; windows of 2 chunks
        "model_type": "qwen3_omni_moe_audio_encoder",
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "max_source_positions": 16,
        "n_window": 50,
        "n_window_infer": 200,
        "output_dim": 32,
        "downsample_hidden_size": 12,
    },
    "qwen2_5_omni_vision": {
        **ENCODERS["qwen2_5_vl"],
        "model_type": "qwen2_5_omni_vision_encoder",
    },
    "qwen2_5_omni_sound": {  # chunks of 10 mel frames, 5 positions; tokens of two chunks
        "model_type": "qwen2_5_omni_audio_encoder",
        "num_mel_bins": 8,
        "d_model": 32,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "max_source_positions": 16,
        "n_window": 5,
        "output_dim": 32,
    },
}
_LISTENER = {  # windows of two seconds, 100 positions
    **{k: v for k, v in ENCODERS["whisper"].items() if k != "encoder_ffn_dim"},
    "max_source_positions": 100,
}
ENCODERS |= {
    "voxtral": {**_LISTENER, "model_type": "voxtral_encoder", "encoder_ffn_dim": 128},
    "qwen2_audio": {**_LISTENER, "model_type": "qwen2_audio_encoder", "encoder_ffn_dim": 48},
    "audioflamingo3": {**_LISTENER, "model_type": "audioflamingo3_encoder", "encoder_ffn_dim": 48},
}
SPEECH = ("voxtral", "qwen2_audio", "audioflamingo3")
"""Speech LLMs, by the names of their towers, which are also their own names."""
AUDIO = (
    "whisper",
    "wav2vec2",
    "wav2vec2_stable",
    "qwen3_omni_sound",
    "qwen2_5_omni_sound",
    *SPEECH,
)
ONE_SIZE_ENCODERS = (
    "clip", "siglip", "dinov2", "dinov2_gated", "internvl", "internvl_norms", "idefics3", "smolvlm",
    "metaclip_2", "aimv2", "aimv2_native", "radio", "radio_gated",
)  # fmt: skip
"""Encoders whose images all have one size, and whose layers read hidden states only."""
BASIC_ENCODERS = ("clip", "siglip", "siglip2", "qwen2_5_vl")
"""Families for tests of behavior that does not depend on the family."""
CLASS_TOKEN = (
    "clip",
    "metaclip_2",
    "dinov3",
    "dinov3_gated",
    "dinov2",
    "dinov2_gated",
    "internvl",
    "internvl_norms",
)
COMPOSITES = {
    "llava": {
        "model_type": "llava",
        "vision_config": ENCODERS["clip"],
        "text_config": LLMS["llama"],
        "image_token_index": IMAGE_TOKEN_ID,
        "image_seq_length": 16,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "vision_config": ENCODERS["qwen2_5_vl"],
        "text_config": {
            **_LLM,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": 62,
        "vision_start_token_id": 61,
        "vision_end_token_id": 60,
    },
}
_OF_QWEN2_5 = ("model_type", "vision_config")
COMPOSITES |= {
    "internvl": {
        "model_type": "internvl",
        "vision_config": ENCODERS["internvl_norms"],
        "text_config": LLMS["qwen2"],
        "image_token_id": IMAGE_TOKEN_ID,
        "image_seq_length": 4,
    },
    "idefics3": {
        "model_type": "idefics3",
        "vision_config": ENCODERS["idefics3"],
        "text_config": LLMS["llama"],
        "image_token_id": IMAGE_TOKEN_ID,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "vision_config": ENCODERS["smolvlm"],
        "text_config": LLMS["llama"],
        "image_token_id": IMAGE_TOKEN_ID,
    },
    "paligemma": {
        "model_type": "paligemma",
        "vision_config": {**ENCODERS["siglip"], "vision_use_head": False},
        "text_config": {"model_type": "gemma", **_LLM, "head_dim": 16},
        "image_token_index": IMAGE_TOKEN_ID,
        "projection_dim": 32,
    },
    "paligemma2": {
        "model_type": "paligemma",
        "vision_config": {**ENCODERS["siglip"], "vision_use_head": False},
        "text_config": {**LLMS["gemma2"], "sliding_window": 64},
        "image_token_index": IMAGE_TOKEN_ID,
        "projection_dim": 32,
    },
    "gemma3": {
        "model_type": "gemma3",
        "vision_config": {**ENCODERS["siglip"], "vision_use_head": False},
        "text_config": LLMS["gemma3_text"],
        "image_token_index": IMAGE_TOKEN_ID,
        "boi_token_index": 61,
        "eoi_token_index": 60,
        "mm_tokens_per_image": 4,
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "vision_config": ENCODERS["qwen2_vl"],
        **{k: v for k, v in COMPOSITES["qwen2_5_vl"].items() if k not in _OF_QWEN2_5},
    },
}
_QWEN3_VL = {
    **{k: v for k, v in COMPOSITES["qwen2_5_vl"].items() if k.endswith("_token_id")},
    "text_config": {
        **{k: v for k, v in _LLM.items() if k not in ("bos_token_id", "eos_token_id")},
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
        },
    },
}
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers")
COMPOSITES |= {
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "vision_config": ENCODERS["qwen3_vl"],
        **_QWEN3_VL,
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "vision_config": ENCODERS["qwen3_vl_moe"],
        **_QWEN3_VL,
        "text_config": {
            **_QWEN3_VL["text_config"],
            **{key: LLMS["qwen3_moe"][key] for key in _EXPERTS},
        },
    },
}
for _name in ("qwen3_5", "qwen3_5_moe"):
    COMPOSITES[_name] = {
        **_QWEN3_VL,
        "model_type": _name,
        "vision_config": ENCODERS[_name],
        # A delta net that reads features directly is ill-conditioned with random weights: gradients
        # in float32 have errors of 1e-4, those of Hugging Face as those of torchmm.
        "text_config": {
            **LLMS[_name],
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    }
COMPOSITES |= {
    "mistral3": {
        "model_type": "mistral3",
        "vision_config": ENCODERS["pixtral"],
        "text_config": LLMS["mistral"],
        "image_token_index": IMAGE_TOKEN_ID,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
}
COMPOSITES |= {
    "pixtral_llava": {
        "model_type": "llava",
        "vision_config": ENCODERS["pixtral"],
        "text_config": LLMS["mistral"],
        "image_token_index": IMAGE_TOKEN_ID,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}
AUDIO_TOKEN_ID = 59
COMPOSITES |= {
    "voxtral": {
        "model_type": "voxtral",
        "audio_config": ENCODERS["voxtral"],
        "text_config": LLMS["llama"],
        "audio_token_id": AUDIO_TOKEN_ID,
    },
    "qwen2_audio": {
        "model_type": "qwen2_audio",
        "audio_config": ENCODERS["qwen2_audio"],
        "text_config": LLMS["qwen2"],
        "audio_token_index": AUDIO_TOKEN_ID,
    },
    "audioflamingo3": {
        "model_type": "audioflamingo3",
        "audio_config": ENCODERS["audioflamingo3"],
        "text_config": LLMS["qwen2"],
        "audio_token_id": AUDIO_TOKEN_ID,
    },
}
COMPOSITES |= {
    "qwen3_omni": {
        "model_type": "qwen3_omni_moe_thinker",
        "vision_config": ENCODERS["qwen3_omni_vision"],
        "audio_config": ENCODERS["qwen3_omni_sound"],
        "text_config": {
            **{k: v for k, v in _QWEN3_VL["text_config"].items() if k != "head_dim"},
            **{key: LLMS["qwen3_moe"][key] for key in _EXPERTS},
        },
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": 62,
        "audio_token_id": AUDIO_TOKEN_ID,
        "audio_start_token_id": 58,
        "position_id_per_seconds": 13,
    },
    "qwen2_5_omni": {
        "model_type": "qwen2_5_omni_thinker",
        "vision_config": ENCODERS["qwen2_5_omni_vision"],
        "audio_config": ENCODERS["qwen2_5_omni_sound"],
        "text_config": COMPOSITES["qwen2_5_vl"]["text_config"],
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": 62,
        "audio_token_id": AUDIO_TOKEN_ID,
        "audio_start_token_id": 58,
        "audio_end_token_id": 57,
        "vision_start_token_id": 61,
        "vision_end_token_id": 60,
    },
}
COMPOSITES |= {
    "gemma4": {
        "model_type": "gemma4",
        "vision_config": {**ENCODERS["gemma4"], "standardize": True},
        "text_config": {**LLMS["gemma4_moe"], "use_bidirectional_attention": "vision"},
        "image_token_id": IMAGE_TOKEN_ID,
        "boi_token_id": 61,
        "eoi_token_id": 60,
        "tie_word_embeddings": False,
        # Outside of the vocabulary: the model of Hugging Face searches for them.
        "video_token_id": 64,
        "audio_token_id": 65,
    },
}
_GLM4V = {
    "image_token_id": IMAGE_TOKEN_ID,
    "video_token_id": 62,
    "image_start_token_id": 61,
    "image_end_token_id": 60,
    "video_start_token_id": 59,
    "video_end_token_id": 58,
}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}
COMPOSITES |= {
    "glm4v": {
        "model_type": "glm4v",
        **_GLM4V,
        "vision_config": ENCODERS["glm4v"],
        "text_config": {
            **{k: v for k, v in _LLM.items() if k not in ("bos_token_id", "eos_token_id")},
            "rope_parameters": _GLM_ROPE,
        },
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        **_GLM4V,
        "vision_config": ENCODERS["glm4v_moe"],
        "text_config": {
            **{k: v for k, v in LLMS["glm4_moe"].items() if k not in ("model_type", "use_qk_norm")},
            "rope_parameters": {**_GLM_ROPE, "partial_rotary_factor": 0.5},
        },
    },
}
COMPOSITES |= {
    "glm46v": {
        **COMPOSITES["glm4v"],
        "model_type": "glm46v",
        "text_config": {**COMPOSITES["glm4v"]["text_config"], "model_type": "glm4v_text"},
    },
}
COMPOSITES |= {  # InternVL 3.5
    f"internvl_{llm}": {**COMPOSITES["internvl"], "text_config": LLMS[llm]}
    for llm in ("qwen3", "qwen3_moe")
}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
COMPOSITES |= {
    "llava_next": {
        **{k: v for k, v in COMPOSITES["llava"].items() if k != "image_seq_length"},
        "model_type": "llava_next",
        "vision_feature_layer": -1,
        "image_grid_pinpoints": PINPOINTS,
    },
    "llava_onevision": {
        "model_type": "llava_onevision",
        "vision_config": {**ENCODERS["siglip"], "vision_use_head": False},
        "text_config": LLMS["qwen2"],
        "image_token_index": IMAGE_TOKEN_ID,
        "image_grid_pinpoints": PINPOINTS,
    },
}


GRIDS = {name: [(1, 4, 4), (1, 4, 4)] for name in ENCODERS} | {
    "siglip2": [(1, 2, 5), (1, 4, 4), (1, 2, 5), (1, 3, 1)],
    "qwen2_vl": [(1, 4, 6), (1, 10, 4), (2, 6, 2)],
    "qwen2_5_vl": [(1, 4, 6), (1, 10, 4), (2, 6, 2)],
    "qwen3_vl": [(1, 4, 6), (1, 10, 4), (2, 6, 2)],
    "qwen3_vl_moe": [(1, 4, 6), (1, 10, 4), (2, 6, 2)],
    "qwen3_5": [(1, 4, 6), (1, 10, 4), (2, 6, 2)],
    "qwen3_5_moe": [(1, 4, 6), (1, 10, 4), (2, 6, 2)],
    "qwen3_omni_vision": [(1, 4, 6), (1, 10, 4), (2, 6, 2)],
    "qwen2_5_omni_vision": [(1, 4, 6), (1, 10, 4), (2, 6, 2)],
    **{name: [(1, 4, 6), (1, 10, 4), (1, 2, 2)] for name in ("glm4v", "glm4v_moe")},
    "pixtral": [(1, 2, 5), (1, 4, 4), (1, 3, 1)],
    "gemma4": [(1, 4, 6), (1, 10, 4), (1, 2, 2)],
    **{name: [(1, 1, 8), (1, 1, 4), (1, 1, 16)] for name in AUDIO},
    "qwen3_omni_sound": [(1, 1, 30), (1, 1, 4), (1, 1, 13)],
    "qwen2_5_omni_sound": [(1, 1, 12), (1, 1, 4), (1, 1, 10)],
    "voxtral": [(1, 1, 100), (1, 1, 200)],  # silence included
    "qwen2_audio": [(1, 1, 7), (1, 1, 100), (1, 1, 20)],
    "audioflamingo3": [(1, 1, 107), (1, 1, 100), (1, 1, 21)],
}
PATCH_VALUES = {
    "whisper": 2 * 8,
    "wav2vec2": 5 * 2,
    "wav2vec2_stable": 5 * 2,
    "siglip2": 3 * 4 * 4,
    "qwen2_vl": 3 * 2 * 4 * 4,
    "qwen2_5_vl": 3 * 2 * 4 * 4,
    "qwen3_vl": 3 * 2 * 4 * 4,
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), 3 * 2 * 4 * 4),
    "qwen3_omni_vision": 3 * 2 * 4 * 4,
    "qwen3_omni_sound": 8 * 8,
    "qwen2_5_omni_vision": 3 * 2 * 4 * 4,
    "qwen2_5_omni_sound": 2 * 8,
    "voxtral": 2 * 8,
    **dict.fromkeys(("qwen2_audio", "audioflamingo3"), 3 * 8),
    **dict.fromkeys(("glm4v", "glm4v_moe"), 3 * 2 * 4 * 4),
    "pixtral": 3 * 4 * 4,
    "gemma4": 3 * 4 * 4,
}


def make_inputs(family: str) -> EncoderInputs:
    generator = torch.Generator().manual_seed(3)
    grids = GRIDS[family]
    if family in PATCH_VALUES:
        shape: tuple[int, ...] = (sum(map(prod, grids)), PATCH_VALUES[family])
    else:
        shape = (len(grids), 3, 16, 16)
    pixels = torch.randn(shape, generator=generator)
    if PATCH_VALUES.get(family) == 3 * 8:  # patches that contain a frame of the next
        inputs = pixels.split([prod(grid) for grid in grids])
        for audio in inputs:
            audio[99::100, 2 * 8 :] = 0  # nothing follows a complete window
    return EncoderInputs(pixels, grids, torch.empty(0))


def problems_of_model(section: dict) -> list[str]:
    """Return the problems of a `[model]` that is rejected."""
    with pytest.raises(ConfigError) as raised:
        build_model(ModelConfig.model_validate(section), FreezeConfig())
    return raised.value.problems


def build(config: ModelConfig, freeze: tuple[str, ...] = (), seed: int = 0) -> MultimodalModel:
    """Return a model on the CPU with random weights, including biases and norms."""
    model = build_model(config, FreezeConfig(modules=list(freeze)))
    materialize(model, "cpu")
    init_weights(model, seed)
    randomize(model)
    return model


def randomize(model: nn.Module) -> None:
    """Add noise to all stored tensors, because zero biases and unit norms hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        for name, buffer in sorted(model.named_buffers()):
            # Buffers of Gemma 4 and Voxtral that files contain.
            if name.endswith(("layer_scalar", "std_bias", "std_scale", "embed_positions.weight")):
                buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.1)


def text_model(llm: str, seed: int = 0) -> MultimodalModel:
    return build(ModelConfig(llm=LlmConfig(config=LLMS[llm])), seed=seed)


def pair_config(llm: str, encoder: str, **settings: object) -> ModelConfig:
    settings = {"modality": "audio" if encoder in AUDIO else "image", **settings}
    section = EncoderConfig(config=ENCODERS[encoder], **settings)  # type: ignore[arg-type]
    return ModelConfig(llm=LlmConfig(config=LLMS[llm]), encoders={"eye": section})


def composite_config(name: str, **changes: object) -> ModelConfig:
    return ModelConfig(config={**COMPOSITES[name], **changes})


def plain_causal_lm(model: MultimodalModel) -> PreTrainedModel:
    """Return the model of Hugging Face with the same weights and eager attention."""
    plain = AutoModelForCausalLM.from_config(model.llm.config, attn_implementation="eager")
    plain.load_state_dict(model.llm.backbone.state_dict())
    plain.tie_weights()
    return plain


def microbatch(
    lengths: list[int],
    images: dict[str, EncoderInputs] | None = None,
    placeholders: Tensor | None = None,
    ignored: int = 2,
    seed: int = 0,
) -> Microbatch:
    """Return packed samples of random tokens; the first `ignored` positions have no target."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(3, 60, (total,), generator=generator)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    targets = torch.roll(ids, -1)
    for start, stop in pairwise(starts):
        targets[start : start + ignored] = IGNORE_TARGET
        targets[stop - 1] = IGNORE_TARGET
    if placeholders is not None:
        ids[placeholders] = IMAGE_TOKEN_ID
        targets[placeholders - 1] = IGNORE_TARGET
        targets[placeholders] = IGNORE_TARGET
    positions = torch.cat([torch.arange(n) for n in lengths])
    meta = MicrobatchMeta(samples=(), tokens=total)
    return Microbatch(ids, targets, positions, starts, images or {}, meta)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


def loss_and_gradients(model: MultimodalModel, batch: Microbatch, rows: int) -> dict[str, Tensor]:
    """Return the loss and all gradients of a seventh of it.

    Args:
        rows: Number of rows per chunk of the loss. If 0, the loss takes all logits at once.
    """
    model.llm.loss_chunk_targets = rows
    model.zero_grad()
    loss = model(batch)
    (loss / 7).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def gradient_limit(name: str) -> float:
    """Return the relative error that float32 gradients may have in another layout.

    The decays of delta nets contain small differences of large sums: changing each weight by half
    of the last bit changes these gradients by 1.4e-5 in a single process.
    """
    return 3e-5 if name.endswith(("linear_attn.dt_bias", "linear_attn.A_log")) else 1e-5


def worst_gradient(ours: nn.Module, theirs: nn.Module, rename: Callable[[str], str]) -> float:
    """Return the largest relative difference of gradients over all parameters of `ours`.

    Vectors count half, because most of a sum over all tokens cancels. Float32 gradients of norms
    and decays of Hugging Face differ by up to 1.4e-5 from float64; the processor determines which.
    """
    reference = dict(theirs.named_parameters())
    largest = max(p.grad.norm().item() for p in reference.values() if p.grad is not None)
    worst = 0.0
    for name, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        expected = reference[rename(name)].grad
        assert parameter.grad is not None and expected is not None, name
        if expected.norm() < 1e-6 * largest:
            # Zero in exact arithmetic (bias of keys): both gradients are noise.
            assert parameter.grad.norm() < 1e-5 * largest, name
        else:
            share = 0.5 if parameter.ndim == 1 else 1.0
            worst = max(worst, share * relative_error(parameter.grad, expected))
    return worst
