"""Checkpoints without weights and Hugging Face processors that split images into tiles."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.smolvlm import processing_smolvlm

from torchmm.data.sources.reader import SampleReader
from torchmm.models.build import build_model
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LLM = {**SMALL, "num_key_value_heads": 2, "vocab_size": 1024}
TEXT = "\n\n \n\n Here is the original image and here are some crops to help you see better \n\n"
TOKENS = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "idefics3": {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"},
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
}
TOKENS["mistral3"] = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
TOKENS["llava_next"] = TOKENS["llava_onevision"] = {"image_token": "<image>"}
TOKENS["smolvlm"] = {**TOKENS["idefics3"], "global_image_token": "<global-img>"}
"""Special tokens by the name that the Hugging Face processor looks up."""
VISION_TYPES = {"llava_next": "clip_vision_model", "llava_onevision": "siglip_vision_model"}
WRITTEN = {"internvl": "<IMG_CONTEXT>", "gemma3": "<start_of_image>"}
"""Placeholder text of an image. The default is "<image>"."""
SWITCHES: dict[str, dict[str, Any]] = {"gemma3": {"do_pan_and_scan": True}}
"""Processor settings of a recipe that enable tiles."""


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with some merges, such as the newlines of Gemma."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT, "\n\n\n"] * 4, trainer)
    if family == "smolvlm":  # the Idefics3 tokenizer has none of these tokens
        rows = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
        backend.add_tokens([AddedToken(row, normalized=False) for row in rows])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=TOKENS[family],
    )


def composite_settings(family: str, side: int, tokenizer: PreTrainedTokenizerFast) -> dict:
    """Return the config of a multimodal model with a vision encoder of an image size."""
    ids = tokenizer.convert_tokens_to_ids
    vision = {**SMALL, "image_size": side, "patch_size": side // 8}
    if family == "gemma3":
        return {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", **LLM},
            "vision_config": {"model_type": "siglip_vision_model", **vision},
            "image_token_index": ids("<image_soft_token>"),
            "boi_token_index": ids("<start_of_image>"),
            "eoi_token_index": ids("<end_of_image>"),
            "mm_tokens_per_image": 16,
        }
    if family.startswith("llava"):
        return {
            "model_type": family,
            "text_config": {"model_type": "llama", **LLM},
            "vision_config": {"model_type": VISION_TYPES[family], **vision},
            "image_token_index": ids("<image>"),
            "image_grid_pinpoints": pinpoints(family, side),
        }
    llm_type = "llama" if family != "internvl" else "qwen2"
    image = "<IMG_CONTEXT>" if family == "internvl" else "<image>"
    return {
        "model_type": family,
        "text_config": {"model_type": llm_type, **LLM},
        "vision_config": {"model_type": f"{family}_vision", **vision},
        "image_token_id": ids(image),
    }


def pinpoints(family: str, side: int) -> list[list[int]]:
    """Return the resolutions of the Hugging Face class, scaled to a tile size."""
    prefix = "LlavaNext" if family == "llava_next" else "LlavaOnevision"
    published = getattr(transformers, f"{prefix}ImageProcessorPil").image_grid_pinpoints
    shortest = min(length for resolution in published for length in resolution)
    return [[length * side // shortest for length in resolution] for resolution in published]


def image_processor(family: str, side: int, **settings: Any) -> Any:
    """Return the Hugging Face image processor with default settings except the tile size."""
    square = {"height": side, "width": side}
    if family == "internvl":  # as in the files of InternVL3
        kind = transformers.GotOcr2ImageProcessorPil
        return kind(size=square, crop_to_patches=False, **settings)
    if family == "gemma3":
        return transformers.Gemma3ImageProcessorPil(size=square, **settings)
    if family.startswith("llava"):
        settings = {"image_grid_pinpoints": pinpoints(family, side), **settings}
    if family == "llava_onevision":
        return transformers.LlavaOnevisionImageProcessorPil(size=square, **settings)
    if family == "llava_next":
        size = {"shortest_edge": side}
        return transformers.LlavaNextImageProcessorPil(size=size, crop_size=square, **settings)
    name = "Idefics3" if family == "idefics3" else "SmolVLM"
    kind = getattr(transformers, f"{name}ImageProcessorPil")
    sizes = {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}
    return kind(**{**sizes, **settings})


def hf_processor(family: str, images: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the Hugging Face processor. An image of a tile has 16 tokens."""
    if family == "gemma3":
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=16)
    if family == "idefics3":
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=16)
    if family == "llava_next":
        return transformers.LlavaNextProcessor(
            images,
            tokenizer,
            patch_size=images.crop_size["height"] // 8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    # These processors also require a video processor, which requires torchvision.
    if family == "internvl":
        kind = _without_videos(transformers.InternVLProcessor)
        return kind(images, tokenizer, None, image_seq_length=16)
    if family == "llava_onevision":
        kind = _without_videos(transformers.LlavaOnevisionProcessor)
        return kind(
            images, tokenizer, None, num_image_tokens=64, vision_feature_select_strategy="full"
        )
    processing_smolvlm.num2words = str  # only used for videos
    return _without_videos(transformers.SmolVLMProcessor)(images, tokenizer, None, image_seq_len=16)


def _without_videos(kind: Any) -> Any:
    checks = {"check_argument_for_proper_class": lambda self, name, value: type(value)}
    return type(kind.__name__, (kind,), checks)


def make_reader(
    family: str,
    directory: Path,
    images: Any,
    tokenizer: PreTrainedTokenizerFast,
    side: int,
    data: dict[str, Any] | None = None,
    **recipe: Any,
) -> SampleReader:
    """Return a reader of samples, as in a run of a checkpoint with this image processor."""
    settings = composite_settings(family, side, tokenizer)
    AutoConfig.for_model(**settings).save_pretrained(directory)
    images.save_pretrained(directory)
    processor = {**SWITCHES.get(family, {}), **recipe}
    model = build_model(ModelConfig(source=str(directory), processor=processor), FreezeConfig())
    specs, text = model.image_specs(), model.text_spec(tokenizer)
    return SampleReader(DataConfig(**(data or {})), 100_000, text, specs, tokenizer)


def varied_images(directory: Path, count: int) -> list[bytes]:
    """Return images of a real dataset: tall, wide, small and large images of every mode."""
    rows = datasets.load_dataset("parquet", data_dir=str(directory / "train"), split="train")
    column = "image" if "image" in rows.column_names else "images"
    cells = rows.select_columns([column]).with_format(None)
    files: list[bytes] = []
    for cell in cells.cast_column(column, rows.features[column]).to_list():
        files += _files(cell[column])
    sizes = []
    for file in files:
        with Image.open(io.BytesIO(file)) as image:
            sizes.append((image.width / image.height, image.width * image.height, image.mode))
    numbers = range(len(files))
    share = count // 7
    by_aspect = sorted(numbers, key=lambda n: sizes[n][0])
    by_area = sorted(numbers, key=lambda n: sizes[n][1])
    chosen = [*by_aspect[:share], *by_aspect[-share:], *by_area[:share], *by_area[-share:]]
    for mode in sorted({mode for _, _, mode in sizes}):
        chosen += [n for n in numbers if sizes[n][2] == mode][: share // 2]
    chosen += [*numbers[:: max(1, len(files) // count)]]
    return [files[n] for n in list(dict.fromkeys(chosen))[:count]]


def _files(cell: Any) -> list[bytes]:
    if isinstance(cell, list):
        return [file for each in cell for file in _files(each)]
    return [cell["bytes"]] if cell is not None else []
