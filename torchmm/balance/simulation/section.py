"""`[simulation]`: the cluster of a simulated step, and statistics instead of data.

`torchmm.balance.simulation.workload` samples microbatches with these statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from torchmm.recipe.section import Section

Range = list[int]
"""Minimum and maximum of a uniform integer."""
NO_SIZE: list = []
"""Value of a contradiction whose key is missing or has several values."""


def as_range(value: Any) -> Any:
    """Convert a number n to the range [n, n]."""
    return [value, value] if type(value) is int else value


class SimulatedSize(Section):
    """Size of images."""

    patches: Range | None = None
    """Number of patches per image, as a number or [min, max]."""
    tokens: int | None = Field(default=None, ge=0)
    """Number of LLM tokens per image, if `patches` is a number. If None, it is `patches` /
    `patches_per_token`."""
    rows: Range | None = None
    """Number of patch rows, as a number or [min, max], instead of `patches`."""
    columns: Range | None = None
    """Number of patch columns, as a number or [min, max], independent of the rows."""

    _numbers = field_validator("patches", "rows", "columns", mode="before")(as_range)


class SimulatedImageSize(SimulatedSize):
    """Image size with a sampling weight."""

    weight: float = Field(default=1.0, gt=0)
    """Sampling weight of this size."""


class SimulatedImages(SimulatedSize):
    """Size of the images of one encoder. NAME is the encoder name."""

    patches_per_token: int = Field(default=1, ge=1)
    """Number of patches per LLM token. Rows and columns are multiples of its square root."""
    sizes: list[SimulatedImageSize] = Field(default=[])
    """Several sizes with sampling weights, instead of one size."""


class SimulatedGrid(Section):
    """Size of target images or videos with a sampling weight."""

    weight: float = Field(default=1.0, gt=0)
    """Sampling weight of this size."""
    rows: Range
    """Number of patch rows of a frame, as a number or [min, max]."""
    columns: Range
    """Number of patch columns of a frame, as a number or [min, max], independent of the rows."""

    _numbers = field_validator("rows", "columns", mode="before")(as_range)


class SimulatedGeneration(Section):
    """Size of the target images or videos of the generator."""

    rows: Range | None = None
    """Number of patch rows of a frame, as a number or [min, max]."""
    columns: Range | None = None
    """Number of patch columns of a frame, as a number or [min, max], independent of the rows."""
    sizes: list[SimulatedGrid] = Field(default=[])
    """Several sizes with sampling weights, instead of one size."""
    frames: Range = Field(default=[1, 1])
    """Number of latent frames of a video, as [min, max]. 1 is an image."""
    frames_per_sequence: int | None = Field(default=None, ge=1)
    """Maximum number of frames of all videos of a sequence. If None, there is no limit."""
    context_tokens: int = Field(default=128, ge=1)
    """Maximum number of LLM tokens that condition an image or video."""

    _numbers = field_validator("rows", "columns", mode="before")(as_range)


class SimulatedSequences(Section):
    """Type of packed sequences. Add several [[simulation.sequences]] tables for a mixture."""

    weight: float = Field(default=1.0, gt=0)
    """Sampling weight of this type."""
    samples: int = Field(default=1, ge=1)
    """Number of samples of similar length in a sequence. Attention does not cross samples."""
    encoder: str | None = None
    """Encoder of the images. If None, the only one in [simulation.images]."""
    images: Range = Field(default=[0, 0])
    """Number of input images per sequence, as [min, max]."""
    generated: Range = Field(default=[0, 0])
    """Number of target images or videos per sequence, as [min, max]."""
    tokens: Range | None = None
    """Number of tokens per sequence, as [min, max]. Image tokens are included, and the remaining
    tokens are text. If None, it is `training.sequence_length`."""


class SimulationConfig(Section):
    """Device and data statistics of simulated steps.

    A recipe with [[simulation.sequences]] needs no [data] and no tokenizer. See
    docs/guides/simulation.md.
    """

    device: str = "h100"
    """Device name, such as "h100". `torchmm/costs/devices.py` lists all names."""
    gpus: int = Field(default=1, ge=1)
    """Number of devices."""
    seed: int = Field(default=0, ge=0)
    """Seed of the sampled microbatches."""
    images: dict[str, SimulatedImages] = Field(default={})
    """Image sizes by encoder."""
    generated: SimulatedGeneration | None = None
    """Sizes of target images or videos."""
    sequences: list[SimulatedSequences] = Field(default=[])
    """Mixture of packed sequences. If empty, sequences have `training.sequence_length` tokens of
    text."""

    @property
    def describes_samples(self) -> bool:
        """Return True if the section has a mixture of sequences."""
        return bool(self.sequences)


class ConfigConflict(NamedTuple):
    """Inconsistent values of the section."""

    key: str
    value: Any
    text: str
    """Problem, and how to fix it."""


class SizeRanges(NamedTuple):
    """Ranges of rows and columns, which are multiples of `step`."""

    rows: Range
    columns: Range
    step: int = 1

    @property
    def max_patches(self) -> int:
        """Number of patches of the largest size."""
        return self.rows[1] * self.columns[1]

    @property
    def varies(self) -> bool:
        """True if rows or columns vary."""
        return self.rows[0] < self.rows[1] or self.columns[0] < self.columns[1]


def image_sizes(images: SimulatedImages) -> list[SimulatedSize]:
    """Return the image sizes of an encoder."""
    return list(images.sizes) or [images]


def generated_sizes(generated: SimulatedGeneration) -> list[SimulatedGrid | SimulatedGeneration]:
    """Return the sizes of generated images or videos."""
    return [*generated.sizes] or [generated]


def size_ranges(
    size: SimulatedSize | SimulatedGrid | SimulatedGeneration, step: int = 1
) -> SizeRanges:
    """Return the ranges of rows and columns. A size with only `patches` has one row."""
    if isinstance(size, SimulatedSize) and size.patches is not None:
        return SizeRanges([1, 1], size.patches)
    assert size.rows is not None and size.columns is not None
    return SizeRanges(size.rows, size.columns, step)


def size_step(patches_per_token: int) -> int:
    """Return the divisor of rows and columns."""
    return isqrt(patches_per_token)


def image_tokens(size: SimulatedSize, patches: int, patches_per_token: int) -> int:
    """Return the number of LLM tokens of an image."""
    return size.tokens if size.tokens is not None else patches // patches_per_token


def max_image_tokens(images: SimulatedImages) -> int:
    """Return the number of LLM tokens of the largest image of an encoder."""
    patches_per_token = images.patches_per_token
    sizes = image_sizes(images)
    return max(
        image_tokens(s, size_ranges(s, size_step(patches_per_token)).max_patches, patches_per_token)
        for s in sizes
    )


def sizes_vary(images: SimulatedImages) -> bool:
    """Return True if the images of an encoder have different numbers of patches."""
    sides = [size_ranges(size) for size in image_sizes(images)]
    return len({ranges.max_patches for ranges in sides}) > 1 or any(
        ranges.varies for ranges in sides
    )


def sequence_encoder(config: SimulationConfig, kind: SimulatedSequences) -> str | None:
    """Return the encoder for the images of a type of sequences, or None if it is ambiguous."""
    return kind.encoder or (next(iter(config.images)) if len(config.images) == 1 else None)


def find_conflicts(config: SimulationConfig, sequence_length: int) -> Iterator[ConfigConflict]:
    """Yield the problems of the section for sequences of `sequence_length` tokens."""
    wrong = list(_size_conflicts(config))
    yield from wrong
    if wrong:
        return
    for index, kind in enumerate(config.sequences):
        key = f"simulation.sequences[{index}]"
        ranges = {
            f"{key}.images": kind.images,
            f"{key}.generated": kind.generated,
            f"{key}.tokens": kind.tokens or [1, 1],
        }
        wrong = list(_invalid_ranges(ranges))
        yield from wrong
        if not wrong:
            yield from _sequence_conflicts(config, kind, key, sequence_length)


def _size_conflicts(config: SimulationConfig) -> Iterator[ConfigConflict]:
    """Yield the problems of sizes of input images and of target images."""
    for name, images in config.images.items():
        key = f"simulation.images.{name}"
        common_size = (images.patches, images.tokens, images.rows, images.columns)
        if images.sizes and any(value is not None for value in common_size):
            yield ConfigConflict(
                f"{key}.sizes", NO_SIZE, "cannot be combined with a size; remove one of them"
            )
            continue
        step = size_step(images.patches_per_token)
        for index, size in enumerate(image_sizes(images)):
            size_key = f"{key}.sizes[{index}]" if images.sizes else key
            yield from _image_size_conflicts(size_key, size, step)
            if size.patches is None and step**2 != images.patches_per_token:
                text = "is not a square number, so the multiples of rows and columns are undefined"
                yield ConfigConflict(f"{key}.patches_per_token", images.patches_per_token, text)
    generated = config.generated
    if generated is None:
        return
    key = "simulation.generated"
    yield from _invalid_ranges({f"{key}.frames": generated.frames}, min_value=1)
    if generated.sizes and (generated.rows is not None or generated.columns is not None):
        yield ConfigConflict(
            f"{key}.sizes", NO_SIZE, "cannot be combined with a size; remove one of them"
        )
        return
    for index, grid in enumerate(generated_sizes(generated)):
        size_key = f"{key}.sizes[{index}]" if generated.sizes else key
        yield from _range_conflicts(size_key, {"rows": grid.rows, "columns": grid.columns})


def _image_size_conflicts(key: str, size: SimulatedSize, step: int) -> Iterator[ConfigConflict]:
    """Yield the problems of a size of input images."""
    sides = {"rows": size.rows, "columns": size.columns}
    set_names = [name for name, side in sides.items() if side is not None]
    if size.patches is None:
        yield from _range_conflicts(key, sides, step, alternative=", or patches")
    elif set_names:
        text = f"cannot be combined with patches = {size.patches}; remove one of them"
        yield ConfigConflict(f"{key}.{set_names[0]}", sides[set_names[0]], text)
    else:
        yield from _range_conflicts(key, {"patches": size.patches})
    if size.tokens is not None and len(set(size.patches or ())) != 1:
        text = "applies only to images with one number of patches; set patches_per_token instead"
        yield ConfigConflict(f"{key}.tokens", size.tokens, text)


def _range_conflicts(
    key: str, sides: Mapping[str, Range | None], step: int = 1, alternative: str = ""
) -> Iterator[ConfigConflict]:
    """Yield the problems of ranges of patches, rows or columns."""
    if missing := [name for name, side in sides.items() if side is None]:
        text = f"is required because sizes are unknown; add {' and '.join(missing)}{alternative}"
        yield ConfigConflict(key, NO_SIZE, text)
        return
    for name, side in sides.items():
        numbers = side or []
        wrong = list(_invalid_ranges({f"{key}.{name}": numbers}, min_value=1))
        yield from wrong
        if not wrong and any(number % step for number in numbers):
            text = f"must be multiples of {step}, the square root of patches_per_token"
            yield ConfigConflict(f"{key}.{name}", side, text)


def _invalid_ranges(ranges: dict[str, Range], min_value: int = 0) -> Iterator[ConfigConflict]:
    for key, numbers in ranges.items():
        if len(numbers) != 2 or not min_value <= numbers[0] <= numbers[1]:
            text = f"must be [minimum, maximum], with a minimum of at least {min_value}"
            yield ConfigConflict(key, numbers, text)


def _sequence_conflicts(
    config: SimulationConfig, kind: SimulatedSequences, key: str, sequence_length: int
) -> Iterator[ConfigConflict]:
    encoder = sequence_encoder(config, kind)
    size = config.images.get(encoder) if encoder else None
    shortest, longest = kind.tokens or [sequence_length, sequence_length]
    if kind.images[1] and size is None:
        text = f"have unknown sizes; add [simulation.images.{encoder or 'NAME'}]"
        if encoder is None and config.images:
            text = f"encoder is ambiguous; set it to one of {', '.join(config.images)}"
        yield ConfigConflict(f"{key}.images", kind.images, text)
    elif size is not None and kind.images[1] * max_image_tokens(size) > shortest:
        needed = kind.images[1] * max_image_tokens(size)
        text = f"require up to {needed} tokens, more than the {shortest} of a sequence; lower them"
        yield ConfigConflict(f"{key}.images", kind.images, text)
    if longest > sequence_length or shortest < kind.samples:
        text = f"must be between samples = {kind.samples} and sequence_length = {sequence_length}"
        yield ConfigConflict(f"{key}.tokens", [shortest, longest], text)
    generated = config.generated
    if generated is None:
        if kind.generated[1]:
            text = "have unknown sizes; add [simulation.generated]"
            yield ConfigConflict(f"{key}.generated", kind.generated, text)
        return
    frames = kind.generated[1] * generated.frames[0]
    max_frames = generated.frames_per_sequence
    if max_frames is not None and frames > max_frames:
        text = (
            f"have at least {frames} frames, but frames_per_sequence = {max_frames}; lower the "
            "frames or raise the limit"
        )
        yield ConfigConflict(f"{key}.generated", kind.generated, text)
