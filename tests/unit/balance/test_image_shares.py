"""Assignment of images to data-parallel ranks."""

from itertools import product
from random import Random

import pytest

from torchmm.balance.image_shares import assign_images


def slowest(costs: list[list[int]], owners: list[int]) -> int:
    work = [0] * len(costs)
    for cost, owner in zip((c for own in costs for c in own), owners, strict=True):
        work[owner] += cost
    return max(work)


@pytest.mark.parametrize("seed", range(8))
def test_assignment_is_near_optimal(seed):
    rng = Random(seed)
    ranks = rng.choice((2, 3))
    costs = [[rng.randint(1, 30) for _ in range(rng.randint(0, 4))] for _ in range(ranks)]
    count = sum(map(len, costs))
    best = min(slowest(costs, list(o)) for o in product(range(ranks), repeat=count))
    found = slowest(costs, assign_images(costs))
    assert best <= found <= (4 / 3) * best


@pytest.mark.parametrize("count", [0, 1, 5])
def test_equal_images_stay_on_their_ranks(count):
    owners = assign_images([[7] * count for _ in range(4)])
    assert owners == [rank for rank in range(4) for _ in range(count)]


def test_only_surplus_images_move():
    owners = assign_images([[3] * 6, [3] * 2])
    assert sorted(owners) == [0] * 4 + [1] * 4
    assert owners[6:] == [1, 1]
