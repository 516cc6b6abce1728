"""Values of processors with one output size: their own bits, however they are computed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from data_cases import CLIP
from PIL import Image

from torchmm.common.batch import ImageSpec
from torchmm.data.media.fixed_pixels import FixedPixels
from torchmm.data.media.images import ImagePreprocessor

SIZE = {"height": 48, "width": 32}
CASES = {
    "resized": ("SiglipImageProcessor", {"size": SIZE}, True),
    "another filter": ("ViTImageProcessor", {"size": SIZE, "resample": 3}, True),
    "own statistics": (
        "SiglipImageProcessor",
        {"size": SIZE, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]},
        True,
    ),
    "not normalised": ("SiglipImageProcessor", {"size": SIZE, "do_normalize": False}, True),
    "cropped": (
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        False,
    ),
}


def pictures(count=12):
    rng = np.random.default_rng(7)
    for width, height in rng.integers(1, 400, (count, 2)):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        yield Image.fromarray(pixels)


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_processor_s(case):
    name, settings, resizes = CASES[case]
    spec = ImageSpec("vision", "fixed", name, settings, patch_size_px=16)
    ours = ImagePreprocessor(spec)
    assert ours._fixed is not None
    assert ours._fixed._table_C256 is not None and ours._fixed._resizes == resizes
    for either in (ours, copy.deepcopy(ours)):
        for picture in pictures():
            theirs = ours.processor(images=[picture], return_tensors="np")["pixel_values"][0]
            found = either.pixels(picture)
            assert found.dtype == np.float32 and found.flags.c_contiguous
            assert np.array_equal(found, theirs)


def fixed(changed):
    """A processor with something of its own."""
    processor = ImagePreprocessor(CLIP).processor

    def run(image, **options):
        pixels = processor(images=[image], return_tensors="np", **options)["pixel_values"][0]
        return changed(pixels, bool(options))

    return FixedPixels(run, processor, (16, 16)), run


@pytest.mark.parametrize(
    "changed",
    [
        lambda pixels, raw: pixels if raw else pixels - pixels.mean(),
        lambda pixels, raw: pixels if raw else pixels + np.float32(np.arange(16) == 3),
        lambda pixels, raw: pixels[::-1] if raw else pixels,
        lambda pixels, raw: np.float32(pixels),
    ],
    ids=["of the picture's mean", "of the place", "of another channel", "never bytes"],
)
def test_what_is_no_table_is_not_made_one(changed):
    ours, run = fixed(changed)
    assert ours._table_C256 is None
    for picture in pictures():
        assert np.array_equal(ours(picture), run(picture))
