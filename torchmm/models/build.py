"""Build a model on the meta device from the recipe tables `[model]`, `[freeze]` and `[adapters]`.

Extensions add models with entries of these tables:

- "generators": "module" is a function of the section `[model.generator]`, the hidden size of the
  LLM and the dtype of parameters. It returns a `GeneratorModule` on the current default device.
- "model_fallbacks": "llm" and "encoder" return the family of a model type that is not registered,
  from its config, the names in its weight files and, for encoders, the settings of the image
  processor. They raise `ConfigError` if the structure of the model is not supported.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from transformers import FeatureExtractionMixin, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import IMAGE_PROCESSOR_NAME

from torchmm.common.batch import BoxFormat
from torchmm.common.errors import ConfigError
from torchmm.common.extensions import NOT_INSTALLED, find_entry, require_entry
from torchmm.common.tiles import TileSpec
from torchmm.models.adapters import add_adapters
from torchmm.models.encoders import EncoderModule, EncoderSpec
from torchmm.models.families.composites.components import PAIR_PROCESSOR, VerifiedFamilies
from torchmm.models.families.composites.registry import COMPOSITES
from torchmm.models.families.encoders.family import EncoderFamily, patches_per_row, side
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.introspection import find_mechanisms, most_similar_family
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.families.text_conventions import TextConventions
from torchmm.models.families.tiling import Tiling
from torchmm.models.generator import GeneratorModule
from torchmm.models.hf.config import load_config, size_problems
from torchmm.models.hf.config_checks import setting_problems
from torchmm.models.hf.config_values import build_checked, value_problems
from torchmm.models.layered import WeightFiles
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel, module_of
from torchmm.recipe.model_section import (
    AdapterConfig,
    EncoderConfig,
    FreezeConfig,
    GeneratorConfig,
    LlmConfig,
    ModelConfig,
    NewTokens,
    split_revision,
)

LLM_FILES = WeightFiles(renames=((r"", "backbone."),), hf_prefixes=(("backbone.", ""),))
ENCODER_FILES = WeightFiles(
    renames=(
        (r"connector\.", "connector."),
        (r"(model\.)?(vision_model|visual)\.", "tower."),
        (r"(?!text_model\.|model\.|lm_head\.|logit_|\w+_projection\.)", "tower."),
    ),
    hf_prefixes=(("tower.", ""),),
    allows_other_tensors=True,
)


def build_model(
    config: ModelConfig,
    freeze: FreezeConfig,
    dtype: torch.dtype = torch.float32,
    adapters: Mapping[str, AdapterConfig] | None = None,
    new_tokens: NewTokens | None = None,
) -> MultimodalModel:
    """Build the model of a recipe on the meta device, add adapters and freeze modules.

    Args:
        config: `[model]` of the recipe.
        freeze: `[freeze]` of the recipe.
        dtype: dtype of the parameters.
        adapters: Adapters by name.
        new_tokens: Ids of `model.new_tokens`, or None without new tokens.

    Raises:
        ConfigError: The sections have problems.
    """
    with torch.device("meta"):
        if config.is_composite:
            build = partial(_build_composite, dtype=dtype, new_tokens=new_tokens)
            model = build_checked("model", config, build)
        else:
            model = _build_pair(config, dtype, new_tokens)
    counts = model.parameter_counts()
    unknown = [name for name in freeze.modules if name not in counts]
    if unknown:
        known = ", ".join(counts)
        raise ConfigError(
            [f"[freeze] modules: {name!r} is not a module; use any of: {known}" for name in unknown]
        )
    for fqn, parameter in model.named_parameters():
        if module_of(fqn) in freeze.modules:
            parameter.requires_grad_(False)
    add_adapters(model, adapters or {})
    if new_tokens is not None and not model.llm.embedding.weight.requires_grad:
        if not model.llm.adapters:
            raise ConfigError(
                'model.new_tokens: the LLM is frozen; add adapters, or remove "llm" from '
                "freeze.modules, so that new tokens are trained"
            )
        model.llm.train_token_rows(new_tokens.ids)
    return model


def _enlarge_vocabulary(config: Any, new_tokens: NewTokens | None) -> int:
    """Add new tokens to the vocabulary of a config, and return the number of rows in the files.

    Raises:
        ConfigError: The embedding lacks rows of tokens that the tokenizer has.
    """
    text_config = config.get_text_config()
    stored: int = text_config.vocab_size
    if new_tokens is None:
        return stored
    if new_tokens.known > stored:
        raise ConfigError(
            f"[model] tokenizer has {new_tokens.known} tokens but the LLM has only {stored} "
            "embeddings; use the tokenizer of the LLM, and list further tokens in model.new_tokens"
        )
    size = max(stored, new_tokens.known + len(new_tokens.added))
    if config is not text_config and getattr(config, "vocab_size", None) == stored:
        config.vocab_size = size
    text_config.vocab_size = size
    return stored


def _build_composite(
    config: ModelConfig, dtype: torch.dtype, new_tokens: NewTokens | None
) -> MultimodalModel:
    hf_config = load_config("model", config.source_with_revision, config.config)
    # torchmm trains and exports the thinker of Omni models, without the talker (speech output).
    hf_config = getattr(hf_config, "thinker_config", hf_config)
    stored_rows = _enlarge_vocabulary(hf_config, new_tokens)
    composite = COMPOSITES.get(hf_config.model_type)
    if composite is None:
        raise ConfigError(_unsupported_message("model", hf_config, COMPOSITES))
    verified = (_verify_components(config, hf_config),) if composite.supports_any_component else ()
    parts = composite.get_components(hf_config, *verified)
    if _is_pair_export(config.source_with_revision):
        parts = parts.without_markers()
    problems: list[str] = []
    if set(config.encoder_names) != set(parts.encoders):
        problems.append(
            f"[model] {hf_config.model_type} has other encoders than "
            f"{', '.join(config.encoder_names)}; set towers = {list(parts.encoders)}"
        )
    problems += size_problems("model", parts.llm_config.get_text_config())
    problems += setting_problems("model", hf_config)
    for part in parts.encoders.values():
        problems += size_problems("model", part.config)
        # Hugging Face counts the embeddings as the hidden states before the first layer.
        layers = part.family.layer_count(part.config)
        if not -layers - 1 <= part.settings.get("feature_layer", -1) < 0:
            problems.append(
                f"[model] vision_feature_layer = {hf_config.vision_feature_layer}: the vision "
                f"encoder has {layers} layers; use a layer between {-layers - 1} (embeddings) "
                "and -1"
            )
    generator = None
    llm_config = parts.llm_config.get_text_config()
    with _collect_problems(problems):
        generator = _build_generator(config.generator, llm_config.hidden_size, dtype)
    encoders = {}
    for name, part in parts.encoders.items():
        # [model.processor] configures the image processor.
        settings = config.processor if part.family.modality == "image" else {}
        with _collect_problems(problems):
            processor = _load_processor(
                "model",
                part.family,
                part.config,
                config.source_with_revision,
                settings,
                part.tiling,
            )
            spec = EncoderSpec(
                name,
                part.family,
                part.config,
                *processor,
                llm_hidden_size=llm_config.hidden_size,
                dtype=dtype,
                connector_from_files=True,
                **part.settings,
            )
            encoders[name] = EncoderModule(
                spec, replace(part.files, source=config.source_with_revision)
            )
    if problems:
        raise ConfigError(problems)
    llm_files = replace(parts.llm_files, source=config.source_with_revision)
    feeds_generator = generator is not None
    with _collect_problems(problems):
        llm = LlmModule(
            parts.llm_config,
            parts.llm_family,
            dtype,
            llm_files,
            feeds_generator,
            bool(config.chunked_loss),
        )
        llm.add_tokens(new_tokens, stored_rows)
    if problems:
        raise ConfigError(problems)
    for module in (llm, *encoders.values()):
        module.describe()  # raises errors that planning would raise for these sizes
    return MultimodalModel(llm, encoders, parts.text, hf_config, generator)


def _is_pair_export(source: str | None) -> bool:
    """Return True if the files are an export of an encoder and an LLM from separate sources.

    The processor of such an export inserts only placeholders and does not support tiles.
    """
    if source is None:
        return False
    name, revision = split_revision(source)
    try:
        settings, _ = ProcessorMixin.get_processor_dict(name, revision=revision)
    except (OSError, ValueError):  # no processor; `load_config` has checked local files
        return False
    return settings.get("processor_class") == PAIR_PROCESSOR


def _verify_components(config: ModelConfig, hf_config: Any) -> VerifiedFamilies:
    """Return verified families of the unregistered encoder and LLM of a multimodal model.

    Raises:
        ConfigError: The verification of a component fails.
    """
    tower = hf_config.vision_config
    llm = hf_config.text_config
    encoder_family = None
    llm_family = None
    problems: list[str] = []
    # Names in the files are those of the multimodal model, so they cannot be verified.
    if tower.model_type not in ENCODER_FAMILIES:
        section = EncoderConfig(
            processor={
                **_read_image_processor(config.source_with_revision),
                **(config.processor or {}),
            }
        )
        with _collect_problems(problems):
            encoder_family = _verify_encoder("model.config.vision_config", section, tower)
    if llm.model_type not in LLM_FAMILIES:
        with _collect_problems(problems):
            llm_family = _verify_llm(llm, LLM_FILES)
    if problems:
        raise ConfigError(problems)
    return VerifiedFamilies(encoder_family, llm_family)


def _build_pair(
    config: ModelConfig, dtype: torch.dtype, new_tokens: NewTokens | None
) -> MultimodalModel:
    if config.llm is None:
        raise ConfigError("[model] requires `llm`, or `source` or `config` of a multimodal model")
    problems: list[str] = []
    llm, encoders, generator = None, {}, None
    # Fallback if the LLM cannot be built: encoders and generator are then built only to report all
    # problems at once, for which any hidden size works.
    hidden_size = 4
    with _collect_problems(problems):
        feeds_generator = config.generator is not None
        chunked = bool(config.chunked_loss)
        llm = build_checked(
            "model.llm",
            config.llm,
            lambda section: _build_llm(section, dtype, feeds_generator, chunked, new_tokens),
        )
        hidden_size = llm.text_config.hidden_size
    for name, section in config.encoders.items():
        with _collect_problems(problems):
            encoders[name] = build_checked(
                f"model.encoders.{name}",
                section,
                partial(_build_encoder, name, hidden_size=hidden_size, dtype=dtype),
            )
    with _collect_problems(problems):
        generator = _build_generator(config.generator, hidden_size, dtype)
    if problems:
        raise ConfigError(problems)
    assert llm is not None
    text = TextConventions(config.image_token, boxes=BoxFormat())
    return MultimodalModel(llm, encoders, text, generator=generator)


def _build_llm(
    section: LlmConfig,
    dtype: torch.dtype,
    feeds_generator: bool,
    chunked_loss: bool,
    new_tokens: NewTokens | None,
) -> LlmModule:
    config = load_config("model.llm", section.source_with_revision, section.config)
    stored_rows = _enlarge_vocabulary(config, new_tokens)
    files = replace(LLM_FILES, source=section.source_with_revision)
    family = LLM_FAMILIES.get(config.model_type)
    problems: list[str] = []
    if family is not None or getattr(config, "num_attention_heads", None):
        problems = size_problems("model.llm", config)
    if family is None:
        with _collect_problems(problems):
            family = _verify_llm(config, files)
    if problems:
        raise ConfigError(problems)
    assert family is not None
    files = replace(files, legacy_names=family.legacy_names, stacked_experts=family.stacked_experts)
    llm = LlmModule(config, family, dtype, files, feeds_generator, chunked_loss)
    llm.add_tokens(new_tokens, stored_rows)
    llm.describe()
    return llm


def _verify_llm(config: Any, files: WeightFiles) -> LlmFamily:
    """Return the family of a causal LM that is not registered.

    Raises:
        ConfigError: The extension for such models rejects it or is not installed.
    """
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"[model.llm] {config.model_type!r} is not a causal LM of transformers "
            f"{transformers.__version__}; registered model types: {', '.join(LLM_FAMILIES)}"
        )
    entry = find_entry("model_fallbacks", "llm")
    if entry is None:
        raise ConfigError(
            f"[model.llm] model_type {config.model_type!r} is not registered, and "
            f"{NOT_INSTALLED.format('auto_models')}; registered model types: "
            f"{', '.join(LLM_FAMILIES)}"
        )
    try:
        return entry.load()(config, files)
    except ConfigError as error:
        has = find_mechanisms(config)
        also = f"It has {', '.join(has)}. " if has else ""
        similar = most_similar_family(config, LLM_FAMILIES)
        hint = f"The most similar registered type is {similar!r}; " if similar else ""
        raise ConfigError(
            f"[model.llm] model_type {config.model_type!r} is not registered, and a small "
            "copy of it does not match the usual structure of causal LMs: "
            f"{'; '.join(error.problems)}. {also}{hint}registered model types: "
            f"{', '.join(LLM_FAMILIES)}"
        ) from error


def _build_generator(
    section: GeneratorConfig | None, hidden_size: int, dtype: torch.dtype
) -> GeneratorModule | None:
    if section is None:
        return None
    entry = require_entry("generators", "module", "generation", "model.generator")
    build = entry.load()

    def describe_built(checked_section: GeneratorConfig) -> GeneratorModule:
        generator = build(checked_section, hidden_size, dtype)
        generator.describe()
        return generator

    return build_checked("model.generator", section, describe_built)


def _build_encoder(
    name: str, section: EncoderConfig, hidden_size: int, dtype: torch.dtype
) -> EncoderModule:
    key = f"model.encoders.{name}"
    if name in ("llm", "generator") or "." in name:
        raise ConfigError(f"[{key}] {name!r} is not a valid encoder name; use another name")
    config = load_config(key, section.source_with_revision, section.config)
    family = ENCODER_FAMILIES.get(config.model_type)
    # An unverified encoder may lack the sizes checked below, so it is rejected first.
    family = (family or _verify_encoder(key, section, config)).variant(config)
    problems = size_problems(key, config)
    problems += _connector_problems(key, section, family, config)
    processor: _Processor = ("", {}, None)
    with _collect_problems(problems):
        processor = _load_processor(
            key, family, config, section.source_with_revision, section.processor
        )
    if problems:
        raise ConfigError(problems)
    spec = EncoderSpec(
        name,
        family,
        config,
        *processor,
        llm_hidden_size=hidden_size,
        dtype=dtype,
        feature_layer=section.feature_layer,
        pixel_shuffle_factor=section.pixel_shuffle_factor if section.merges_features else 1,
        connector="norm_mlp" if section.connector == "pixel_shuffle_norm_mlp" else "mlp",
        final_norm=family.modality == "audio"
        and section.feature_layer == -1
        and bool(family.final_norm),
    )
    renames = (*family.renames, *ENCODER_FILES.renames)
    files = replace(ENCODER_FILES, source=section.source_with_revision, renames=renames)
    encoder = EncoderModule(spec, files)
    encoder.describe()
    return encoder


def _verify_encoder(key: str, section: EncoderConfig, config: Any) -> EncoderFamily:
    """Return the family of an encoder that is not registered.

    Raises:
        ConfigError: The extension for such models rejects it or is not installed.
    """
    files = replace(ENCODER_FILES, source=section.source_with_revision)
    entry = find_entry("model_fallbacks", "encoder")
    if entry is None:
        raise ConfigError(
            f"{_unsupported_message(key, config, ENCODER_FAMILIES)}; "
            f"{NOT_INSTALLED.format('auto_models')}"
        )
    try:
        settings = {
            **_read_image_processor(section.source_with_revision),
            **(section.processor or {}),
        }
        return entry.load()(config, files, settings)
    except ConfigError as error:
        raise ConfigError(
            f"{_unsupported_message(key, config, ENCODER_FAMILIES)}. A small copy of it does not "
            f"match the structure of a ViT encoder: {'; '.join(error.problems)}"
        ) from error


def _connector_problems(
    key: str, section: EncoderConfig, family: EncoderFamily, config: Any
) -> list[str]:
    problems = []
    layers = family.layer_count(config)
    if section.feature_layer < -layers:
        problems.append(
            f"[{key}] feature_layer = {section.feature_layer}, but the encoder has {layers} layers"
        )
    if family.fixed_merge and section.feature_layer != -1:
        problems.append(
            f"[{key}] feature_layer = {section.feature_layer}: {config.model_type} merges patches "
            "after its last layer; use -1"
        )
    if section.modality != family.modality:
        problems.append(
            f'[{key}] modality = "{section.modality}", but {config.model_type} reads '
            f'{family.modality}; set modality = "{family.modality}"'
        )
    if not section.merges_features or family.modality == "audio":
        return problems
    if family.inputs != "fixed":
        problems.append(
            f'[{key}] connector = "{section.connector}" requires images of one size, which '
            f'{config.model_type} does not have; use "mlp"'
        )
    elif patches_per_row(config) % section.pixel_shuffle_factor:
        problems.append(
            f"[{key}] pixel_shuffle_factor = {section.pixel_shuffle_factor} must divide the "
            f"{patches_per_row(config)} "
            "patches per row of the image"
        )
    return problems


def _read_image_processor(source: str | None) -> dict[str, Any]:
    """Return the settings of the image processor file, or {} (defaults) without a file.

    Raises:
        ConfigError: The file has wrong values.
    """
    if source is None:
        return {}
    name, revision = split_revision(source)
    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(name, revision=revision)
    except OSError:
        return {}
    if problems := value_problems(f"{source}: {IMAGE_PROCESSOR_NAME}", settings):
        raise ConfigError(problems)
    return settings


_Processor = tuple[str, dict[str, Any], TileSpec | None]
_EXTRACTOR_KEYS = (
    "feature_size",
    "sampling_rate",
    "hop_length",
    "n_fft",
    "chunk_length",
    "do_normalize",
)


def _load_processor(
    key: str,
    family: EncoderFamily,
    config: Any,
    source: str | None,
    override: dict[str, Any] | None,
    composite: Tiling | None = None,
) -> _Processor:
    """Return class name and settings of the image or audio processor, and the tiling of images.

    Args:
        key: Section of the recipe, for messages.
        family: Family of the encoder.
        config: Hugging Face config of the encoder.
        source: Local directory or Hugging Face id with the processor, or None.
        override: Processor settings of the recipe.
        composite: Tiling of the multimodal model that contains the encoder.

    Raises:
        ConfigError: A setting is wrong or differs from the sizes of the model.
    """
    override = override or {}
    if family.modality == "image":
        name, settings, tiles = _image_processor(key, family, config, source, override, composite)
    else:
        name = family.processor_class
        settings = {}
        tiles = None
        if source is not None:
            repo_or_path, revision = split_revision(source)
            with suppress(OSError):  # weights without an extractor use the defaults of the class
                settings, _ = FeatureExtractionMixin.get_feature_extractor_dict(
                    repo_or_path, revision=revision
                )
        known_settings = {
            setting: settings[setting] for setting in _EXTRACTOR_KEYS if setting in settings
        }
        settings = {**known_settings, **override, **family.processor(config)}
    if problems := value_problems(f"[{key}] processor", settings):
        raise ConfigError(problems)
    return name, settings, tiles


def _image_processor(
    key: str,
    family: EncoderFamily,
    config: Any,
    source: str | None,
    override: dict[str, Any],
    composite: Tiling | None,
) -> _Processor:
    fixed = family.processor(config)
    settings = _read_image_processor(source)
    tiling = composite or family.tiling
    tiles = None
    if tiling is not None:
        is_multimodal = composite is not None
        tiles = tiling.spec(key, side(config.image_size), fixed, settings, override, is_multimodal)
    is_tiled = family.tiling is not None or (tiling is not None and tiling.switch is None)
    if is_tiled:
        settings.pop("size", None)  # size of the image before it is split into tiles
        override = {n: v for n, v in override.items() if tiles is None or n != "size"}
    settings = {**fixed, **settings, **override}
    if "crop_size" in fixed:
        fixed.pop("size")  # free, because the crop after it decides
    for name in ("size", "crop_size", "patch_size", "temporal_patch_size", "merge_size"):
        if name in fixed and _to_height_width(settings[name]) != _to_height_width(fixed[name]):
            raise ConfigError(
                f"[{key}] processor.{name} = {settings[name]}, but the model requires {fixed[name]}"
            )
    name = family.resolve_processor_class(
        settings.pop("image_processor_type", family.processor_class)
    )
    if tiling is not None and tiling.switch is not None:
        settings.pop(tiling.switch, None)
    if is_tiled:
        name = family.processor_class
        kept_keys = ("image_mean", "image_std", "do_convert_rgb", "rescale_factor", *fixed)
        settings = {key: value for key, value in settings.items() if key in kept_keys}
        if tiles is None and family.tiling is not None:
            settings |= family.tiling.untiled_settings
    settings.pop("processor_class", None)
    return name, settings, tiles


def _to_height_width(size: Any) -> Any:
    """Return a size as a dict. Older files store a square as one number."""
    return {"height": size, "width": size} if isinstance(size, int) else size


def _unsupported_message(key: str, config: Any, supported: Collection[str]) -> str:
    """Return the message for an unsupported model type, with the most similar types."""
    model_type = config.model_type
    known: dict[str, Collection[str]] = {
        "model.llm": LLM_FAMILIES,
        "model.encoders": ENCODER_FAMILIES,
    }
    parts = []
    for section, name in (("model.llm", "text_config"), ("model.encoders", "vision_config")):
        part = getattr(config, name, None)
        if key == "model" and part is not None:
            listed = "supported" if part.model_type in known[section] else "not registered"
            parts.append(f"its {name} is {part.model_type!r} ({listed})")
    close_names = difflib.get_close_matches(model_type, list(supported), 1, cutoff=0.4)
    similar = most_similar_family(config, supported)
    has = find_mechanisms(config)
    return (
        f"[{key}] model_type {model_type!r} is not supported"
        + (f"; it has {', '.join(has)}" if has else "")
        + (f"; the most similar registered type is {similar!r}" if similar else "")
        + (
            f"; the closest name is {close_names[0]!r}"
            if close_names and close_names[0] != similar
            else ""
        )
        + (
            f"; {', '.join(parts)}: supported components can be combined with a new "
            "connector, as [model.llm] and [model.encoders.NAME]"
            if parts
            else ""
        )
        + f"; registered model types: {', '.join(supported)}"
    )


@contextmanager
def _collect_problems(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += error.problems
