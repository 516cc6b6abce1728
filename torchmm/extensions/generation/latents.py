"""Frozen autoencoder around a generator: from pixels to latents, and from latents to pixels.

A latent diffusion model (Rombach et al., arXiv 2112.10752) generates the latents of a pretrained
autoencoder. The encoder runs before the first stage of the generator, which reads pixels. The
decoder runs after the last stage, at the end of generation. Neither is trained, and neither saves
activations for backward.

A patch of the generator has `LatentSpec.side` latents per side and `side_px` pixels per side. The
data pipeline therefore splits images into patches of pixels as for a generator of pixels, and the
number of patches does not change. Frames of one size are encoded in batches and are independent.

Latents are not encoded in the data loader, which would require the device or slow down decoding.
The last stage, whose loss compares with latents, does not encode again: latents are sent with the
hidden states and add less than a tenth to their size. Latents are not stored on disk, because other
crops, augmentations and autoencoders require new latents.

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

from torchmm.common.layers import AutoencoderSizes
from torchmm.models.layered import WeightFiles

Grid = tuple[int, int, int]
LOG_VARIANCES = -30.0, 20.0
"""Limits of the log variance of latents, as in diffusers."""


@dataclass(frozen=True)
class LatentSpec:
    """Specification of an autoencoder without weights."""

    config: dict[str, Any]
    """Complete config of the diffusers class."""
    side: int
    """Rows and columns of latents in a patch of the generator."""
    factor: int
    """Rows and columns of pixels per latent."""
    sampled: bool
    """Whether latents are sampled from the encoder distribution. Otherwise they are its mean."""
    files: WeightFiles
    sizes: AutoencoderSizes

    @property
    def channels(self) -> int:
        """Number of channels of latents."""
        return self.config["latent_channels"]

    @property
    def side_px(self) -> int:
        """Rows and columns of pixels in a patch."""
        return self.side * self.factor

    @property
    def values(self) -> int:
        """Number of latents V of a patch."""
        return self.channels * self.side**2

    def scaled(self, latents: Tensor) -> Tensor:
        """Return normalized latents for the generator, with a standard deviation of about 1."""
        return (latents - self._shift) * self.config["scaling_factor"]

    def unscaled(self, latents: Tensor) -> Tensor:
        """Return latents of the autoencoder from normalized latents."""
        return latents / self.config["scaling_factor"] + self._shift

    @property
    def _shift(self) -> float:
        return self.config["shift_factor"] or 0.0


class LatentEncoder(nn.Module):
    """Encoder from pixels to latents.

    Args:
        spec: Specification of the autoencoder.
        encoder: Encoder of pixels (F, 3, H, W) in [-1, 1].
        quant_conv: Convolution after the encoder, or None.
    """

    def __init__(self, spec: LatentSpec, encoder: nn.Module, quant_conv: nn.Module | None) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = encoder
        self.quant_conv = quant_conv
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, patches_AX: Tensor, grids: list[Grid], noise_AV: Tensor | None) -> Tensor:
        """Return normalized latents (A, V) in the dtype of the weights, without a gradient.

        Args:
            patches_AX: Concatenated pixels of images, in [-1, 1].
            grids: Patch grids of the images.
            noise_AV: Standard normal noise that samples latents. If None, latents are means.
        """
        dtype = next(self.encoder.parameters()).dtype
        of_images = patches_AX.split([prod(grid) for grid in grids])
        by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (_, rows, columns) in enumerate(grids):
            by_size[rows, columns].append(index)
        encoded_images: dict[int, Tensor] = {}
        for (rows, columns), images in by_size.items():
            pixels_AX = torch.cat([of_images[i] for i in images])
            frames = sum(grids[i][0] for i in images)
            pixels_FCHW = to_images(pixels_AX.to(dtype), (frames, rows, columns), self.spec.side_px)
            parts = pixels_FCHW.split(self.spec.sizes.encode_batch_size)
            encoded = torch.cat([self._encode(part) for part in parts])
            patches = to_patches(encoded, self.spec.side)
            encoded_images |= zip(
                images, patches.split([prod(grids[i]) for i in images]), strict=True
            )
        mean_AV, log_variance_AV = torch.cat([encoded_images[i] for i in range(len(grids))]).chunk(
            2, dim=1
        )
        if noise_AV is not None:
            deviation_AV = (0.5 * log_variance_AV.clamp(*LOG_VARIANCES)).exp()
            mean_AV = mean_AV + deviation_AV * noise_AV.to(dtype)
        return self.spec.scaled(mean_AV)

    def _encode(self, pixels_FCHW: Tensor) -> Tensor:
        """Return means and log variances of the latents, (F, 2 C, H, W)."""
        encoded = self.encoder(pixels_FCHW)
        return encoded if self.quant_conv is None else self.quant_conv(encoded)


class LatentDecoder(nn.Module):
    """Decoder from latents to pixels.

    Args:
        spec: Specification of the autoencoder.
        decoder: Decoder of latents (F, C, H, W).
        post_quant_conv: Convolution before the decoder, or None.
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
        """Return pixels, float32 (A, X), in [-1, 1] for latents of images.

        Args:
            latents_AV: Normalized latents of images, concatenated.
            grids: Patch grids of the images.
        """
        dtype = next(self.decoder.parameters()).dtype
        pixels = []
        for latents_PV, grid in zip(latents_AV.split([prod(g) for g in grids]), grids, strict=True):
            latents_FCHW = to_images(self.spec.unscaled(latents_PV).to(dtype), grid, self.spec.side)
            for part in latents_FCHW.split(self.spec.sizes.encode_batch_size):
                decoder_input = part if self.post_quant_conv is None else self.post_quant_conv(part)
                pixels.append(to_patches(self.decoder(decoder_input), self.spec.side_px).float())
        return torch.cat(pixels)


def to_images(patches_PV: Tensor, grid_thw: Grid, side: int) -> Tensor:
    """Return frames (F, C, H, W) from patches with channels first."""
    frames, rows, columns = grid_thw
    blocks = patches_PV.reshape(frames, rows, columns, -1, side, side).permute(0, 3, 1, 4, 2, 5)
    return blocks.reshape(frames, -1, rows * side, columns * side)


def to_patches(images_FCHW: Tensor, side: int) -> Tensor:
    """Return patches (P, V) of frames, the inverse of `to_images`."""
    frames, channels, height, width = images_FCHW.shape
    blocks = images_FCHW.reshape(frames, channels, height // side, side, width // side, side)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * side**2)
