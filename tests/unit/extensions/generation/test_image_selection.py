"""Generated images of held-out batches: selection of images, and conversion of patches."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from torchmm.common.batch import Microbatch, MicrobatchMeta, SampleMeta
from torchmm.common.generated import (
    TARGET_PIXEL_VALUES,
    GeneratedMeta,
    GeneratorInputs,
    GeneratorSpec,
)
from torchmm.data.loader import StepBatch
from torchmm.extensions.evaluation.generated_images import held_out_target_images, to_frames
from torchmm.extensions.evaluation.sample_plots import plot_generated_images
from torchmm.extensions.generation.images import DiffusionImages

GRID = (1, 1, 1)


def microbatch(counts: list[int]) -> Microbatch:
    """Return samples of four tokens with the specified numbers of target images."""
    metas = tuple(
        SampleMeta("s", i, 4, generated=(GeneratedMeta(GRID, 2),) * n) for i, n in enumerate(counts)
    )
    count, tokens = sum(counts), 4 * len(counts)
    inputs = GeneratorInputs(
        patches_PV=torch.arange(count)[:, None].float(),
        noise_PV=torch.zeros(count, 1),
        times=[0.5] * count,
        grids_thw=[GRID] * count,
        context_positions_K=torch.cat(
            [4 * i + torch.tensor([0, 1]).repeat(n) for i, n in enumerate(counts)]
        ),
        contexts=[2] * count,
        in_loss=[True] * count,
    )
    ids = torch.arange(tokens)
    starts = list(range(0, tokens + 1, 4))
    meta = MicrobatchMeta(metas, tokens)
    return Microbatch(ids, ids, ids, starts, {}, meta, inputs if count else None)


def test_requested_number_of_images_is_selected():
    batches = [
        StepBatch([microbatch([0, 0]), microbatch([1, 2])], {}),
        StepBatch([microbatch([2, 0, 3]), microbatch([1])], {}),
    ]
    for count, expected in ((2, [2]), (3, [3]), (4, [3, 1]), (6, [3, 3]), (99, [3, 5, 1])):
        actual = list(held_out_target_images(batches, count))
        assert [len(m.generator.contexts) for m in actual] == expected
        for m in actual:
            assert len(m.meta.generated) == len(m.generator.contexts)
            assert len(m.generator.context_positions_K) == 2 * len(m.generator.contexts)
            assert m.generator.patches_PV[:, 0].tolist() == list(range(len(m.meta.generated)))
    assert len(batches[0].microbatches[1].meta.generated) == 3, "the batch does not change"


def test_patches_convert_back_to_image():
    levels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(levels).save(stream, "PNG")
    meta = GeneratedMeta((1, 2, 2), 1)
    targets = DiffusionImages(GeneratorSpec(8, 4), seed=0, max_pixels=100)
    decoded = targets.decode(stream.getvalue(), meta, 1, ("s", 0, 0, 0))
    pixels = TARGET_PIXEL_VALUES.look_up(torch.from_numpy(decoded.patches_PV))
    (frame,) = to_frames(pixels, meta.grid_thw, 4)
    assert np.array_equal(np.asarray(frame), levels)


def test_values_outside_range_are_clipped():
    (frame,) = to_frames(torch.tensor([[-9.0, 0.0, 9.0]]), GRID, 1)
    assert frame.getpixel((0, 0)) == (0, 128, 255)


def test_plot_has_generated_and_target_frames(tmp_path: Path):
    black, white = Image.new("RGB", (4, 4)), Image.new("RGB", (4, 4), "white")
    samples = [([white] * 3, [black] * 3, f"text {i} for $5") for i in range(5)]
    plot_generated_images(samples, "title", tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as plot:
        dark_rows = (np.asarray(plot.convert("L")) < 30).mean(axis=1) > 0.3
    assert dark_rows.any() and not dark_rows.all()
