"""The frozen autoencoder around a generator: from pixels to latents, and from latents to pixels.

A latent diffusion model (Rombach et al., arXiv 2112.10752) draws the latents of an autoencoder that
was trained before it. Its first half stands before the generator's first stage, where pixels are
read, its second half behind the last stage, where a drawing ends. Neither is trained, nor is
anything of them kept for backward.

A patch of the generator has `LatentSpec.side` latents per side and `side_px` pixels per side. So
data cut images into patches of pixels as they do for a generator that draws these, and an image has
as many patches before as after. What is encoded together are frames of one size; none depends on
another.

Rejected: encoding in the loader, which would need the device or keep CPUs from decoding; an
encoding for the first stage and another for the last, whose loss compares with latents: they
travel with the hidden states, whose tenth they hardly are; latents stored on disk, which other
crops, augmentation and autoencoders would make anew.

Shape legend: A patches of all images, V latents of a patch, X pixel values of a patch, F frames, C
channels, H, W rows and columns of pixels or latents.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from torchmm.common.layers import LatentSizes
from torchmm.models.layered import WeightFiles

Grid = tuple[int, int, int]
LOG_VARIANCES = -30.0, 20.0
"""Limits of what an encoder says about its latents' variance; diffusers' values."""


@dataclass(frozen=True)
class LatentSpec:
    """Everything that determines an autoencoder, apart from its weights."""

    config: dict[str, Any]
    """Of the diffusers class, complete."""
    side: int
    """Rows and columns of latents in a patch of the generator."""
    factor: int
    """Rows and columns of pixels that one latent stands for."""
    sampled: bool
    """Whether latents are drawn from the distribution that the encoder gives, or its mean."""
    files: WeightFiles
    sizes: LatentSizes

    @property
    def channels(self) -> int:
        """Of latents."""
        return self.config["latent_channels"]

    @property
    def side_px(self) -> int:
        """Rows and columns of pixels in a patch."""
        return self.side * self.factor

    @property
    def values(self) -> int:
        """V."""
        return self.channels * self.side**2

    def scaled(self, latents: Tensor) -> Tensor:
        """As the generator sees them: with a deviation of about one."""
        return (latents - self._shift) * self.config["scaling_factor"]

    def unscaled(self, latents: Tensor) -> Tensor:
        """The reverse."""
        return latents / self.config["scaling_factor"] + self._shift

    @property
    def _shift(self) -> float:
        return self.config["shift_factor"] or 0.0


class LatentEncoder(nn.Module):
    """Pixels to latents.

    Args:
        encoder: of pixels (F, 3, H, W) in [-1, 1].
        quant_conv: after it, if there is one.
    """

    def __init__(self, spec: LatentSpec, encoder: nn.Module, quant_conv: nn.Module | None) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = encoder
        self.quant_conv = quant_conv
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, patches_AX: Tensor, grids: list[Grid], noise_AV: Tensor | None) -> Tensor:
        """(A, V) in the weights' dtype: latents, scaled, without a gradient.

        Args:
            patches_AX: pixels in [-1, 1] of images one after another.
            noise_AV: standard normal, which latents are drawn with; None: they are means.
        """
        dtype = next(self.encoder.parameters()).dtype
        of_images = patches_AX.split([prod(grid) for grid in grids])
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (_, rows, columns) in enumerate(grids):
            alike[rows, columns].append(index)
        found: dict[int, Tensor] = {}
        for (rows, columns), images in alike.items():
            own = torch.cat([of_images[i] for i in images])
            frames = sum(grids[i][0] for i in images)
            pixels_FCHW = to_images(own.to(dtype), (frames, rows, columns), self.spec.side_px)
            parts = pixels_FCHW.split(self.spec.sizes.encode_batch_size)
            encoded = torch.cat([self._encode(part) for part in parts])
            patches = to_patches(encoded, self.spec.side)
            found |= zip(images, patches.split([prod(grids[i]) for i in images]), strict=True)
        mean_AV, log_variance_AV = torch.cat([found[i] for i in range(len(grids))]).chunk(2, dim=1)
        if noise_AV is not None:
            deviation_AV = (0.5 * log_variance_AV.clamp(*LOG_VARIANCES)).exp()
            mean_AV = mean_AV + deviation_AV * noise_AV.to(dtype)
        return self.spec.scaled(mean_AV)

    def _encode(self, pixels_FCHW: Tensor) -> Tensor:
        """(F, 2 C, H, W): means, then logarithms of variances."""
        found = self.encoder(pixels_FCHW)
        return found if self.quant_conv is None else self.quant_conv(found)


class LatentDecoder(nn.Module):
    """Latents to pixels.

    Args:
        decoder: of latents (F, C, H, W).
        post_quant_conv: before it, if there is one.
    """

    def __init__(
        self, spec: LatentSpec, decoder: nn.Module, post_quant_conv: nn.Module | None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.decoder = decoder
        self.post_quant_conv = post_quant_conv
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, latents_AV: Tensor, grids: list[Grid]) -> Tensor:
        """float32 (A, X): pixels, in [-1, 1] where latents are those of an image.

        Args:
            latents_AV: scaled, of images one after another.
        """
        dtype = next(self.decoder.parameters()).dtype
        pixels = []
        for own, grid in zip(latents_AV.split([prod(g) for g in grids]), grids, strict=True):
            latents_FCHW = to_images(self.spec.unscaled(own).to(dtype), grid, self.spec.side)
            for part in latents_FCHW.split(self.spec.sizes.encode_batch_size):
                given = part if self.post_quant_conv is None else self.post_quant_conv(part)
                pixels.append(to_patches(self.decoder(given), self.spec.side_px).float())
        return torch.cat(pixels)


def to_images(patches_PV: Tensor, grid_thw: Grid, side: int) -> Tensor:
    """(F, C, H, W) from the patches of an image or clip, whose values have channels first."""
    frames, rows, columns = grid_thw
    blocks = patches_PV.reshape(frames, rows, columns, -1, side, side).permute(0, 3, 1, 4, 2, 5)
    return blocks.reshape(frames, -1, rows * side, columns * side)


def to_patches(images_FCHW: Tensor, side: int) -> Tensor:
    """The reverse: (P, V)."""
    frames, channels, height, width = images_FCHW.shape
    blocks = images_FCHW.reshape(frames, channels, height // side, side, width // side, side)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * side**2)
