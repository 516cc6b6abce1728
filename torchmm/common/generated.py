"""Types of generated images and videos that data, models and planners share.

A sample can contain a *generated* image, which the generator is trained to produce. It has no
tokens in the LLM sequence. It depends on its *context*: LLM hidden states of the preceding tokens
of the sample. Training uses flow matching (Lipman et al., arXiv 2210.02747, with the straight paths
of arXiv 2209.03003). The path between image x and noise e is (1 - t) x + t e. The generator learns
the velocity e - x.

Noise and time are part of the data of a sample, so losses do not depend on the assignment of
samples to ranks, microbatches and stages.

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

TARGET_PIXEL_VALUES = ByteValues(
    np.arange(256, dtype=np.float32)[None] / np.float32(127.5) - np.float32(1)
)
"""Values of uint8 pixels: [-1, 1]."""


@dataclass(frozen=True)
class GeneratedMeta:
    """Sizes of a generated image or video for planning."""

    grid_thw: tuple[int, int, int]
    """Patches as (frames, rows, columns). An image has one frame."""
    context: int
    """Number of LLM tokens that it depends on."""

    @property
    def patches(self) -> int:
        """Number of patches that the generator processes."""
        return prod(self.grid_thw)


DUMMY_IMAGE = GeneratedMeta((1, 1, 1), 1)
"""The smallest image. It is the dummy image of microbatches without images."""


@dataclass(frozen=True)
class GeneratorSpec:
    """Sizes, noise and times of the images that a generator is trained on.

    `torchmm.models` creates it, and `torchmm.data` prepares images accordingly.
    """

    size_px: int
    """Height and width of each frame in pixels."""
    patch_size_px: int
    frames: int = 1
    """Maximum number of frames of a video. 1 for images only."""
    context_tokens: int = 128
    """Maximum number of context tokens. They directly precede the image."""
    time_sampling: str = "logit_normal"
    """Distribution of times: "uniform", or "logit_normal" (arXiv 2403.03206, section 3.1)."""
    latent_values: int = 0
    """Number of latents per patch. 0 if pixels are generated."""
    latent_noise: int = 0
    """Random numbers per patch for sampling its latents. 0 if latents are means."""

    def grid(self, frames: int) -> tuple[int, int, int]:
        """Return the patches of an image, or of a video with this number of frames."""
        side = self.size_px // self.patch_size_px
        return min(frames, self.frames), side, side


@dataclass
class GeneratorInputs:
    """Generator inputs of a microbatch, sorted by image."""

    patches_PV: Tensor
    """Pixels, with V = channels x rows x columns of a patch, in this order. float32 in [-1, 1], or
    uint8 until they are needed (`values`)."""
    noise_PV: Tensor
    """float32, standard normal. If latents are sampled, it has additional columns: noise that the
    generator learns to remove, then random numbers for sampling the latents."""
    times: list[float]
    """Time of each image, between 0 (no noise) and 1 (only noise)."""
    grids_thw: list[tuple[int, int, int]]
    context_positions_K: Tensor
    """Position in the T tokens of the microbatch of each context token, int64."""
    contexts: list[int]
    """Number of context tokens of each image."""
    in_loss: list[bool]
    """Whether each image is included in the loss. False if it could not be decoded."""
    local_images: list[int] | None = None
    """Images with pixels and noise on this rank, ascending. None: all images, on each rank that
    generates images."""
    latent_values: int = 0
    """Number of latents per patch, which pixels are encoded to. 0 if pixels are generated."""
    is_encoded: bool = False
    """Whether `patches_PV` already contains latents."""

    @property
    def target_noise_PV(self) -> Tensor:
        """Noise of the generated pixels or latents."""
        return self.noise_PV[:, : self.latent_values] if self.latent_values else self.noise_PV

    @property
    def latent_noise_PV(self) -> Tensor | None:
        """Random numbers for sampling the latents, or None if latents are means."""
        other = self.noise_PV[:, self.latent_values :] if self.latent_values else None
        return other if other is not None and other.shape[1] else None

    def values(self) -> GeneratorInputs:
        """Return float32 pixels, for generators. Pixels of images outside the loss are 0."""
        if self.patches_PV.dtype != torch.uint8:
            return self
        pixels_PV = TARGET_PIXEL_VALUES.look_up(self.patches_PV)
        for image, is_in_loss in enumerate(self.in_loss):
            if not is_in_loss:
                rows, _ = local_pixel_rows(
                    self.pixel_rows, self.local_images, range(image, image + 1)
                )
                pixels_PV[rows] = 0
        return replace(self, patches_PV=pixels_PV)

    def without_pixels(self) -> GeneratorInputs:
        """Return the same sizes, times and positions without pixels."""
        return replace(
            self, patches_PV=self.patches_PV[:0], noise_PV=self.noise_PV[:0], local_images=[]
        )

    @property
    def pixel_rows(self) -> list[int]:
        """Number of patches of each image."""
        return [prod(grid) for grid in self.grids_thw]

    @property
    def loss_count(self) -> int:
        """Number of images in the loss."""
        return sum(self.in_loss)

    def select(self, images: range) -> GeneratorInputs:
        """Return the inputs of consecutive images. Tensors are views.

        Raises:
            ValueError: The range is empty or invalid.
        """
        if not 0 <= images.start < images.stop <= len(self.grids_thw) or images.step != 1:
            raise ValueError(
                f"generated images {images} are out of range; the batch has "
                f"{len(self.grids_thw)} generated images"
            )
        selected = slice(images.start, images.stop)
        patch_slice, local_images = local_pixel_rows(self.pixel_rows, self.local_images, images)
        tokens = list(accumulate(self.contexts, initial=0))
        token_slice = slice(tokens[images.start], tokens[images.stop])
        return GeneratorInputs(
            self.patches_PV[patch_slice],
            self.noise_PV[patch_slice],
            self.times[selected],
            self.grids_thw[selected],
            self.context_positions_K[token_slice],
            self.contexts[selected],
            self.in_loss[selected],
            local_images,
            self.latent_values,
            self.is_encoded,
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> GeneratorInputs:
        """Return a copy with `function` applied to each tensor."""
        return replace(
            self,
            patches_PV=function(self.patches_PV),
            noise_PV=function(self.noise_PV),
            context_positions_K=function(self.context_positions_K),
        )


def local_pixel_rows(
    rows: Sequence[int], local_images: Sequence[int] | None, images: range
) -> tuple[slice, list[int] | None]:
    """Find the pixels of consecutive images, if the rank has pixels of some images.

    Args:
        rows: Number of pixel rows of each image.
        local_images: Images with pixels on this rank, ascending. None: all images.
        images: Consecutive images.

    Returns:
        (slice of the pixel rows, indices within `images`). The indices are None if `local_images`
        is None.
    """
    available = range(len(rows)) if local_images is None else local_images
    start = sum(rows[image] for image in available if image < images.start)
    selected = [image for image in available if image in images]
    pixel_slice = slice(start, start + sum(rows[image] for image in selected))
    return pixel_slice, None if local_images is None else [
        image - images.start for image in selected
    ]
