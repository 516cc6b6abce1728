"""The pixels of a Hugging Face image processor as bytes, without most of its work.

Rescaling and normalising give one number for each of a channel's 256 values (`ByteValues`): a
table, filled by the processor itself. What it does before that is done to bytes, and the bytes are
what is kept. Most processors of one output size only resize, which Pillow does here directly. All
this is used where it gives the processor's own bits on pictures of several shapes, tried when it is
made; else pixels are the processor's float32.

Rejected: computing mean and standard deviation here, which rounds differently in every processor.

Shape legend: C channels, H height, W width, P patches of one image, D values of one patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchmm.common.dtypes import ByteValues

RAW = {"do_rescale": False, "do_normalize": False}
SHAPES = ((96, 64), (40, 90), (300, 200), (7, 5), (513, 257))
"""Widths and heights of the pictures that are tried; the output's own is another."""

Run = Callable[..., np.ndarray]
"""What a processor makes of a picture, (C, H, W) or (P, D); with RAW, too."""


class FixedPixels:
    """Pixels of RGB pictures, for processors whose outputs have one shape.

    Args:
        run: calls the processor.
        processor: to ask how it resizes.
        shape: (H, W) of its outputs.

    Attributes:
        byte_values: what the pixels stand for; None: they are float32.
    """

    def __init__(self, run: Run, processor: Any, shape: tuple[int, int]) -> None:
        self._run = run
        self._size = shape[1], shape[0]
        self._resample = getattr(processor, "resample", None)
        probes = [noise(size) for size in (*SHAPES, self._size)]
        self.byte_values = find_byte_values(run, self._size, probes)
        self._resizes = self.byte_values is not None and all(
            np.array_equal(self._resized(probe), as_bytes(run(probe, **RAW))) for probe in probes
        )

    def __call__(self, image: Image.Image) -> np.ndarray:
        """(C, H, W): uint8, or float32."""
        if self.byte_values is None:
            return self._run(image)
        return self._resized(image) if self._resizes else as_bytes(self._run(image, **RAW))

    def _resized(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.resize(self._size, self._resample)).transpose(2, 0, 1)


def find_byte_values(
    run: Run, size: tuple[int, int], probes: Sequence[Image.Image]
) -> ByteValues | None:
    """What the bytes of a processor stand for; None: it does not give one number for each.

    Args:
        size: width and height of pictures that it does not pad.
        probes: pictures on which the processor's bits have to be found.
    """
    pairs = [(run(picture, **RAW), np.float32(run(picture))) for picture in probes]
    if any((raw != as_bytes(raw)).any() for raw, _ in pairs):
        return None
    for last in (False, True):
        table_C256 = np.full((3, 256), np.nan, np.float32)
        for raw, values in pairs:
            table_C256[_channels(raw, last), as_bytes(raw)] = values
        found = ByteValues(table_C256, last)
        if all(np.array_equal(values_of(as_bytes(raw), found), v) for raw, v in pairs):
            return found if _fill(found, run, size) else None
    return None


def _fill(found: ByteValues, run: Run, size: tuple[int, int]) -> bool:
    """Adds the values that no picture had, from pictures of one color; whether that could be."""
    table_C256 = found.table_C256
    for level in np.flatnonzero(np.isnan(table_C256).any(axis=0)).tolist():
        plain = Image.new("RGB", size, (level, level, level))
        raw = run(plain, **RAW)
        if (raw != level).any():
            return False
        table_C256[_channels(raw, found.channels_last), level] = run(plain)
    return True


def values_of(pixels: np.ndarray, byte_values: ByteValues | None) -> np.ndarray:
    """float32 of the pixels, (C, H, W) or (P, D), of one image."""
    if byte_values is None:
        return pixels
    found = torch.from_numpy(np.ascontiguousarray(pixels))
    if found.ndim == 3:
        return byte_values.look_up(found[None])[0].numpy()
    return byte_values.look_up(found).numpy()


def as_bytes(raw: np.ndarray) -> np.ndarray:
    """uint8 of what a processor gives that neither rescales nor normalises."""
    return raw if raw.dtype == np.uint8 else raw.astype(np.uint8)


def noise(size: tuple[int, int]) -> Image.Image:
    """A picture of this width and height, to be tried."""
    pixels_HW3 = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels_HW3)


def shape_only(width_px: int, height_px: int) -> np.ndarray:
    """Return a (C, H, W) image without memory, for functions that only read its shape."""
    return np.broadcast_to(np.uint8(0), (3, height_px, width_px))


def _channels(pixels: np.ndarray, last: bool) -> np.ndarray:
    """Of every value."""
    if pixels.ndim == 3:
        return np.broadcast_to(np.arange(3)[:, None, None], pixels.shape)
    place_D = np.arange(pixels.shape[1])
    return np.broadcast_to(place_D % 3 if last else place_D // (len(place_D) // 3), pixels.shape)
