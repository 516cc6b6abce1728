"""Planned samples to tensors: the only place where pixels are decoded. Runs in worker processes.

A sample that turns out to be corrupt here keeps its place and its shape: pad tokens without
targets, and blank pixels for its images. So the lengths that a plan was made from stay valid, all
other samples stay where they are, and nothing depends on which rank found the broken one.

Shape legend: T tokens of a microbatch, L of a sample, N images, P patches, K output tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    SampleMeta,
)
from torchmm.common.tiles import Kept
from torchmm.data.corrupt import CorruptSampleError, naming_place
from torchmm.data.layouts.sample import Record
from torchmm.data.media.generated_images import DecodedDrawing, DrawingRow
from torchmm.data.media.images import decode_rgb
from torchmm.data.media.medium import MediaPreprocessor
from torchmm.data.media.text import VisionBlock, mrope_positions, places_in_rows
from torchmm.data.media.tiles import Tile
from torchmm.data.media.video import ClipFrames
from torchmm.data.order import Item
from torchmm.data.sources.local_and_hub import MapSource
from torchmm.data.sources.reader import EncodedFile, SampleReader
from torchmm.data.step_packs import PackItems, microbatch_meta


@dataclass(frozen=True)
class DecodedSample:
    """One sample as arrays."""

    ids_L: np.ndarray
    targets_L: np.ndarray
    image_starts: list[int]
    pixels: list[np.ndarray]
    kept: list[Kept | None]
    """Of each image: what reaches the LLM, if that is not everything."""
    places: list[np.ndarray]
    """Of each image: its tokens, relative to its start."""
    drawings: list[DecodedDrawing] = field(default_factory=list)
    """Images to be drawn."""


@dataclass
class DecodedStep:
    """One rank's share of a step, as a worker returns it."""

    microbatches: list[Microbatch]
    corrupt: dict[str, str]
    """Reason by "source[index]"."""
    failure: str = ""
    """Why the step could not be prepared; an exception would bring a worker's traceback."""

    def pin_memory(self) -> DecodedStep:
        """Copy in page-locked memory."""
        return replace(self, microbatches=[m.pin_memory() for m in self.microbatches])


@dataclass
class _Read:
    """What one encoder reads of a microbatch."""

    pixels: list[np.ndarray] = field(default_factory=list)
    grids_thw: list[tuple[int, int, int]] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    def inputs(self, medium: MediaPreprocessor) -> EncoderInputs:
        """As tensors."""
        pixels = np.stack(self.pixels) if medium.grouped else np.concatenate(self.pixels)
        of_sounds = medium.spec.patches_per_token if medium.spec.modality == "audio" else None
        positions_K = _tensor(self.positions)
        return EncoderInputs(
            torch.from_numpy(pixels), self.grids_thw, positions_K, self.kept or None, of_sounds
        )


@dataclass
class _Row:
    """Arrays of a microbatch under construction."""

    ids: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    cu_seqlens: list[int] = field(default_factory=lambda: [0])
    read: dict[str, _Read] = field(default_factory=dict)
    """By encoder."""
    generated: DrawingRow = field(default_factory=DrawingRow)

    def append(self, ids_L: np.ndarray, targets_L: np.ndarray, positions: np.ndarray) -> None:
        self.ids.append(ids_L)
        self.targets.append(targets_L)
        self.positions.append(positions)
        self.cu_seqlens.append(self.cu_seqlens[-1] + len(ids_L))


class StepDecoder(Dataset[DecodedStep]):
    """Decodes the microbatches of one rank; the "index" of this data set is their plan.

    Args:
        reader: tokenises samples.
        sources: by feed; None for streams, whose items carry their records.
        sequence_length: tokens of a pack.
    """

    def __init__(
        self,
        reader: SampleReader,
        sources: Sequence[MapSource | None],
        sequence_length: int,
    ) -> None:
        self._reader = reader
        self._sources = sources
        self._sequence_length = sequence_length

    def __getitem__(self, microbatches: list[list[PackItems]]) -> DecodedStep:
        corrupt: dict[str, str] = {}
        return DecodedStep([self._microbatch(packs, corrupt) for packs in microbatches], corrupt)

    def images(self, feed: int, index: int) -> list[Image.Image]:
        """Images and frames of a sample, upright RGB; none if its source is a stream."""
        source = self._sources[feed]
        if source is None:
            return []
        reader = self._reader
        sample = reader.read(source.read(index))
        shown = [n for n, medium in reader.media.items() if medium.spec.modality == "image"][:1]
        return [
            picture
            for file, image in zip(sample.files, sample.images, strict=True)
            if reader.medium(image).spec.encoder in shown
            for picture in _pictures(file, reader.max_pixels)
        ]

    def _microbatch(self, packs: list[PackItems], corrupt: dict[str, str]) -> Microbatch:
        row = _Row()
        for pack in packs:
            for item in pack:
                try:
                    sample = self._decode(item)
                except CorruptSampleError as error:
                    corrupt[f"{item.meta.source}[{item.meta.index}]"] = str(error)
                    sample = self._placeholder(item)
                self._append(row, sample, item.meta)
            used = sum(item.meta.tokens for item in pack)
            self._append_padding(row, self._sequence_length - used)
        media = self._reader.media
        return Microbatch(
            input_ids_T=_tensor(row.ids),
            targets_T=_tensor(row.targets),
            position_ids=torch.from_numpy(np.concatenate(row.positions, axis=-1)),
            cu_seqlens=row.cu_seqlens,
            encoders={
                name: row.read[name].inputs(medium)
                for name, medium in media.items()
                if name in row.read
            },
            meta=microbatch_meta(packs, self._sequence_length),
            generator=row.generated.inputs(),
        )

    def _decode(self, item: Item) -> DecodedSample:
        source = self._sources[item.feed]
        if item.record is not None:
            record = item.record
        else:
            assert source is not None
            record = source.read(item.meta.index)
        with naming_place(record.where):
            return self._decode_record(item, record)

    def _decode_record(self, item: Item, record: Record) -> DecodedSample:
        sample = self._reader.read(record)
        meta = self._reader.meta(item.meta.source, item.meta.index, sample)
        if meta != item.meta:
            raise CorruptSampleError(f"changed since it was measured: {item.meta} -> {meta}")
        pixels = [
            self._reader.pixels(file, image)
            for file, image in zip(sample.files, meta.images, strict=True)
        ]
        drawings = []
        drawn = zip(sample.generated_files, meta.generated, sample.text.generated_at, strict=False)
        for number, (data, generated, context_end) in enumerate(drawn):
            assert self._reader.drawings is not None
            key = _drawing_key(item, number)
            drawings.append(self._reader.drawings.decode(data, generated, context_end, key))
        ids_L = np.asarray(sample.text.ids, np.int64)
        text = sample.text
        kept = [file.kept if isinstance(file, Tile) else None for file in sample.files]
        places = [
            file.places if isinstance(file, Tile) else self._places(image)
            for file, image in zip(sample.files, meta.images, strict=True)
        ]
        return DecodedSample(
            ids_L, text.targets_L, text.image_starts, pixels, kept, places, drawings
        )

    def _places(self, image: ImageMeta) -> np.ndarray:
        """Of its tokens, relative to its first placeholder."""
        if self._reader.text_spec.row_end_id is None:
            return np.arange(image.tokens)
        _, _, columns = self._reader.medium(image).block(image)
        return places_in_rows(image.tokens, columns)

    def _placeholder(self, item: Item) -> DecodedSample:
        """A sample of the same size that teaches nothing."""
        meta = item.meta
        spec = self._reader.text_spec
        ids_L = np.full(meta.tokens, spec.pad_token_id, np.int64)
        starts, pixels, start = [], [], 0
        for image in meta.images:
            assert spec.image_token_id is not None
            start = min(start, meta.tokens - image.tokens)
            starts.append(start)
            ids_L[start : start + image.tokens] = spec.image_token_id
            start += image.tokens
            pixels.append(self._reader.medium(image).blank(image))
        drawings = []
        for number, drawn in enumerate(meta.generated):
            assert self._reader.drawings is not None
            drawings.append(self._reader.drawings.blank(drawn, _drawing_key(item, number)))
        places = [np.arange(image.tokens) for image in meta.images]
        # Any tokens will do, as long as they are as many.
        kept: list[Kept | None] = [Kept(0, 0, 0, 0, i.tokens) for i in meta.images]
        targets_L = np.full_like(ids_L, IGNORE_TARGET)
        return DecodedSample(ids_L, targets_L, starts, pixels, kept, places, drawings)

    def _append(self, row: _Row, sample: DecodedSample, meta: SampleMeta) -> None:
        first = row.cu_seqlens[-1]
        blocks: list[VisionBlock] = []
        for start, pixels, kept, places, image in zip(
            sample.image_starts,
            sample.pixels,
            sample.kept,
            sample.places,
            meta.images,
            strict=True,
        ):
            medium = self._reader.medium(image)
            if medium.spec.modality == "image":  # a sound counts up as text does
                blocks.append(self._block(start, image))
            read = row.read.setdefault(medium.spec.encoder, _Read())
            read.pixels.append(pixels)
            read.grids_thw.append(medium.grid_thw(image))
            read.positions.append(first + start + places)
            if medium.spec.ends_lines:
                _, rows, columns = medium.block(image)
                read.kept.append(kept or Kept(0, rows, 0, columns, 0))
        for drawing in sample.drawings:
            row.generated.append(drawing, first)
        positions = self._positions(len(sample.ids_L), blocks)
        row.append(sample.ids_L, sample.targets_L, positions)

    def _append_padding(self, row: _Row, tokens: int) -> None:
        if tokens:
            ids_L = np.full(tokens, self._reader.text_spec.pad_token_id, np.int64)
            row.append(ids_L, np.full_like(ids_L, IGNORE_TARGET), self._positions(tokens, []))

    def _block(self, start: int, image: ImageMeta) -> VisionBlock:
        block = self._reader.medium(image).block(image)
        spec = self._reader.text_spec
        per_second = spec.tokens_per_second
        if per_second is None:
            return VisionBlock(start, *block)
        step_s = image.duration_ms / (1000 * image.frames)
        if spec.clip_times == "sides":  # Qwen2.5-VL multiplies the two beforehand
            return VisionBlock(start, *block, per_second * step_s)
        return VisionBlock(start, *block, step_s, per_second)

    def _positions(self, length: int, blocks: list[VisionBlock]) -> np.ndarray:
        if self._reader.text_spec.positions == "mrope":
            return mrope_positions(length, blocks, self._reader.text_spec.clip_times)
        return np.arange(length, dtype=np.int64)


def _pictures(file: EncodedFile, max_pixels: int) -> list[Image.Image]:
    if isinstance(file, Tile):
        return [file.of.image()] if file.number == 0 else []
    return file.images() if isinstance(file, ClipFrames) else [decode_rgb(file, max_pixels)]


def _drawing_key(item: Item, number: int) -> tuple[object, ...]:
    """Names an image to be drawn, for its noise: other noise in every epoch."""
    return item.meta.source, item.meta.index, item.epoch, number


def _tensor(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
