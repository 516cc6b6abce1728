"""Decode planned samples to tensors, in worker processes.

Each rank reads and tokenizes all records of its data-parallel rank, because plans and losses depend
on the number of targets. It decodes only the images that `DecodeAssignment` assigns to it. It does
not open the files of the remaining images, except for tiles and videos, whose text depends on the
file.

A sample that is corrupt is masked (`torchmm.data.microbatch_builder`). Ranks of a replica may find
different corrupt samples, so `StepDecoder.mask_corrupt_samples` masks the samples that the
remaining ranks found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from torchmm.common.batch import ImageMeta, Microbatch, MicrobatchMeta, SampleMeta
from torchmm.common.dtypes import ByteValues
from torchmm.common.module_names import GENERATOR
from torchmm.common.processes import SHARED_MEMORY_ADVICE
from torchmm.common.sequence_slices import BalancedMicrobatch, DecodeAssignment
from torchmm.common.tiles import TileRegion
from torchmm.data.corrupt import CorruptSampleError, record_errors_at
from torchmm.data.items import (
    AssignedSample,
    BalancedRankSamples,
    Item,
    PackItems,
    RankImages,
    microbatch_meta,
)
from torchmm.data.media.images import decode_rgb
from torchmm.data.media.text import placeholder_offsets
from torchmm.data.media.tiles import Tile
from torchmm.data.media.video import VideoFrames
from torchmm.data.microbatch_builder import (
    DecodedSample,
    MicrobatchBuilder,
    make_masked_sample,
    mask_corrupt_samples,
    sample_name,
    zero_corrupt_images,
)
from torchmm.data.record_formats.questions import read_references
from torchmm.data.sources.reader import (
    CHANGED_MESSAGE,
    EncodedFile,
    ReadCounter,
    SampleReader,
    require_bytes,
)
from torchmm.data.sources.source_options import MapSource
from torchmm.data.target_images import NoiseKey, TargetImage, TargetImagePreprocessor


@dataclass
class DecodedStep:
    """Decoded part of a step of one rank."""

    microbatches: list[Microbatch]
    corrupt: dict[str, str]
    """Maps "source[index]" to the reason."""
    failure: str = ""
    """Error message if the step could not be prepared, else an empty string."""
    decoded_media: int = 0
    """Number of decoded images, audio files, videos or frames, and target images."""
    read_bytes: int = 0
    """Bytes of files, and characters of records."""

    def share_memory(self) -> DecodedStep:
        """Return a copy in shared memory, or a step with `failure` if /dev/shm is full.

        PyTorch would allocate shared memory in a thread of the worker, where an error is not
        reported to the training process.
        """
        try:
            shared = [microbatch.share_memory() for microbatch in self.microbatches]
        except (RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0]
            return replace(
                self,
                microbatches=[],
                failure=f"a data worker cannot write a step: {reason}; {SHARED_MEMORY_ADVICE}",
            )
        return replace(self, microbatches=shared)

    def pin_memory(self) -> DecodedStep:
        """Return a copy in page-locked memory."""
        return replace(self, microbatches=[m.pin_memory() for m in self.microbatches])


class StepDecoder(Dataset[DecodedStep]):
    """Dataset that maps the planned samples of one rank to a decoded step.

    Args:
        reader: Reads and tokenizes records.
        sources: Source of each feed. None for streams, whose items have their records.
        sequence_length: Number of tokens of a sequence.
        reads: Images that this rank decodes. None for all images.
    """

    def __init__(
        self,
        reader: SampleReader,
        sources: Sequence[MapSource | None],
        sequence_length: int,
        reads: DecodeAssignment | None = None,
    ) -> None:
        self._reader = reader
        self._sources = sources
        self._sequence_length = sequence_length
        self._reads = reads

    def for_rank(self, reads: DecodeAssignment | None) -> StepDecoder:
        """Return a decoder of the same samples for a rank that decodes these images."""
        return StepDecoder(self._reader, self._sources, self._sequence_length, reads)

    def without_sources(self, reads: DecodeAssignment | None) -> StepDecoder:
        """Return a decoder that only checks the microbatches of another process (`rebuild`)."""
        return StepDecoder(self._reader, (), self._sequence_length, reads)

    @property
    def reader(self) -> SampleReader:
        """Reader with the tokenizer, media and text settings of the samples."""
        return self._reader

    @property
    def target_preprocessor(self) -> TargetImagePreprocessor | None:
        """Preprocessor of target images, or None without a generator."""
        return self._reader.target_preprocessor

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the encoders."""
        return self._reader.encoders

    @property
    def byte_values(self) -> dict[str, ByteValues | None]:
        """Mapping of uint8 pixels to model inputs, by encoder."""
        return {name: medium.byte_values for name, medium in self._reader.media.items()}

    def __getitem__(self, share: list[list[PackItems]] | BalancedRankSamples) -> DecodedStep:
        if isinstance(share, BalancedRankSamples):
            return add_noise(self.target_preprocessor, self._decode_balanced(share), share)
        return add_noise(self.target_preprocessor, self.decode(share), share)

    def decode(self, microbatches: list[list[PackItems]]) -> DecodedStep:
        """Decode the sequences of each microbatch. The result has no noise."""
        parts = [
            self.decode_one(*each)
            for each in zip(microbatches, self.images_to_decode(microbatches), strict=True)
        ]
        return DecodedStep(
            [microbatch for part in parts for microbatch in part.microbatches],
            {name: why for part in parts for name, why in part.corrupt.items()},
            decoded_media=sum(part.decoded_media for part in parts),
            read_bytes=sum(part.read_bytes for part in parts),
        )

    def _decode_balanced(self, share: BalancedRankSamples, *, blank: bool = False) -> DecodedStep:
        """Return the step with the images of this rank's encoders and generator, without noise.

        Args:
            share: Samples and images of the rank.
            blank: Whether to mask all samples, so that no file is read.
        """
        step = DecodedStep([], {})
        metas = [microbatch_meta(packs, self._sequence_length) for packs in share.microbatches]
        task_metas = [e.task_meta(m) for e, m in zip(share.rank_images, metas, strict=True)]
        for packs, rank_images, meta, images in zip(
            share.microbatches,
            share.rank_images,
            task_metas,
            self._images_to_decode(task_metas),
            strict=True,
        ):
            read_counter = ReadCounter()
            arguments = () if blank else (step, read_counter)
            step.microbatches.append(
                self._build_balanced(packs, rank_images, meta, images, *arguments)
            )
            step.read_bytes += read_counter.read_bytes
        return step

    def _build_balanced(
        self,
        packs: list[PackItems],
        rank_images: RankImages,
        task_meta: MicrobatchMeta,
        images: Mapping[str, range],
        step: DecodedStep | None = None,
        read_counter: ReadCounter | None = None,
    ) -> BalancedMicrobatch:
        """Return the microbatch of the packs and the images that this rank reads for all ranks.

        Args:
            packs: Sequences of the local microbatch.
            rank_images: Images that this rank encodes and generates.
            task_meta: Metadata with these images.
            images: Indices of the images that this rank decodes, by module.
            step: Step that receives counts and corrupt samples. If None, all samples are masked.
            read_counter: Counter of read bytes. If None, all samples are masked.
        """
        encoders = self._reader.encoders
        read = MicrobatchBuilder(self._reader, images)
        decodes = _DecodeFlags(images)
        local = {_item_key(item) for pack in packs for item in pack}
        decoded = {
            _item_key(each.item): decodes.next(each, encoders) for each in rank_images.samples
        }
        samples: dict[tuple[int, int, int], DecodedSample] = {}

        row = MicrobatchBuilder(self._reader, (*encoders, GENERATOR))
        for pack in packs:
            for item in pack:
                flags = decoded.get(_item_key(item), _SampleFlags.none(item.meta))
                sample = samples[_item_key(item)] = self._decode_or_mask(
                    item, flags, step, read_counter
                )
                row.append(sample.without_pixels(), item.meta, item.feed)
            row.append_padding(self._sequence_length - sum(item.meta.tokens for item in pack))
        for item, selected, generated in rank_images.samples:
            if _item_key(item) in local:
                sample = samples[_item_key(item)]
            else:
                sample = self._decode_or_mask(item, decoded[_item_key(item)], step, read_counter)
            read.append_images(sample, item.meta, selected, generated)
        microbatch = row.microbatch(packs, self._sequence_length)
        values = {f.name: getattr(microbatch, f.name) for f in fields(Microbatch)}
        return BalancedMicrobatch(
            **values,
            rank_encoders=read.encoder_inputs(),
            rank_generator=read.generator_inputs(),
            image_sources=rank_images.read_for,
            image_owners=rank_images.read_by,
            rank_meta=task_meta,
        )

    def images_to_decode(self, microbatches: list[list[PackItems]]) -> list[dict[str, range]]:
        """Return the images that this rank decodes, by microbatch and module.

        A rank decodes all images of a module without an entry.
        """
        return self._images_to_decode(
            [microbatch_meta(packs, self._sequence_length) for packs in microbatches]
        )

    def _images_to_decode(self, metas: Sequence[MicrobatchMeta]) -> list[dict[str, range]]:
        ranges: list[dict[str, range]] = [{} for _ in metas]
        if self._reads is None:
            return ranges
        for name in (
            *self._reader.encoders,
            *([GENERATOR] if self._reader.target_preprocessor else []),
        ):
            for by_name, images in zip(ranges, self._reads.images(metas, name) or (), strict=False):
                by_name[name] = images
        return ranges

    def decode_one(self, packs: list[PackItems], images: Mapping[str, range]) -> DecodedStep:
        """Decode one microbatch of a step. The result has no noise.

        Args:
            packs: Sequences of the microbatch.
            images: Entry of `images_to_decode` for the microbatch.
        """
        step = DecodedStep([], {})
        read_counter = ReadCounter()
        step.microbatches.append(
            self._build_microbatch(packs, _DecodeFlags(images), step, read_counter)
        )
        step.read_bytes += read_counter.read_bytes
        return step

    def step_bytes(self, share: list[list[PackItems]] | BalancedRankSamples) -> int:
        """Return the size of the tensors of a step in bytes, without reading data.

        The size excludes the positions of targets, which have 8 bytes each.
        """
        if isinstance(share, BalancedRankSamples):
            step = self._decode_balanced(share, blank=True)
        else:
            step = DecodedStep([], {})
            for packs, images in zip(share, self.images_to_decode(share), strict=True):
                step.microbatches.append(self._build_microbatch(packs, _DecodeFlags(images)))
        step = add_noise(self.target_preprocessor, step, share)
        return sum(microbatch.nbytes for microbatch in step.microbatches)

    def images(self, feed: int, index: int) -> list[Image.Image]:
        """Return images and frames of a sample in RGB. Empty if the source is a stream."""
        source = self._sources[feed]
        if source is None:
            return []
        reader = self._reader
        sample = reader.read(source.read(index))
        displayed_encoders = [
            n for n, medium in reader.media.items() if medium.spec.modality == "image"
        ][:1]
        return [
            picture
            for file, image in zip(sample.files, sample.images, strict=True)
            if reader.preprocessor_of(image).spec.encoder in displayed_encoders
            for picture in _decode_images(file, reader.max_pixels)
        ]

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """Return the result of `read_references`. Empty if the source is a stream."""
        source = self._sources[feed]
        return () if source is None else read_references(source.read(index))

    def mask_corrupt_samples(
        self, microbatch: Microbatch, packs: list[PackItems], corrupt: Collection[str]
    ) -> Microbatch:
        """Return the microbatch with masked corrupt samples. Its tensors are changed in place.

        Args:
            microbatch: Decoded microbatch.
            packs: Sequences of the microbatch.
            corrupt: Names of the corrupt samples ("source[index]").
        """
        return mask_corrupt_samples(self._reader, microbatch, packs, self._sequence_length, corrupt)

    def zero_corrupt_images(
        self, microbatch: BalancedMicrobatch, rank_images: RankImages, corrupt: Collection[str]
    ) -> None:
        """Zero the images of corrupt samples that this rank reads, in place."""
        zero_corrupt_images(self._reader, microbatch, rank_images, corrupt)

    def _build_microbatch(
        self,
        packs: list[PackItems],
        flags: _DecodeFlags,
        step: DecodedStep | None = None,
        read_counter: ReadCounter | None = None,
    ) -> Microbatch:
        """Return the microbatch of these samples. Without `step`, all samples are masked."""
        row = MicrobatchBuilder(self._reader, flags.images)
        for pack in packs:
            for item in pack:
                meta = item.meta
                every = [True] * len(meta.images), [True] * len(meta.generated)
                sample_flags = flags.next(AssignedSample(item, *every), self._reader.encoders)
                sample = self._decode_or_mask(item, sample_flags, step, read_counter)
                row.append(sample, meta, item.feed)
            used = sum(item.meta.tokens for item in pack)
            row.append_padding(self._sequence_length - used)
        return row.microbatch(packs, self._sequence_length)

    def _decode_or_mask(
        self,
        item: Item,
        flags: _SampleFlags,
        step: DecodedStep | None,
        read_counter: ReadCounter | None,
    ) -> DecodedSample:
        """Return a sample. It is masked if it is corrupt, or if `step` is None.

        Args:
            item: Planned sample.
            flags: Decode flags of the images.
            step: Step that receives counts, and the reason if the sample is corrupt.
            read_counter: Counter of read bytes.
        """
        if step is None or read_counter is None:
            return self._make_masked(item, flags)
        try:
            return self._decode(item, flags, step, read_counter)
        except CorruptSampleError as error:
            step.corrupt[sample_name(item.meta)] = str(error)
            return self._make_masked(item, flags)

    def _decode(
        self, item: Item, flags: _SampleFlags, step: DecodedStep, read_counter: ReadCounter
    ) -> DecodedSample:
        """Return a decoded sample.

        Raises:
            CorruptSampleError: The sample cannot be read, or its size changed.
        """
        reader = self._reader
        record = item.record
        if record is None:
            source = self._sources[item.feed]
            assert source is not None
            record = source.read(item.meta.index)
        with record_errors_at(record.location):
            step.read_bytes += count_record_bytes(record.columns)
            sample = reader.read(record, item.meta, read_counter)
            meta = reader.meta(item.meta.source, item.meta.index, sample)
            if meta != item.meta:
                raise CorruptSampleError(f"{CHANGED_MESSAGE}: {item.meta} -> {meta}")
            pixels = [
                reader.pixels(file, image, read_counter) if decoded else None
                for file, image, decoded in zip(
                    sample.files, meta.images, flags.images, strict=True
                )
            ]
            target_images: list[TargetImage] = []
            for file, drawn, context_end, decoded in zip(
                sample.generated_files,
                sample.generated,
                sample.text.target_positions,
                flags.target_images,
                strict=False,
            ):
                assert reader.target_preprocessor is not None
                key = _noise_key(item, len(target_images))
                if decoded:
                    target_images.append(
                        reader.decode_target_image(file, drawn, context_end, key, read_counter)
                    )
                else:
                    target_images.append(
                        reader.target_preprocessor.without_pixels(drawn, context_end, key)
                    )
            step.decoded_media += sum(flags.images) + sum(flags.target_images)
            kept = [file.kept if isinstance(file, Tile) else None for file in sample.files]
            text = sample.text
            token_offsets = [
                file.token_offsets if isinstance(file, Tile) else self._token_offsets(image)
                for file, image in zip(sample.files, meta.images, strict=True)
            ]
            for number, offsets in text.token_offsets.items():
                token_offsets[number] = offsets
            ids_L = np.asarray(text.ids, np.int64)
            return DecodedSample(
                ids_L, text.targets_L, text.image_starts, pixels, kept, token_offsets, target_images
            )

    def _token_offsets(self, image: ImageMeta) -> np.ndarray:
        """Return the positions of image tokens relative to the first placeholder."""
        if self._reader.text_spec.row_end_id is None:
            return np.arange(image.tokens)
        _, _, columns = self._reader.preprocessor_of(image).token_grid(image)
        return placeholder_offsets(image.tokens, columns)

    def rebuild(
        self,
        packs: list[PackItems],
        images: Mapping[str, range],
        source_microbatch: Microbatch | None = None,
        corrupt: Collection[str] = (),
    ) -> Microbatch:
        """Return the microbatch of these samples without pixels, computed from their metadata.

        Token ids, targets, crops of tiles and positions of images and contexts are copied from
        `source_microbatch`. Position ids, document boundaries, patch grids and times are
        recomputed.

        Args:
            packs: Sequences of the microbatch.
            images: Entry of `images_to_decode` for the microbatch.
            source_microbatch: Microbatch with tensors of the right shapes. If None, all samples are
                masked.
            corrupt: Names of samples that are masked (`sample_name`).

        Raises:
            ValueError: The images of a sample do not fit into its tokens.
        """
        row = MicrobatchBuilder(self._reader, images)
        copied = (
            None
            if source_microbatch is None
            else _CopiedSamples(source_microbatch, self._reader.encoders)
        )
        start = 0
        for pack in packs:
            for item in pack:
                sample = self._make_masked(item, _SampleFlags.none(item.meta))
                if copied is not None:
                    decoded = copied.next(item, start, self._reader.target_preprocessor)
                    sample = sample if sample_name(item.meta) in corrupt else decoded
                row.append(sample, item.meta)
                start += item.meta.tokens
            padding = self._sequence_length - sum(item.meta.tokens for item in pack)
            row.append_padding(padding)
            start += padding
        rebuilt = row.microbatch(packs, self._sequence_length)
        modules: dict[str, Any] = {**rebuilt.encoders, GENERATOR: rebuilt.generator}
        for name, inputs in modules.items():
            if inputs is not None and name in images:
                inputs.local_images = list(images[name])
        return rebuilt

    def _make_masked(self, item: Item, flags: _SampleFlags) -> DecodedSample:
        sample = make_masked_sample(self._reader, item.meta, flags.images)
        target_images: list[TargetImage] = []
        for number, drawn in enumerate(item.meta.generated):
            assert self._reader.target_preprocessor is not None
            target_image = self._reader.target_preprocessor.blank(drawn, _noise_key(item, number))
            if not flags.target_images[number]:
                target_image = replace(target_image, patches_PV=None)
            target_images.append(target_image)
        return replace(sample, target_images=target_images)


@dataclass(frozen=True)
class _SampleFlags:
    """Decode flags of each image and each target image of a sample, for one rank."""

    images: list[bool]
    target_images: list[bool]

    @classmethod
    def none(cls, meta: SampleMeta) -> _SampleFlags:
        """Return the flags of a rank that decodes no image of a sample."""
        return cls([False] * len(meta.images), [False] * len(meta.generated))


class _CopiedSamples:
    """Iterator over the token ids, targets and positions of the samples of a microbatch.

    Args:
        source_microbatch: Microbatch to copy from.
        encoders: Names of the encoders.
    """

    def __init__(self, source_microbatch: Microbatch, encoders: Sequence[str]) -> None:
        self._source_microbatch = source_microbatch
        self._encoders = encoders
        self._positions: dict[str, Iterator[Tensor]] = {}
        self._kept: dict[str, Iterator[TileRegion | None]] = {}
        for name, inputs in source_microbatch.encoders.items():
            tokens = [image.tokens for image in source_microbatch.meta.images_of_encoder(name)]
            self._positions[name] = iter(inputs.positions_K.split(tokens))
            self._kept[name] = (
                repeat(None) if inputs.tile_regions is None else iter(inputs.tile_regions)
            )
        contexts = [each.context for each in source_microbatch.meta.generated]
        drawn = source_microbatch.generator
        self._context_positions = iter(drawn.context_positions_K.split(contexts) if drawn else ())

    def next(
        self, item: Item, start: int, target_preprocessor: TargetImagePreprocessor | None
    ) -> DecodedSample:
        """Return the next sample without pixels.

        Args:
            item: Planned sample.
            start: Index of the first token of the sample in the microbatch.
            target_preprocessor: Preprocessor of target images.
        """
        meta = item.meta
        tokens = slice(start, start + meta.tokens)
        starts: list[int] = []
        token_offsets: list[np.ndarray] = []
        kept: list[TileRegion | None] = []
        for image in meta.images:
            name = image.encoder or meta.encoder or self._encoders[0]
            positions = next(self._positions[name]).numpy() - start
            first = int(positions[0]) if len(positions) else 0
            starts.append(first)
            token_offsets.append(positions - first)
            kept.append(next(self._kept[name]))
        generated = []
        for number, each in enumerate(meta.generated):
            assert target_preprocessor is not None
            context_end = int(next(self._context_positions)[-1]) + 1 - start
            key = _noise_key(item, number)
            generated.append(target_preprocessor.without_pixels(each, context_end, key))
        ids_L = self._source_microbatch.input_ids_T[tokens].numpy()
        targets_L = self._source_microbatch.targets_T[tokens].numpy()
        pixels: list[np.ndarray | None] = [None] * len(starts)
        return DecodedSample(ids_L, targets_L, starts, pixels, kept, token_offsets, generated)


@dataclass
class _DecodeFlags:
    """Iterator over the decode flags of the samples of a microbatch."""

    images: Mapping[str, range]
    """Images that the rank decodes, by module (`StepDecoder.images_to_decode`)."""
    _num_preceding: dict[str, int] = field(default_factory=dict)
    """Number of images of the preceding samples, by module."""

    def next(self, sample: AssignedSample, encoders: Sequence[str]) -> _SampleFlags:
        """Return the flags of the next sample. The index counts only images that the rank reads."""
        meta = sample.item.meta
        names = [image.encoder or meta.encoder or encoders[0] for image in meta.images]
        return _SampleFlags(
            [
                is_read and self._decodes_next(n)
                for n, is_read in zip(names, sample.images, strict=True)
            ],
            [is_drawn and self._decodes_next(GENERATOR) for is_drawn in sample.generated],
        )

    def _decodes_next(self, module: str) -> bool:
        number = self._num_preceding.get(module, 0)
        self._num_preceding[module] = number + 1
        return module not in self.images or number in self.images[module]


def add_noise(
    target_preprocessor: TargetImagePreprocessor | None,
    step: DecodedStep,
    share: list[list[PackItems]] | BalancedRankSamples,
) -> DecodedStep:
    """Return a decoded step with noise for the target images whose pixels it has.

    Args:
        target_preprocessor: Preprocessor of target images. If None, the step is returned.
        step: Decoded step without noise.
        share: Samples of the step.
    """
    if target_preprocessor is None:
        return step
    packs = share.microbatches if isinstance(share, BalancedRankSamples) else share
    microbatches = []
    for number, microbatch in enumerate(step.microbatches):
        changed: dict[str, Any] = {}
        if microbatch.generator is not None:
            items = [item for pack in packs[number] for item in pack]
            keys = [_noise_key(i, n) for i in items for n in range(len(i.meta.generated))]
            changed["generator"] = target_preprocessor.add_noise(microbatch.generator, keys)
        if isinstance(microbatch, BalancedMicrobatch) and microbatch.rank_generator is not None:
            assert isinstance(share, BalancedRankSamples)
            keys = [
                _noise_key(sample.item, image)
                for sample in share.rank_images[number].samples
                for image, is_drawn in enumerate(sample.generated)
                if is_drawn
            ]
            changed["rank_generator"] = target_preprocessor.add_noise(
                microbatch.rank_generator, keys
            )
        microbatches.append(replace(microbatch, **changed))
    return replace(step, microbatches=microbatches)


def count_record_bytes(value: Any) -> int:
    """Return the total size of strings and bytes in a record. A character counts as one byte."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(count_record_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(count_record_bytes, value))
    return 0


def _decode_images(file: EncodedFile, max_pixels: int) -> list[Image.Image]:
    if isinstance(file, Tile):
        return [file.parent.image()] if file.number == 0 else []
    if isinstance(file, VideoFrames):
        return file.images()
    return [decode_rgb(require_bytes(file), max_pixels)]


def _item_key(item: Item) -> tuple[int, int, int]:
    """Return the key of a sample within a step."""
    return item.feed, item.epoch, item.meta.index


def _noise_key(item: Item, number: int) -> NoiseKey:
    """Return the noise key of a target image. It differs between epochs."""
    return item.meta.source, item.meta.index, item.epoch, number
