"""Tests of simulated steps with the sample packing of the data loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torchmm.balance.recipe_simulation.first_microbatches import simulated_microbatches
from torchmm.recipe.read import load_recipe

RECIPE = Path(__file__).parents[4] / "benchmarks/support/recipes/vlm_s_samples.toml"


def microbatches(count, packing, *overrides):
    recipe = load_recipe(RECIPE, [f"--data.packing={packing}", *overrides]).recipe
    return simulated_microbatches(recipe, count)


@pytest.mark.parametrize("packing", ["best_fit", "balanced"])
def test_simulated_sequences_do_not_depend_on_count(packing):
    long = microbatches(200, packing)
    assert microbatches(70, packing) == long[:70]
    pairs = microbatches(35, packing, "--training.microbatch_size=2")
    assert [m.samples for m in pairs[:2]] == [
        long[0].samples + long[1].samples,
        long[2].samples + long[3].samples,
    ]


def test_balanced_packing_evens_simulated_images():
    best_fit, balanced = (microbatches(256, packing) for packing in ("best_fit", "balanced"))
    names = [sample.index for meta in balanced for sample in meta.samples]
    assert len(names) == len(set(names))
    used = [sum(meta.used_tokens for meta in metas) for metas in (best_fit, balanced)]
    assert used[1] > 0.985 * used[0]
    assert max(meta.used_tokens for meta in balanced) <= balanced[0].tokens == 8192
    excess = [
        (images.max(1) / images.mean(1)).mean() - 1
        for images in (
            np.array([meta.image_count for meta in metas]).reshape(8, 32)
            for metas in (best_fit, balanced)
        )
    ]
    assert excess[0] > 2 and excess[1] < 0.15
