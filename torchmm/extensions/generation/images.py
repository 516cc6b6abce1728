"""Prepare images and videos for flow matching: sizes, pixels, noise and times.

Every frame is resized to the square of the generator (scaled to cover it, then cropped at the
center) and split into patches. A video is an animated GIF, WebP or PNG. If it has more frames than
the generator, evenly spaced frames are used.

Random numbers are not generated on the training device, because they would depend on the
parallelism config.

Shape legend: V values of a patch (channels x rows x columns).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageOps

from torchmm.common.generated import GeneratorInputs
from torchmm.data.media.images import count_frames, decode_frames, read_size
from torchmm.data.target_images import NoiseKey, TargetImagePreprocessor


class DiffusionImages(TargetImagePreprocessor):
    """Preparation of the images for a diffusion transformer."""

    @property
    def values(self) -> int:
        return 3 * self.spec.patch_size_px**2

    def grid(self, data: bytes) -> tuple[int, int, int]:
        read_size(data, self._max_pixels)
        frames = count_frames(data, self._max_pixels) if self.spec.frames > 1 else 1
        return self.spec.grid(frames)

    def decode_patches(self, data: bytes, frames: int) -> np.ndarray:
        decoded = decode_frames(data, self._max_pixels, frames)
        return np.concatenate([self._patches(frame) for frame in decoded])

    def time(self, key: NoiseKey) -> float:
        return self._random_numbers(key)[1]

    def add_noise(self, inputs: GeneratorInputs, keys: Sequence[NoiseKey]) -> GeneratorInputs:
        held = range(len(keys)) if inputs.local_images is None else inputs.local_images
        widths = [self.spec.latent_values or self.values, self.spec.latent_noise]
        noise = [torch.zeros(0, sum(widths))]
        for number in held:
            generator, _ = self._random_numbers(keys[number])
            rows = inputs.pixel_rows[number]
            # The noise that samples latents is last, so that other numbers do not depend on it.
            parts = [torch.randn(rows, n, generator=generator) for n in widths if n]
            noise.append(torch.cat(parts, dim=1))
        return replace(inputs, noise_PV=torch.cat(noise), latent_values=self.spec.latent_values)

    def _patches(self, frame: Image.Image) -> np.ndarray:
        size = self.spec.size_px
        patch = self.spec.patch_size_px
        square = ImageOps.fit(frame, (size, size), Image.Resampling.BICUBIC)
        side = size // patch
        blocks = np.asarray(square).reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
        return blocks.reshape(side * side, -1)

    def _random_numbers(self, key: NoiseKey) -> tuple[torch.Generator, float]:
        """Return the random number generator of the noise of an image, and the time."""
        digest = hashlib.sha256(json.dumps([self._seed, *key]).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        if self.spec.time_sampling == "uniform":
            time = torch.rand((), generator=generator)
        else:
            time = torch.randn((), generator=generator).sigmoid()
        return generator, time.item()
