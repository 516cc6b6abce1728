"""Common interface for the preprocessing of images and audio.

Videos (`torchmm.data.media.video`) use the preprocessing of the image encoder.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from torchmm.common.batch import ImageMeta, ImageSpec
from torchmm.common.dtypes import ByteValues
from torchmm.common.errors import LIBRARY_ERRORS, ConfigError, describe_error
from torchmm.data.media.audio import AudioPreprocessor
from torchmm.data.media.images import ImagePreprocessor, OpenedImage
from torchmm.data.record_formats.sample import NO_OPTIONS, MediaOptions


class MediaPreprocessor(Protocol):
    """Preprocessor of files to the inputs of one encoder."""

    spec: ImageSpec
    is_stacked: bool
    """Whether inputs have equal shapes and are stacked. Otherwise they are concatenated."""

    @property
    def byte_values(self) -> ByteValues | None:
        """Mapping of uint8 inputs to model inputs. None for float32 inputs."""
        ...

    def meta(self, data: bytes) -> ImageMeta:
        """Return the sizes of a file, from its header. May raise CorruptSampleError."""
        ...

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Return the patch grid as (frames, rows, columns)."""
        ...

    def token_grid(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Return the grid of output tokens as (frames, rows, columns)."""
        ...

    def pixels(self, data: bytes, meta: ImageMeta) -> np.ndarray:
        """Return the inputs of a file, uint8 or float32. May raise CorruptSampleError."""
        ...

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Return all-zero inputs of the same shape."""
        ...


class ImageMedia:
    """Preprocessor of image files.

    Args:
        spec: Format of the images for the encoder.
        max_pixels: Maximum number of pixels of an image.

    Raises:
        ConfigError: The processor is unknown or does not match.
    """

    def __init__(self, spec: ImageSpec, max_pixels: int) -> None:
        self.spec = spec
        self.is_stacked = spec.inputs == "fixed"
        self.preprocessor = ImagePreprocessor(spec)
        self._max_pixels = max_pixels
        self._opened: OpenedImage | None = None
        """Last measured file. Most samples have one image, which is decoded next."""

    @property
    def byte_values(self) -> ByteValues | None:
        """Mapping of uint8 inputs to model inputs. None for float32 inputs."""
        return self.preprocessor.byte_values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}  # open files cannot be pickled

    def meta(self, data: bytes, options: MediaOptions = NO_OPTIONS) -> ImageMeta:
        """Return the sizes of a file, from its header. May raise CorruptSampleError."""
        self._opened = None
        self._opened = OpenedImage(data, self._max_pixels)
        return self.preprocessor.meta(*self._opened.size(), options=options)

    def grid_thw(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Return the patch grid as (frames, rows, columns)."""
        grid = self.preprocessor.grid_of(meta)
        return 1, grid.rows, grid.columns

    def token_grid(self, meta: ImageMeta) -> tuple[int, int, int]:
        """Return the grid of output tokens as (frames, rows, columns)."""
        _, rows, columns = self.grid_thw(meta)
        return 1, rows // self.spec.merge, columns // self.spec.merge

    def pixels(self, data: bytes, meta: ImageMeta) -> np.ndarray:
        """Return the inputs of a file, (C, H, W) or (P, D). May raise CorruptSampleError."""
        opened = self._opened
        self._opened = None
        if opened is None or opened.data is not data:
            opened = OpenedImage(data, self._max_pixels)
        return self.preprocessor.inputs(opened.rgb(), meta)

    def blank(self, meta: ImageMeta) -> np.ndarray:
        """Return all-zero inputs of the same shape."""
        return self.preprocessor.blank_of(meta)


def open_media(spec: ImageSpec, max_pixels: int) -> MediaPreprocessor:
    """Return the preprocessor of files for an encoder.

    Raises:
        ConfigError: The processor is unknown, does not match, requires a missing library, or
            rejects its settings.
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
