from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from torchmm.data.steps.shuffling import hash_integers, permute_indices


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000, 65537])
@pytest.mark.parametrize("key", [0, 1, (1 << 64) - 1])
def test_permutation_has_each_number_once(count, key):
    assert sorted(permute_indices(np.arange(count), count, key)) == list(range(count))


def test_permuted_value_is_independent_of_others():
    full = permute_indices(np.arange(1000), 1000, 7)
    assert (
        permute_indices(np.array([999, 3, 500]), 1000, 7).tolist() == full[[999, 3, 500]].tolist()
    )


def test_permutation_is_stable():
    assert permute_indices(np.arange(8), 8, 7).tolist() == [0, 4, 5, 6, 2, 7, 3, 1]
    assert hash_integers(1, 2, 3) == 15020427595393229491


def test_permutations_are_uniformly_distributed():
    counts = Counter(tuple(permute_indices(np.arange(4), 4, key).tolist()) for key in range(4800))
    assert len(counts) == 24
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 49.7  # chi square, 23: 0.1 %


@pytest.mark.parametrize("count", [4096, 5000])
def test_adjacent_positions_are_spread(count):
    """Check by chi square that 512 adjacent positions spread over 16 bins, for several keys."""
    for key in range(8):
        bins = permute_indices(np.arange(512), count, key) * 16 // count
        actual = np.bincount(bins, minlength=16)
        assert ((actual - 32) ** 2 / 32).sum() < 45  # 15: 37.7 at 0.1 %
    steps = np.diff(permute_indices(np.arange(count), count, 3))
    assert Counter(steps.tolist()).most_common(1)[0][1] < 12, "no fixed distance"
