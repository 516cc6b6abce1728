"""What encoders read: one interface to the preprocessing of images and sounds.

Clips (`torchmm.data.media.video`) go through an image encoder's preprocessing.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from torchmm.common.batch import ImageMeta, ImageSpec
from torchmm.common.dtypes import ByteValues
from torchmm.common.errors import LIBRARY_ERRORS, ConfigError, describe_error
from torchmm.data.media.audio import AudioPreprocessor
from torchmm.data.media.images import ImagePreprocessor, OpenedImage


class MediaPreprocessor(Protocol):
    """Files to the inputs of one encoder."""

    spec: ImageSpec
    grouped: bool
    """Whether inputs are stacked, as all have one shape; otherwise they are concatenated."""

    @property
    def byte_values(self) -> ByteValues | None:
        """What uint8 inputs stand for; None: inputs are float32."""
        ...

    def meta(self, data: bytes) -> ImageMeta:
        """What planning needs to know of a file; raises CorruptSampleError."""
        ...

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Patches as (frames, rows, columns)."""
        ...

    def block(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Output tokens as (frames, rows, columns)."""
        ...

    def pixels(self, data: bytes, meta: ImageMeta) -> np.ndarray:
        """Inputs of a file, uint8 or float32; raises CorruptSampleError."""
        ...

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Zeros of the same shape."""
        ...


class ImageMedia:
    """Image files.

    Args:
        spec: how the encoder wants its images.
        max_pixels: of the largest image that is decoded.

    Raises:
        ConfigError: the processor is unknown or does not fit.
    """

    def __init__(self, spec: ImageSpec, max_pixels: int) -> None:
        self.spec = spec
        self.grouped = spec.inputs == "fixed"
        self.preprocessor = ImagePreprocessor(spec)
        self._max_pixels = max_pixels
        self._opened: OpenedImage | None = None
        """The file measured last: most samples have one, and its pixels are wanted next."""

    @property
    def byte_values(self) -> ByteValues | None:
        """What uint8 inputs stand for; None: inputs are float32."""
        return self.preprocessor.byte_values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}  # for workers, which open their own

    def meta(self, data: bytes) -> ImageMeta:
        """From the header; raises CorruptSampleError."""
        self._opened = None
        self._opened = OpenedImage(data, self._max_pixels)
        return self.preprocessor.meta(*self._opened.size())

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Patches as (frames, rows, columns)."""
        grid = self.preprocessor.grid(meta.width_px, meta.height_px)
        return 1, grid.rows, grid.columns

    def block(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Output tokens as (frames, rows, columns)."""
        _, rows, columns = self.grid_thw(meta)
        return 1, rows // self.spec.merge, columns // self.spec.merge

    def pixels(self, data: bytes, meta: ImageMeta) -> np.ndarray:
        """(C, H, W) or (P, D); raises CorruptSampleError."""
        opened = self._opened
        self._opened = None
        if opened is None or opened.data is not data:
            opened = OpenedImage(data, self._max_pixels)
        return self.preprocessor.stored(opened.rgb())

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Zeros of the same shape."""
        return self.preprocessor.blank(meta.width_px, meta.height_px)


def open_media(spec: ImageSpec, max_pixels: int) -> MediaPreprocessor:
    """Return what prepares files for an encoder.

    Raises:
        ConfigError: The processor is unknown, does not fit, lacks a library, or cannot be used with
            its settings.
    """
    try:
        return AudioPreprocessor(spec) if spec.modality == "audio" else ImageMedia(spec, max_pixels)
    except LIBRARY_ERRORS as error:
        settings = ", ".join(f"{name} = {value!r:.80}" for name, value in spec.processor.items())
        raise ConfigError(
            f"encoder {spec.encoder!r}: {spec.processor_class} rejects these settings; "
            "correct `processor` in the recipe or preprocessor_config.json "
            f"({describe_error(error)}): {settings}"
        ) from error
