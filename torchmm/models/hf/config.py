"""Load, override and check Hugging Face configs of a recipe."""

from __future__ import annotations

import difflib
import logging
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import (
    CONFIG_MAPPING,
    CONFIG_NAME,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import GENERATION_CONFIG_NAME

from torchmm.common.errors import ConfigError, describe_error, describe_load_error
from torchmm.models.hf.config_checks import rope_settings, setting_problems
from torchmm.models.hf.config_values import MODEL_ERRORS, find_causes, value_problems
from torchmm.recipe.model_section import json_problems, split_revision

logger = logging.getLogger(__name__)

_UNLISTED_KEYS = {
    "audio_end_token_id",  # three keys in published configs of Qwen3-Omni
    "vision_end_token_id",
    "vision_start_token_id",
    "global_head_dim",  # Gemma 4
    "head_dim",
    "model_type",
    "num_global_key_value_heads",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "torch_dtype",
    "vision_use_head",
}
"""Keys that every config class reads although none of them lists them."""
_FILES = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""JSON files of a model directory that torchmm reads. Some readers ignore damaged files."""


def load_config(key: str, source: str | None, override: dict[str, Any] | None) -> Any:
    """Return the Hugging Face config of a section.

    For an encoder section with a dual model (such as CLIP), this is its vision config.

    Args:
        key: Section, for messages.
        source: Local directory or hub id, with its revision; None if `override` is the config.
        override: Values that replace those of `source`. Tables are merged key by key.

    Raises:
        ConfigError: The config is missing or damaged, or has unknown keys or wrong values.
    """
    base: Any
    written = override or {}
    if written.get("apply_spec_augment"):
        raise ConfigError(
            f"[{key}] apply_spec_augment = true is not supported; override it with false"
        )
    base = _make_config(key, written, written) if source is None else _read_config(key, source)
    if key.startswith("model.encoders."):
        base = getattr(base, "vision_config", None) or base
    if source is not None and written:
        base = _make_config(key, _merge(base.to_dict(), written), written)
    # The default of Wav2Vec2 and of its published files.
    if getattr(base, "apply_spec_augment", False):
        logger.warning(
            "[%s] apply_spec_augment = true has no effect, because SpecAugment is not "
            "supported; set it to false to disable this warning",
            key,
        )
    return base


def _read_config(key: str, source: str) -> PreTrainedConfig:
    """Return the config of a directory or hub id.

    Raises:
        ConfigError: config.json is missing, damaged or has wrong values.
    """
    name, revision = split_revision(source)
    if damaged := json_problems(Path(name), _FILES):
        raise ConfigError([f"[{key}] source: {p}; download the file again" for p in damaged])
    _check_generation(key, Path(name))
    try:
        # The dict is checked first, because config classes allocate lists with one item per layer.
        settings, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
        if problems := value_problems(f"[{key}] source = {source!r}: {CONFIG_NAME}", settings):
            raise ConfigError(problems)
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, *MODEL_ERRORS) as error:
        is_local = Path(name).is_dir()
        elsewhere = (
            "" if is_local else " (not a local directory, so requested from the Hugging Face Hub)"
        )
        raise ConfigError(
            f"[{key}] source = {source!r} has no readable config.json{elsewhere}; use a local "
            f"directory or a model of the Hub ({describe_load_error(error)})"
        ) from error
    if not Path(name).is_dir():
        file = try_to_load_from_cache(name, CONFIG_NAME, revision=revision)
        commit = Path(file).parent.name if isinstance(file, str) else None
        if commit is not None and commit != revision:
            logger.info('[%s] has no fixed revision; the current revision is "%s"', key, commit)
    return config


def _check_generation(key: str, directory: Path) -> None:
    """Raise a ConfigError if generation_config.json of a local directory would stop an export.

    Conflicts between settings are allowed. Exports keep them, or log a warning and omit the file.
    """
    if not (directory / GENERATION_CONFIG_NAME).is_file():
        return
    try:
        GenerationConfig.from_pretrained(directory).validate(strict=True)
    except (OSError, ValueError):
        return
    except MODEL_ERRORS as error:
        raise ConfigError(
            f"[{key}] source: {directory / GENERATION_CONFIG_NAME} has a value of a wrong "
            f"type ({describe_error(error)}); correct or remove the file"
        ) from error


def _make_config(key: str, settings: dict[str, Any], written: dict[str, Any]) -> PreTrainedConfig:
    """Return the config for `settings`, of which `written` are the settings in the recipe."""
    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        similar = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ConfigError(f"[{key}] config: model_type = {model_type!r} is unknown{hint}")
    if unknown := _unknown_keys(f"{key}.config", CONFIG_MAPPING[model_type], written):
        raise ConfigError(unknown)
    if problems := value_problems(f"[{key}] config", settings):
        raise ConfigError(problems)
    try:
        return AutoConfig.for_model(**settings)
    except MODEL_ERRORS as error:
        reason = " ".join(str(error).split())
        causes = find_causes(settings, error, lambda values: AutoConfig.for_model(**values))
        raise ConfigError(
            f"[{key}] config is not a valid {model_type!r} config: {reason}"
            + (f"; correct {causes}" if causes else "")
        ) from error


def _unknown_keys(key: str, kind: type[PreTrainedConfig], settings: dict[str, Any]) -> list[str]:
    """Return messages for unknown keys, which Hugging Face would ignore silently."""
    defaults = vars(kind())
    known = set(defaults) | set(kind.attribute_map) | _UNLISTED_KEYS
    if any("partial_rotary_factor" in rope for rope in rope_settings(kind())):
        known.add("partial_rotary_factor")  # key in published configs of Phi-4-mini
    problems = []
    for name, value in settings.items():
        part = defaults.get(name)
        if name not in known:
            similar = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            problems.append(f"[{key}] {name!r} is not a key of {kind.model_type!r}{hint}")
        elif isinstance(part, PreTrainedConfig) and isinstance(value, dict):
            inner_type = str(value.get("model_type", part.model_type))
            # `CONFIG_MAPPING.get` finds only classes that are already imported.
            inner = CONFIG_MAPPING[inner_type] if inner_type in CONFIG_MAPPING else type(part)
            problems += _unknown_keys(f"{key}.{name}", inner, value)
    return problems


def _merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in override.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[name] = _merge(old, value)
        else:
            merged[name] = value
    return merged


def layer_config(config: Any, index: int) -> Any:
    """Return the config of one layer, for models whose sizes differ between layers."""
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config


def size_problems(key: str, config: Any) -> list[str]:
    """Return the settings and sizes of `config` that are rejected for every family."""
    differ = getattr(config, "is_heterogeneous", False)
    problems = []
    for index in range(config.num_hidden_layers if differ else 1):
        layer = layer_config(config, index)
        hidden = getattr(layer, "embed_dim", None) or layer.hidden_size  # encoder of Qwen2-VL
        heads = layer.num_attention_heads
        if getattr(layer, "head_dim", None) is None and hidden % heads:
            problems.append(f"[{key}] hidden_size = {hidden} is not divisible by its {heads} heads")
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        if heads % kv_heads:
            problems.append(
                f"[{key}] num_attention_heads = {heads} is not divisible by the {kv_heads} "
                "num_key_value_heads"
            )
        # "vision" is for images in Gemma 4, which the multimodal model supports.
        if getattr(layer, "use_bidirectional_attention", None) not in (None, False, "vision"):
            problems.append(
                f"[{key}] use_bidirectional_attention is not supported; override it with false"
            )
    return list(dict.fromkeys([*problems, *setting_problems(key, config)]))
