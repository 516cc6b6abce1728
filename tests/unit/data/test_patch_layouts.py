"""Sizes and patches of processors for images of any size, compared with the processors."""

import numpy as np
import pytest
import transformers
from PIL import Image

from torchmm.common.batch import ImageSpec
from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.images import ImagePreprocessor

POOLED = ImageSpec(
    "vision",
    "patches",
    "Gemma4ImageProcessor",
    {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 140},
    4,
    merge=2,
)
SIZED = ImageSpec(
    "vision",
    "patches",
    "PixtralImageProcessor",
    {"patch_size": {"height": 4, "width": 4}, "size": {"longest_edge": 64}},
    4,
)
SIZES = [(1, 1), (6, 60), (60, 6), (16, 24), (37, 53), (99, 40), (640, 480)]


def noise_image(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, 3))
    return Image.fromarray(values.astype(np.uint8))


def expected_patches(spec: ImageSpec, image: Image.Image) -> dict[tuple[int, int], np.ndarray]:
    """Return the patches of the Hugging Face processor by (row, column)."""
    kind = getattr(transformers, f"{spec.processor_class}Pil")
    outputs = kind.from_dict(spec.processor)(images=[image], return_tensors="np")
    values = np.asarray(outputs["pixel_values"])[0]
    if spec is POOLED:
        positions = outputs["image_position_ids"][0]
        valid = [n for n, (column, _) in enumerate(positions) if column >= 0]
        return {(int(positions[n][1]), int(positions[n][0])): values[n] for n in valid}
    return {
        (row, column): values[:, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4].ravel()
        for row in range(values.shape[1] // 4)
        for column in range(values.shape[2] // 4)
    }


@pytest.mark.parametrize("spec", [POOLED, SIZED], ids=lambda s: s.processor_class)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_match_processor_in_row_order(spec: ImageSpec, size: tuple[int, int]) -> None:
    ours = ImagePreprocessor(spec)
    expected = expected_patches(spec, noise_image(*size))
    grid = ours.grid(*size)
    assert max(expected) == (grid.rows - 1, grid.columns - 1)
    actual = ours.pixels(noise_image(*size)).reshape(grid.rows, grid.columns, -1)
    assert ours.blank(*size).shape == (grid.rows * grid.columns, actual.shape[-1])
    for place, values in expected.items():
        np.testing.assert_array_equal(actual[place], values)


def test_images_less_than_one_pixel_wide_are_corrupt() -> None:
    with pytest.raises(
        CorruptSampleError, match="image of 3x300 pixels becomes less than one pixel wide"
    ):
        ImagePreprocessor(SIZED).meta(3, 300)


@pytest.mark.parametrize(
    ("spec", "limit_px", "max_pixels"),
    [(POOLED, 5000, 70 * 64), (POOLED, 10_000, 140 * 64), (SIZED, 500, 500), (SIZED, 200, 200)],
)
def test_pixel_limit_bounds_patches(spec: ImageSpec, limit_px: int, max_pixels: int) -> None:
    """Check pixel limits for video frames, with limits above the minimum size of a processor."""
    ours = ImagePreprocessor(spec)
    for size in SIZES:
        grid = ours.grid(*size, limit_px)
        assert len(ours.pixels(noise_image(*size), limit_px)) == grid.rows * grid.columns
        assert grid.rows * grid.columns * 16 <= max_pixels


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (POOLED, {"merge": 3}, "pooling_kernel_size 2, encoder 3"),
        (POOLED, {"patch_size_px": 8}, "patch size 4, encoder 8"),
        (SIZED, {"patch_size_px": 8}, "patch size 4, encoder 8"),
    ],
)
def test_processor_that_differs_from_encoder_is_rejected(
    spec: ImageSpec, change: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ImagePreprocessor(ImageSpec(**{**vars(spec), **change}))
