"""Tools to examine unregistered models: small copies, layer types and mechanisms by name.

A small copy has few layers and features. Two layers have the same type if their modules and
settings are equal except for sizes. Names of modules show which mechanisms a rejected model has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchmm.common.errors import ConfigError
from torchmm.models.hf.config_checks import is_random_rate

MAX_COPY_LAYERS = 24
"""Maximum layers of a copy. Models whose layer types first occur later are rejected."""
MAX_COPY_PARAMETERS = 5_000_000
"""Maximum parameters of a copy. More parameters indicate a size with an unsupported name."""
SMALL_SIZES = {
    "hidden_size": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "intermediate_size_mlp": 40,
    "dense_intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 8,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "floor_scale": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes of the copy by name. Sizes that a config does not set are skipped."""
_EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
}
_MAX_VALUES = {
    **_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "moe_num_shared_experts": 2,
    "n_group": 2,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "logits_soft_cap": 3.0,
}
"""Upper bounds of the copy by name.

Models may have smaller values. Large caps would have no effect on small activations.
"""
TOLERANCE = 1e-5
"""Maximum relative difference of float32 results that are equal in exact arithmetic."""
_INDEX = ("layer_idx", "layer_id", "layer_number", "training")


Result = TypeVar("Result")


def run_external(what: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """Run code of Hugging Face on an untested config and return its result.

    Raises:
        ConfigError: The code raised an error. The message has its type and text.
    """
    try:
        return run(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{what} fails: {type(error).__name__}: {reason}") from error


def is_outermost_list(model: nn.Module, name: str) -> bool:
    """Return True if a module list is not inside of another module list."""
    parents = name.split(".")[:-1]
    above = (model.get_submodule(".".join(parents[: i + 1])) for i in range(len(parents)))
    return not any(isinstance(part, nn.ModuleList) for part in above)


def layer_signature(layer: nn.Module) -> frozenset[tuple[Any, ...]]:
    """Return the modules and settings of a layer without sizes, equal for layers of one type."""
    signature_items: set[tuple[Any, ...]] = set()
    for name, part in layer.named_modules():
        module_name = re.sub(r"\d+", "n", name)
        signature_items.add((module_name, type(part).__name__))
        for key, value in vars(part).items():
            if key.startswith("_") or key in _INDEX:
                continue
            if isinstance(value, str):
                signature_items.add((module_name, key, value))
            elif value is None or isinstance(value, (bool, int, float)):
                signature_items.add((module_name, key, bool(value)))
    return frozenset(signature_items)


def shrink_value(name: str, value: Any) -> Any:
    """Return a setting of the copy.

    Args:
        name: Usual name of the setting.
        value: Value in the original config.
    """
    if name in SMALL_SIZES and value:
        return SMALL_SIZES[name]
    if name in _MAX_VALUES and isinstance(value, (int, float)):
        return min(value, _MAX_VALUES[name])
    # Other checks report unsupported rates together with all other problems.
    return 0.0 if is_random_rate(name, value) else value


def small_config(
    config: PreTrainedConfig,
    layers_of: Callable[[PreTrainedConfig], nn.ModuleList],
    shrunk: Callable[[PreTrainedConfig, int], dict[str, Any]],
) -> PreTrainedConfig:
    """Return a config of the same type whose model is small and has all types of layers.

    Args:
        config: Original config.
        layers_of: Function that builds a model and returns its layers, on the default device.
        shrunk: Function that returns settings with small sizes and a given number of layers.

    Raises:
        ConfigError: The copy lacks a type of layer or is too large.
    """
    settings = config.to_dict()
    settings |= {name: 0.0 for name, value in settings.items() if is_random_rate(name, value)}
    with torch.device("meta"):
        all_layers = layers_of(AutoConfig.for_model(**settings))
    kinds = [layer_signature(layer) for layer in all_layers]
    needed = max(kinds.index(kind) for kind in set(kinds)) + 1
    count = min(max(needed, 3), MAX_COPY_LAYERS, len(all_layers))
    small = AutoConfig.for_model(**shrunk(config, count))
    with torch.device("meta"):
        layers = layers_of(small)
        size = sum(p.numel() for layer in layers for p in layer.parameters())
    if missing := set(kinds) - {layer_signature(layer) for layer in layers}:
        differ = set.union(*map(set, missing)) - set(layer_signature(layers[0]))
        raise ConfigError(
            f"a small copy with {len(layers)} layers does not contain {sorted(differ)[:3]}"
        )
    if size > MAX_COPY_PARAMETERS:
        raise ConfigError(
            f"its small copy has {size:,} parameters, because some of its sizes are not supported"
        )
    return small


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Move all weights off their initial values: zero biases and unit norms hide mistakes."""
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.add_(torch.randn_like(value), alpha=0.1)


_MECHANISMS = (
    (r"mamba|\bssm\b|A_log", "state-space (Mamba) layers"),
    (r"linear_attn|delta_net|\bkda\b|lightning|rwkv|time_mix", "linear attention"),
    (r"(^|\.)conv", "convolutions over tokens"),
    (r"indexer", "an indexer that chooses which tokens attend to which"),
    (r"kv_a_proj|kv_b_proj", "latent attention (MLA)"),
    (r"sinks", "attention sinks"),
    (r"(^|\.)(wpe|embed_positions|position_embeddings|positions_embed)", "learned positions"),
    (r"rel_pos|relative_attention_bias|position_bias", "biases by distance"),
    (r"crossattention|encoder_attn|cross_attn", "attention to an encoder"),
    (r"(^|\.)(hc_|attn_hc|ffn_hc)|altup|hyper_conn", "several residual streams between layers"),
    (r"per_layer", "embeddings for every layer"),
    (r"embeddings\.word_embeddings|embeddings\.tok_embeddings", "the embedding format of BERT"),
)
"""Pairs (pattern of module names, description of the mechanism) for causal LMs."""


_ENCODER_MECHANISMS = (
    (r"relative_position|rel_pos|position_bias", "biases by distance"),
    (r"q_?former", "a Q-Former"),
    (r"resampler|perceiver|abstractor", "a resampler of features"),
    (r"crossattention|encoder_attn|cross_attn", "attention to an encoder"),
    (r"downsample|(^|\.)(stages|blocks|layers)\.n\.(blocks|layers)\.n", "stages of several widths"),
    (r"depthwise|dwconv|conv_layers|convolution", "convolutional stages"),
    (r"codebook|quantize", "a codebook (images become discrete tokens)"),
    (r"timm_model|backbone", "a backbone of another library, or for detection"),
)
"""Pairs (pattern of module names, description) for encoders and multimodal models."""

_MERGES_INSIDE = "a merger of patches between encoder layers"
_MULTIMODAL_MECHANISMS = {
    "gemma4_unified": "patches and audio samples that enter the LLM without encoder layers",
    "glm5_next": (
        "several residual streams between layers, linear attention, an indexer that chooses which "
        "tokens attend to which"
    ),
    "glm_ocr": "an encoder with norms of queries and keys and without learned positions",
    "glmga": "image sizes that are multiples of patch_expand_factor",
    "minicpm_ocr": _MERGES_INSIDE,
    "minicpmv4_6": _MERGES_INSIDE,
    "minicpmv4_7": _MERGES_INSIDE,
    "nemotron_h_omni": "state-space (Mamba) layers, video patches of several frames",
    "step3p7": (
        "gated attention heads whose number differs between layers, convolutions with overlap "
        "after the encoder"
    ),
}
"""Mechanisms of multimodal models that module names do not show, by model type."""


def find_mechanisms(config: PreTrainedConfig) -> list[str]:
    """Return the unusual mechanisms of a model, mostly those that its module names show."""
    if known := _MULTIMODAL_MECHANISMS.get(config.model_type):
        return [known]
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return _encoder_mechanisms(config)
    mechanisms = []
    if getattr(config, "is_encoder_decoder", False):
        mechanisms.append("separate encoder and decoder")
    if config.get_text_config() is not config:
        inner = config.get_text_config().model_type
        mechanisms.append(f"several components (its text component is {inner!r})")
    if getattr(config, "alibi", False) or "attn_config" in config.to_dict():
        mechanisms.append("biases by distance (ALiBi)")
    names = "\n".join(_module_names(config, full_names=True))
    mechanisms += [what for pattern, what in _MECHANISMS if re.search(pattern, names, re.MULTILINE)]
    return mechanisms


def _encoder_mechanisms(config: PreTrainedConfig) -> list[str]:
    """Return the unusual mechanisms of an encoder or multimodal model."""
    names = "\n".join(_module_names(config, full_names=True))
    mechanisms = [
        what for pattern, what in _ENCODER_MECHANISMS if re.search(pattern, names, re.MULTILINE)
    ]
    if config.model_type == "timm_wrapper":
        mechanisms.append("a backbone of another library (timm)")
    windows = ("window_size", "window_block_indexes", "num_windows")
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    if any(getattr(part, name, None) for part in parts for name in windows):
        mechanisms.append("attention in windows")
    if any(isinstance(getattr(config, name, None), list) for name in ("depths", "hidden_sizes")):
        mechanisms.append("stages of several widths")
    return list(dict.fromkeys(mechanisms))


def most_similar_family(config: PreTrainedConfig, families: Collection[str]) -> str:
    """Return the registered family with the most similar module names, or "" without overlap."""
    names = _module_names(config)

    def likeness(model_type: str) -> float:
        other_names = _module_names(CONFIG_MAPPING[model_type]())
        return len(names & other_names) / max(len(names | other_names), 1)

    similarities = {model_type: likeness(model_type) for model_type in families}
    best = max(similarities, key=lambda model_type: similarities[model_type])
    return best if similarities[best] else ""


def _module_names(config: PreTrainedConfig, full_names: bool = False) -> set[str]:
    """Return the names of modules and weights of a model.

    Args:
        config: Config of the model.
        full_names: Whether to return full names. Otherwise, only names inside of layers are
            returned.
    """
    try:
        with torch.device("meta"):
            causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            auto = AutoModelForCausalLM if causal else AutoModel
            model = auto.from_config(config, trust_remote_code=False)
    except Exception:  # raised by classes that need more than a config
        return set()
    names = [*(n for n, _ in model.named_modules()), *(n for n, _ in model.named_parameters())]
    module_names = {re.sub(r"\.\d+(?=\.|$)", ".n", name) for name in names}
    if full_names:
        return module_names
    return {name.partition(".n.")[2] for name in module_names if ".n." in name}
