"""Preprocess image files to encoder inputs with the image processor of Hugging Face.

Planning requires only the header, so no image is decoded, and an image with too many pixels is
rejected before it uses memory. `docs/reference/data_formats.md` lists the conversions to RGB. The
plain `convert("RGB")` of Pillow drops alpha, truncates 16-bit values and ignores EXIF rotation.

The image processor runs with its Pillow backend. Faster equivalents are used if they are bitwise
identical (`uint8_pixels.py`). The torchvision backend resizes differently from Pillow.

Shape legend: C channels, H height, W width, P patches of one image, D values of one patch.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers
from PIL import Image, UnidentifiedImageError, features

from torchmm.common.batch import ImageMeta, ImageSpec
from torchmm.common.dtypes import ByteValues
from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.patch_layouts import LAYOUTS, PatchLayout
from torchmm.data.media.uint8_pixels import (
    RAW_SETTINGS,
    FixedSizePixels,
    find_byte_values,
    noise_image,
    to_model_inputs,
)
from torchmm.data.record_formats.sample import MAX_ASPECT_RATIO, NO_OPTIONS, MediaOptions

FORMATS = (
    *("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"),
    *(("AVIF",) if features.check("avif") else ()),
)
"""Pillow decoders for untrusted data. Others, such as EPS, would start a process."""
MAX_HEADER_BYTES = 16 << 20
"""Maximum size of a header. Color profiles, thumbnails and depth maps have a few MB."""
MAX_HEADER_READS = 100_000
"""Maximum number of reads for a header. Pillow reads PPM comments byte by byte."""
EXIF_ORIENTATION = 0x0112
EXIF_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return the upright (width, height) of an image in pixels, from its header.

    Raises:
        CorruptSampleError: The file is not a supported image, or its size exceeds a limit.
    """
    return OpenedImage(data, max_pixels).size()


class OpenedImage:
    """Image file whose header was read. Its pixels can be decoded once.

    Args:
        data: Content of the file.
        max_pixels: Maximum number of pixels.

    Attributes:
        data: Content of the file.

    Raises:
        CorruptSampleError: The file is not a supported image, or its size exceeds a limit.
    """

    def __init__(self, data: bytes, max_pixels: int) -> None:
        self.data = data
        self._image, self._orientation = _open_image(data, max_pixels)

    def size(self) -> tuple[int, int]:
        """Return the upright (width, height) in pixels."""
        width, height = self._image.size
        return (height, width) if self._orientation >= 5 else (width, height)

    def rgb(self) -> Image.Image:
        """Decode to an upright RGB image. Raise CorruptSampleError if it fails."""
        return _to_upright_rgb(self._image, self._orientation)


def decode_rgb(data: bytes, max_pixels: int) -> Image.Image:
    """Decode to an upright RGB image.

    `docs/reference/data_formats.md` lists the conversion of each mode.

    Raises:
        CorruptSampleError: The header is not valid, or the pixels cannot be decoded.
    """
    return OpenedImage(data, max_pixels).rgb()


def _to_upright_rgb(image: Image.Image, orientation: int) -> Image.Image:
    try:
        image.load()
        image = to_rgb(image)
    except Exception as error:  # decoders raise any error; counted by CorruptLimit
        raise CorruptSampleError(
            f"image cannot be decoded: {_describe_pillow_error(error)}"
        ) from error
    return (
        image.transpose(EXIF_TRANSPOSES[orientation]) if orientation in EXIF_TRANSPOSES else image
    )


def count_frames(data: bytes, max_pixels: int) -> int:
    """Return the number of frames of an image or animation.

    Raises:
        CorruptSampleError: The file is not a supported image, or its size exceeds a limit.
    """
    image, _ = _open_image(data, max_pixels)
    try:
        return getattr(image, "n_frames", 1)
    except Exception as error:  # as in decode_rgb
        raise CorruptSampleError(
            f"frames cannot be counted: {_describe_pillow_error(error)}"
        ) from error


def decode_frames(data: bytes, max_pixels: int, count: int) -> list[Image.Image]:
    """Decode `count` evenly spaced frames of an image or animation to RGB.

    Raises:
        CorruptSampleError: The header is not valid, or the pixels cannot be decoded.
    """
    if count == 1:
        return [decode_rgb(data, max_pixels)]
    image, _ = _open_image(data, max_pixels)
    frames = []
    try:
        for number in np.linspace(0, image.n_frames - 1, count).round():  # type: ignore[attr-defined]
            image.seek(int(number))
            frames.append(to_rgb(image.copy()))
    except Exception as error:  # as in decode_rgb
        raise CorruptSampleError(
            f"frames cannot be decoded: {_describe_pillow_error(error)}"
        ) from error
    return frames


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a loaded image to RGB, with alpha over white and scaled high bit depths."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _scale_to_8_bit(image).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _scale_to_8_bit(image: Image.Image) -> Image.Image:
    values_HW = np.asarray(image).astype(np.float64)
    if not np.isfinite(values_HW).all():
        raise ValueError("pixels contain NaN or infinite values")
    low, high = (0.0, 1.0) if image.mode == "F" else (0.0, 65535.0)
    if values_HW.min() < low or values_HW.max() > high:
        low, high = values_HW.min(), values_HW.max()
    scaled_HW = (values_HW - low) * (255.0 / (high - low))
    return Image.fromarray(np.rint(scaled_HW).astype(np.uint8))


class _ImageFile(io.BytesIO):
    """Image file in memory that limits the size of the header that Pillow reads.

    Args:
        data: Content of the file.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._size = len(data)
        # Pillow reads complete WebP files when it opens them.
        self.in_header = not (data[:4] == b"RIFF" and data[8:12] == b"WEBP")
        self._bytes = self._reads = 0

    def read(self, size: int | None = -1) -> bytes:
        """Read bytes of the file. Raise CorruptSampleError if a limit is exceeded."""
        if self.in_header:
            left = self._size - self.tell()
            self._bytes += left if size is None or size < 0 else min(size, left)
            self._reads += 1
            if self._bytes > MAX_HEADER_BYTES or self._reads > MAX_HEADER_READS:
                raise CorruptSampleError(
                    f"image of {self._size:,} bytes: its header is larger than "
                    f"{MAX_HEADER_BYTES >> 20} MiB or has more than {MAX_HEADER_READS:,} "
                    "segments; save the image without comments and metadata"
                )
        return super().read(size)


def _open_image(data: bytes, max_pixels: int) -> tuple[Image.Image, int]:
    """Read the header, and return the undecoded image and its EXIF orientation."""
    file = _ImageFile(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=FORMATS)
        # Pillow rotates TIFF images. getexif() of PNG decodes the pixels to find EXIF data after
        # them. EXIF data before the pixels is already in `info`.
        has_exif = image.format != "TIFF" and "exif" in image.info
        orientation = image.getexif().get(EXIF_ORIENTATION, 1) if has_exif else 1
    except CorruptSampleError:
        raise
    except Exception as error:  # as above
        kind = f"{len(data)} bytes starting with {data[:12]!r}"
        raise CorruptSampleError(
            f"not an image ({kind}): {_describe_pillow_error(error)}"
        ) from error
    file.in_header = False
    width, height = image.size
    if width < 1 or height < 1:
        raise CorruptSampleError(f"image of {width}x{height} pixels")
    if width * height > max_pixels:
        raise CorruptSampleError(
            f"image of {width}x{height} pixels is larger than data.max_image_pixels = {max_pixels}"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise CorruptSampleError(f"image of {width}x{height} pixels has an aspect ratio above 200")
    return image, orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _describe_pillow_error(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"none of {', '.join(FORMATS)}"
    return f"{type(error).__name__}: {str(error)[:120]}"


@dataclass(frozen=True)
class ImageGrid:
    """Patch grid of an image after resizing."""

    rows: int
    columns: int


class ImagePreprocessor:
    """Preprocessor of images with a Hugging Face processor, which also predicts output sizes.

    Args:
        spec: Format of the images for the encoder.

    Attributes:
        byte_values: Mapping of stored uint8 pixels to model inputs. None for float32 pixels.

    Raises:
        ConfigError: The processor is unknown, or does not match the inputs or patch sizes.
    """

    def __init__(self, spec: ImageSpec) -> None:
        self.spec = spec
        self.processor = make_processor(spec.encoder, spec.processor_class, spec.processor)
        probe = Image.new("RGB", (96, 64))
        outputs = self._run(probe)
        self._layout: PatchLayout | None = None
        named = (kind for kind in LAYOUTS if spec.processor_class.startswith(kind.name_prefix))
        kind = next((kind for kind in named if kind.marker in outputs), None)
        if spec.inputs == "fixed":
            self._fixed_shape = self._probe_fixed_shape(outputs)
        elif kind is not None:
            self._layout = kind(self.processor, spec)
        else:
            markers = dict.fromkeys(known.marker for known in LAYOUTS)
            raise ConfigError(
                f"encoder {spec.encoder!r}: {spec.processor_class} makes no patches; supported for "
                "variable sizes are Qwen2VLImageProcessor, Siglip2ImageProcessor and others whose "
                f"results have {', '.join(markers)}"
            )
        self.frames_per_patch: int = getattr(self.processor, "temporal_patch_size", 1)
        """Number of video frames that a patch spans. Images are repeated."""
        self.byte_values: ByteValues | None = None
        self._fixed: FixedSizePixels | None = None
        self._check(probe)
        if self._layout is None:
            self._fixed = FixedSizePixels(self._run_fixed, self.processor, self._fixed_shape)
            self.byte_values = self._fixed.byte_values
        else:
            height, width = self._layout.size(probe.width, probe.height, 0)
            probes = [noise_image(size) for size in ((width, height), (300, 200), (40, 90))]
            self.byte_values = find_byte_values(self._run_patches, (width, height), probes)

    def grid(self, width_px: int, height_px: int, limit_px: int = 0) -> ImageGrid:
        """Return the patch grid of an upright image of this size.

        Args:
            width_px: Width in pixels.
            height_px: Height in pixels.
            limit_px: Maximum number of pixels after resizing to variable sizes. 0 for the limit of
                the processor.
        """
        patch = self.spec.patch_size_px
        if self._layout is None:
            height, width = self._fixed_shape
        else:
            height, width = self._layout.size(width_px, height_px, limit_px)
        return ImageGrid(height // patch, width // patch)

    def grid_of(self, image: ImageMeta) -> ImageGrid:
        """Return the patch grid of an image, or of a frame of a video."""
        if image.rows:
            return ImageGrid(image.rows, image.patches // (image.frames * image.rows))
        return self.grid(image.width_px, image.height_px, image.frame_pixels)

    def meta(
        self,
        width_px: int,
        height_px: int,
        limit_px: int = 0,
        options: MediaOptions = NO_OPTIONS,
    ) -> ImageMeta:
        """Return the metadata of an upright image of this size.

        Args:
            width_px: Width in pixels.
            height_px: Height in pixels.
            limit_px: See `grid`.
            options: Options of the image or of its video.

        Raises:
            CorruptSampleError: The processor does not support the options.
        """
        if options.size_keys:
            size = None
            if self._layout is not None:
                size = self._layout.size_with_options(width_px, height_px, limit_px, options)
            if size is None:
                raise unsupported_options(self.spec, options, "resizes by different rules")
            limit_px = 0
            side = self.spec.patch_size_px
            grid = ImageGrid(size[0] // side, size[1] // side)
        else:
            grid = self.grid(width_px, height_px, limit_px)
        patches = grid.rows * grid.columns
        tokens = patches // self.spec.merge**2 + self.spec.extra_tokens
        rows = grid.rows if options.size_keys else 0
        return ImageMeta(width_px, height_px, patches, tokens, frame_pixels=limit_px, rows=rows)

    def inputs(self, image: Image.Image, meta: ImageMeta) -> np.ndarray:
        """Return the inputs of an RGB image, or of a frame of a video, in storage format."""
        if not meta.rows:
            return self.stored_pixels(image, meta.frame_pixels)
        grid = self.grid_of(meta)
        side = self.spec.patch_size_px
        resized = image.resize((grid.columns * side, grid.rows * side), self.processor.resample)
        raw = RAW_SETTINGS if self.byte_values is not None else {}
        pixels = self._run_patches(resized, do_resize=False, **raw)
        return np.ascontiguousarray(pixels, self._dtype)

    def pixels(self, image: Image.Image, limit_px: int = 0) -> np.ndarray:
        """Return the inputs of an RGB image without padding: (C, H, W) or (P, D), float32."""
        return to_model_inputs(self.stored_pixels(image, limit_px), self.byte_values)

    def stored_pixels(self, image: Image.Image, limit_px: int = 0) -> np.ndarray:
        """Return the inputs in storage format, which is uint8 if `byte_values` is not None."""
        raw = self.byte_values is not None
        if self._layout is not None:
            limits = self._layout.limits(limit_px) if limit_px else {}
            pixels = self._run_patches(image, **limits, **(RAW_SETTINGS if raw else {}))
        elif self._fixed is not None and raw:
            pixels = self._fixed(image)
        else:
            pixels = self._run_fixed(image)
        return np.ascontiguousarray(pixels, self._dtype)

    def blank(self, width_px: int, height_px: int, limit_px: int = 0) -> np.ndarray:
        """Return all-zero inputs of the same shape in storage format."""
        return self.blank_of(self.meta(width_px, height_px, limit_px))

    def blank_of(self, image: ImageMeta) -> np.ndarray:
        """Return all-zero inputs of an image, or of a frame of a video, in storage format."""
        if self._layout is None:
            return np.zeros((3, *self._fixed_shape), self._dtype)
        grid = self.grid_of(image)
        return np.zeros((grid.rows * grid.columns, self._patch_values), self._dtype)

    @property
    def _dtype(self) -> type[np.generic]:
        return np.float32 if self.byte_values is None else np.uint8

    def _run_patches(self, image: Image.Image, **changes: Any) -> np.ndarray:
        assert self._layout is not None
        return self._layout.patches(self._run(image, **self._layout.settings(), **changes))

    def _run(self, image: Image.Image, **changes: Any) -> Any:
        return self.processor(images=[image], return_tensors="np", **changes)

    def _run_fixed(self, image: Image.Image, **changes: Any) -> np.ndarray:
        return np.asarray(self._run(image, **changes)["pixel_values"])[0]

    def _probe_fixed_shape(self, outputs: Any) -> tuple[int, int]:
        shape = outputs["pixel_values"].shape
        other = self._run(Image.new("RGB", (40, 90)))["pixel_values"].shape
        if len(shape) != 4 or shape != other:
            raise ConfigError(
                f"encoder {self.spec.encoder!r}: {self.spec.processor_class} returns {shape} "
                f"and {other} for images of two sizes, but a fixed size is required; set a "
                "square `size` or a `crop_size` in model.encoders.*.processor"
            )
        return shape[2], shape[3]

    def _check(self, probe: Image.Image) -> None:
        spec = self.spec
        problems = []
        if self._layout is not None:
            problems += self._layout.problems()
            if not problems:
                self._patch_values = self.pixels(probe).shape[1]
            if not self.processor.do_resize:
                problems.append("do_resize = false")
        else:
            grid = self.grid(probe.width, probe.height)
            if grid.rows % spec.merge or grid.columns % spec.merge:
                problems.append(
                    f"{grid.rows}x{grid.columns} patches, not divisible by {spec.merge}"
                )
        if problems:
            raise ConfigError(
                [f"encoder {spec.encoder!r}: {spec.processor_class} has {p}" for p in problems]
            )


def make_processor(encoder: str, processor_class: str, settings: Mapping[str, Any]) -> Any:
    """Return a Hugging Face image processor with the Pillow backend.

    Raises:
        ConfigError: The processor does not exist, or requires a missing library.
    """
    name = processor_class.removesuffix("Fast").removesuffix("Pil") + "Pil"
    cls = getattr(transformers, name, None)
    if cls is None:
        raise ConfigError(
            f"encoder {encoder!r}: transformers {transformers.__version__} has no image "
            f"processor {name!r} (requested: {processor_class!r})"
        )
    try:
        return cls.from_dict(dict(settings))
    except ImportError as error:  # Idefics3 and SmolVLM, transformers 5.17: torchvision
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"encoder {encoder!r}: transformers {transformers.__version__}: {reason} Install it, "
            "or transformers 5.18 or newer"
        ) from error


def unsupported_options(spec: ImageSpec, options: MediaOptions, reason: str) -> CorruptSampleError:
    """Return the error of an encoder that does not support the size options of a file."""
    values = ", ".join(f"{key} = {getattr(options, key)}" for key in options.size_keys)
    return CorruptSampleError(
        f"{values}: {spec.processor_class} of encoder {spec.encoder!r} {reason}; remove the keys "
        "from the record, or use an encoder with the image processor of Qwen2-VL"
    )


def resolution_settings(processor: Any) -> list[str]:
    """Return the settings of a Hugging Face image processor that limit the tokens of an image."""
    size = getattr(processor, "size", None) or {}
    settings = ["size.longest_edge"] if dict(size).get("longest_edge") else []
    keys = ("max_pixels", "max_patches", "max_num_patches", "image_grid_pinpoints")
    return settings + [key for key in keys if getattr(processor, key, None)]


def png_thumbnail(image: Image.Image, side_px: int) -> bytes:
    """Return a PNG thumbnail whose sides are at most `side_px` pixels."""
    small = image.copy()
    small.thumbnail((side_px, side_px))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return buffer.getvalue()
