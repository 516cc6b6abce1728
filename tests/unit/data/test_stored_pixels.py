"""Values of processors with a fixed output size: bitwise equal to the processor output."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_cases import CLIP, NAFLEX, QWEN
from PIL import Image
from test_patch_layouts import POOLED, SIZED

from torchmm.common.batch import EncoderInputs, ImageSpec
from torchmm.common.dtypes import ByteValues
from torchmm.data.media.images import ImagePreprocessor
from torchmm.data.media.uint8_pixels import FixedSizePixels

SIZE = {"height": 48, "width": 32}
CASES = {
    "resized": ("SiglipImageProcessor", {"size": SIZE}, True),
    "another filter": ("ViTImageProcessor", {"size": SIZE, "resample": 3}, True),
    "custom statistics": (
        "SiglipImageProcessor",
        {"size": SIZE, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]},
        True,
    ),
    "not normalized": ("SiglipImageProcessor", {"size": SIZE, "do_normalize": False}, True),
    "cropped": (
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        False,
    ),
}


def noise_images(count=12, least=1):
    rng = np.random.default_rng(7)
    for width, height in rng.integers(least, 400, (count, 2)):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        yield Image.fromarray(pixels)


@pytest.mark.parametrize("case", CASES)
def test_stored_pixels_match_processor(case):
    name, settings, resizes = CASES[case]
    spec = ImageSpec("vision", "fixed", name, settings, patch_size_px=16)
    ours = ImagePreprocessor(spec)
    assert ours._fixed is not None
    assert ours.byte_values is not None and ours._fixed._resizes == resizes
    assert ours.stored_pixels(next(noise_images())).dtype == np.uint8
    for preprocessor in (ours, copy.deepcopy(ours)):
        for image in noise_images():
            theirs = ours.processor(images=[image], return_tensors="np")["pixel_values"][0]
            actual = preprocessor.pixels(image)
            assert actual.dtype == np.float32 and actual.flags.c_contiguous
            assert np.array_equal(actual, theirs)


def fixed(changed):
    """Return fixed-size pixels of a processor whose values `changed` modifies."""
    processor = ImagePreprocessor(CLIP).processor

    def run(image, **options):
        pixels = processor(images=[image], return_tensors="np", **options)["pixel_values"][0]
        return changed(pixels, bool(options))

    return FixedSizePixels(run, processor, (16, 16)), run


@pytest.mark.parametrize(
    "changed",
    [
        lambda pixels, raw: pixels if raw else pixels - pixels.mean(),
        lambda pixels, raw: pixels if raw else pixels + np.float32(np.arange(16) == 3),
        lambda pixels, raw: pixels[::-1] if raw else pixels,
        lambda pixels, raw: np.float32(pixels) / 2,
    ],
    ids=["image mean", "position", "different channel", "never bytes"],
)
def test_processor_without_value_table_is_not_tabulated(changed):
    ours, run = fixed(changed)
    assert ours.byte_values is None
    for image in noise_images():
        assert np.array_equal(ours(image), run(image))


@pytest.mark.parametrize(
    "spec",
    [
        CLIP,
        QWEN,
        NAFLEX,
        POOLED,
        SIZED,
        replace(NAFLEX, processor=NAFLEX.processor | {"image_mean": [0.1, 0.2, 0.3]}),
    ],
    ids=lambda s: f"{s.processor_class}{len(s.processor)}",
)
def test_pixels_are_stored_as_bytes(spec):
    """Check also processors whose channels are adjacent within a pixel."""
    ours = ImagePreprocessor(spec)
    theirs = ImagePreprocessor(spec)
    theirs.byte_values = None  # the values of the processor
    for image in noise_images(least=16):
        stored_pixels = ours.stored_pixels(image)
        assert stored_pixels.dtype == np.uint8 and theirs.stored_pixels(image).dtype == np.float32
        assert np.array_equal(ours.pixels(image), theirs.pixels(image))
    other = copy.deepcopy(ours)
    assert other.byte_values == ours.byte_values
    other.byte_values.table_C256[1, stored_pixels.flat[0]] += 1
    assert other.byte_values != ours.byte_values


def test_blank_images_are_zeros():
    table = np.arange(256, dtype=np.float32)[None] - 50
    pixels = torch.arange(36, dtype=torch.uint8).view(6, 6)
    inputs = EncoderInputs(
        pixels,
        [(1, 1, 2)] * 4,
        torch.arange(8),
        local_images=[0, 1, 3],
        byte_values=ByteValues(table),
        undecodable=[1, 2],
    )
    expected = pixels.float() - 50
    expected[2:4] = 0
    assert torch.equal(inputs.values().pixels, expected)
    part = inputs.select(range(1, 4))
    assert part.undecodable == [0, 1] and torch.equal(part.values().pixels, expected[2:])
