"""Clips to the inputs of an image encoder: whole, or frame by frame.

Encoders whose patches span frames (Qwen's: two) read a clip as one image of several frames, behind
one marker; their LLM's positions know the time. All others read its frames as single images, each
with its time before it as text ("<1.5 seconds>", as in Qwen3-VL). Both use the encoder's image
processor: a patch of two frames is made of halves of theirs. Rejected: Hugging Face's video
processors, which need torchvision and differ in little else (its resizing from Pillow's).

Shape legend: F frames, G groups of them that make patches, P patches of a frame, D values of a
patch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from torchmm.common.batch import ImageMeta
from torchmm.data.media.images import ImagePreprocessor
from torchmm.data.media.video import Clip, ClipFrames, sampled_frames
from torchmm.recipe.config_video import VideoConfig


class ClipPart(NamedTuple):
    """What of a clip becomes one image of the encoder."""

    before: str
    """Text in front of it."""
    file: ClipFrames
    meta: ImageMeta


class ClipMedia:
    """Clips for one encoder, beside `torchmm.data.media.medium.ImageMedia`.

    Args:
        images: the encoder's preprocessing.
        config: which frames are read.
    """

    def __init__(self, images: ImagePreprocessor, config: VideoConfig) -> None:
        self.spec = images.spec
        self._images = images
        self._config = config
        self._group = images.frames_per_patch
        self.whole = self._group > 1
        """Whether a clip is one image."""

    def parts(self, clip: Clip) -> list[ClipPart]:
        """The images that a clip becomes, in order."""
        config, size = self._config, (clip.width_px, clip.height_px)
        fixed = self.spec.layout == "fixed"
        most = None
        if fixed:  # its frames cannot become smaller
            grid = self._images.grid(*size)
            frame_px = grid.rows * grid.columns * self.spec.patch_size_px**2
            most = max(1, config.max_pixels // frame_px)
        numbers = sampled_frames(clip.frames, clip.duration_s, config, self._group, most)
        groups = -(-len(numbers) // self._group)
        limit_px = 0 if fixed else max(1, config.max_pixels // (groups * self._group))
        meta = self._images.meta(*size, limit_px)
        if self.whole:
            meta = replace(
                meta,
                patches=groups * meta.patches,
                tokens=groups * meta.tokens,
                frames=groups,
                duration_ms=_ms(clip.duration_s),
            )
            return [ClipPart("", clip.select(numbers), meta)]
        meta = replace(meta, duration_ms=_ms(clip.duration_s / len(numbers)))
        return [
            ClipPart(
                f"<{clip.at_s(number):.1f} seconds>" if config.timestamps else "",
                clip.select([number]),
                meta,
            )
            for number in numbers
        ]

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Patches as (frames, rows, columns)."""
        grid = self._images.grid(meta.width_px, meta.height_px, meta.frame_pixels)
        return meta.frames, grid.rows, grid.columns

    def block(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Output tokens as (frames, rows, columns)."""
        frames, rows, columns = self.grid_thw(meta)
        return frames, rows // self.spec.merge, columns // self.spec.merge

    def pixels(self, file: ClipFrames, meta: ImageMeta) -> np.ndarray:
        """(C, H, W) or (P, D) of a frame, or (G P, D) of a clip; raises CorruptSampleError."""
        images = [self._images.pixels(image, meta.frame_pixels) for image in file.images()]
        if not self.whole:
            return images[0]
        images += [images[-1]] * (meta.frames * self._group - len(images))
        # An image's patch holds the same frame several times, color by color.
        pixels = self.spec.patch_size_px**2
        x_GFPcfp = np.stack(images).reshape(
            meta.frames, self._group, len(images[0]), -1, self._group, pixels
        )
        x_GPcfp = np.stack([x_GFPcfp[:, f, :, :, f] for f in range(self._group)], axis=3)
        return x_GPcfp.reshape(meta.patches, -1)

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Zeros of the same shape."""
        frame = self._images.blank(meta.width_px, meta.height_px, meta.frame_pixels)
        return np.concatenate([frame] * meta.frames) if self.whole else frame


def _ms(duration_s: float) -> int:
    """Never 0, which is the duration of images."""
    return max(1, round(1000 * duration_s))
