"""Keys of exported configs that transformers 4 reads.

Transformers 5 writes `rope_parameters` and a tokenizer class that transformers 4 does not have.
Transformers 4 ignores unknown keys, so it would compute with the default RoPE of the class. The
old keys are written next to the new ones, unless transformers 5 then reads another config.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, CONFIG_NAME, AutoConfig

TOKENIZER_FILE = "tokenizer_config.json"
_LEGACY = {"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"}
_BY_LAYER_TYPE = ("gemma3_text", "olmo3")
"""Model types with RoPE parameters by layer type in version 5 and flat keys in version 4."""


def add_legacy_keys(directory: Path) -> None:
    """Add keys for transformers 4 to the files of a model and its tokenizer."""
    config = directory / CONFIG_NAME
    if config.is_file():
        settings = json.loads(config.read_text())
        legacy = _with_rope_keys(settings)
        if settings.get("model_type") in CONFIG_MAPPING and _reads_same(settings, legacy):
            _write(config, legacy)
    tokenizer = directory / TOKENIZER_FILE
    if tokenizer.is_file():
        settings = json.loads(tokenizer.read_text())
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        _write(tokenizer, settings)


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
    return rope | {
        key: without_legacy_keys(value)
        for key, value in settings.items()
        if key not in _LEGACY and key not in rope
    }


def _with_rope_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a config and its parts with the RoPE keys of transformers 4."""
    legacy = {k: _with_rope_keys(v) if isinstance(v, dict) else v for k, v in settings.items()}
    rope = settings.get("rope_parameters")
    if not isinstance(rope, dict):
        return legacy
    if settings.get("model_type") in _BY_LAYER_TYPE:
        legacy["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" not in rope:
        return legacy
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if "partial_rotary_factor" in scaling:
        legacy["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    legacy["rope_theta"] = rope["rope_theta"]
    legacy["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    return legacy


def _write(file: Path, settings: dict[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
