from __future__ import annotations

import numpy as np
import pytest

from torchmm.data.step_packs import Packer, assign


def pack(lengths, sequence_length, max_open):
    packer = Packer(sequence_length, max_open)
    for i, length in enumerate(lengths):
        packer.add(i, length)
        assert len(packer.open) <= max_open
    packer.flush()
    return list(packer.closed)


@pytest.mark.parametrize("max_open", [1, 2, 16])
@pytest.mark.parametrize("seed", range(5))
def test_every_item_is_in_exactly_one_pack_and_none_overflows(seed, max_open):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 101, 500)
    packs = pack(lengths, 100, max_open)
    assert sorted(i for p in packs for i in p) == list(range(500))
    assert max(sum(lengths[i] for i in p) for p in packs) <= 100


def test_best_fit_takes_the_fullest_pack_with_room():
    assert pack([60, 70, 30, 40], 100, 4) == [[1, 2], [0, 3]]


def test_fullest_pack_is_closed_when_too_many_are_open():
    packer = Packer(100, 2)
    for i, length in enumerate([60, 90, 70]):
        packer.add(i, length)
    assert list(packer.closed) == [[1]]


def test_open_packs_fill_sequences_better_than_one():
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    assert len(pack(lengths, 100, 16)) < 0.85 * len(pack(lengths, 100, 1))
    assert sum(lengths) / (100 * len(pack(lengths, 100, 16))) > 0.97


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (2, 1), (2, 4), (8, 1), (1, 8)])
def test_assignment_keeps_order_and_shapes(ranks, size):
    assigned = assign(list(range(8)), ranks, size)
    assert [len(rank) for rank in assigned] == [8 // ranks // size] * ranks
    assert [p for rank in assigned for m in rank for p in m] == list(range(8))
