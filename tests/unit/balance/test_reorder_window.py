"""Windows of several global batches: evener steps than any batch has alone, and never longer."""

import numpy as np
import pytest
from test_reorder_step import LAYOUTS, pack, reorder

from torchmm.balance.reordering.window import WindowReorder


def window_of(batches: int, count: int, heavy: int, seed: int = 0) -> list:
    """Global batches of packs with few images, of which so many in all have a hundred."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 4, batches * count)
    images[rng.choice(len(images), heavy, replace=False)] = 100
    return [pack(int(n)) for n in images]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2])
def test_steps_are_whole_and_no_window_lasts_longer(name, size):
    found = reorder(name, 2, balance=True, order=True, size=size)
    window = WindowReorder(found)
    for seed in range(4):
        packs = window_of(3, 16, 5, seed)
        steps = window(packs, 3)
        assert [len(own) for own in steps] == [16] * 3
        assert sorted(n for own in steps for n in own) == [*range(48)]
        times = found.stage_times(packs)
        natural = window.lasts_ns(times, np.arange(48).reshape(3, 16))
        assert window.lasts_ns(times, np.array(steps)) <= natural
        assert steps == window(packs, 3), "not the same"


@pytest.mark.parametrize("name", ["megatron_balanced", "interleaved_1f1b", "disaggregated"])
def test_packs_that_are_too_much_for_any_rank_go_to_the_same_step(name):
    """In every batch one pack makes all ranks wait; together they do so once."""
    found = reorder(name, 4, balance=True, order=True)
    packs = [pack(100 if n % 16 == 3 else 1) for n in range(4 * 16)]
    times = found.stage_times(packs)
    window = WindowReorder(found)
    steps = window(packs, 4)
    heavy = [sum(n % 16 == 3 for n in own) for own in steps]
    assert max(heavy) == 4
    natural = np.arange(64).reshape(4, 16)
    assert window.lasts_ns(times, np.array(steps)) < 0.7 * window.lasts_ns(times, natural)


def test_batches_that_are_even_stay_as_they_came():
    found = reorder("megatron_balanced", 2, balance=True, order=False)
    packs = [pack(2)] * 32
    assert WindowReorder(found)(packs, 2) == [[*range(16)], [*range(16, 32)]]


def test_groups_of_all_steps_are_even_where_they_can_be():
    found = reorder("one rank", 4, balance=True, order=False)
    rng = np.random.default_rng(1)
    packs = [pack(int(n)) for n in rng.integers(0, 25, 4 * 16)]
    times = found.stage_times(packs)
    sizes = found.sizes_of(times)
    natural, dealt = (
        [found.arranged(times.part(own)).ends_ns for own in steps]
        for steps in (np.arange(64).reshape(4, 16), WindowReorder(found).dealt(times, 4))
    )
    assert max(dealt) < 1.01 * sizes.sum() / 16 < max(natural)
