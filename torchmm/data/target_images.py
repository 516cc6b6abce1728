"""Prepare the target images of a generator, from files to microbatches.

The noise and the time of an image depend only on seed, sample and epoch. They are the same for any
number of ranks, workers and microbatches, and after resuming. Noise has the size of the target, so
workers do not send it. The training process adds it (`TargetImagePreprocessor.add_noise`).

An extension provides the preprocessor with the entry "images" of the table "generators": a subclass
of `TargetImagePreprocessor` with the same arguments.

Shape legend: P patches of an image, V pixel values of a patch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from torchmm.common.extensions import require_entry
from torchmm.common.generated import GeneratedMeta, GeneratorInputs, GeneratorSpec

NoiseKey = tuple[object, ...]
"""Key of an image: source, sample, epoch and number within the sample."""


@dataclass(frozen=True)
class TargetImage:
    """Arrays of a target image or video."""

    meta: GeneratedMeta
    patches_PV: np.ndarray | None
    """(P, V), uint8. None if this rank does not decode the image."""
    time: float
    """Diffusion time."""
    context_end: int
    """Number of tokens of the sample before the image. The context ends with them."""
    counted: bool
    """Whether the image is included in the loss."""


class TargetImagePreprocessor(ABC):
    """Preprocessor of the target images of one generator.

    Args:
        spec: Sizes, noise and times of the images.
        seed: Seed of noise and times.
        max_pixels: Maximum number of pixels. Larger images are corrupt.
    """

    def __init__(self, spec: GeneratorSpec, seed: int, max_pixels: int) -> None:
        self.spec = spec
        self._seed = seed
        self._max_pixels = max_pixels

    @property
    @abstractmethod
    def values(self) -> int:
        """Number V of pixel values of a patch."""

    @abstractmethod
    def grid(self, data: bytes) -> tuple[int, int, int]:
        """Return the patch grid (frames, rows, columns) from the header of a file.

        Raises:
            CorruptSampleError: The file is not a supported image or has too many pixels.
        """

    @abstractmethod
    def decode_patches(self, data: bytes, frames: int) -> np.ndarray:
        """Return the pixels of an image or video: (P, V), uint8.

        Raises:
            CorruptSampleError: The pixels cannot be decoded.
        """

    @abstractmethod
    def time(self, key: NoiseKey) -> float:
        """Return the diffusion time of an image."""

    @abstractmethod
    def add_noise(self, inputs: GeneratorInputs, keys: Sequence[NoiseKey]) -> GeneratorInputs:
        """Return the inputs with the noise of the images whose pixels they have.

        Args:
            inputs: Inputs without noise.
            keys: Keys of all images.
        """

    def context(self, context_end: int) -> int:
        """Return the number of context tokens of an image after `context_end` tokens."""
        return min(context_end, self.spec.context_tokens)

    def decode(
        self, data: bytes, meta: GeneratedMeta, context_end: int, key: NoiseKey
    ) -> TargetImage:
        """Return an image with pixels and time.

        Raises:
            CorruptSampleError: The pixels cannot be decoded.
        """
        patches_PV = self.decode_patches(data, meta.grid_thw[0])
        return TargetImage(meta, patches_PV, self.time(key), context_end, counted=True)

    def without_pixels(self, meta: GeneratedMeta, context_end: int, key: NoiseKey) -> TargetImage:
        """Return an image that another rank decodes."""
        return TargetImage(meta, None, self.time(key), context_end, counted=True)

    def blank(self, meta: GeneratedMeta, key: NoiseKey) -> TargetImage:
        """Return an all-zero image of the same size that is not included in the loss."""
        patches_PV = np.zeros((meta.patches, self.values), np.uint8)
        return TargetImage(meta, patches_PV, self.time(key), meta.context, counted=False)


def make_target_preprocessor(
    spec: GeneratorSpec | None, seed: int, max_pixels: int
) -> TargetImagePreprocessor | None:
    """Return the preprocessor of a generator, or None if `spec` is None.

    Raises:
        ConfigError: The extension for generators is not installed.
    """
    if spec is None:
        return None
    entry = require_entry("generators", "images", "generation", "model.generator")
    preprocessor: TargetImagePreprocessor = entry.load()(spec, seed, max_pixels)
    return preprocessor


@dataclass
class TargetImageBuilder:
    """Target images of a microbatch under construction."""

    images: list[TargetImage] = field(default_factory=list)
    context_positions: list[np.ndarray] = field(default_factory=list)

    def append(self, image: TargetImage, sample_start: int) -> None:
        """Append an image of the sample whose first token has the index `sample_start`."""
        self.images.append(image)
        end = sample_start + image.context_end
        self.context_positions.append(np.arange(end - image.meta.context, end))

    def inputs(self, values: int, *, shared: bool) -> GeneratorInputs | None:
        """Return all images without noise, or None if there are none.

        Args:
            values: V.
            shared: Whether this rank decodes only some of the images.
        """
        if not self.images:
            return None
        patches = [np.zeros((0, values), np.uint8)]
        held: list[int] = []
        for number, image in enumerate(self.images):
            if image.patches_PV is not None:
                patches.append(image.patches_PV)
                held.append(number)
        return GeneratorInputs(
            patches_PV=torch.from_numpy(np.concatenate(patches)),
            noise_PV=torch.zeros(0, values),
            times=[t.time for t in self.images],
            grids_thw=[t.meta.grid_thw for t in self.images],
            context_positions_K=torch.from_numpy(np.concatenate(self.context_positions)),
            contexts=[t.meta.context for t in self.images],
            in_loss=[t.counted for t in self.images],
            local_images=held if shared else None,
        )
