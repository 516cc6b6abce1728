"""Build packed microbatches from decoded samples, and mask corrupt samples.

A corrupt sample is replaced by a sample of the same shape. It has pad tokens without targets, and
all-zero images. So the plan stays valid and no other sample moves:

    sequence   | sample 0 | sample 1 (corrupt) | sample 2 | padding |
    becomes    | sample 0 | pad tokens         | sample 2 | padding |

The replacement depends only on the metadata of the sample. Therefore the rank that fails to decode
an image and the ranks that receive its report have the same microbatch.

Shape legend: T tokens of a microbatch, L of a sample, N images, P patches, K output tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    SampleMeta,
)
from torchmm.common.generated import GeneratorInputs, local_pixel_rows
from torchmm.common.module_names import GENERATOR
from torchmm.common.sequence_slices import BalancedMicrobatch
from torchmm.common.tiles import TileRegion
from torchmm.data.items import Item, PackItems, RankImages, microbatch_meta
from torchmm.data.media.preprocessors import MediaPreprocessor
from torchmm.data.media.text import VisionBlock, mrope_positions, vision_block
from torchmm.data.sources.reader import SampleReader
from torchmm.data.target_images import TargetImage, TargetImageBuilder


@dataclass(frozen=True)
class DecodedSample:
    """Arrays of one sample."""

    ids_L: np.ndarray
    targets_L: np.ndarray
    image_starts: list[int]
    """Index of the first token of each image."""
    pixels: list[np.ndarray | None]
    """Preprocessed pixels of each image. None if this rank does not decode the image."""
    kept: list[TileRegion | None]
    """Tokens of each image that the LLM receives. None for all tokens."""
    token_offsets: list[np.ndarray]
    """Positions of the tokens of each image, relative to its start."""
    target_images: list[TargetImage] = field(default_factory=list)
    """Target images."""
    blank: bool = False
    """Whether the sample replaces a corrupt sample."""

    def without_pixels(self) -> DecodedSample:
        """Return the sample without pixels of images and target images."""
        target_images = [
            replace(target_image, patches_PV=None) for target_image in self.target_images
        ]
        return replace(self, pixels=[None] * len(self.pixels), target_images=target_images)


@dataclass
class _ImageLists:
    """Inputs of one encoder for a microbatch under construction."""

    pixels: list[np.ndarray] = field(default_factory=list)
    images: list[ImageMeta] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    grids_thw: list[tuple[int, int, int]] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    kept: list[TileRegion] = field(default_factory=list)
    blank: list[int] = field(default_factory=list)


class MicrobatchBuilder:
    """Builder of a packed microbatch.

    Args:
        reader: Media settings of each encoder.
        shared: Modules of which this rank decodes only some images.
    """

    def __init__(self, reader: SampleReader, shared: Collection[str] = ()) -> None:
        self._reader = reader
        self._shared = shared
        self._ids: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._sources: list[int] = []
        """Index of the data source of each segment."""
        self._answers: list[int] = []
        """Index of the answer of each segment, see `Microbatch.answers_T`."""
        self._cu_seqlens = [0]
        self._read: dict[str, _ImageLists] = {}
        """Inputs by encoder."""
        self._generated = TargetImageBuilder()

    def append(self, sample: DecodedSample, meta: SampleMeta, source: int = 0) -> None:
        """Append the tokens and images of a sample, with the index of its data source."""
        generated = [True] * len(sample.target_images)
        self.append_images(sample, meta, [True] * len(meta.images), generated)
        blocks = []
        for number, (start, image) in enumerate(zip(sample.image_starts, meta.images, strict=True)):
            medium = self._reader.preprocessor_of(image)
            if medium.spec.modality == "image":  # audio has text positions
                is_audio = self._audio_of_video(sample, number)
                grid = medium.token_grid(image)
                blocks.append(vision_block(self._reader.text_spec, start, grid, image, is_audio))
        start = 0
        for length in meta.segment_lengths:
            stop = start + length
            inside = [
                block._replace(start=block.start - start)
                for block in blocks
                if start <= block.start < stop
            ]
            answer = -1
            if meta.chosen_tokens:
                answer = max(self._answers, default=-1) + 1
            self._append_tokens(
                sample.ids_L[start:stop],
                sample.targets_L[start:stop],
                self._text_positions(length, inside),
                source,
                answer,
            )
            start = stop

    def append_images(
        self,
        sample: DecodedSample,
        meta: SampleMeta,
        selected: Sequence[bool],
        generated: Sequence[bool],
    ) -> None:
        """Append images of a sample without its tokens.

        Args:
            sample: Decoded sample.
            meta: Metadata of the sample.
            selected: Whether to append each image.
            generated: Whether to append each target image.
        """
        first = self._cu_seqlens[-1]
        for start, pixels, kept, token_offsets, image, is_selected in zip(
            sample.image_starts,
            sample.pixels,
            sample.kept,
            sample.token_offsets,
            meta.images,
            selected,
            strict=True,
        ):
            if not is_selected:
                continue
            medium = self._reader.preprocessor_of(image)
            read = self._read.setdefault(medium.spec.encoder, _ImageLists())
            if pixels is not None:
                read.pixels.append(pixels)
                read.held.append(len(read.images))
            if sample.blank:
                read.blank.append(len(read.images))
            read.images.append(image)
            read.grids_thw.append(medium.grid_thw(image))
            read.positions.append(first + start + token_offsets)
            if medium.spec.ends_lines:
                _, rows, columns = medium.token_grid(image)
                read.kept.append(kept or TileRegion(0, rows, 0, columns, 0))
        for target_image, is_selected in zip(sample.target_images, generated, strict=True):
            if is_selected:
                self._generated.append(target_image, first)

    def append_padding(self, tokens: int) -> None:
        """Append a number of pad tokens without targets, which may be 0."""
        if tokens:
            ids_L = np.full(tokens, self._reader.text_spec.pad_token_id, np.int64)
            positions = self._text_positions(tokens, [])
            self._append_tokens(ids_L, np.full_like(ids_L, IGNORE_TARGET), positions)

    def microbatch(self, packs: Sequence[PackItems], sequence_length: int) -> Microbatch:
        """Return the microbatch with all appended samples.

        Args:
            packs: Appended samples, by sequence.
            sequence_length: Number of tokens of a sequence.
        """
        return Microbatch(
            input_ids_T=_tensor(self._ids),
            targets_T=_tensor(self._targets),
            position_ids=torch.from_numpy(np.concatenate(self._positions, axis=-1)),
            cu_seqlens=self._cu_seqlens,
            encoders=self.encoder_inputs(),
            meta=microbatch_meta(packs, sequence_length),
            generator=self.generator_inputs(),
            sources_T=torch.from_numpy(np.repeat(self._sources, np.diff(self._cu_seqlens))),
            answers_T=self._answers_of_tokens(),
        )

    def encoder_inputs(self) -> dict[str, EncoderInputs]:
        """Return the appended images by encoder."""
        media = self._reader.media
        return {name: self._inputs(name, media[name]) for name in media if name in self._read}

    def generator_inputs(self) -> GeneratorInputs | None:
        """Return the appended target images without noise, or None if there are none."""
        target_preprocessor = self._reader.target_preprocessor
        if target_preprocessor is None:
            return None
        return self._generated.inputs(target_preprocessor.values, shared=GENERATOR in self._shared)

    def _answers_of_tokens(self) -> Tensor | None:
        if max(self._answers, default=-1) < 0:
            return None
        return torch.from_numpy(np.repeat(self._answers, np.diff(self._cu_seqlens)))

    def _append_tokens(
        self,
        ids_L: np.ndarray,
        targets_L: np.ndarray,
        positions: np.ndarray,
        source: int = 0,
        answer: int = -1,
    ) -> None:
        self._ids.append(ids_L)
        self._targets.append(targets_L)
        self._positions.append(positions)
        self._sources.append(source)
        self._answers.append(answer)
        self._cu_seqlens.append(self._cu_seqlens[-1] + len(ids_L))

    def _inputs(self, name: str, medium: MediaPreprocessor) -> EncoderInputs:
        read = self._read[name]
        if not read.pixels:
            image = replace(read.images[0], frames=1)
            empty = self._reader.preprocessor_of(image).blank(image)
            pixels = empty[None][:0] if medium.is_stacked else empty[:0]
        else:
            pixels = np.stack(read.pixels) if medium.is_stacked else np.concatenate(read.pixels)
        patches_per_token = (
            medium.spec.patches_per_token if medium.spec.modality == "audio" else None
        )
        return EncoderInputs(
            torch.from_numpy(pixels),
            read.grids_thw,
            _tensor(read.positions),
            read.kept or None,
            patches_per_token,
            read.held if name in self._shared else None,
            medium.byte_values,
            read.blank,
        )

    def _audio_of_video(self, sample: DecodedSample, number: int) -> np.ndarray | None:
        """Return whether each token of a video and its audio is of the audio, or None.

        The audio of a video follows without a marker. Separate audio has a marker before it.
        """
        if self._reader.text_spec.audio_chunk_tokens is None or sample.blank:
            return None
        starts, offsets = sample.image_starts, sample.token_offsets
        video_K = starts[number] + offsets[number]
        if number + 1 == len(starts) or starts[number + 1] - 1 not in video_K:
            return None
        is_audio = np.zeros(len(video_K) + len(offsets[number + 1]), bool)
        is_audio[starts[number + 1] - starts[number] + offsets[number + 1]] = True
        return is_audio

    def _text_positions(self, length: int, blocks: list[VisionBlock]) -> np.ndarray:
        if self._reader.text_spec.positions == "mrope":
            return mrope_positions(length, blocks, self._reader.text_spec.clip_times)
        return np.arange(length, dtype=np.int64)


def make_masked_sample(
    reader: SampleReader, meta: SampleMeta, held: Sequence[bool] | None = None
) -> DecodedSample:
    """Return a masked sample of the same size, without targets and target images.

    Args:
        reader: Media and text settings.
        meta: Metadata of the sample.
        held: Whether this rank decodes each image. None for all images.
    """
    spec = reader.text_spec
    ids_L = np.full(meta.tokens, spec.pad_token_id, np.int64)
    starts: list[int] = []
    pixels: list[np.ndarray | None] = []
    start = 0
    first_stop = meta.chosen_tokens or meta.tokens
    for number, image in enumerate(meta.images):
        assert spec.image_token_id is not None
        # Both segments of a preference pair have the images of the prompt.
        is_second = meta.chosen_tokens > 0 and 2 * number >= len(meta.images)
        start = max(start, first_stop) if is_second else start
        start = min(start, (meta.tokens if is_second else first_stop) - image.tokens)
        starts.append(start)
        ids_L[start : start + image.tokens] = spec.image_token_id
        start += image.tokens
        here = held is None or held[number]
        pixels.append(reader.preprocessor_of(image).blank(image) if here else None)
    token_offsets = [np.arange(image.tokens) for image in meta.images]
    # Only the number of tokens matters.
    kept: list[TileRegion | None] = [TileRegion(0, 0, 0, 0, i.tokens) for i in meta.images]
    targets_L = np.full_like(ids_L, IGNORE_TARGET)
    return DecodedSample(ids_L, targets_L, starts, pixels, kept, token_offsets, blank=True)


def mask_corrupt_samples(
    reader: SampleReader,
    microbatch: Microbatch,
    packs: Sequence[PackItems],
    sequence_length: int,
    corrupt: Collection[str],
) -> Microbatch:
    """Return the microbatch with masked corrupt samples. Its tensors are changed in place.

    Args:
        reader: Media and text settings.
        microbatch: Decoded microbatch.
        packs: Sequences of the microbatch.
        sequence_length: Number of tokens of a sequence.
        corrupt: Names of corrupt samples (`sample_name`), also of other microbatches.
    """
    read = dict.fromkeys(microbatch.encoders, 0)  # images of the preceding samples
    generated = 0
    has_corrupt = False
    for number, pack in enumerate(packs):
        start = number * sequence_length
        for item in pack:
            meta = item.meta
            if sample_name(meta) in corrupt:
                _overwrite_with_masked(reader, microbatch, item, start, read, generated)
                has_corrupt = True
            start += meta.tokens
            generated += len(meta.generated)
            read = {name: n + len(meta.images_of_encoder(name)) for name, n in read.items()}
    if not has_corrupt:
        return microbatch
    return replace(microbatch, target_positions_L=None)  # type: ignore[arg-type]  # recomputed


def zero_corrupt_images(
    reader: SampleReader,
    microbatch: BalancedMicrobatch,
    rank_images: RankImages,
    corrupt: Collection[str],
) -> None:
    """Zero the images of corrupt samples that this rank encodes or generates, in place.

    Args:
        reader: Media and text settings.
        microbatch: Decoded microbatch.
        rank_images: Images that this rank encodes and generates.
        corrupt: Names of corrupt samples (`sample_name`).
    """
    read = dict.fromkeys(microbatch.rank_encoders, 0)  # images of the preceding samples
    end = 0
    for item, selected, generated in rank_images.samples:
        row = MicrobatchBuilder(reader)
        row.append_images(make_masked_sample(reader, item.meta), item.meta, selected, [])
        first, end = end, end + sum(generated)
        if end > first and sample_name(item.meta) in corrupt:
            assert microbatch.rank_generator is not None
            _zero_target_images(microbatch.rank_generator, range(first, end))
        for name, masked_inputs in row.encoder_inputs().items():
            images = range(read[name], read[name] + len(masked_inputs.grids_thw))
            read[name] = images.stop
            if sample_name(item.meta) in corrupt:
                _zero_images(microbatch.rank_encoders[name], masked_inputs, images)


def sample_name(meta: SampleMeta) -> str:
    """Return "source[index]", the name of a sample in logs and reports."""
    return f"{meta.source}[{meta.index}]"


def _overwrite_with_masked(
    reader: SampleReader,
    microbatch: Microbatch,
    item: Item,
    start: int,
    read: Mapping[str, int],
    first_target: int,
) -> None:
    """Overwrite a sample with a masked sample, except for noise and times of target images.

    Args:
        reader: Media and text settings.
        microbatch: Microbatch to change.
        item: Planned sample.
        start: Index of the first token of the sample.
        read: Number of images of the preceding samples, by encoder.
        first_target: Number of target images of the preceding samples.
    """
    meta = item.meta
    row = MicrobatchBuilder(reader)
    row.append(make_masked_sample(reader, meta), meta)
    blank = row.microbatch([[item]], meta.tokens)
    stop = start + meta.tokens
    microbatch.input_ids_T[start:stop] = blank.input_ids_T
    microbatch.targets_T[start:stop] = blank.targets_T
    microbatch.position_ids[..., start:stop] = blank.position_ids
    for name, masked_inputs in blank.encoders.items():
        inputs = microbatch.encoders[name]
        first = read[name]
        images = range(first, first + len(masked_inputs.grids_thw))
        tokens = [image.tokens for image in microbatch.meta.images_of_encoder(name)]
        offset = sum(tokens[:first])
        inputs.positions_K[offset : offset + len(masked_inputs.positions_K)] = (
            masked_inputs.positions_K + start
        )
        _zero_images(inputs, masked_inputs, images)
    if meta.generated:
        generator = microbatch.generator
        assert generator is not None
        _zero_target_images(generator, range(first_target, first_target + len(meta.generated)))
        offset = sum(generator.contexts[:first_target])
        for image in meta.generated:
            context = slice(offset, offset + image.context)
            generator.context_positions_K[context] = torch.arange(start, start + image.context)
            offset += image.context


def _zero_images(inputs: EncoderInputs, masked_inputs: EncoderInputs, images: range) -> None:
    """Overwrite the images of these indices with all-zero images."""
    rows, held = local_pixel_rows(inputs.pixel_rows, inputs.local_images, images)
    if held is None:
        inputs.pixels[rows] = masked_inputs.pixels
    elif held:
        blank_rows, _ = local_pixel_rows(
            masked_inputs.pixel_rows, None, range(held[0], held[-1] + 1)
        )
        inputs.pixels[rows] = masked_inputs.pixels[blank_rows]
    inputs.undecodable = sorted({*inputs.undecodable, *images})
    if inputs.tile_regions is not None and masked_inputs.tile_regions is not None:
        inputs.tile_regions[images.start : images.stop] = masked_inputs.tile_regions


def _zero_target_images(inputs: GeneratorInputs, images: range) -> None:
    """Zero the pixels of target images, and exclude these images from the loss."""
    rows, _ = local_pixel_rows(inputs.pixel_rows, inputs.local_images, images)
    inputs.patches_PV[rows] = 0
    for image in images:
        inputs.in_loss[image] = False


def _tensor(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
