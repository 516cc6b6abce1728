"""Small models of every family with random weights, and their configs for Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING

IMAGE_PX, PATCH_PX = 64, 8
"""Fixed-size images: 64 patches."""
MEL_BINS = 80
"""Number of mel bins of audio."""
WINDOW_POSITIONS = 500
"""Positions in the 10 s windows of audio encoders; no caption here takes longer."""
PINPOINTS = [[IMAGE_PX, 2 * IMAGE_PX], [2 * IMAGE_PX, IMAGE_PX], [2 * IMAGE_PX, 2 * IMAGE_PX]]
"""Resolutions into which images are tiled."""


class Size(NamedTuple):
    """Size of the LLM; a tower has the same width and half the depth."""

    hidden: int
    layers: int


QUICK, FULL = Size(128, 2), Size(256, 6)

PAD, BEGIN, END = 0, 1, 2
IMAGE, SOUND, START, STOP, AUDIO_START, ROW_END, UNUSED = range(3, 10)
FIRST_TEXT = 10
"""Token ids of text, placeholders, tokens around images and audio, and unused tokens."""
_MARKS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    **dict.fromkeys(("audio_token_id", "audio_token_index"), SOUND),
    "audio_start_token_id": AUDIO_START,
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "boi_token_id"), START),
    "audio_end_token_id": STOP,
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_id"), STOP),
    **{"boi_token_index": START, "eoi_token_index": STOP},
    "video_token_index": UNUSED,
    **dict.fromkeys(("video_token_id", "video_start_token_id", "video_end_token_id"), UNUSED),
}
"""Token ids by key of the config of a composite."""


@dataclass(frozen=True)
class Family:
    """A comparison: an LLM on texts, or a composite on images with texts."""

    name: str
    config: dict[str, Any]
    composite: bool
    attention: str = "sdpa"
    """Attention of Hugging Face: the fastest that is correct on a CPU."""


def families(size: Size, vocabulary: int) -> list[Family]:
    """Return all families.

    Args:
        vocabulary: Size of the vocabulary.
    """
    texts, towers = _texts(size, vocabulary), _towers(size)
    eager = {"gemma2": "eager", "gpt_oss": "eager"}  # sdpa has no soft cap and no sinks
    cases = [Family(n, c, False, eager.get(n, "sdpa")) for n, c in texts.items()]
    for name, config in _composites(size, texts, towers).items():
        defaults = CONFIG_MAPPING[config["model_type"]]()
        marks = {key: number for key, number in _MARKS.items() if key in vars(defaults)}
        cases.append(Family(name, {**config, **marks}, True))
    return cases


def _texts(size: Size, vocabulary: int) -> dict[str, dict[str, Any]]:
    sizes = {
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // 32,
        "num_key_value_heads": size.hidden // 64,
        "vocab_size": vocabulary,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    head = {"head_dim": 32}
    latent = {
        "num_key_value_heads": size.hidden // 32,
        "q_lora_rank": size.hidden // 2,
        "kv_lora_rank": size.hidden // 2,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    delta |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    shared = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": size.hidden}
    shared["shared_expert_intermediate_size"] = size.hidden
    special: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"sliding_window": 32},
        "qwen2": {},
        "qwen3": head,
        "qwen3_moe": {
            **head,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": size.hidden,
        },
        "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "gpt_oss": {
            **head,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "layer_types": _alternating(size.layers),
        },
        "glm": head,
        "glm4": head,
        "glm4_moe": {**head, **_SHARED, "moe_intermediate_size": size.hidden},
        "deepseek_v3": {**latent, **_SHARED, "moe_intermediate_size": size.hidden},
        "minicpm3": latent,
        "cohere2": {"sliding_window": 32, "layer_types": _alternating(size.layers)},
        "olmo3": {"sliding_window": 32, "layer_types": _alternating(size.layers)},
        "qwen3_5_text": {**head, **delta},
        "qwen3_5_moe_text": {**head, **delta, **shared},
        "qwen3_next": {**head, **delta, **shared},
        "smollm3": {},
        "gemma": head,
        "ministral3": head,
        "lfm2": {"layer_types": [("conv", "full_attention")[i % 2] for i in range(size.layers)]},
        "gemma2": {**head, "sliding_window": 32},
        "gemma4_text": {
            **head,
            "global_head_dim": 64,
            "num_global_key_value_heads": 2,
            "sliding_window": 32,
            "layer_types": _alternating(size.layers),
            "hidden_size_per_layer_input": 0,
        },
        "gemma3_text": {**head, "sliding_window": 32, "layer_types": _alternating(size.layers)},
        "granite": {},
        "olmo2": {},
        "phi3": {"sliding_window": None},
        "starcoder2": {"sliding_window": None},
    }
    configs = {n: {"model_type": n, **sizes, **settings} for n, settings in special.items()}
    del configs["qwen3_5_moe_text"]["intermediate_size"]  # all of its layers have experts
    return configs


_SHARED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _alternating(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]


def _towers(size: Size) -> dict[str, dict[str, Any]]:
    shared = {
        "hidden_size": size.hidden,
        "num_hidden_layers": max(2, size.layers // 2),
        "num_attention_heads": size.hidden // 32,
        "patch_size": PATCH_PX,
        "image_size": IMAGE_PX,
    }
    ffn = {"intermediate_size": 3 * size.hidden}
    siglip = {**shared, **ffn, "vision_use_head": False}
    qwen = {
        "depth": max(2, size.layers // 2),
        "num_heads": size.hidden // 32,
        "patch_size": PATCH_PX,
    }
    windows = {"window_size": 4 * PATCH_PX, "fullatt_block_indexes": [1]}
    qwen3 = {
        **qwen,
        **ffn,
        "hidden_size": size.hidden,
        "out_hidden_size": size.hidden,
        "num_position_embeddings": (IMAGE_PX // PATCH_PX) ** 2,
        "deepstack_visual_indexes": [0, 1],
    }
    plain = {key: value for key, value in qwen3.items() if key != "deepstack_visual_indexes"}
    qwen2_5 = {**qwen, **ffn, **windows}
    qwen2_5 |= {"hidden_size": size.hidden, "out_hidden_size": size.hidden}
    hearing = {
        "num_mel_bins": MEL_BINS,
        "d_model": size.hidden,
        "encoder_layers": max(2, size.layers // 2),
        "encoder_attention_heads": size.hidden // 32,
        "encoder_ffn_dim": 3 * size.hidden,
        "output_dim": size.hidden,
    }
    unsized = {key: value for key, value in shared.items() if key != "image_size"}
    glm = {**qwen, **ffn, "hidden_size": size.hidden, "out_hidden_size": size.hidden}
    glm["image_size"] = IMAGE_PX
    return {
        "pixtral": {"model_type": "pixtral", **shared, **ffn},
        "gemma4": {
            "model_type": "gemma4_vision",
            **unsized,
            **ffn,
            "num_key_value_heads": size.hidden // 32,
            "head_dim": 32,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "glm4v": {"model_type": "glm4v_vision", **glm},
        "glm4v_moe": {"model_type": "glm4v_moe_vision", **glm},
        "qwen2_5_omni": {**qwen2_5, "model_type": "qwen2_5_omni_vision_encoder"},
        "qwen2_5_omni_sound": {"model_type": "qwen2_5_omni_audio_encoder", **hearing},
        "qwen3_omni": {"model_type": "qwen3_omni_moe_vision_encoder", **qwen3},
        "qwen3_omni_sound": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            **hearing,
            "downsample_hidden_size": size.hidden // 4,
        },
        "qwen3_5": {"model_type": "qwen3_5_vision", **plain},
        "qwen3_5_moe": {"model_type": "qwen3_5_moe_vision", **plain},
        "qwen3_vl": {"model_type": "qwen3_vl_vision", **qwen3},
        "qwen3_vl_moe": {"model_type": "qwen3_vl_moe_vision", **qwen3},
        **{
            f"{name}_sound": {
                "model_type": f"{name}_encoder",
                **{key: value for key, value in hearing.items() if key != "output_dim"},
                "max_source_positions": WINDOW_POSITIONS,
            }
            for name in ("qwen2_audio", "audioflamingo3")
        },
        "voxtral_sound": {
            "model_type": "voxtral_encoder",
            "num_mel_bins": MEL_BINS,
            "hidden_size": size.hidden,
            "num_hidden_layers": max(2, size.layers // 2),
            "num_attention_heads": size.hidden // 32,
            "intermediate_size": 4 * size.hidden,
            "max_source_positions": WINDOW_POSITIONS,
        },
        "aimv2": {"model_type": "aimv2_vision_model", **shared, **ffn},
        "clip": {"model_type": "clip_vision_model", **shared, **ffn},
        "siglip": {"model_type": "siglip_vision_model", **siglip},
        "dinov2": {"model_type": "dinov2", **shared, "mlp_ratio": 3},
        "internvl": {"model_type": "internvl_vision", **shared, **ffn},
        "idefics3": {"model_type": "idefics3_vision", **shared, **ffn},
        "smolvlm": {"model_type": "smolvlm_vision", **shared, **ffn},
        "qwen2_vl": {
            "model_type": "qwen2_vl_vision",
            **qwen,
            "embed_dim": size.hidden,
            "hidden_size": size.hidden,
            "mlp_ratio": 3,
        },
        "qwen2_5_vl": {"model_type": "qwen2_5_vl_vision", **qwen2_5},
    }


def _composites(
    size: Size, texts: dict[str, dict[str, Any]], towers: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    def composite(kind: str, tower: str, text: str, **settings: Any) -> dict[str, Any]:
        parts = {"vision_config": towers[tower], "text_config": texts[text]}
        return {"model_type": kind, **parts, "tie_word_embeddings": False, **settings}

    full = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    default = {**full, "vision_feature_select_strategy": "default"}
    seeing = {**texts["gemma4_text"], "use_bidirectional_attention": "vision"}
    configs = {
        "llava with clip": composite("llava", "clip", "llama", **default),
        "llava with siglip": composite("llava", "siglip", "qwen2", **full),
        "llava with dinov2": composite("llava", "dinov2", "llama", **default),
        "llava with aimv2": composite("llava", "aimv2", "llama", **full),
        "llava_next": composite(
            "llava_next", "clip", "mistral", **default, image_grid_pinpoints=PINPOINTS
        ),
        "llava_onevision": composite(
            "llava_onevision", "siglip", "qwen2", **full, image_grid_pinpoints=PINPOINTS
        ),
        "llava with pixtral": composite("llava", "pixtral", "mistral", **full),
        "internvl": composite("internvl", "internvl", "qwen2"),
        "idefics3": composite("idefics3", "idefics3", "llama"),
        "smolvlm": composite("smolvlm", "smolvlm", "llama"),
        "paligemma": composite("paligemma", "siglip", "gemma", projection_dim=size.hidden),
        "gemma3": composite("gemma3", "siglip", "gemma3_text", mm_tokens_per_image=16),
        "gemma4": composite("gemma4", "gemma4", "gemma4_text", text_config=seeing),
        "mistral3": composite(
            "mistral3", "pixtral", "mistral", spatial_merge_size=2, vision_feature_layer=-1
        ),
        "qwen3_5": composite("qwen3_5", "qwen3_5", "qwen3_5_text"),
        "qwen3_5_moe": composite("qwen3_5_moe", "qwen3_5_moe", "qwen3_5_moe_text"),
    }
    for name, text in (("voxtral", "llama"), ("qwen2_audio", "qwen2"), ("audioflamingo3", "qwen2")):
        parts = {"audio_config": towers[f"{name}_sound"], "text_config": texts[text]}
        configs[name] = {"model_type": name, **parts}
    return configs | _with_mrope(texts, towers)


_MROPE = {
    "qwen2_vl": ("qwen2_vl", "qwen2", [4, 6, 6]),
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2", [4, 6, 6]),
    "qwen3_vl": ("qwen3_vl", "qwen3", [6, 5, 5]),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_moe", [6, 5, 5]),
    "qwen2_5_omni_thinker": ("qwen2_5_omni", "qwen2", [4, 6, 6]),
    "qwen3_omni_moe_thinker": ("qwen3_omni", "qwen3_moe", [6, 5, 5]),
    "glm4v": ("glm4v", "glm4", [4, 6, 6]),
    "glm4v_moe": ("glm4v_moe", "glm4_moe", [2, 3, 3]),
    "glm46v": ("glm4v", "glm4", [4, 6, 6]),
}
"""VLMs with three positions per token and separate text components: encoder, whose sizes the LLM
has, pairs of features of a head that turn with time, row and column."""


def _with_mrope(
    texts: dict[str, dict[str, Any]], towers: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    configs: dict[str, dict[str, Any]] = {}
    for name, (tower, text, sections) in _MROPE.items():
        defaults = CONFIG_MAPPING[name]().text_config
        text_config = {
            k: v for k, v in texts[text].items() if hasattr(defaults, k) and k != "model_type"
        }
        text_config["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": sections,
            "partial_rotary_factor": sum(sections) / 16,  # heads have 32 features
        }
        parts = {"vision_config": towers[tower], "text_config": text_config}
        configs[name] = {"model_type": name, **parts, "tie_word_embeddings": False}
    configs["glm46v"]["text_config"]["model_type"] = "glm4v_text"
    configs["qwen2_5_omni_thinker"]["audio_config"] = towers["qwen2_5_omni_sound"]
    configs["qwen3_omni_moe_thinker"]["audio_config"] = towers["qwen3_omni_sound"]
    return configs
