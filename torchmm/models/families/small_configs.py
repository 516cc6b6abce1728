"""Settings of small copies of LLMs and encoders, for comparisons with Hugging Face classes."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from torchmm.models.families.introspection import SMALL_SIZES, shrink_value, small_config

_PATCH_PX = 4
_PATCHES_PER_ROW = 4
_BACKBONE_KEYS = ("out_features", "out_indices", "stage_names")
"""Keys about single layers, which a shorter copy does not have."""


def small_llm_config(config: PreTrainedConfig, layers: str) -> PreTrainedConfig:
    """Return a config of the same type whose model is small and has every type of layer.

    Args:
        config: Config of a causal LM.
        layers: Name of the list of layers in the Hugging Face model.

    Raises:
        ConfigError: The copy lacks a type of layer or is too large.
    """

    def layers_of(config: PreTrainedConfig) -> nn.ModuleList:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        module = model.get_submodule(layers)
        assert isinstance(module, nn.ModuleList)
        return module

    return small_config(config, layers_of, shrink_llm_settings)


def shrink_llm_settings(config: PreTrainedConfig, layers: int) -> dict[str, Any]:
    """Return the settings of a small copy of a causal LM with a number of layers."""
    settings = config.to_dict()
    usual = {own_name: name for name, own_name in config.attribute_map.items()}
    small: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            values = [shrink_value(usual.get(key, key), item) for item in value]
            small[key] = values[:layers]
        else:
            small[key] = shrink_value(usual.get(key, key), value)
    small |= _shrink_heads(config, settings)
    if settings.get("dim_model_base"):  # MiniCPM 3 divides by the ratio of hidden_size to it
        ratio = settings["dim_model_base"] / config.hidden_size
        small["dim_model_base"] = max(1, round(SMALL_SIZES["hidden_size"] * ratio))
    groups = settings.get("n_group") or 0
    if settings.get("topk_group"):
        small["topk_group"] = 1 if settings["topk_group"] < groups else min(groups, 2)
    if "output_router_logits" in settings:
        small["output_router_logits"] = False
    return small | {config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers}


def _shrink_heads(config: PreTrainedConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of heads and rotary embeddings of a small copy."""
    attribute_map = config.attribute_map
    heads = config.num_attention_heads
    usual = getattr(config, "head_dim", None) in (None, config.hidden_size // heads)
    size = 8 if usual or "qk_rope_head_dim" in settings else 16
    names = (
        attribute_map.get(name, name) for name in ("head_dim", "global_head_dim", "swa_head_dim")
    )
    small: dict[str, Any] = {name: size for name in names if settings.get(name)}
    groups = getattr(config, "num_key_value_heads", None)
    if isinstance(groups, int):
        key = attribute_map.get("num_key_value_heads", "num_key_value_heads")
        small[key] = 4 if groups == heads else min(groups, 2)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(settings.get(key), dict):
            small[key] = _shrink_rope(settings[key], size)
    return small


def _shrink_rope(settings: dict[str, Any], head_dim: int) -> dict[str, Any]:
    small = dict(settings)
    features = int(head_dim * (settings.get("partial_rotary_factor") or 1.0))
    for key, value in settings.items():
        if isinstance(value, dict):
            small[key] = _shrink_rope(value, head_dim)
        elif key == "original_max_position_embeddings":
            small[key] = SMALL_SIZES[key]
        elif key in ("short_factor", "long_factor") and value:
            small[key] = value[: features // 2]
    return small


def shrink_encoder_settings(
    config: PreTrainedConfig, layers: int, patches_per_row: int = _PATCHES_PER_ROW
) -> dict[str, Any]:
    """Return the settings of a small copy of an encoder.

    Args:
        config: Config of the encoder.
        layers: Number of layers of the copy.
        patches_per_row: Patches per row of an image.
    """
    usual = {own_name: name for name, own_name in config.attribute_map.items()}
    small = {
        key: shrink_value(usual.get(key, key), value)
        for key, value in config.to_dict().items()
        if key not in _BACKBONE_KEYS
    }
    for key in ("pooler_output_size", "projection_dim"):
        if key in small:
            small[key] = 32
    for name, size in (("image_size", patches_per_row * _PATCH_PX), ("patch_size", _PATCH_PX)):
        original = getattr(config, name, None)
        if original is not None:
            key = config.attribute_map.get(name, name)
            small[key] = size if isinstance(original, int) else [size, size]
    return small | {config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers}
