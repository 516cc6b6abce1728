"""Convert encoder inputs back to images, next to their original files.

These images are only for display. Normalization is inverted with the mean and standard deviation of
the processor, and patches are reassembled. Audio inputs have no image.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from torchmm.common.batch import ImageMeta
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.images import ImagePreprocessor, decode_rgb
from torchmm.data.media.tiles import Tile
from torchmm.data.media.uint8_pixels import to_model_inputs
from torchmm.data.media.video import VideoFrames
from torchmm.data.sources.reader import EncodedFile, SampleReader, require_bytes


def displayed_images(
    reader: SampleReader, file: EncodedFile, image: ImageMeta
) -> tuple[Image.Image | None, Image.Image | None]:
    """Return a file and the encoder input as images, or None for audio.

    Raises:
        CorruptSampleError: The file cannot be decoded.
    """
    medium = reader.media[image.encoder or reader.encoders[0]]
    preprocessor = getattr(medium, "preprocessor", None)
    if not isinstance(preprocessor, ImagePreprocessor):
        return None, None
    if isinstance(file, VideoFrames):
        frames = file.images()
        if not frames:
            raise CorruptSampleError("a video without frames")
        original = frames[0]
    elif isinstance(file, Tile):
        original = file.parent.image()
    else:
        original = decode_rgb(require_bytes(file), reader.max_pixels)
    pixels = to_model_inputs(reader.pixels(file, image), preprocessor.byte_values)
    return original, pixels_to_image(preprocessor, pixels, image)


def pixels_to_image(
    preprocessor: ImagePreprocessor, pixels: np.ndarray, image: ImageMeta
) -> Image.Image | None:
    """Return the first frame of an encoder input as an image.

    Args:
        preprocessor: Preprocessor of the encoder.
        pixels: Frame, float32 (C, H, W), or its patches (P, D).
        image: Metadata of the image.
    """
    if pixels.ndim == 3:
        image_HWC = pixels.transpose(1, 2, 0)
    else:
        grid = preprocessor.grid_of(image)
        image_HWC = _from_patches(preprocessor, pixels, grid.rows, grid.columns)
    processor = preprocessor.processor
    if getattr(processor, "do_normalize", False):
        deviation, mean = (np.asarray(v) for v in (processor.image_std, processor.image_mean))
        image_HWC = image_HWC * deviation + mean
    return Image.fromarray(np.rint(image_HWC.clip(0, 1) * 255).astype(np.uint8))


def _from_patches(
    preprocessor: ImagePreprocessor, pixels_PD: np.ndarray, rows: int, columns: int
) -> np.ndarray:
    """Return the first frame (H, W, C) of patches."""
    side = preprocessor.spec.patch_size_px
    merge = preprocessor.spec.merge
    first = pixels_PD[: rows * columns]
    if first.shape[1] == 3 * side * side and merge == 1:  # NaFlex: rows of patches, colors last
        patches = first.reshape(rows, columns, side, side, 3)
        return patches.transpose(0, 2, 1, 3, 4).reshape(rows * side, columns * side, 3)
    # Qwen order: squares of merged patches one after another, then colors, then frames of a patch.
    frames = preprocessor.frames_per_patch
    blocks = first.reshape(rows // merge, columns // merge, merge, merge, 3, frames, side, side)[
        :, :, :, :, :, 0
    ]
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, 3)
