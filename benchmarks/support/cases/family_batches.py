"""The same samples for both sides: packed into one row for torchmm, padded for Hugging Face.

A sample is a caption after its image and, for audio models, noise as audio: begin, media, caption,
end. Placeholders are at the positions that each model expects, surrounded by its special tokens;
only captions are targets. The image processor of each model processes images individually for
torchmm and as a batch for Hugging Face; tiled models have all tiles of an image. Audio LLMs receive
the noise in windows, which Hugging Face pads to their full length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.captions import Captions
from support.cases.family_cases import (
    AUDIO_START,
    BEGIN,
    END,
    FIRST_TEXT,
    IMAGE,
    IMAGE_PX,
    PAD,
    ROW_END,
    SOUND,
    START,
    STOP,
)
from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageSpec,
    Microbatch,
    MicrobatchMeta,
    TextSpec,
)
from torchmm.data.media.images import ImagePreprocessor, decode_rgb
from torchmm.data.media.text import VisionBlock, mrope_positions
from torchmm.data.media.tiles import TiledMedia
from torchmm.data.media.uint8_pixels import to_model_inputs
from torchmm.models.families.text_conventions import Token
from torchmm.models.multimodal import MultimodalModel

TOKENS_PER_S = 4
"""Caption tokens per second of audio."""
SECOND_FRAMES, FRAME_SAMPLES = 100, 160
"""Mel frames per second of audio, which is a chunk of Qwen3-Omni; samples per frame."""
POSITION_FRAMES = 2
"""Mel frames of a position of towers that read windows."""
MASKS = {"qwen2_audio": "feature_attention_mask", "audioflamingo3": "input_features_mask"}
"""Name of the audio mask in models of Hugging Face; Voxtral has none."""


@dataclass(frozen=True)
class Sample:
    """A caption and its image."""

    ids: list[int]
    image: bytes


class Media(NamedTuple):
    """An image or audio input of every sample."""

    encoder: str
    ours: EncoderInputs
    """Inputs of torchmm, without positions."""
    theirs: dict[str, Tensor]
    """Arguments of the model of Hugging Face."""
    written: list[list[int]]
    """Token ids in the text of each sample."""
    placeholder: int
    places: list[Tensor] | None = None
    """Offsets of the output tokens of each sample from its first placeholder, if tiles interleave.

    None: the tokens are consecutive.
    """


def renumbered(captions: Captions, count: int) -> tuple[list[Sample], int]:
    """Return the first samples with tokens numbered from `FIRST_TEXT`, and the vocabulary size."""
    records = captions.records[:count]
    texts = [captions.tokenizer(r["text"], add_special_tokens=False).input_ids for r in records]
    numbers = {old: FIRST_TEXT + i for i, old in enumerate(sorted({i for t in texts for i in t}))}
    samples = [
        Sample([numbers[i] for i in text], record["image"]["bytes"])
        for text, record in zip(texts, records, strict=True)
    ]
    return samples, -(-(FIRST_TEXT + len(numbers)) // 64) * 64


def batches(model: MultimodalModel, samples: list[Sample]) -> tuple[Microbatch, dict[str, Any]]:
    """Return the samples as a microbatch and as arguments of the model of Hugging Face."""
    specs = model.image_specs()
    media = [_media(model, spec, samples) for spec in specs.values()]
    heads = [[BEGIN, *(i for m in media for i in m.written[n])] for n in range(len(samples))]
    rows = [torch.tensor([*head, *s.ids, END]) for head, s in zip(heads, samples, strict=True)]
    lengths = [len(head) for head in heads]
    packed = _pack(rows, lengths, media)
    if model.text.mrope:
        packed.position_ids = _mrope(model, packed)
    padded = _pad(rows, lengths)
    for inputs in media:
        padded |= inputs.theirs
    if model.composite is not None:
        padded |= _token_types(model.composite.model_type, padded)
    return packed, padded


def _media(model: MultimodalModel, spec: ImageSpec, samples: list[Sample]) -> Media:
    if spec.modality == "audio":
        windows = spec.sound_chunks is not None and spec.sound_chunks.padding != "patch"
        return (_windows if windows else _sounds)(model, spec, samples)
    return (_tiles if spec.ends_lines else _images)(model, spec, samples)


def _tiles(model: MultimodalModel, spec: ImageSpec, samples: list[Sample]) -> Media:
    """Return the full image and its tiles, without their padding."""
    assert spec.tiles is not None
    media = TiledMedia(spec.tiles, ImagePreprocessor(spec), TextSpec(0, IMAGE), {}, 10**9)
    opened = [media.open(sample.image) for sample in samples]
    tiles = [tile for image in opened for tile in image.tiles]
    byte_values = media.images.byte_values
    pixels = torch.stack(
        [torch.from_numpy(to_model_inputs(p, byte_values)) for c in opened for p in c.pixels]
    )
    grid = media.images.grid(0, 0)
    kept = [tile.kept for tile in tiles if tile.kept is not None]
    inputs = EncoderInputs(
        pixels, [(1, grid.rows, grid.columns)] * len(tiles), torch.empty(0), kept
    )
    outputs = media.scheme.processor([image.image() for image in opened], return_tensors="pt")
    theirs = {name: outputs[name] for name in ("pixel_values", "image_sizes")}
    written, places = [], []
    for image in opened:
        written.append([IMAGE] * sum(image.placeholders))
        starts = accumulate(image.placeholders, initial=0)
        offsets = [
            torch.from_numpy(t.token_offsets) + s for t, s in zip(image.tiles, starts, strict=False)
        ]
        places.append(torch.cat(offsets))
    return Media(spec.encoder, inputs, theirs, written, IMAGE, places)


def _images(model: MultimodalModel, spec: ImageSpec, samples: list[Sample]) -> Media:
    """Return images of variable or fixed size.

    Images of variable size have at most as many patches as images of fixed size, unless the
    processor does not support such a limit.
    """
    settings = dict(spec.processor)
    at_once: dict[str, Any] = {}
    if spec.processor_class == "PixtralImageProcessor":
        settings["size"] = {"longest_edge": IMAGE_PX}
        at_once["patch_size"] = dict.fromkeys(("height", "width"), spec.patch_size_px * spec.merge)
    elif spec.processor_class == "Gemma4ImageProcessor":
        settings["max_soft_tokens"] = 70  # the fewest that it accepts
    elif spec.inputs == "patches":
        settings["size"] = {"shortest_edge": (IMAGE_PX // 2) ** 2, "longest_edge": IMAGE_PX**2}
    preprocessor = ImagePreprocessor(replace(spec, processor=settings))
    decoded = [decode_rgb(sample.image, 10**9) for sample in samples]
    grids, pixels = [], []
    for image in decoded:
        grid = preprocessor.grid(*image.size)
        grids.append((1, grid.rows, grid.columns))
        pixels.append(torch.from_numpy(preprocessor.pixels(image)))
    stacked = torch.stack(pixels) if spec.inputs == "fixed" else torch.cat(pixels)
    outputs = preprocessor.processor(decoded, return_tensors="pt", **at_once)
    names = ("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes")
    theirs = {name: outputs[name] for name in names if name in outputs}
    if model.composite is not None and model.composite.model_type in ("idefics3", "smolvlm"):
        theirs["pixel_values"] = theirs["pixel_values"][:, None]
    written = [_written(model, spec, grid) for grid in grids]
    return Media(
        spec.encoder, EncoderInputs(stacked, grids, torch.empty(0)), theirs, written, IMAGE
    )


def _written(model: MultimodalModel, spec: ImageSpec, grid: tuple[int, int, int]) -> list[int]:
    """Return the tokens of an image in the text."""
    text = model.text
    tokens = prod(grid) // spec.merge**2 + spec.extra_tokens
    shown = [IMAGE] * tokens
    if text.row_end is not None:
        row = [IMAGE] * (grid[2] // spec.merge)
        shown = [*row, *[ROW_END, *row] * (tokens // len(row) - 1)]
    return [*_marks(text.prefix, START), *shown, *_marks(text.suffix, STOP)]


def _marks(marks: tuple[int | str | Token, ...], unknown: int) -> list[int]:
    """Return token ids, with `unknown` for tokens that only a tokenizer can resolve."""
    return [mark if isinstance(mark, int) else unknown for mark in marks]


def _sounds(model: MultimodalModel, spec: ImageSpec, samples: list[Sample]) -> Media:
    """Return noise in proportion to the caption lengths, in the format of Omni models."""
    generator = torch.Generator().manual_seed(len(samples))
    position = spec.patch_size_px // FRAME_SAMPLES
    token = position * spec.patches_per_token
    step = SECOND_FRAMES // TOKENS_PER_S // token * token
    mels, patches = [], []
    for sample in samples:
        seconds, rest = divmod(len(sample.ids), TOKENS_PER_S)
        frames = SECOND_FRAMES * seconds + step * rest
        mels_FM = torch.randn(frames, spec.processor["feature_size"], generator=generator)
        mels.append(mels_FM)
        chunks = mels_FM.split(SECOND_FRAMES)  # filled up to full positions
        filled = [functional.pad(c, (0, 0, 0, -len(c) % position)) for c in chunks]
        patches.append(torch.cat(filled).unflatten(0, (-1, position)).flatten(1))
    grids = [(1, 1, len(patch)) for patch in patches]
    text = model.text
    written = [
        [
            *_marks(text.sound_prefix, AUDIO_START),
            *[SOUND] * (len(patch) // spec.patches_per_token),
            *_marks(text.sound_suffix, STOP),
        ]
        for patch in patches
    ]
    lengths = torch.tensor([len(mels_FM) for mels_FM in mels])
    padded = nn.utils.rnn.pad_sequence(mels, batch_first=True)
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    theirs = {"input_features": padded.mT, "feature_attention_mask": mask.long()}
    ours = EncoderInputs(torch.cat(patches), grids, torch.empty(0))
    return Media(spec.encoder, ours, theirs, written, SOUND)


def _windows(model: MultimodalModel, spec: ImageSpec, samples: list[Sample]) -> Media:
    """Return noise in proportion to the caption lengths, at most a window of the tower."""
    chunks = spec.sound_chunks
    assert chunks is not None and model.composite is not None
    generator = torch.Generator().manual_seed(len(samples))
    window_frames = POSITION_FRAMES * chunks.patches
    windows, patches, lengths = [], [], []
    for sample in samples:
        frames = min(SECOND_FRAMES * len(sample.ids) // TOKENS_PER_S, window_frames)
        mels_FM = torch.randn(frames, spec.processor["feature_size"], generator=generator)
        window_FM = functional.pad(mels_FM, (0, 0, 0, window_frames - frames + chunks.overlap))
        positions = chunks.patches if chunks.padding == "heard" else -(-frames // POSITION_FRAMES)
        cut_PMF = window_FM.unfold(0, POSITION_FRAMES + chunks.overlap, POSITION_FRAMES)[:positions]
        patches.append(cut_PMF.mT.flatten(1))
        windows.append(window_FM[:window_frames])
        lengths.append(frames)
    theirs = {"input_features": torch.stack(windows).mT}
    if chunks.padding == "silent":
        mask = torch.arange(window_frames) < torch.tensor(lengths)[:, None]
        theirs[MASKS[model.composite.model_type]] = mask.long()
    text = model.text
    written = [
        [
            *_marks(text.prefix, START),
            *[SOUND] * (len(patch) // spec.patches_per_token),
            *_marks(text.suffix, STOP),
        ]
        for patch in patches
    ]
    grids = [(1, 1, len(patch)) for patch in patches]
    ours = EncoderInputs(torch.cat(patches), grids, torch.empty(0), None, spec.patches_per_token)
    return Media(spec.encoder, ours, theirs, written, SOUND)


def _pack(rows: list[Tensor], lengths: list[int], media: list[Media]) -> Microbatch:
    """Return the packed row.

    Args:
        lengths: Number of tokens of each sample before its caption.
    """
    starts = [0, *accumulate(len(row) for row in rows)]
    targets = []
    for row, length in zip(rows, lengths, strict=True):
        shifted = torch.roll(row, -1)
        shifted[: length - 1] = IGNORE_TARGET
        shifted[-1] = IGNORE_TARGET
        targets.append(shifted)
    ids = torch.cat(rows)
    encoders = {m.encoder: replace(m.ours, positions_K=_positions(ids, starts, m)) for m in media}
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    meta = MicrobatchMeta(samples=(), tokens=starts[-1])
    return Microbatch(ids, torch.cat(targets), positions, starts, encoders, meta)


def _positions(ids: Tensor, starts: list[int], media: Media) -> Tensor:
    """Return the positions (K,) of output tokens, image by image."""
    is_placeholder = ids == media.placeholder
    if media.places is None:
        return is_placeholder.nonzero()[:, 0]
    positions = []
    for places, (start, stop) in zip(media.places, pairwise(starts), strict=True):
        positions.append(start + is_placeholder[start:stop].int().argmax() + places)
    return torch.cat(positions)


def _mrope(model: MultimodalModel, packed: Microbatch) -> Tensor:
    """Return the positions (3, T) for one image in each sample."""
    (merge,) = (s.merge for s in model.image_specs().values() if s.modality == "image")
    parts = []
    grids = packed.encoders["vision"].grids_thw
    for (start, stop), (_, rows, columns) in zip(pairwise(packed.cu_seqlens), grids, strict=True):
        ids = packed.input_ids_T[start:stop].tolist()
        block = VisionBlock(ids.index(IMAGE), 1, rows // merge, columns // merge)
        positions = mrope_positions(len(ids), [block], model.text.clip_times)
        parts.append(torch.from_numpy(positions))
    return torch.cat(parts, dim=1)


def _pad(rows: list[Tensor], lengths: list[int]) -> dict[str, Any]:
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    ends = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(padded.shape[1]) < ends[:, None]).long()
    labels = padded.masked_fill(mask == 0, IGNORE_TARGET)
    for row, length in enumerate(lengths):
        labels[row, :length] = IGNORE_TARGET
    return {"input_ids": padded, "attention_mask": mask, "labels": labels, "use_cache": False}


def _token_types(model_type: str, padded: dict[str, Any]) -> dict[str, Tensor]:
    """Return the token types that some composites need in addition to ids."""
    shown = (padded["input_ids"] == IMAGE).int()
    if model_type == "gemma3":
        return {"token_type_ids": shown}
    if model_type == "paligemma":
        return {"token_type_ids": (padded["labels"] != IGNORE_TARGET).int()}
    if model_type == "gemma4" or model_type.startswith("glm"):
        return {"mm_token_type_ids": shown}
    if model_type.startswith("qwen") and "omni" not in model_type:
        return {"mm_token_type_ids": shown}
    return {}
