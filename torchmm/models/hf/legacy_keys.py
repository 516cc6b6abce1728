"""Keys of exported configs that transformers 4 reads, and the versions that an export supports.

Transformers 5 writes `rope_parameters` and a tokenizer class that transformers 4 does not have.
Transformers 4 ignores unknown keys, so it would compute with the default RoPE of the class. The
old keys are written next to the new ones, unless transformers 5 then reads another config.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, CONFIG_NAME, AutoConfig, PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer_config.json"
_LEGACY = {"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"}
"""RoPE keys of version 4."""
_EXPERTS, _LEGACY_EXPERTS = "num_local_experts", "num_experts"
_TIED = "tie_word_embeddings"
"""Key of multimodal models in version 5, and of their text config in version 4."""
_BY_LAYER_TYPE = ("gemma3_text", "olmo3")
"""Model types with RoPE parameters by layer type in version 5 and flat keys in version 4."""
LEGACY_VERSION = "4.57"
OLDEST_VERSION = "5.17"
"""Oldest supported version 5."""
_LEGACY_LLMS = (
    "cohere2 deepseek_v3 gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_oss granite lfm2 llama "
    "mistral mixtral olmo2 olmo3 phi3 qwen2 qwen3 qwen3_moe qwen3_next smollm3 starcoder2"
)
_LEGACY_MODELS = (
    "gemma3 glm4v glm4v_moe internvl llava llava_next llava_onevision mistral3 paligemma "
    "qwen2_5_vl qwen2_audio qwen2_vl qwen3_vl voxtral"
)
_LEGACY_PARTS = (
    "aimv2_vision_model clip_vision_model dinov2 glm4v_moe_text glm4v_moe_vision glm4v_text "
    "glm4v_vision internvl_vision metaclip_2_vision_model pixtral qwen2_5_vl_text "
    "qwen2_5_vl_vision qwen2_audio_encoder qwen2_vl_text qwen2_vl_vision qwen3_vl_text "
    "qwen3_vl_vision siglip_vision_model voxtral_encoder"
)
_LEGACY_TYPES = frozenset(f"{_LEGACY_LLMS} {_LEGACY_MODELS} {_LEGACY_PARTS}".split())
"""Model types that version 4.57 computes as version 5 (tests/clients/test_transformers_4.py)."""
_NEEDED_VERSIONS = {
    ("qwen2_5_omni_thinker",): "5.21",
    ("qwen3_omni_moe_thinker",): "5.21",
    ("paligemma", "gemma2"): "5.23",  # older versions do not cap logits
}
"""Oldest version for model types that are in one config."""


def add_legacy_keys(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add keys for transformers 4 to the files of a model and of a tokenizer, if they exist.

    Args:
        directory: Directory of the files.
        tokenizer: Tokenizer that was saved.
    """
    config = directory / CONFIG_NAME
    if config.is_file():
        settings = json.loads(config.read_text())
        legacy = _with_legacy_keys(settings)
        if settings.get("model_type") in CONFIG_MAPPING and _reads_same(settings, legacy):
            _write(config, legacy)
    file = directory / TOKENIZER_FILE
    if file.is_file():
        settings = json.loads(file.read_text())
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        # Version 5 reads this from tokenizer.json. Some classes of version 4 add BOS by default.
        ids = tokenizer("a").input_ids
        settings["add_bos_token"] = ids[:1] == [tokenizer.bos_token_id]
        settings["add_eos_token"] = ids[-1:] == [tokenizer.eos_token_id]
        _write(file, settings)


def describe_versions(directory: Path) -> str:
    """Return a sentence with the versions of transformers that compute the outputs of an export.

    Args:
        directory: Directory with the config of a model.
    """
    settings = json.loads((directory / CONFIG_NAME).read_text())
    parts = [part for part in _tables(settings) if "model_type" in part]
    types = {part["model_type"] for part in parts}
    for needing, version in _NEEDED_VERSIONS.items():
        if types.issuperset(needing):
            return f"Use transformers {version} or later."
    unsupported = sorted(types - _LEGACY_TYPES)
    if types >= {"llava", "internvl_vision"}:
        unsupported.append("internvl_vision in llava")
    if not unsupported:
        unsupported = [f"{key} of {part['model_type']}" for part in parts for key in _ignored(part)]
    if not unsupported:
        return f"Use transformers {LEGACY_VERSION}, or {OLDEST_VERSION} or later."
    return (
        f"Use transformers {OLDEST_VERSION} or later. Transformers {LEGACY_VERSION} is not "
        f"supported for {', '.join(unsupported)}."
    )


def _tables(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and the tables inside of it."""
    yield settings
    for value in settings.values():
        if isinstance(value, dict):
            yield from _tables(value)


def _ignored(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the settings of a component that version 4.57 replaces by constants or defaults."""
    rope = settings.get("rope_parameters") or {}
    if settings["model_type"].endswith("_vision"):
        if rope.get("rope_theta", 1e4) != 1e4:
            yield "rope_theta"
    elif rope and "rope_theta" not in settings:
        yield "rope_parameters"
    if settings.get("swiglu_limit", 7.0) != 7.0:
        yield "swiglu_limit"


def _reads_same(settings: dict[str, Any], legacy: dict[str, Any]) -> bool:
    """Return True if this version of transformers reads the same config with the legacy keys."""
    try:
        config = AutoConfig.for_model(**copy.deepcopy(legacy)).to_dict()  # adds keys in place
    except (KeyError, TypeError, ValueError):
        return False
    expected = AutoConfig.for_model(**copy.deepcopy(settings)).to_dict()
    return without_legacy_keys(config) == without_legacy_keys(expected)


def without_legacy_keys(settings: Any) -> Any:
    """Return a config and its parts without keys that only transformers 4 reads."""
    if not isinstance(settings, dict):
        return settings
    rope = {k: v for k, v in settings.items() if k == "rope_parameters"}
    if isinstance(rope.get("rope_parameters"), dict):
        rope["rope_parameters"] = {k: v for k, v in rope["rope_parameters"].items() if k != "type"}
    others = {
        key: without_legacy_keys(value)
        for key, value in settings.items()
        if key not in _LEGACY and key not in rope
    }
    if _EXPERTS in others:
        others.pop(_LEGACY_EXPERTS, None)
    if _TIED in others and isinstance(others.get("text_config"), dict):
        others["text_config"].pop(_TIED, None)
    return rope | others


def _with_legacy_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a config and its parts with the keys of transformers 4."""
    legacy = {k: _with_legacy_keys(v) if isinstance(v, dict) else v for k, v in settings.items()}
    if _EXPERTS in settings:
        legacy[_LEGACY_EXPERTS] = settings[_EXPERTS]
    if _TIED in settings and isinstance(settings.get("text_config"), dict):
        legacy["text_config"][_TIED] = settings[_TIED]
    rope = settings.get("rope_parameters")
    if not isinstance(rope, dict):
        return legacy
    if settings.get("model_type") in _BY_LAYER_TYPE:
        local, rope = rope["sliding_attention"], rope["full_attention"]
        has_one_base = settings["model_type"] == "olmo3"
        if local["rope_type"] != "default" or (
            has_one_base and local["rope_theta"] != rope["rope_theta"]
        ):
            return legacy
        legacy["rope_local_base_freq"] = local["rope_theta"]
    if "rope_theta" not in rope:
        return legacy
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if "partial_rotary_factor" in scaling:
        legacy["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if settings.get("model_type") == "phi3" and scaling.get("rope_type") == "longrope":
        # Version 4 rejects other keys.
        factors = {key: scaling[key] for key in ("short_factor", "long_factor")}
        scaling = {"type": "longrope", **factors}
    legacy["rope_theta"] = rope["rope_theta"]
    legacy["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    return legacy


def _write(file: Path, settings: dict[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
