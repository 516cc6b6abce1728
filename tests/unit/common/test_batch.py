"""Tests of the split of encoder inputs by images."""

from math import prod

import pytest
import torch

from torchmm.common.batch import EncoderInputs, split_evenly

GRIDS = [(1, 2, 4), (1, 2, 2), (1, 4, 6), (2, 2, 2), (1, 6, 2)]


def inputs_of(kind: str, tokens_per_image: list[int]) -> EncoderInputs:
    """Return inputs whose pixels contain the index of the image, with gaps between positions."""
    grids = GRIDS if kind == "patches" else [(1, 2, 2)] * 5
    if kind == "patches":
        pixels = torch.cat([torch.full((prod(g), 3), float(i)) for i, g in enumerate(grids)])
    else:
        pixels = torch.arange(5.0)[:, None, None, None].expand(5, 3, 4, 4)
    starts = [100 * i for i in range(5)]
    positions = [s + k for s, n in zip(starts, tokens_per_image, strict=True) for k in range(n)]
    return EncoderInputs(pixels, grids, torch.tensor(positions))


CASES = [
    ("patches", [prod(g) for g in GRIDS]),
    ("patches", [prod(g) // 4 for g in GRIDS]),
    ("fixed", [4] * 5),
    ("fixed", [5] * 5),  # with class token
    ("fixed", [1] * 5),  # with pixel shuffle
]


@pytest.mark.parametrize(("kind", "tokens"), CASES)
@pytest.mark.parametrize("images", [range(0, 1), range(1, 3), range(4, 5), range(0, 5)])
def test_selected_images_keep_pixels_grids_and_positions(kind, tokens, images):
    inputs = inputs_of(kind, tokens)
    selected = inputs.select(images)
    assert selected.grids_thw == [inputs.grids_thw[i] for i in images]
    assert selected.pixels.unique().tolist() == [float(i) for i in images]
    patches = sum(prod(inputs.grids_thw[i]) for i in images)
    assert len(selected.pixels) == (patches if kind == "patches" else len(images))
    assert selected.positions_K.tolist() == [100 * i + k for i in images for k in range(tokens[i])]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_even_ranges_are_even_and_complete(parts):
    inputs = inputs_of(*CASES[1])
    split = [inputs.select(images) for images in split_evenly(5, parts)]
    counts = [len(part.grids_thw) for part in split]
    assert len(split) == parts
    assert max(counts) - min(counts) <= 1
    assert torch.equal(torch.cat([p.pixels for p in split]), inputs.pixels)
    assert torch.equal(torch.cat([p.positions_K for p in split]), inputs.positions_K)
    assert [g for p in split for g in p.grids_thw] == inputs.grids_thw


@pytest.mark.parametrize("parts", [0, 6])
def test_ranges_without_images_are_rejected(parts):
    with pytest.raises(ValueError, match=f"5 images cannot be split into {parts} parts"):
        split_evenly(5, parts)


@pytest.mark.parametrize("images", [range(3, 6), range(2, 2), range(0, 4, 2)])
def test_missing_images_are_rejected(images):
    with pytest.raises(ValueError, match="out of range"):
        inputs_of(*CASES[0]).select(images)
