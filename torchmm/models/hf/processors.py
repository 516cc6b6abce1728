"""Processor files of an export: image processor, feature extractor and names of tokens.

A multimodal model with pretrained files keeps the processor files of its source. For other models,
the training settings are written in the format of Hugging Face processors:

- `preprocessor_config.json` and `processor_config.json`
- `video_preprocessor_config.json`, if the processor class supports videos
- names of special tokens (`image_token`, `boi_token`, ...), which processors read from tokenizers

Hugging Face processors are not built and saved, because many require torchvision or other packages.
Some also add tokens to the tokenizer for which the LLM has no embeddings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers import PreTrainedTokenizerBase

from torchmm.models.encoders import EncoderModule
from torchmm.models.hf.chat_template import extend_chat_template
from torchmm.models.hf.processor_classes import (
    PIXEL_SHUFFLE_PROCESSOR,
    PIXTRAL,
    PROCESSOR_FILES,
    ProcessorFiles,
)
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.model_section import split_revision

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
TOKENIZER_FILE = "tokenizer_config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_FRAME_SETTINGS = (
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "size",
    "image_mean",
    "image_std",
)
"""Settings of an image processor that also apply to video frames."""
_RESIZE_PROCESSOR = "CLIPImageProcessor"
_SCALE_SETTINGS = ("do_resize", "size", "resample", "do_rescale", "rescale_factor")
_RESIZE_SETTINGS = (*_SCALE_SETTINGS, "do_normalize", "image_mean", "image_std", "do_convert_rgb")
"""Settings of an image processor that only resizes images to one size and normalizes them."""


def save_processor(
    model: MultimodalModel, directory: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the processor files next to the tokenizer files.

    Args:
        model: Model that is exported as one Hugging Face class.
        directory: Directory with the tokenizer files.
        tokenizer: Tokenizer of the export.
    """
    encoders = model.encoder_modules()
    if not encoders:
        return
    if model.composite is not None and model.llm.weights.source is not None:
        _copy_files(model.llm.weights.source, directory)
        return
    # Published Omni models have the image processor and the feature extractor in one file.
    for encoder in encoders:
        before = directory / PREPROCESSOR_FILE
        settings = json.loads(before.read_text()) if before.is_file() else {}
        processor = image_processor(encoder)
        if model.composite is None and hasattr(processor, "crop_to_patches"):
            # The class does not support tiles and rejects outputs that count them. This processor
            # does the same to a full image. vLLM reads a crop size from the one of LLaVA.
            tiled = processor.to_dict()
            settings_of_resize = {key: tiled[key] for key in _RESIZE_SETTINGS}
            processor = _processor_class(_RESIZE_PROCESSOR)(
                **settings_of_resize, crop_size=tiled["size"]
            )
        processor.save_pretrained(directory)
        if settings:
            _update_json(before, {**settings, **json.loads(before.read_text())})
    placeholder = model.image_token_id(tokenizer)
    written = choose_processor(model)
    settings = written.settings(model.composite, encoders)
    tokens = processor_tokens(written, model.composite, placeholder, tokenizer)
    # In some classes, tokens around placeholders are also settings of the processor.
    settings |= {key: tokens[key] for key in written.token_settings if key in tokens}
    _update_json(directory / PROCESSOR_FILE, {"processor_class": written.processor, **settings})
    is_tiled = any(encoder.spec.tiles is not None for encoder in encoders)
    untiled = {} if is_tiled else written.untiled_settings(model.composite, encoders)
    _update_json(directory / PREPROCESSOR_FILE, {"processor_class": written.processor, **untiled})
    if written.video:
        image_settings = json.loads((directory / PREPROCESSOR_FILE).read_text())
        sizes = {key: image_settings[key] for key in _FRAME_SETTINGS if key in image_settings}
        _update_json(directory / VIDEO_FILE, {**sizes, "video_processor_type": written.video})
    if model.composite is None and isinstance(model.text.image_token, str):
        template = extend_chat_template(tokenizer, model.text.image_token)
        if template is not None:
            (directory / _TEMPLATE_FILES[0]).write_text(template)
    missing = {k: v for k, v in tokens.items() if not hasattr(tokenizer, k)}
    if missing and (directory / TOKENIZER_FILE).is_file():
        _update_json(directory / TOKENIZER_FILE, missing)


def image_processor(encoder: EncoderModule) -> Any:
    """Return the Hugging Face image processor or feature extractor with the training settings."""
    image_spec = encoder.image_spec()
    spec = image_spec.tiles or image_spec
    return _processor_class(spec.processor_class)(**spec.processor)


def _processor_class(name: str) -> Any:
    """Return a Hugging Face processor class, in its Pillow version if available."""
    base_name = name.removesuffix("Fast").removesuffix("Pil")
    return getattr(transformers, f"{base_name}Pil", None) or getattr(transformers, base_name)


def _copy_files(source: str, directory: Path) -> None:
    """Copy the processor files of a local directory or a Hub id."""
    for name in (PREPROCESSOR_FILE, PROCESSOR_FILE, VIDEO_FILE, *_TEMPLATE_FILES):
        file = Path(source) / name
        if not Path(source).is_dir():
            repo_or_path, revision = split_revision(source)
            try:
                file = Path(hf_hub_download(repo_or_path, name, revision=revision))
            except (EntryNotFoundError, HFValidationError, OSError):
                continue  # the file does not exist
        if file.is_file():
            shutil.copyfile(file, directory / name)


def choose_processor(model: MultimodalModel) -> ProcessorFiles:
    """Return the processor of a model with encoders."""
    first = model.encoder_modules()[0]
    if model.composite is None and first.spec.pixel_shuffle_factor > 1:
        return PIXEL_SHUFFLE_PROCESSOR
    if model.composite is None:
        return PROCESSOR_FILES["audioflamingo3" if first.family.modality == "audio" else "llava"]
    if model.composite.model_type == "llava" and first.spec.config.model_type == "pixtral":
        return PIXTRAL
    return PROCESSOR_FILES[model.composite.model_type]


def processor_tokens(
    written: ProcessorFiles,
    config: Any,
    placeholder: int | None,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, str]:
    """Return the special tokens of the tokenizer by the names that the processor looks for."""
    vocabulary = tokenizer.get_vocab()
    known = {index: token for token, index in vocabulary.items()}

    def special_tokens() -> Iterator[tuple[str, str | None]]:
        for name, token_or_key in written.tokens.items():
            if token_or_key is None:
                yield name, known.get(-1 if placeholder is None else placeholder)
            elif token_or_key in vocabulary:
                yield name, token_or_key
            else:
                index = getattr(config, token_or_key, None)
                yield name, known.get(index) if isinstance(index, int) else None

    return {name: token for name, token in special_tokens() if token is not None}


def _update_json(file: Path, settings: Mapping[str, Any]) -> None:
    """Add settings to a JSON file, which may not exist yet."""
    before = json.loads(file.read_text()) if file.is_file() else {}
    text = json.dumps({**before, **settings}, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n")
