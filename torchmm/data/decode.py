"""Planned samples to tensors: the only place where pixels are decoded. Runs in worker processes.

Every rank reads and tokenises the records of its data-parallel rank, for numbers of targets belong
to plans and losses; a rank decodes only the images that `Reads` says. Of the others it opens no
file, where sizes alone say how a file is written (all but tiles and clips).

A sample that turns out to be corrupt here becomes blank (`torchmm.data.rows`). Ranks of a replica
may find different ones: `StepDecoder.blank_out` does the same to what others have found.
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
from torchmm.common.processes import MORE_SHARED_MEMORY
from torchmm.common.row_slices import BalancedMicrobatch, Reads
from torchmm.common.tiles import Kept
from torchmm.data.corrupt import CorruptSampleError, naming_place
from torchmm.data.generated import DecodedDrawing, DrawingPreprocessor, Key
from torchmm.data.items import (
    BalancedShare,
    EncodedImages,
    Item,
    PackItems,
    ReadSample,
    microbatch_meta,
)
from torchmm.data.layouts.questions import references_of
from torchmm.data.media.images import decode_rgb
from torchmm.data.media.text import places_in_rows
from torchmm.data.media.tiles import Tile
from torchmm.data.media.video import ClipFrames
from torchmm.data.rows import (
    DecodedSample,
    RowBuilder,
    blank_out,
    blank_read,
    blank_sample,
    sample_name,
)
from torchmm.data.sources.configured import MapSource
from torchmm.data.sources.reader import (
    CHANGED,
    EncodedFile,
    Opened,
    SampleReader,
    data_of,
)


@dataclass
class DecodedStep:
    """One rank's share of a step, as a worker returns it."""

    microbatches: list[Microbatch]
    corrupt: dict[str, str]
    """Reason by "source[index]"."""
    failure: str = ""
    """Why the step could not be prepared; an exception would bring a worker's traceback."""
    decoded_media: int = 0
    """Images, sounds and clips (or their frames) that were decoded, and drawings."""
    read_bytes: int = 0
    """Of records, a byte for every character, and of files."""

    def share_memory(self) -> DecodedStep:
        """Return a copy in shared memory; if that is full, a step with `failure`.

        A worker hands tensors over in shared memory. PyTorch would allocate it in a thread of the
        worker, in which an error loses the step without a message to the training process.
        """
        try:
            shared = [microbatch.share_memory() for microbatch in self.microbatches]
        except (RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0]
            return replace(
                self,
                microbatches=[],
                failure=f"a data worker cannot write a step: {reason}; {MORE_SHARED_MEMORY}",
            )
        return replace(self, microbatches=shared)

    def pin_memory(self) -> DecodedStep:
        """Copy in page-locked memory."""
        return replace(self, microbatches=[m.pin_memory() for m in self.microbatches])


class StepDecoder(Dataset[DecodedStep]):
    """Decodes the microbatches of one rank; the "index" of this data set is their plan.

    Args:
        reader: tokenises samples.
        sources: by feed; None for streams, whose items carry their records.
        sequence_length: tokens of a pack.
        reads: which images it decodes; None: all.
    """

    def __init__(
        self,
        reader: SampleReader,
        sources: Sequence[MapSource | None],
        sequence_length: int,
        reads: Reads | None = None,
    ) -> None:
        self._reader = reader
        self._sources = sources
        self._sequence_length = sequence_length
        self._reads = reads

    def for_rank(self, reads: Reads | None) -> StepDecoder:
        """The same for a rank that decodes other images."""
        return StepDecoder(self._reader, self._sources, self._sequence_length, reads)

    def without_sources(self, reads: Reads | None) -> StepDecoder:
        """Return a decoder that only checks microbatches of another process (`rebuild`)."""
        return StepDecoder(self._reader, (), self._sequence_length, reads)

    @property
    def reader(self) -> SampleReader:
        """Tokenizer, media and text settings of the samples."""
        return self._reader

    @property
    def drawings(self) -> DrawingPreprocessor | None:
        """Adds the noise; None: nothing is drawn."""
        return self._reader.drawings

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of those that read images or sounds."""
        return self._reader.encoders

    @property
    def byte_values(self) -> dict[str, ByteValues | None]:
        """What uint8 pixels of encoders stand for, by name."""
        return {name: medium.byte_values for name, medium in self._reader.media.items()}

    def __getitem__(self, share: list[list[PackItems]] | BalancedShare) -> DecodedStep:
        if isinstance(share, BalancedShare):
            return with_noise(self.drawings, self._decode_balanced(share), share)
        return with_noise(self.drawings, self.decode(share), share)

    def decode(self, microbatches: list[list[PackItems]]) -> DecodedStep:
        """The step, still without noise."""
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

    def _decode_balanced(self, share: BalancedShare, *, blank: bool = False) -> DecodedStep:
        """Return the step with the images of this rank's encoders and generator, without noise.

        Args:
            blank: Whether all samples are blank, so that no file is read.
        """
        step = DecodedStep([], {})
        metas = [microbatch_meta(packs, self._sequence_length) for packs in share.microbatches]
        task_metas = [e.task_meta(m) for e, m in zip(share.encoded, metas, strict=True)]
        for packs, encoded, meta, images in zip(
            share.microbatches,
            share.encoded,
            task_metas,
            self._images_to_decode(task_metas),
            strict=True,
        ):
            opened = Opened()
            arguments = () if blank else (step, opened)
            step.microbatches.append(self._balanced(packs, encoded, meta, images, *arguments))
            step.read_bytes += opened.read_bytes
        return step

    def _balanced(
        self,
        packs: list[PackItems],
        encoded: EncodedImages,
        task_meta: MicrobatchMeta,
        images: Mapping[str, range],
        step: DecodedStep | None = None,
        opened: Opened | None = None,
    ) -> BalancedMicrobatch:
        """Return the microbatch of the packs and the images that this rank reads for all ranks.

        Args:
            images: Images that this rank decodes, by module, among those that its encoders and its
                generator read.
            step, opened: If None, all samples are blank.
        """
        encoders = self._reader.encoders
        read = RowBuilder(self._reader, images)
        decodes = _DecodeFlags(images)
        own = {_key(item) for pack in packs for item in pack}
        decoded = {_key(each.item): decodes.next(each, encoders) for each in encoded.samples}
        samples: dict[tuple[int, int, int], DecodedSample] = {}

        row = RowBuilder(self._reader, (*encoders, GENERATOR))
        for pack in packs:
            for item in pack:
                flags = decoded.get(_key(item), _SampleFlags.nothing(item.meta))
                sample = samples[_key(item)] = self._sample(item, flags, step, opened)
                row.append(sample.without_pixels(), item.meta)
            row.append_padding(self._sequence_length - sum(item.meta.tokens for item in pack))
        for item, chosen, generated in encoded.samples:
            if _key(item) in own:
                sample = samples[_key(item)]
            else:
                sample = self._sample(item, decoded[_key(item)], step, opened)
            read.append_images(sample, item.meta, chosen, generated)
        microbatch = row.microbatch(packs, self._sequence_length)
        values = {f.name: getattr(microbatch, f.name) for f in fields(Microbatch)}
        return BalancedMicrobatch(
            **values,
            read=read.encoder_inputs(),
            drawn=read.generator_inputs(),
            read_for=encoded.read_for,
            read_by=encoded.read_by,
            balanced_meta=task_meta,
        )

    def images_to_decode(self, microbatches: list[list[PackItems]]) -> list[dict[str, range]]:
        """Return the images that this rank decodes, by microbatch and module.

        A rank decodes all images of a module without an entry.
        """
        return self._images_to_decode(
            [microbatch_meta(packs, self._sequence_length) for packs in microbatches]
        )

    def _images_to_decode(self, metas: Sequence[MicrobatchMeta]) -> list[dict[str, range]]:
        found: list[dict[str, range]] = [{} for _ in metas]
        if self._reads is None:
            return found
        for name in (*self._reader.encoders, *([GENERATOR] if self._reader.drawings else [])):
            for own, images in zip(found, self._reads.images(metas, name) or (), strict=False):
                own[name] = images
        return found

    def decode_one(self, packs: list[PackItems], images: Mapping[str, range]) -> DecodedStep:
        """One microbatch of a step, still without noise.

        Args:
            images: from `images_to_decode`.
        """
        step = DecodedStep([], {})
        opened = Opened()
        step.microbatches.append(self._microbatch(packs, _DecodeFlags(images), step, opened))
        step.read_bytes += opened.read_bytes
        return step

    def step_bytes(self, share: list[list[PackItems]] | BalancedShare) -> int:
        """Return the bytes of a step's tensors, without reading or decoding anything.

        Positions of targets, 8 bytes each, do not count: blank samples have none.
        """
        if isinstance(share, BalancedShare):
            step = self._decode_balanced(share, blank=True)
        else:
            step = DecodedStep([], {})
            for packs, images in zip(share, self.images_to_decode(share), strict=True):
                step.microbatches.append(self._microbatch(packs, _DecodeFlags(images)))
        step = with_noise(self.drawings, step, share)
        return sum(microbatch.nbytes for microbatch in step.microbatches)

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

    def references(self, feed: int, index: int) -> tuple[str, ...]:
        """See `references_of`; none if its source is a stream."""
        source = self._sources[feed]
        return () if source is None else references_of(source.read(index))

    def blank_out(
        self, microbatch: Microbatch, packs: list[PackItems], corrupt: Collection[str]
    ) -> Microbatch:
        """Return the microbatch with corrupt samples made blank; writes to its tensors.

        Args:
            corrupt: Names of the samples ("source[index]").
        """
        return blank_out(self._reader, microbatch, packs, self._sequence_length, corrupt)

    def blank_read(
        self, microbatch: BalancedMicrobatch, encoded: EncodedImages, corrupt: Collection[str]
    ) -> None:
        """Make the images blank that this rank reads of corrupt samples, in place."""
        blank_read(self._reader, microbatch, encoded, corrupt)

    def _microbatch(
        self,
        packs: list[PackItems],
        flags: _DecodeFlags,
        step: DecodedStep | None = None,
        opened: Opened | None = None,
    ) -> Microbatch:
        """Return the microbatch of these samples; without `step`, its samples are blank."""
        row = RowBuilder(self._reader, flags.images)
        for pack in packs:
            for item in pack:
                meta = item.meta
                every = [True] * len(meta.images), [True] * len(meta.generated)
                own = flags.next(ReadSample(item, *every), self._reader.encoders)
                row.append(self._sample(item, own, step, opened), meta)
            used = sum(item.meta.tokens for item in pack)
            row.append_padding(self._sequence_length - used)
        return row.microbatch(packs, self._sequence_length)

    def _sample(
        self,
        item: Item,
        own: _SampleFlags,
        step: DecodedStep | None,
        opened: Opened | None,
    ) -> DecodedSample:
        """Return a sample. It is blank if it is corrupt, or if `step` is None.

        Args:
            own: Images that the rank decodes.
            step: Receives the reason why the sample is corrupt, and counts.
            opened: Files that were opened for the microbatch.
        """
        if step is None or opened is None:
            return self._blank(item, own)
        try:
            return self._decode(item, own, step, opened)
        except CorruptSampleError as error:
            step.corrupt[sample_name(item.meta)] = str(error)
            return self._blank(item, own)

    def _decode(
        self, item: Item, own: _SampleFlags, step: DecodedStep, opened: Opened
    ) -> DecodedSample:
        """Return a decoded sample.

        Raises:
            CorruptSampleError: The sample cannot be read, or its size has changed.
        """
        reader = self._reader
        record = item.record
        if record is None:
            source = self._sources[item.feed]
            assert source is not None
            record = source.read(item.meta.index)
        with naming_place(record.where):
            step.read_bytes += record_bytes(record.columns)
            sample = reader.read(record, item.meta, opened)
            meta = reader.meta(item.meta.source, item.meta.index, sample)
            if meta != item.meta:
                raise CorruptSampleError(f"{CHANGED}: {item.meta} -> {meta}")
            pixels = [
                reader.pixels(file, image, opened) if decoded else None
                for file, image, decoded in zip(sample.files, meta.images, own.images, strict=True)
            ]
            drawings: list[DecodedDrawing] = []
            for file, drawn, context_end, decoded in zip(
                sample.generated_files,
                sample.generated,
                sample.text.generated_at,
                own.drawings,
                strict=False,
            ):
                assert reader.drawings is not None
                key = _drawing_key(item, len(drawings))
                if decoded:
                    drawings.append(reader.drawing(file, drawn, context_end, key, opened))
                else:
                    drawings.append(reader.drawings.without_pixels(drawn, context_end, key))
            step.decoded_media += sum(own.images) + sum(own.drawings)
            kept = [file.kept if isinstance(file, Tile) else None for file in sample.files]
            places = [
                file.places if isinstance(file, Tile) else self._places(image)
                for file, image in zip(sample.files, meta.images, strict=True)
            ]
            text = sample.text
            ids_L = np.asarray(text.ids, np.int64)
            return DecodedSample(
                ids_L, text.targets_L, text.image_starts, pixels, kept, places, drawings
            )

    def _places(self, image: ImageMeta) -> np.ndarray:
        """Of its tokens, relative to its first placeholder."""
        if self._reader.text_spec.row_end_id is None:
            return np.arange(image.tokens)
        _, _, columns = self._reader.medium(image).block(image)
        return places_in_rows(image.tokens, columns)

    def rebuild(
        self,
        packs: list[PackItems],
        images: Mapping[str, range],
        found: Microbatch | None = None,
        corrupt: Collection[str] = (),
    ) -> Microbatch:
        """Return the microbatch of these samples without pixels, computed from their metadata.

        Token ids, targets, kept parts of tiles and positions of images and contexts are copied from
        `found`. Everything else follows from them: position ids, segments, patch grids, times.

        Args:
            images: Result of `images_to_decode`.
            found: Microbatch with tensors of the right shapes. If None, all samples are blank.
            corrupt: Names of samples that are blank (`sample_name`).

        Raises:
            ValueError: The images of a sample do not fit into its tokens.
        """
        row = RowBuilder(self._reader, images)
        copied = None if found is None else _Copied(found, self._reader.encoders)
        start = 0
        for pack in packs:
            for item in pack:
                sample = self._blank(item, _SampleFlags.nothing(item.meta))
                if copied is not None:
                    own = copied.next(item, start, self._reader.drawings)
                    sample = sample if sample_name(item.meta) in corrupt else own
                row.append(sample, item.meta)
                start += item.meta.tokens
            padding = self._sequence_length - sum(item.meta.tokens for item in pack)
            row.append_padding(padding)
            start += padding
        rebuilt = row.microbatch(packs, self._sequence_length)
        modules: dict[str, Any] = {**rebuilt.encoders, GENERATOR: rebuilt.generator}
        for name, inputs in modules.items():
            if inputs is not None and name in images:
                inputs.held = list(images[name])
        return rebuilt

    def _blank(self, item: Item, own: _SampleFlags) -> DecodedSample:
        sample = blank_sample(self._reader, item.meta, own.images)
        drawings: list[DecodedDrawing] = []
        for number, drawn in enumerate(item.meta.generated):
            assert self._reader.drawings is not None
            drawing = self._reader.drawings.blank(drawn, _drawing_key(item, number))
            if not own.drawings[number]:
                drawing = replace(drawing, patches_PV=None)
            drawings.append(drawing)
        return replace(sample, drawings=drawings)


@dataclass(frozen=True)
class _SampleFlags:
    """Decode flags of each image and each generated image of a sample, for one rank."""

    images: list[bool]
    drawings: list[bool]

    @classmethod
    def nothing(cls, meta: SampleMeta) -> _SampleFlags:
        """Return the flags of a rank that decodes no image of a sample."""
        return cls([False] * len(meta.images), [False] * len(meta.generated))


class _Copied:
    """Texts and positions of a microbatch, sample by sample, without pixels.

    Args:
        found: Microbatch to copy from.
        encoders: Names of the encoders.
    """

    def __init__(self, found: Microbatch, encoders: Sequence[str]) -> None:
        self._found = found
        self._encoders = encoders
        self._positions: dict[str, Iterator[Tensor]] = {}
        self._kept: dict[str, Iterator[Kept | None]] = {}
        for name, inputs in found.encoders.items():
            tokens = [image.tokens for image in found.meta.images_read_by(name)]
            self._positions[name] = iter(inputs.positions_K.split(tokens))
            self._kept[name] = repeat(None) if inputs.kept is None else iter(inputs.kept)
        contexts = [each.context for each in found.meta.generated]
        drawn = found.generator
        self._contexts = iter(drawn.context_positions_K.split(contexts) if drawn else ())

    def next(self, item: Item, start: int, drawings: DrawingPreprocessor | None) -> DecodedSample:
        """Return the next sample.

        Args:
            start: Position of the sample in the microbatch.
        """
        meta = item.meta
        own = slice(start, start + meta.tokens)
        starts: list[int] = []
        places: list[np.ndarray] = []
        kept: list[Kept | None] = []
        for image in meta.images:
            name = image.encoder or meta.encoder or self._encoders[0]
            positions = next(self._positions[name]).numpy() - start
            first = int(positions[0]) if len(positions) else 0
            starts.append(first)
            places.append(positions - first)
            kept.append(next(self._kept[name]))
        generated = []
        for number, each in enumerate(meta.generated):
            assert drawings is not None
            context_end = int(next(self._contexts)[-1]) + 1 - start
            key = _drawing_key(item, number)
            generated.append(drawings.without_pixels(each, context_end, key))
        ids_L = self._found.input_ids_T[own].numpy()
        targets_L = self._found.targets_T[own].numpy()
        pixels: list[np.ndarray | None] = [None] * len(starts)
        return DecodedSample(ids_L, targets_L, starts, pixels, kept, places, generated)


@dataclass
class _DecodeFlags:
    """Flags of the samples of a microbatch, one after another."""

    images: Mapping[str, range]
    """Images that the rank decodes, by module (`StepDecoder.images_to_decode`)."""
    _seen: dict[str, int] = field(default_factory=dict)
    """Number of images of the preceding samples, by module."""

    def next(self, sample: ReadSample, encoders: Sequence[str]) -> _SampleFlags:
        """Return the flags of the next sample. Only images that the rank reads are counted."""
        meta = sample.item.meta
        names = [image.encoder or meta.encoder or encoders[0] for image in meta.images]
        return _SampleFlags(
            [is_read and self._takes(n) for n, is_read in zip(names, sample.images, strict=True)],
            [is_drawn and self._takes(GENERATOR) for is_drawn in sample.generated],
        )

    def _takes(self, module: str) -> bool:
        number = self._seen.get(module, 0)
        self._seen[module] = number + 1
        return module not in self.images or number in self.images[module]


def with_noise(
    drawings: DrawingPreprocessor | None,
    step: DecodedStep,
    share: list[list[PackItems]] | BalancedShare,
) -> DecodedStep:
    """Return a decoded step with the noise of the generated images whose pixels it has.

    Args:
        share: Samples of the step.
    """
    if drawings is None:
        return step
    packs = share.microbatches if isinstance(share, BalancedShare) else share
    found = []
    for number, microbatch in enumerate(step.microbatches):
        changed: dict[str, Any] = {}
        if microbatch.generator is not None:
            items = [item for pack in packs[number] for item in pack]
            keys = [_drawing_key(i, n) for i in items for n in range(len(i.meta.generated))]
            changed["generator"] = drawings.with_noise(microbatch.generator, keys)
        if isinstance(microbatch, BalancedMicrobatch) and microbatch.drawn is not None:
            assert isinstance(share, BalancedShare)
            keys = [
                _drawing_key(sample.item, image)
                for sample in share.encoded[number].samples
                for image, is_drawn in enumerate(sample.generated)
                if is_drawn
            ]
            changed["drawn"] = drawings.with_noise(microbatch.drawn, keys)
        found.append(replace(microbatch, **changed))
    return replace(step, microbatches=found)


def record_bytes(value: Any) -> int:
    """Size of the texts and files in a record; a byte for every character."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(record_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(record_bytes, value))
    return 0


def _pictures(file: EncodedFile, max_pixels: int) -> list[Image.Image]:
    if isinstance(file, Tile):
        return [file.of.image()] if file.number == 0 else []
    if isinstance(file, ClipFrames):
        return file.images()
    return [decode_rgb(data_of(file), max_pixels)]


def _key(item: Item) -> tuple[int, int, int]:
    """Return what identifies a sample in a step."""
    return item.feed, item.epoch, item.meta.index


def _drawing_key(item: Item, number: int) -> Key:
    """Names an image to be drawn, for its noise: other noise in every epoch."""
    return item.meta.source, item.meta.index, item.epoch, number
