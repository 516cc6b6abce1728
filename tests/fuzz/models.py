"""Random `[model]` sections: tiny models of several families.

Multimodal models are in `fuzz.composites`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from fuzz.composites import VIDEO, delta_layers, draw_composite, layers_of
from fuzz.data import SPECIAL

Table = dict[str, Any]

LLM_FAMILIES: dict[str, Table] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "qwen2": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 24,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"head_dim": 8, "sliding_window": 24},
    "olmo2": {},
    "phi3": {"sliding_window": None},
    "starcoder2": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "qwen3_5_text": {"head_dim": 16, **delta_layers(0)},
    "lfm2": {"block_multiple_of": 8},
}
"""Config keys by model_type, in addition to those of `_llm`."""
LLM_WEIGHTS = (8, 8, 2, 2, 2, 1, 2, 2, 2, 2, 3, 0, 0)
"""Sampling weights. `draw_model` handles families with weight 0."""
SCALED_ROPE = (
    *("llama", "qwen3", "qwen2", "mistral", "olmo2", "phi3", "starcoder2", "granite", "qwen3_moe"),
)
"""Families that are also drawn with scaled RoPE types."""
COMPOSITES, DELTA_NETS, CONVOLUTIONS = 0.2, 0.06, 0.03
"""Fractions of models."""

ENCODER_FAMILIES = {
    "siglip_vision_model": {"intermediate_size": 48, "image_size": 16},
    "clip_vision_model": {"intermediate_size": 48, "image_size": 16},
    "dinov2": {"mlp_ratio": 2, "image_size": 16},
    "internvl_vision": {"intermediate_size": 48, "image_size": 16, "attention_bias": True},
    "siglip2_vision_model": {"intermediate_size": 48, "num_patches": 9},
    "whisper": {},
}
"""Config keys by model_type, in addition to those of `_encoder`."""
ENCODER_WEIGHTS = (7, 3, 3, 2, 3, 3)


def draw_model(rng: Random) -> tuple[Table, str]:
    """Draw [model] without paths, and return it with a matching source (`data.SOURCES`)."""
    llm_type = rng.choices(list(LLM_FAMILIES), LLM_WEIGHTS)[0]
    model: Table = {"llm": {"config": _llm(rng, llm_type)}}
    encoders = {}
    count = rng.choices((0, 1, 2), (3, 14, 5))[0]
    for name in ("vision", "second")[:count]:
        encoders[name] = _encoder(rng)
    if encoders:
        model["encoders"] = encoders
    if rng.random() < 0.2:
        model["generator"] = _generator(rng)
    # The seed is the model instead of `rng`, so that most older draws are unchanged.
    later = Random(repr(model))
    chunked = later.random() < 0.25
    kind = later.random()
    if kind < COMPOSITES:
        model = draw_composite(later)
    elif kind < COMPOSITES + DELTA_NETS:
        model["llm"] = {"config": _llm(later, "qwen3_5_text")}
    elif kind < COMPOSITES + DELTA_NETS + CONVOLUTIONS:
        model["llm"] = {"config": _llm(later, "lfm2")}
    model["chunked_loss"] = chunked
    if "llm" in model:
        _scale_rope(Random(f"rope {model!r}"), model["llm"]["config"])
    return model, source_of(model)


def _scale_rope(rng: Random, config: Table) -> None:
    """Give a third of the LLMs with plain rotary embeddings a scaled RoPE type.

    Lengths of samples are on both sides of the original maximum, at which "longrope" switches its
    factors.
    """
    if config["model_type"] not in SCALED_ROPE or rng.random() > 1 / 3:
        return
    rope_type = rng.choice(("linear", "yarn", "llama3", "longrope", "longrope", "dynamic"))
    original = rng.choice((16, 24))
    rope: Table = {"rope_type": rope_type, "rope_theta": 1e4}
    if rope_type in ("linear", "dynamic", "yarn", "llama3"):
        rope["factor"] = 256 / original
    if rope_type in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "dynamic":
        config["max_position_embeddings"] = original
    if rope_type == "longrope":
        heads = config["num_attention_heads"]
        pairs = config.get("head_dim", config["hidden_size"] // heads) // 2
        rope["short_factor"] = [1.0 + 0.1 * pair for pair in range(pairs)]
        rope["long_factor"] = [2.0 + 1.5 * pair for pair in range(pairs)]
    config["rope_parameters"] = rope


def source_of(model: Table) -> str:
    """Return the source that matches a model (`data.SOURCES`)."""
    if "config" in model:
        if model["config"]["model_type"] in VIDEO:
            return "videos"
        has_vision, has_audio = (
            f"{kind}_config" in model["config"] for kind in ("vision", "audio")
        )
        return ("both" if has_vision else "sounds") if has_audio else "images"
    modalities = {encoder["modality"] for encoder in model.get("encoders", {}).values()}
    sources = {(): "text", ("image",): "images", ("audio",): "sounds", ("audio", "image"): "both"}
    source = sources[tuple(sorted(modalities))]
    if "generator" in model:
        source = "drawn" if source == "text" else f"drawn_{source}"
    return source


def _llm(rng: Random, model_type: str) -> Table:
    family_keys = {k: v for k, v in LLM_FAMILIES[model_type].items() if v is not None}
    vocabulary, layers = rng.choice((96, 96, 97)), rng.choice((2, 2, 3, 4, 4))
    if model_type == "qwen3_5_text":
        family_keys |= delta_layers(layers)
    if model_type == "lfm2":
        family_keys["layer_types"] = [("conv", "full_attention")[i % 2] for i in range(layers)]
    return {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice((2, 4)),
        "max_position_embeddings": 256,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
        "pad_token_id": SPECIAL.index("<pad>"),
        **family_keys,
    }


def _encoder(rng: Random) -> Table:
    model_type = rng.choices(list(ENCODER_FAMILIES), ENCODER_WEIGHTS)[0]
    layers = rng.choice((2, 2, 3, 4))
    if model_type == "whisper":
        config: Table = {
            "model_type": "whisper",
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": layers,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "max_source_positions": 12,
        }
        return {"modality": "audio", "connector": "mlp", "config": config}
    config = {
        "model_type": model_type,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "patch_size": 8,
        **ENCODER_FAMILIES[model_type],
    }
    encoder: Table = {"modality": "image", "connector": "mlp", "config": config}
    if rng.random() < 0.2 and model_type != "siglip2_vision_model":
        encoder["connector"] = f"pixel_shuffle_{'norm_' if layers == 3 else ''}mlp"
    if rng.random() < 0.2:
        encoder["feature_layer"] = -2
    return encoder


def _generator(rng: Random) -> Table:
    config = {
        "_class_name": "PixArtTransformer2DModel",
        "sample_size": 16,
        "patch_size": 8,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_layers": rng.choice((2, 3, 4)),
    }
    return {
        "config": config,
        "context_tokens": rng.choice((4, 16)),
        "loss_weight": rng.choice((1.0, 2.0)),
        "text_loss_weight": rng.choice((1.0, 0.5, 0.0)),
    }


def module_layers(model: Table) -> dict[str, int]:
    """Return the number of executed layers by module, in the order of the model."""
    if "config" in model:
        return layers_of(model["config"])
    layers_of_module = {}
    for name, encoder in model.get("encoders", {}).items():
        config = encoder["config"]
        layers = config.get("num_hidden_layers", config.get("encoder_layers"))
        layers_of_module[name] = layers + 1 + encoder.get("feature_layer", -1)
    layers_of_module["llm"] = model["llm"]["config"]["num_hidden_layers"]
    if "generator" in model:
        layers_of_module["generator"] = model["generator"]["config"]["num_layers"]
    return layers_of_module


def find_experts(model: Table) -> int:
    """Return the number of experts per layer of the LLM."""
    text = model["config"]["text_config"] if "config" in model else model["llm"]["config"]
    return text.get("num_experts", text.get("n_routed_experts", 0))


def is_sharp(model: Table) -> bool:
    """Return True if rounding errors grow in gradients.

    Gemma 4 does not divide attention scores by the square root of the head size. With random
    weights, the softmax is close to a one-hot vector.
    """
    return model.get("config", {}).get("model_type") == "gemma4"


def model_types(model: Table) -> list[str]:
    """Return the model types of encoders, LLM and generator, or of the multimodal model."""
    if "config" in model:
        return [model["config"]["model_type"]]
    parts = [encoder["config"]["model_type"] for encoder in model.get("encoders", {}).values()]
    generator = ["generator"] if "generator" in model else []
    return [*parts, model["llm"]["config"]["model_type"], *generator]
