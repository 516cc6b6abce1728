"""Store preprocessed pixels as bytes, which requires less time and memory than float32.

Rescaling and normalization map each of the 256 values of a channel to one float. `ByteValues` is
this mapping, measured with the processor. Pixels are stored as bytes before the mapping. Most
processors with a fixed output size only resize, for which Pillow is called directly. Both are used
only if the result is bitwise identical to the processor on probe images of several shapes.
Otherwise pixels are float32. Computing the mapping from mean and standard deviation would round
differently from some processors.

Shape legend: C channels, H height, W width, P patches of one image, D values of one patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchmm.common.dtypes import ByteValues

RAW_SETTINGS = {"do_rescale": False, "do_normalize": False}
PROBE_SIZES = ((96, 64), (40, 90), (300, 200), (7, 5), (513, 257))
"""Widths and heights of probe images, in addition to the output size."""

RunProcessor = Callable[..., np.ndarray]
"""Function that runs a processor on an image. It returns (C, H, W) or (P, D), and accepts
`RAW_SETTINGS`."""


class FixedSizePixels:
    """Preprocessor of RGB images for processors with a fixed output shape.

    Args:
        run: Runs the processor.
        processor: Processor with the resampling filter.
        shape: (H, W) of the outputs.

    Attributes:
        byte_values: Mapping of uint8 pixels to model inputs. None for float32 pixels.
    """

    def __init__(self, run: RunProcessor, processor: Any, shape: tuple[int, int]) -> None:
        self._run = run
        self._size = shape[1], shape[0]
        self._resample = getattr(processor, "resample", None)
        probes = [noise_image(size) for size in (*PROBE_SIZES, self._size)]
        self.byte_values = find_byte_values(run, self._size, probes)
        self._resizes = self.byte_values is not None and all(
            np.array_equal(self._resized(probe), to_uint8(run(probe, **RAW_SETTINGS)))
            for probe in probes
        )

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Return the pixels of an image: (C, H, W), uint8 or float32."""
        if self.byte_values is None:
            return self._run(image)
        return self._resized(image) if self._resizes else to_uint8(self._run(image, **RAW_SETTINGS))

    def _resized(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.resize(self._size, self._resample)).transpose(2, 0, 1)


def find_byte_values(
    run: RunProcessor, size: tuple[int, int], probes: Sequence[Image.Image]
) -> ByteValues | None:
    """Return the mapping of bytes to outputs of a processor, or None if it has no such mapping.

    Args:
        run: Runs the processor.
        size: Width and height of images that the processor does not pad.
        probes: Images for which the result must be bitwise identical.
    """
    pairs = [(run(picture, **RAW_SETTINGS), np.float32(run(picture))) for picture in probes]
    if any((raw != to_uint8(raw)).any() for raw, _ in pairs):
        return None
    for last in (False, True):
        table_C256 = np.full((3, 256), np.nan, np.float32)
        for raw, values in pairs:
            table_C256[_channel_indices(raw, last), to_uint8(raw)] = values
        byte_values = ByteValues(table_C256, last)
        if all(np.array_equal(to_model_inputs(to_uint8(raw), byte_values), v) for raw, v in pairs):
            return byte_values if _fill_missing_values(byte_values, run, size) else None
    return None


def _fill_missing_values(byte_values: ByteValues, run: RunProcessor, size: tuple[int, int]) -> bool:
    """Add missing values with gray images. Return False if the processor changes plain images.

    Images with many levels add most values, if the processor keeps their levels. The other values
    need one image per level.
    """
    table_C256 = byte_values.table_C256

    def missing_levels() -> np.ndarray:
        return np.flatnonzero(np.isnan(table_C256).any(axis=0))

    levels, pixels = missing_levels(), size[0] * size[1]
    for start in range(0, len(levels), pixels):
        levels_HW = np.resize(levels[start : start + pixels], (size[1], size[0]))
        gray = Image.fromarray(levels_HW.astype(np.uint8)).convert("RGB")
        raw = run(gray, **RAW_SETTINGS)
        if np.isin(raw, levels_HW).all():
            channels = _channel_indices(raw, byte_values.channels_last)
            table_C256[channels, to_uint8(raw)] = run(gray)
    for level in missing_levels().tolist():
        plain = Image.new("RGB", size, (level, level, level))
        raw = run(plain, **RAW_SETTINGS)
        if (raw != level).any():
            return False
        table_C256[_channel_indices(raw, byte_values.channels_last), level] = run(plain)
    return True


def to_model_inputs(pixels: np.ndarray, byte_values: ByteValues | None) -> np.ndarray:
    """Return the model inputs of stored pixels: (C, H, W) or (P, D), float32."""
    if byte_values is None:
        return pixels
    tensor = torch.from_numpy(np.ascontiguousarray(pixels))
    if tensor.ndim == 3:
        return byte_values.look_up(tensor[None])[0].numpy()
    return byte_values.look_up(tensor).numpy()


def to_uint8(raw: np.ndarray) -> np.ndarray:
    """Convert the output of a processor without rescaling and normalization to uint8."""
    return raw if raw.dtype == np.uint8 else raw.astype(np.uint8)


def noise_image(size: tuple[int, int]) -> Image.Image:
    """Return a random probe image of this width and height."""
    pixels_HW3 = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels_HW3)


def shape_array(width_px: int, height_px: int) -> np.ndarray:
    """Return a (C, H, W) image without memory, for functions that only read its shape."""
    return np.broadcast_to(np.uint8(0), (3, height_px, width_px))


def _channel_indices(pixels: np.ndarray, last: bool) -> np.ndarray:
    """Return the channel of each value."""
    if pixels.ndim == 3:
        return np.broadcast_to(np.arange(3)[:, None, None], pixels.shape)
    index_D = np.arange(pixels.shape[1])
    return np.broadcast_to(index_D % 3 if last else index_D // (len(index_D) // 3), pixels.shape)
