"""The types that data, models and planners share: samples, microbatches, what models ask of both.

`torchmm.data` produces these and `torchmm.models` consumes them; neither imports the other.
A microbatch is *packed*: the samples of one or more sequences follow one another in one row of T
tokens, and `cu_seqlens` says where each sample starts, so attention never crosses from one sample
into the next. Padding, if any, is the last segment of a sequence and has no targets. Rejected: a
(B, S) layout with a dense mask, which costs S x S memory and hides leaks (see
`torchmm.models.layers.attention`).

Shape legend: T tokens of a microbatch, N images, P patches of all images of an encoder,
K encoder output tokens of all images, D features, C channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchmm.common.dtypes import ByteValues
from torchmm.common.generated import GeneratedMeta, GeneratorInputs, held_rows
from torchmm.common.module_names import GENERATOR
from torchmm.common.tiles import Kept, TileSpec

IGNORE_TARGET = -100
"""Target value of a position that does not count in the loss."""


@dataclass(frozen=True)
class ImageMeta:
    """What planning needs to know of one image, read from its header without decoding it.

    A sound is an "image" too, of one row: its patches are the positions that the encoder sees. So
    is a clip, or each of its frames for encoders that read single frames.
    """

    width_px: int
    """0 for sounds."""
    height_px: int
    patches: int
    """Patches the encoder processes, after resizing."""
    tokens: int
    """Tokens the image takes in the LLM's sequence (placeholders only, no marker tokens); of a tile
    whose picture is shrunk, also those that it shares with its neighbours."""
    frames: int = 1
    """Frames of a clip (or groups of frames, if a patch spans several); all have equally many
    patches."""
    encoder: str | None = None
    """Name of the encoder that reads it, if a model has several; None: the sample's."""
    duration_ms: int = 0
    """Duration of a sound or clip; for a clip's single frame, of the part it represents."""
    frame_pixels: int = 0
    """Most pixels of a clip's frame after resizing; 0: the limit for images."""


def padded_images(count: int) -> int:
    """Return the number of images that a CUDA graph for `count` images has, at most 1.5 x `count`.

    These are 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, so that a run has few graphs.
    """
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


@dataclass(frozen=True)
class SampleMeta:
    """One sample: where it comes from and how large it is.

    `index` is the position inside its source, so (source, index) always names the same sample.
    """

    source: str
    index: int
    tokens: int
    """Length in the LLM's sequence: text, markers and image placeholders."""
    images: tuple[ImageMeta, ...] = ()
    encoder: str | None = None
    """Name of the encoder that reads the images; None for a text-only sample, or if each image
    names its own."""
    generated: tuple[GeneratedMeta, ...] = ()
    """Images and clips that the generator has to draw; they take no tokens."""

    @property
    def tiles(self) -> int:
        """Pictures and tiles of pictures: neither sounds nor clips nor their frames."""
        return sum(not image.duration_ms for image in self.images)

    @property
    def patches(self) -> int:
        """Patches of all images, audio clips and generated images."""
        return sum(i.patches for i in self.images) + sum(g.patches for g in self.generated)

    def images_read_by(self, encoder: str) -> list[ImageMeta]:
        """Those that `encoder` reads, in order."""
        return [i for i in self.images if (i.encoder or self.encoder) == encoder]


@dataclass(frozen=True)
class MicrobatchMeta:
    """The samples of one microbatch, in packing order: the planner's only input."""

    samples: tuple[SampleMeta, ...]
    tokens: int
    """T, padding included."""
    balanced: bool = False
    """Whether images are those that this rank encodes or generates for all data-parallel ranks. All
    ranks then run every encoder and the generator, also without images."""
    arriving: tuple[tuple[str, int], ...] = ()
    """Encoders and their tokens in the packed sequences, if `balanced`. The ranks that encode the
    images send the features."""

    def with_images(
        self, images: Sequence[ImageMeta], generated: Sequence[GeneratedMeta] = ()
    ) -> MicrobatchMeta:
        """Return the same tokens with images of any rank (`balanced`).

        A sample without tokens lists the images, as most belong to samples of other ranks.
        """
        own = [
            replace(s, images=(), generated=()) if s.images or s.generated else s
            for s in self.samples
        ]
        read = []
        if images or generated:
            read = [SampleMeta("", 0, 0, tuple(images), generated=tuple(generated))]
        arriving: Counter[str] = Counter()
        for sample in self.samples:
            for image in sample.images:
                arriving[image.encoder or sample.encoder or ""] += image.tokens
        return MicrobatchMeta(
            (*own, *read), self.tokens, balanced=True, arriving=tuple(sorted(arriving.items()))
        )

    def images_read_by(self, encoder: str) -> list[ImageMeta]:
        """Images that `encoder` reads, in order."""
        return [image for sample in self.samples for image in sample.images_read_by(encoder)]

    def patches(self, encoder: str) -> list[int]:
        """Patches per image that `encoder` has to process, in order."""
        return [image.patches for image in self.images_read_by(encoder)]

    @property
    def generated(self) -> list[GeneratedMeta]:
        """Images and clips that the generator has to draw, in order."""
        return [image for sample in self.samples for image in sample.generated]

    def images_for(self, module: str) -> Sequence[ImageMeta | GeneratedMeta]:
        """Images that an encoder reads, or that the generator draws, in order."""
        return self.generated if module == GENERATOR else self.images_read_by(module)

    def images_of(self, module: str) -> int:
        """How many these are."""
        return len(self.images_for(module))

    @property
    def used_tokens(self) -> int:
        """Tokens without padding."""
        return sum(s.tokens for s in self.samples)

    @property
    def image_count(self) -> int:
        """Images in the microbatch that encoders read."""
        return sum(len(s.images) for s in self.samples)


class ImageSizes(NamedTuple):
    """Sizes of the images of N samples, one sample after another.

    The generated images of a sample follow the images that encoders read, if the modules include
    the generator.
    """

    counts_N: NDArray[np.int64]
    """Number of images of each sample."""
    sizes_I4: NDArray[np.int64]
    """Position of the module, patches, tokens and frames of each image. Tokens of a generated image
    are its context."""

    @classmethod
    def of(cls, samples: Sequence[SampleMeta], modules: Sequence[str]) -> ImageSizes:
        """Return the sizes of the images of samples.

        Args:
            modules: Names of all encoders and, to include generated images, of the generator.
        """
        sizes: list[tuple[int, int, int, int]] = []
        counts = []
        for s in samples:
            before = len(sizes)
            sizes += [
                (modules.index(i.encoder or s.encoder or ""), i.patches, i.tokens, i.frames)
                for i in s.images
            ]
            if GENERATOR in modules:
                number = modules.index(GENERATOR)
                sizes += [(number, g.patches, g.context, g.grid_thw[0]) for g in s.generated]
            counts.append(len(sizes) - before)
        return cls(np.array(counts, np.int64), np.array(sizes, np.int64).reshape(-1, 4))

    @classmethod
    def of_groups(
        cls, groups_N: NDArray[np.int64], read: Callable[[int, NDArray[np.int64]], ImageSizes]
    ) -> ImageSizes:
        """Return the sizes of the images of samples that are read group by group.

        Args:
            groups_N: Group of each sample, for example its source.
            read: Returns the sizes of some samples of a group, from the group and the positions of
                the samples in `groups_N`.
        """
        counts_N = np.zeros_like(groups_N)
        starts_N = np.zeros_like(groups_N)
        parts = [np.zeros((0, 4), np.int64)]
        total = 0
        order_N = np.argsort(groups_N, kind="stable")
        firsts = np.flatnonzero(np.diff(groups_N[order_N])) + 1
        for own in np.split(order_N, firsts) if len(order_N) else []:
            part = read(int(groups_N[own[0]]), own)
            counts_N[own] = part.counts_N
            starts_N[own] = total + np.cumsum(part.counts_N) - part.counts_N
            parts.append(part.sizes_I4)
            total += len(part.sizes_I4)
        return cls(counts_N, np.concatenate(parts)[consecutive(starts_N, counts_N)])

    def followed_by(self, others: ImageSizes) -> ImageSizes:
        """Return the images of each sample, followed by `others` of the same sample."""
        counts_2N = np.stack([self.counts_N, others.counts_N])
        starts_2N = np.cumsum(counts_2N).reshape(counts_2N.shape) - counts_2N
        rows_I = consecutive(starts_2N.T.flatten(), counts_2N.T.flatten())
        return ImageSizes(
            counts_2N.sum(0), np.concatenate([self.sizes_I4, others.sizes_I4])[rows_I]
        )

    def part(self, samples: NDArray[np.int64]) -> ImageSizes:
        """Return the sizes of the images of some samples, in their order."""
        starts_N = np.cumsum(self.counts_N) - self.counts_N
        counts = self.counts_N[samples]
        return ImageSizes(counts, self.sizes_I4[consecutive(starts_N[samples], counts)])


class Imbalance(NamedTuple):
    """Work of the slowest data-parallel rank over that of the mean rank: 1 if all are equal.

    Ranks that synchronize in every layer are compared in each microbatch. The work of all
    microbatches of a step is then summed.
    """

    before: float
    """Without balancing."""
    after: float
    """As executed."""

    def figures(self, name: str) -> dict[str, float]:
        """Return the metrics of a step record."""
        return {f"{name}_imbalance": self.after, f"{name}_imbalance_before": self.before}


class Arrangement(NamedTuple):
    """Sequences of a global batch, rearranged."""

    places: Sequence[Sequence[Sequence[int]]]
    """Indices of the sequences by data-parallel rank and microbatch."""
    imbalance: Imbalance | None = None


class ImageOwners(NamedTuple):
    """Ranks that encode or generate the images of one microbatch of all ranks.

    The work is summed over modules, in any unit.
    """

    owners_I: NDArray[np.int64]
    """Rank of each image."""
    before: float
    """Work of the slowest rank if each rank reads its own images."""
    after: float
    """Work of the slowest rank."""
    mean: float
    """Mean work of all ranks."""


def consecutive(starts_N: NDArray[np.int64], counts_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `start`, `start` + 1, ... of each range, one range after another."""
    shifts_N = starts_N - (np.cumsum(counts_N) - counts_N)
    return np.arange(int(counts_N.sum())) + np.repeat(shifts_N, counts_N)


@dataclass
class EncoderInputs:
    """One encoder's share of a microbatch: its images and where their outputs go.

    An encoder takes pixels in exactly one way, see `ImageSpec.inputs`: "fixed" has the shape
    (N, C, height, width), "patches" has (P, D), the patches of one image after another; a patch of
    a sound is the mel bins of a few frames. Sizes are plain Python numbers, so that no kernel
    launch waits for the device.

    Sizes and positions are those of all images; pixels may be those of some, for a rank decodes
    only its share of what its stages read (`torchmm.common.row_slices.Reads`).
    """

    pixels: Tensor
    """(N, C, height, width) or (P, D), of the images that are `held`: float32, or uint8 as long as
    nobody reads them (`values`)."""
    grids_thw: list[tuple[int, int, int]]
    """Patches per image as (frames, rows, columns), one entry per image."""
    positions_K: Tensor
    """int64: position in the microbatch's T tokens of each output token, image after image."""
    kept: list[Kept] | None = None
    """What is kept of each image; None: everything, and no line is ended."""
    patches_per_token: int | None = None
    """Consecutive patches of a sound that become one output token, what remains of it none; None:
    all patches of an encoder's images become tokens."""
    held: list[int] | None = None
    """Images whose pixels are here, ascending; None: those of all, on every rank that reads any."""
    byte_values: ByteValues | None = None
    """What uint8 pixels stand for."""
    blank: list[int] = field(default_factory=list)
    """Images that could not be decoded, ascending: all that encoders read of them is 0."""

    def values(self) -> EncoderInputs:
        """With float32 pixels, for encoders."""
        if self.pixels.dtype != torch.uint8:
            return self
        assert self.byte_values is not None
        found = self.byte_values.look_up(self.pixels)
        for image in self.blank:
            rows, _ = held_rows(self.pixel_rows, self.held, range(image, image + 1))
            found[rows] = 0
        return replace(self, pixels=found, byte_values=None)

    def without_pixels(self) -> EncoderInputs:
        """The same sizes and positions."""
        return replace(self, pixels=self.pixels[:0], held=[])

    @property
    def pixel_rows(self) -> list[int]:
        """Rows of `pixels` that each image has, or would have if it were here."""
        if self.pixels.ndim == 2:
            return [prod(grid) for grid in self.grids_thw]
        return [1] * len(self.grids_thw)

    def select(self, images: range) -> EncoderInputs:
        """The inputs of consecutive images; tensors are views.

        Raises:
            ValueError: there are no such images.
        """
        if not 0 <= images.start < images.stop <= len(self.grids_thw) or images.step != 1:
            raise ValueError(
                f"images {images} are out of range; the batch has {len(self.grids_thw)} images"
            )
        patches = [prod(grid) for grid in self.grids_thw]
        start = sum(patches[: images.start])
        stop = sum(patches[: images.stop])
        own = slice(images.start, images.stop)
        if self.kept is not None:
            places = _slice_of([kept.tokens for kept in self.kept], own)
        elif self.patches_per_token is not None:
            places = _slice_of([count // self.patches_per_token for count in patches], own)
        else:
            # An output token stands for the same number of patches in all images of an encoder.
            tokens = len(self.positions_K)
            total = sum(patches)
            places = slice(start * tokens // total, stop * tokens // total)
        rows, held = held_rows(self.pixel_rows, self.held, images)
        return EncoderInputs(
            self.pixels[rows],
            self.grids_thw[own],
            self.positions_K[places],
            self.kept and self.kept[own],
            self.patches_per_token,
            held,
            self.byte_values,
            [image - images.start for image in self.blank if image in images],
        )


def _slice_of(counts: list[int], own: slice) -> slice:
    """Where the tokens of some images are among those of all."""
    first = sum(counts[: own.start])
    return slice(first, first + sum(counts[own]))


def even_ranges(count: int, parts: int) -> list[range]:
    """`count` things in `parts` consecutive groups, the larger ones first.

    Raises:
        ValueError: a group would be empty.
    """
    if not 1 <= parts <= count:
        raise ValueError(
            f"{count} images cannot be split into {parts} parts; use 1 to {count} parts"
        )
    size, larger = divmod(count, parts)
    sizes = [size + 1] * larger + [size] * (parts - larger)
    return [range(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


@dataclass
class Microbatch:
    """One packed microbatch of one data-parallel rank."""

    input_ids_T: Tensor
    """int64; image positions hold the placeholder id and are overwritten by encoder outputs."""
    targets_T: Tensor
    """int64: the token each position has to predict (already shifted); IGNORE_TARGET elsewhere."""
    position_ids: Tensor
    """int64, (T,), restarting at 0 in every sample; (3, T) for models with M-RoPE."""
    cu_seqlens: list[int]
    """Start of every packed segment, then T: [0, ..., T]. Padding is a separate segment."""
    encoders: dict[str, EncoderInputs]
    """By encoder name. An encoder without images in this microbatch has no entry."""
    meta: MicrobatchMeta
    generator: GeneratorInputs | None = None
    """None if there are no images to be drawn."""
    target_positions_L: Tensor = None  # type: ignore[assignment]
    """int64: positions that count in the loss, found on the CPU if None is given. A field, for FSDP
    hands a copy of all fields to a forward, where finding them would wait for the device. Who
    replaces `targets_T` has to say None here."""

    def __post_init__(self) -> None:
        if self.target_positions_L is None:
            self.target_positions_L = (self.targets_T != IGNORE_TARGET).nonzero()[:, 0]

    @property
    def task_meta(self) -> MicrobatchMeta:
        """Sizes of the tasks of this rank, for plans and predictions."""
        return self.meta

    @property
    def target_count(self) -> int:
        """Positions that count in the loss."""
        return self.target_positions_L.numel()

    @property
    def generated_count(self) -> int:
        """Images to be drawn that count in the loss."""
        return self.generator.count if self.generator else 0

    def values(self) -> Microbatch:
        """With float32 pixels."""
        encoders = {name: inputs.values() for name, inputs in self.encoders.items()}
        return replace(
            self, encoders=encoders, generator=self.generator and self.generator.values()
        )

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Microbatch:
        """Copy with every tensor on `device`; metadata stays in Python."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Microbatch:
        """Copy in page-locked memory (called by the loader on CUDA machines)."""
        return self._map(lambda x: x.pin_memory())

    def share_memory(self) -> Microbatch:
        """Return a copy in shared memory (/dev/shm).

        Raises:
            RuntimeError, OSError: The shared memory is full or cannot be written.
        """
        return self._map(lambda x: x.share_memory_())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        sizes: list[int] = []

        def add(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        self._map(add)
        return sum(sizes)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Microbatch:
        encoders = {
            name: replace(e, pixels=function(e.pixels), positions_K=function(e.positions_K))
            for name, e in self.encoders.items()
        }
        generator = self.generator and self.generator.map(function)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors: dict[str, Any] = {
            name: function(v) for name, v in values.items() if isinstance(v, Tensor)
        }
        return replace(self, encoders=encoders, generator=generator, **tensors)


Marks = tuple[int | str, ...]
"""What stands beside images in the text: token ids, and plain text without special tokens."""


@dataclass(frozen=True)
class ClipText:
    """How clips are written whose frames, or groups of frames, are images of their own."""

    group: str = "<{mean_s:.1f} seconds>{frames}"
    """One of them and its time. Times that it may name: first_s, of the first frame; whole_s, the
    same in whole seconds, cut; mean_s, the mean of the first and the last frame's."""
    prefix: Marks = ()
    """Before a whole clip."""
    suffix: Marks = ()


@dataclass(frozen=True)
class SoundChunks:
    """Stretches of a sound that a tower reads one by one."""

    samples: int
    patches: int
    """Of a whole chunk; the last of them may have fewer frames than the others."""
    padding: Literal["patch", "silent", "heard"]
    """How the last chunk ends. patch: after its last patch, which is filled with silence; silent,
    heard: it is filled with silence to its whole length, of which the tower reads nothing, or all.
    """
    overlap: int = 0
    """Frames of the next patch that each patch has too, because its position depends on them."""


@dataclass(frozen=True)
class ImageSpec:
    """How an encoder wants its images or sounds; made by `torchmm.models`, followed by
    `torchmm.data`."""

    encoder: str
    inputs: Literal["fixed", "patches"]
    processor_class: str
    """Name of the Hugging Face image processor or feature extractor, e.g.
    "CLIPImageProcessor"."""
    processor: dict[str, Any]
    """Its settings (the content of preprocessor_config.json)."""
    patch_size_px: int
    """For sounds: samples of a patch."""
    merge: int = 1
    """Rows and columns of patches that become one output token. For sounds, merge**2 times `pooled`
    consecutive patches."""
    drop_class_token: bool = True
    """Inputs of a fixed size: whether a class token is kept from the LLM."""
    extra_tokens: int = 0
    """Inputs of a fixed size: output tokens beyond one per merged patch (a kept class token)."""
    modality: Literal["image", "audio"] = "image"
    """What the encoder reads."""
    max_patches: int = 0
    """Maximum number of patches of an audio clip; samples with longer audio are filtered."""
    pooled: int = 1
    """Consecutive patches of a sound that its tower averages into one; what remains behind the last
    of such groups is left out."""
    sound_chunks: SoundChunks | None = None
    """How sounds are cut; None: they are read whole, to the end of the last patch."""
    tiles: TileSpec | None = None
    """How pictures are cut; None: a picture is one image. Frames of clips always are."""
    splits_clips: bool = False
    """Where patches span several frames: whether each group of frames is an image of its own, with
    its time before it; otherwise a clip is one image."""
    ends_lines: bool = False
    """Whether `EncoderInputs.kept` says which tokens of a tile are kept, and where lines end."""

    @property
    def patches_per_token(self) -> int:
        """Patches that become one output token."""
        return self.pooled * self.merge**2


@dataclass(frozen=True)
class TextSpec:
    """How the LLM wants its text; made by `torchmm.models`, followed by `torchmm.data`."""

    vocab_size: int
    image_token_id: int | None
    """Placeholder id written at image positions (its embedding is never used)."""
    image_prefix: Marks = ()
    """Before each image, e.g. the id of <|vision_start|>."""
    image_suffix: Marks = ()
    row_end_id: int | None = None
    """After every row of an image's tokens but the last; None: rows follow each other."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int = 0
    positions: Literal["1d", "mrope"] = "1d"
    video_token_id: int | None = None
    """Placeholder id at positions of clips that are read whole; None: that of images."""
    tokens_per_second: float | None = None
    """M-RoPE: time positions per second of a clip; None: one per group of frames."""
    clip_times: Literal["sides", "whole", "fractional"] = "sides"
    """See `TextConventions`."""
    clip: ClipText = ClipText()
    sound_token_id: int | None = None
    """Placeholder id at positions of sounds; None: sounds are written as images are."""
    sound_prefix: Marks = ()
    sound_suffix: Marks = ()
    around_sounds: tuple[str, str] = ("", "")
    """See `TextConventions`."""
