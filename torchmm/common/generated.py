"""What data, models and planners share about images and clips that a generator has to draw.

A sample may end in, or contain, an image that is not read but drawn: the *generated* image. It
takes no place in the LLM's sequence. What is drawn depends on the *context*: the LLM's hidden
states of the sample's tokens before it. Training is flow matching (Lipman et al., arXiv 2210.02747,
with the straight paths of arXiv 2209.03003): the path between the image x and noise e is
(1 - t) x + t e, and the generator learns the velocity e - x.

Noise and time belong to the sample and come with the data, so that losses do not depend on how
the work is divided among ranks, microbatches and stages.

Shape legend: P patches of all generated images, V values of a patch, N images, T tokens of the
microbatch, K context tokens of all images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from torchmm.common.dtypes import ByteValues

DRAWN = ByteValues(np.arange(256, dtype=np.float32)[None] / np.float32(127.5) - np.float32(1))
"""Pixels in [-1, 1]."""


@dataclass(frozen=True)
class GeneratedMeta:
    """What planning needs to know of one generated image or clip."""

    grid_thw: tuple[int, int, int]
    """Patches as (frames, rows, columns); an image has one frame."""
    context: int
    """Tokens of the LLM it depends on."""

    @property
    def patches(self) -> int:
        """Patches the generator processes."""
        return prod(self.grid_thw)


DUMMY = GeneratedMeta((1, 1, 1), 1)
"""The smallest image. It stands in for the images of a microbatch without any."""


@dataclass(frozen=True)
class GeneratorSpec:
    """Sizes, noise and times of the images that a generator is trained on.

    `torchmm.models` creates it, and `torchmm.data` prepares images accordingly.
    """

    size_px: int
    """Rows and columns of pixels of every frame."""
    patch_size_px: int
    frames: int = 1
    """Most frames of a clip; 1: only images."""
    context_tokens: int = 128
    """Most tokens an image may depend on: those directly before it."""
    time_sampling: str = "logit_normal"
    """Distribution of times: "uniform", or "logit_normal" (arXiv 2403.03206, section 3.1)."""
    latent_values: int = 0
    """Latents of a patch, where these are drawn; 0: pixels are."""
    latent_noise: int = 0
    """Random numbers that the latents of a patch are drawn with; 0: they are means."""

    def grid(self, frames: int) -> tuple[int, int, int]:
        """Patches of an image, or of a clip with this many frames."""
        side = self.size_px // self.patch_size_px
        return min(frames, self.frames), side, side


@dataclass
class GeneratorInputs:
    """The generator's share of a microbatch, image after image."""

    patches_PV: Tensor
    """Pixels; V = channels x rows x columns of a patch, in this order. float32 in [-1, 1], or uint8
    as long as nobody reads them (`values`)."""
    noise_PV: Tensor
    """float32, standard normal. Where latents are drawn from distributions, twice as wide: behind
    the noise that the generator learns to remove stands what they are drawn with."""
    times: list[float]
    """Time of each image, between 0 (no noise) and 1 (nothing but noise)."""
    grids_thw: list[tuple[int, int, int]]
    context_positions_K: Tensor
    """int64: position in the microbatch's T tokens of each context token."""
    contexts: list[int]
    """Context tokens of each image."""
    counted: list[bool]
    """Whether an image counts in the loss: not if it could not be decoded."""
    held: list[int] | None = None
    """Images whose pixels and noise are here, ascending; None: those of all, on every rank that
    draws any."""
    latent_values: int = 0
    """Of a patch that is drawn, where that is latents, which pixels become; 0: pixels are drawn."""
    encoded: bool = False
    """Whether `patches_PV` are such latents already."""

    @property
    def drawn_noise_PV(self) -> Tensor:
        """Noise of what is drawn."""
        return self.noise_PV[:, : self.latent_values] if self.latent_values else self.noise_PV

    @property
    def latent_noise_PV(self) -> Tensor | None:
        """What latents are drawn with; None: they are means."""
        other = self.noise_PV[:, self.latent_values :] if self.latent_values else None
        return other if other is not None and other.shape[1] else None

    def values(self) -> GeneratorInputs:
        """With float32 pixels, for generators; those of images that do not count are 0."""
        if self.patches_PV.dtype != torch.uint8:
            return self
        found = DRAWN.look_up(self.patches_PV)
        for image, counted in enumerate(self.counted):
            if not counted:
                rows, _ = held_rows(self.pixel_rows, self.held, range(image, image + 1))
                found[rows] = 0
        return replace(self, patches_PV=found)

    def without_pixels(self) -> GeneratorInputs:
        """The same sizes, times and positions."""
        return replace(self, patches_PV=self.patches_PV[:0], noise_PV=self.noise_PV[:0], held=[])

    @property
    def pixel_rows(self) -> list[int]:
        """Patches that each image has."""
        return [prod(grid) for grid in self.grids_thw]

    @property
    def count(self) -> int:
        """Images that count in the loss."""
        return sum(self.counted)

    def select(self, images: range) -> GeneratorInputs:
        """The inputs of consecutive images; tensors are views.

        Raises:
            ValueError: there are no such images.
        """
        if not 0 <= images.start < images.stop <= len(self.grids_thw) or images.step != 1:
            raise ValueError(
                f"generated images {images} are out of range; the batch has "
                f"{len(self.grids_thw)} generated images"
            )
        own = slice(images.start, images.stop)
        of_patches, held = held_rows(self.pixel_rows, self.held, images)
        tokens = list(accumulate(self.contexts, initial=0))
        of_tokens = slice(tokens[images.start], tokens[images.stop])
        return GeneratorInputs(
            self.patches_PV[of_patches],
            self.noise_PV[of_patches],
            self.times[own],
            self.grids_thw[own],
            self.context_positions_K[of_tokens],
            self.contexts[own],
            self.counted[own],
            held,
            self.latent_values,
            self.encoded,
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> GeneratorInputs:
        """Copy with every tensor made another by a function."""
        return replace(
            self,
            patches_PV=function(self.patches_PV),
            noise_PV=function(self.noise_PV),
            context_positions_K=function(self.context_positions_K),
        )


def held_rows(
    rows: Sequence[int], held: Sequence[int] | None, images: range
) -> tuple[slice, list[int] | None]:
    """Where the pixels of consecutive images are, and which of these images they belong to.

    Args:
        rows: of pixels, by image.
        held: images whose pixels are there, ascending; None: all.

    Returns:
        rows of the pixels; numbers within `images`, or None as above.
    """
    here = range(len(rows)) if held is None else held
    start = sum(rows[image] for image in here if image < images.start)
    own = [image for image in here if image in images]
    found = slice(start, start + sum(rows[image] for image in own))
    return found, None if held is None else [image - images.start for image in own]
