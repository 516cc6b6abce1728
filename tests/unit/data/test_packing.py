from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from order_oracles import PlainPacker

from torchmm.data.steps.packing import BestFitPacker, group_by_sequence, pack_all


@pytest.mark.parametrize("max_open", [1, 2, 16])
@pytest.mark.parametrize("seed", range(3))
def test_packs_contain_each_item_without_overflow(seed, max_open):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 101, 500)
    packs = pack_all(lengths, 100, max_open)
    assert sorted(i for p in packs for i in p) == list(range(500))
    assert max(sum(lengths[i] for i in p) for p in packs) <= 100


def test_best_fit_selects_pack_with_least_space():
    assert pack_all([60, 70, 30, 40], 100, 4) == [[1, 2], [0, 3]]


def test_fullest_pack_closes_at_open_limit():
    assert pack_all([60, 90, 70], 100, 2, flush=False) == [[1]]


def test_open_packs_improve_fill():
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    assert len(pack_all(lengths, 100, 16)) < 0.85 * len(pack_all(lengths, 100, 1))
    assert sum(lengths) / (100 * len(pack_all(lengths, 100, 16))) > 0.97


def test_old_open_pack_is_closed_by_age():
    packer = BestFitPacker(100, 4)
    for now in range(1, 6):
        packer.add(np.array([40 if now == 1 else 99]), np.zeros(1, int), now=now)
    assert packer.opened_at[0] == 1
    packer.close_older(0)
    assert 0 in packer.open
    packer.close_older(1)
    assert packer.closed[-1] == 0 and 0 not in packer.open


@pytest.mark.parametrize("max_tiles", [None, 5])
@pytest.mark.parametrize("max_open", [1, 3, 16])
def test_packer_matches_reference(max_open, max_tiles):
    rng = np.random.default_rng(max_open)
    tokens, tiles = rng.integers(1, 101, 3000), rng.integers(0, 8, 3000)
    tokens[::7] = 100
    reference, packer = (
        PlainPacker(100, max_open, max_tiles),
        BestFitPacker(100, max_open, max_tiles),
    )
    packs = np.zeros(0, np.int64)
    while len(packs) < 3000:
        time = len(packs) // 100
        packer.close_older(time - 3)
        part = slice(len(packs), len(packs) + int(rng.integers(1, 200)))
        assigned = packer.add(
            tokens[part], tiles[part], max_closed=len(packer.closed) + 5, now=time
        )
        reference.close_older(time - 3)
        for i in range(part.start, part.start + len(assigned)):
            reference.add(i, int(tokens[i]), int(tiles[i]), time)
        packs = np.append(packs, assigned)
        chosen, starts = group_by_sequence(packs, np.array(packer.open))
        actual = [chosen[a:b].tolist() for a, b in pairwise(starts)]
        assert actual == [p["names"] for p in reference.open]
    chosen, starts = group_by_sequence(packs, np.array(packer.closed))
    actual = [chosen[a:b].tolist() for a, b in pairwise(starts)]
    assert actual == reference.closed


def test_packer_stops_after_requested_packs():
    packer = BestFitPacker(100, 3)
    placed = packer.add(np.full(1000, 60), np.zeros(1000, int), max_closed=4)
    assert len(packer.closed) == 4 and len(placed) == 7
