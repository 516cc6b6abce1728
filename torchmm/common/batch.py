"""Types that data, models and planners share: samples, microbatches, and requirements of models.

`torchmm.data` creates these types and `torchmm.models` uses them. Neither imports the other. A
microbatch is *packed*: samples are concatenated to one sequence of T tokens, and `cu_seqlens` has
the start of each sample. Attention does not cross samples. Padding is the last segment of a
sequence, and has no targets:

    cu_seqlens    0           5               11      14     16 = T
    tokens        [ sample 0  | sample 1      | sample 2 | pad ]
    encoders      {"vision": pixels of all images, positions_K of their tokens}

A dense (B, S) layout would need an S x S mask, and would hide attention across samples
(`torchmm.models.layers.attention`).

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
from torchmm.common.generated import GeneratedMeta, GeneratorInputs, local_pixel_rows
from torchmm.common.module_names import GENERATOR
from torchmm.common.tiles import TileRegion, TileSpec

IGNORE_TARGET = -100
"""Target value of positions that are not included in the loss."""


@dataclass(frozen=True)
class ImageMeta:
    """Sizes of an image for planning, from its header, without decoding it.

    Audio is an "image" with one row, whose patches are the positions in the encoder. A video is one
    image, or one image per frame for encoders of single frames.
    """

    width_px: int
    """Width in pixels. 0 for audio."""
    height_px: int
    patches: int
    """Number of patches in the encoder, after resizing."""
    tokens: int
    """Number of placeholder tokens in the LLM sequence, without marker tokens. For a tile of an
    interpolated image, it includes the tokens shared with adjacent tiles."""
    frames: int = 1
    """Number of frames of a video, or of groups of frames if a patch spans several. All frames have
    the same number of patches."""
    encoder: str | None = None
    """Name of the encoder, if a model has several. None: the encoder of the sample."""
    duration_ms: int = 0
    """Duration of audio or video. For a single video frame, that of the interval it represents."""
    frame_pixels: int = 0
    """Maximum number of pixels of a video frame after resizing. 0: the limit of images."""
    rows: int = 0
    """Number of patch rows, if the record limits the size (`MediaOptions`). 0: no such limit."""


def cuda_graph_image_count(count: int) -> int:
    """Return the number of images that a CUDA graph for `count` images has, at most 1.5 x `count`.

    These are 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, so that a run has few graphs.
    """
    upper_power = 1 << max(0, count - 1).bit_length()
    return (
        upper_power * 3 // 4 if upper_power >= 4 and count <= upper_power * 3 // 4 else upper_power
    )


@dataclass(frozen=True)
class SampleMeta:
    """Source and sizes of one sample.

    `index` is the position in the source, so (source, index) identifies a sample.
    """

    source: str
    index: int
    tokens: int
    """Length in the LLM sequence: text, markers and image placeholders."""
    images: tuple[ImageMeta, ...] = ()
    encoder: str | None = None
    """Name of the encoder of the images. None for a sample without images, or if each image has an
    encoder name."""
    generated: tuple[GeneratedMeta, ...] = ()
    """Images and videos that the generator is trained to produce. They have no tokens."""
    chosen_tokens: int = 0
    """Number of tokens of the first segment, if the sample is a preference pair. Its segments are
    the prompt with the chosen answer, and the prompt with the rejected answer. 0: one segment."""

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each segment, which is packed and attended separately."""
        if not self.chosen_tokens:
            return (self.tokens,)
        return self.chosen_tokens, self.tokens - self.chosen_tokens

    @property
    def tiles(self) -> int:
        """Number of images and tiles, without audio, videos and video frames."""
        return sum(not image.duration_ms for image in self.images)

    @property
    def patches(self) -> int:
        """Number of patches of all images, audio inputs and generated images."""
        return sum(i.patches for i in self.images) + sum(g.patches for g in self.generated)

    def images_of_encoder(self, encoder: str) -> list[ImageMeta]:
        """Return the images of an encoder, in order."""
        return [i for i in self.images if (i.encoder or self.encoder) == encoder]


@dataclass(frozen=True)
class MicrobatchMeta:
    """Samples of one microbatch, in packing order. The planner needs no other input."""

    samples: tuple[SampleMeta, ...]
    tokens: int
    """T, including padding."""
    balanced: bool = False
    """Whether images are those that this rank encodes or generates for all data-parallel ranks. All
    ranks then run all encoders and the generator, also without images."""
    received_tokens: tuple[tuple[str, int], ...] = ()
    """Encoders and their tokens in the packed sequences, if `balanced`. The ranks that encode the
    images send the features."""

    def with_images(
        self, images: Sequence[ImageMeta], generated: Sequence[GeneratedMeta] = ()
    ) -> MicrobatchMeta:
        """Return the same tokens with images of any rank (`balanced`).

        A sample without tokens lists the images, as most belong to samples of other ranks.
        """
        local_samples = [
            replace(s, images=(), generated=()) if s.images or s.generated else s
            for s in self.samples
        ]
        image_sample = []
        if images or generated:
            image_sample = [SampleMeta("", 0, 0, tuple(images), generated=tuple(generated))]
        received_tokens: Counter[str] = Counter()
        for sample in self.samples:
            for image in sample.images:
                received_tokens[image.encoder or sample.encoder or ""] += image.tokens
        return MicrobatchMeta(
            (*local_samples, *image_sample),
            self.tokens,
            balanced=True,
            received_tokens=tuple(sorted(received_tokens.items())),
        )

    def images_of_encoder(self, encoder: str) -> list[ImageMeta]:
        """Return the images of an encoder, in order."""
        return [image for sample in self.samples for image in sample.images_of_encoder(encoder)]

    def patches(self, encoder: str) -> list[int]:
        """Return the number of patches of each image of an encoder, in order."""
        return [image.patches for image in self.images_of_encoder(encoder)]

    @property
    def generated(self) -> list[GeneratedMeta]:
        """Images and videos that the generator is trained to produce, in order."""
        return [image for sample in self.samples for image in sample.generated]

    def module_images(self, module: str) -> Sequence[ImageMeta | GeneratedMeta]:
        """Return the images of an encoder, or the generated images of the generator, in order."""
        return self.generated if module == GENERATOR else self.images_of_encoder(module)

    def module_image_count(self, module: str) -> int:
        """Return the number of images of an encoder or of the generator."""
        return len(self.module_images(module))

    @property
    def used_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(s.tokens for s in self.samples)

    @property
    def image_count(self) -> int:
        """Number of encoder images in the microbatch."""
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
    def from_samples(cls, samples: Sequence[SampleMeta], modules: Sequence[str]) -> ImageSizes:
        """Return the sizes of the images of samples.

        Args:
            modules: Names of all encoders. Includes the generator to include generated images.
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
    def from_groups(
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
        for members in np.split(order_N, firsts) if len(order_N) else []:
            part = read(int(groups_N[members[0]]), members)
            counts_N[members] = part.counts_N
            starts_N[members] = total + np.cumsum(part.counts_N) - part.counts_N
            parts.append(part.sizes_I4)
            total += len(part.sizes_I4)
        return cls(counts_N, np.concatenate(parts)[concatenate_ranges(starts_N, counts_N)])

    def append_per_sample(self, other: ImageSizes) -> ImageSizes:
        """Return the images of each sample, followed by `other` of the same sample."""
        counts_2N = np.stack([self.counts_N, other.counts_N])
        starts_2N = np.cumsum(counts_2N).reshape(counts_2N.shape) - counts_2N
        rows_I = concatenate_ranges(starts_2N.T.flatten(), counts_2N.T.flatten())
        return ImageSizes(counts_2N.sum(0), np.concatenate([self.sizes_I4, other.sizes_I4])[rows_I])

    def select(self, samples: NDArray[np.int64]) -> ImageSizes:
        """Return the sizes of the images of some samples, in their order."""
        starts_N = np.cumsum(self.counts_N) - self.counts_N
        counts = self.counts_N[samples]
        return ImageSizes(counts, self.sizes_I4[concatenate_ranges(starts_N[samples], counts)])


class Imbalance(NamedTuple):
    """Work of the slowest data-parallel rank divided by the mean work. 1 if all are equal.

    Ranks that synchronize in each layer are compared in each microbatch. Their work is then summed
    over the microbatches of a step.
    """

    before: float
    """Without balancing."""
    after: float
    """As executed."""

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics of a step record."""
        return {f"{name}_imbalance": self.after, f"{name}_imbalance_before": self.before}


class SequenceAssignment(NamedTuple):
    """New assignment of the sequences of a global batch."""

    places: Sequence[Sequence[Sequence[int]]]
    """Indices of the sequences by data-parallel rank and microbatch."""
    imbalance: Imbalance | None = None


class ImageAssignment(NamedTuple):
    """Ranks that encode or generate the images of one microbatch of all ranks.

    Work is summed over modules, in any unit.
    """

    owners_I: NDArray[np.int64]
    """Rank of each image."""
    before: float
    """Work of the slowest rank if each rank encodes the images of its samples."""
    after: float
    """Work of the slowest rank."""
    mean: float
    """Mean work of all ranks."""


def concatenate_ranges(
    starts_N: NDArray[np.int64], counts_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the concatenation of the ranges [start, start + count)."""
    shifts_N = starts_N - (np.cumsum(counts_N) - counts_N)
    return np.arange(int(counts_N.sum())) + np.repeat(shifts_N, counts_N)


@dataclass
class EncoderInputs:
    """Encoder inputs of a microbatch: images, and positions of their output tokens.

    An encoder accepts one format of pixels, see `ImageSpec.inputs`: "fixed" has the shape (N, C,
    height, width), "patches" has (P, D), sorted by image. A patch of audio is the mel bins of a few
    frames. Sizes are Python integers, so kernel launches need no synchronization.

    Sizes and positions are those of all images. A rank can have the pixels of some images, because
    it decodes only its share of the images of its stages
    (`torchmm.common.sequence_slices.DecodeAssignment`).
    """

    pixels: Tensor
    """Pixels of the images in `local_images`: (N, C, height, width) or (P, D). float32, or uint8
    until they are needed (`values`)."""
    grids_thw: list[tuple[int, int, int]]
    """(frames, rows, columns) of patches of each image."""
    positions_K: Tensor
    """Position in the T tokens of the microbatch of each output token, sorted by image, int64."""
    tile_regions: list[TileRegion] | None = None
    """Output tokens of each image, and line ends. None: all tokens, without line ends."""
    patches_per_token: int | None = None
    """Number of consecutive audio patches per output token. Remaining patches have no token. None:
    all patches of an image become tokens."""
    local_images: list[int] | None = None
    """Images with pixels on this rank, ascending. None: all images, on all ranks."""
    byte_values: ByteValues | None = None
    """Values of uint8 pixels."""
    undecodable: list[int] = field(default_factory=list)
    """Images that could not be decoded, ascending. Encoders receive zeros instead."""

    def values(self) -> EncoderInputs:
        """Return float32 pixels, for encoders."""
        if self.pixels.dtype != torch.uint8:
            return self
        assert self.byte_values is not None
        pixels = self.byte_values.look_up(self.pixels)
        for image in self.undecodable:
            rows, _ = local_pixel_rows(self.pixel_rows, self.local_images, range(image, image + 1))
            pixels[rows] = 0
        return replace(self, pixels=pixels, byte_values=None)

    def without_pixels(self) -> EncoderInputs:
        """Return the same sizes and positions without pixels."""
        return replace(self, pixels=self.pixels[:0], local_images=[])

    @property
    def pixel_rows(self) -> list[int]:
        """Number of rows in `pixels` of each image, also of images without pixels on this rank."""
        if self.pixels.ndim == 2:
            return [prod(grid) for grid in self.grids_thw]
        return [1] * len(self.grids_thw)

    def select(self, images: range) -> EncoderInputs:
        """Return the inputs of consecutive images. Tensors are views.

        Raises:
            ValueError: The range is empty or invalid.
        """
        if not 0 <= images.start < images.stop <= len(self.grids_thw) or images.step != 1:
            raise ValueError(
                f"images {images} are out of range; the batch has {len(self.grids_thw)} images"
            )
        patches = [prod(grid) for grid in self.grids_thw]
        start = sum(patches[: images.start])
        stop = sum(patches[: images.stop])
        selected = slice(images.start, images.stop)
        if self.tile_regions is not None:
            token_slice = _token_slice([region.tokens for region in self.tile_regions], selected)
        elif self.patches_per_token is not None:
            token_slice = _token_slice(
                [count // self.patches_per_token for count in patches], selected
            )
        else:
            # All images of an encoder have the same number of patches per output token.
            tokens = len(self.positions_K)
            total = sum(patches)
            token_slice = slice(start * tokens // total, stop * tokens // total)
        rows, local_images = local_pixel_rows(self.pixel_rows, self.local_images, images)
        return EncoderInputs(
            self.pixels[rows],
            self.grids_thw[selected],
            self.positions_K[token_slice],
            self.tile_regions and self.tile_regions[selected],
            self.patches_per_token,
            local_images,
            self.byte_values,
            [image - images.start for image in self.undecodable if image in images],
        )


def _token_slice(counts: list[int], selected: slice) -> slice:
    """Return the slice of the tokens of some images."""
    first = sum(counts[: selected.start])
    return slice(first, first + sum(counts[selected]))


def split_evenly(count: int, parts: int) -> list[range]:
    """Split `count` items into `parts` consecutive groups, with larger groups first.

    Raises:
        ValueError: A group would be empty.
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
    """Packed microbatch of one data-parallel rank."""

    input_ids_T: Tensor
    """Token IDs, int64. Image positions have a placeholder, and receive encoder outputs."""
    targets_T: Tensor
    """Next token of each position, int64 (already shifted). IGNORE_TARGET if not in the loss."""
    position_ids: Tensor
    """int64, (T,), starting at 0 in each sample, or (3, T) for models with M-RoPE."""
    cu_seqlens: list[int]
    """Start of each packed segment, then T: [0, ..., T]. Padding is a separate segment."""
    encoders: dict[str, EncoderInputs]
    """Inputs by encoder name. Encoders without images in this microbatch have no entry."""
    meta: MicrobatchMeta
    generator: GeneratorInputs | None = None
    """Generator inputs, or None without generated images."""
    sources_T: Tensor | None = None
    """Index of the data source of each token, int64. None if the loss per source is not needed."""
    answers_T: Tensor | None = None
    """Index of the answer of each token, int64: 2 n for the chosen and 2 n + 1 for the rejected
    answer of pair n, and -1 for padding. None if the samples are not preference pairs."""
    reference_bits_A: Tensor | None = None
    """Log-probability of each answer under the reference model. None without a reference, and on
    ranks that do not compute the loss. The dtype is int32, with the bits of float32, because mixed
    precision casts floating-point inputs of a module."""
    target_positions_L: Tensor = None  # type: ignore[assignment]
    """Positions that are included in the loss, int64. If None, they are computed on the CPU.

    A field, because FSDP passes a copy of all fields to a forward, where computing them would
    synchronize with the device. Set it to None when replacing `targets_T`.
    """

    def __post_init__(self) -> None:
        if self.target_positions_L is None:
            self.target_positions_L = (self.targets_T != IGNORE_TARGET).nonzero()[:, 0]

    @property
    def task_meta(self) -> MicrobatchMeta:
        """Task sizes of this rank, for plans and simulations."""
        return self.meta

    @property
    def target_count(self) -> int:
        """Number of positions in the loss."""
        return self.target_positions_L.numel()

    @property
    def loss_count(self) -> int:
        """Number of terms of the text loss: targets, or preference pairs with targets."""
        if self.answers_T is None:
            return self.target_count
        return (self.answers_T[self.target_positions_L] // 2).unique().numel()

    @property
    def generated_count(self) -> int:
        """Number of generated images in the loss."""
        return self.generator.loss_count if self.generator else 0

    def values(self) -> Microbatch:
        """Return the microbatch with float32 pixels."""
        encoders = {name: inputs.values() for name, inputs in self.encoders.items()}
        return replace(
            self, encoders=encoders, generator=self.generator and self.generator.values()
        )

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Microbatch:
        """Return a copy with all tensors on `device`. Metadata is not copied."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Microbatch:
        """Return a copy in pinned memory. The loader calls it on machines with CUDA."""
        return self._map(lambda x: x.pin_memory() if x.device.type == "cpu" else x)

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


MarkerText = tuple[int | str, ...]
"""Text before or after an image: token IDs, or plain text without special tokens."""


@dataclass(frozen=True)
class ClipText:
    """Text of videos whose frames, or groups of frames, are separate images."""

    group: str = "<{mean_s:.1f} seconds>{frames}"
    """Text of a frame or group with its time. Fields: first_s (time of the first frame), whole_s
    (the same, truncated to seconds), mean_s (mean time of the first and last frame)."""
    prefix: MarkerText = ()
    """Text before the video."""
    suffix: MarkerText = ()


@dataclass(frozen=True)
class AudioChunks:
    """Chunks of audio that the encoder processes separately."""

    samples: int
    patches: int
    """Number of patches of a complete chunk. The last chunk can have fewer frames."""
    padding: Literal["patch", "silent", "heard"]
    """Padding of the last chunk with silence: to a complete patch ("patch"), or to its full length.
    The encoder ignores the additional patches ("silent") or processes them ("heard")."""
    overlap: int = 0
    """Frames of the next patch that each patch includes, because its position depends on them."""


@dataclass(frozen=True)
class ImageSpec:
    """Requirements of an encoder for its images or audio.

    `torchmm.models` creates it, and `torchmm.data` prepares inputs accordingly.
    """

    encoder: str
    inputs: Literal["fixed", "patches"]
    processor_class: str
    """Name of the Hugging Face image processor or feature extractor, such as
    "CLIPImageProcessor"."""
    processor: dict[str, Any]
    """Settings of the processor (preprocessor_config.json)."""
    patch_size_px: int
    """Size of a patch in pixels. For audio, in samples."""
    merge: int = 1
    """Number of patch rows and columns per output token. For audio, a token has merge**2 x `pooled`
    consecutive patches."""
    drop_class_token: bool = True
    """Whether the class token is not passed to the LLM. For inputs of a fixed size."""
    extra_tokens: int = 0
    """Number of output tokens besides patches (the class token). For inputs of a fixed size."""
    modality: Literal["image", "audio"] = "image"
    """Modality of the encoder."""
    max_patches: int = 0
    """Maximum number of patches of audio. Samples with longer audio are skipped."""
    pooled: int = 1
    """Number of consecutive audio patches that the encoder averages into one. Remaining patches are
    dropped."""
    sound_chunks: AudioChunks | None = None
    """Chunks of audio. None: audio is processed at once, to the end of the last patch."""
    tiles: TileSpec | None = None
    """Tiling of images. None: no tiling. Video frames are not tiled."""
    splits_clips: bool = False
    """If patches span several frames: whether each group of frames is a separate image with its
    time. Otherwise, a video is one image."""
    ends_lines: bool = False
    """Whether `EncoderInputs.tile_regions` selects the tokens of each tile and contains line
    ends."""

    @property
    def patches_per_token(self) -> int:
        """Number of patches per output token."""
        return self.pooled * self.merge**2


@dataclass(frozen=True)
class BoxFormat:
    """Format of boxes and points in the text of a model."""

    coordinates: Literal["norm1000", "pixels"] = "norm1000"
    """Range of coordinates: 0 to 1000 for each side, or pixels of the resized image."""
    name_text: str = "{}"
    """Text of the name of an object. "{}" is replaced by the name."""
    box_text: str = "{}"
    """Text of a box. "{}" is replaced by the coordinates."""
    has_pairs: bool = False
    """Whether coordinates are written as "(x1,y1),(x2,y2)" instead of "[x1, y1, x2, y2]"."""
    tokens: tuple[str, ...] = ()
    """Special tokens for boxes, which may occur in data."""

    def write(self, box: list[int]) -> str:
        """Return the text of a box or point."""
        pairs = zip(box[::2], box[1::2], strict=True)
        text = ",".join(f"({x},{y})" for x, y in pairs) if self.has_pairs else str(box)
        return self.box_text.format(text)


@dataclass(frozen=True)
class TextSpec:
    """Requirements of the LLM for its text.

    `torchmm.models` creates it, and `torchmm.data` prepares text accordingly.
    """

    vocab_size: int
    image_token_id: int | None
    """Placeholder ID at image positions. Its embedding is not used."""
    image_prefix: MarkerText = ()
    """Text before each image, such as the ID of <|vision_start|>."""
    image_suffix: MarkerText = ()
    row_end_id: int | None = None
    """Token after each row of image tokens except the last. None: no token."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int = 0
    positions: Literal["1d", "mrope"] = "1d"
    video_token_id: int | None = None
    """Placeholder ID at positions of videos that are one image. None: that of images."""
    tokens_per_second: float | None = None
    """M-RoPE: time positions per second of video. None: one position per group of frames."""
    clip_times: Literal["sides", "whole", "fractional"] = "sides"
    """See `TextConventions`."""
    clip: ClipText = ClipText()
    sound_token_id: int | None = None
    """Placeholder ID at positions of audio. None: audio uses the text of images."""
    sound_prefix: MarkerText = ()
    sound_suffix: MarkerText = ()
    around_sounds: tuple[str, str] = ("", "")
    """See `TextConventions`."""
    audio_chunk_tokens: int | None = None
    """See `TextConventions`."""
    boxes: BoxFormat | None = None
    """Format of boxes. None: records with boxes are rejected."""
