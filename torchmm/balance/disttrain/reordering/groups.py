"""Which data-parallel group gets which items of a global batch: equal counts, equal work.

INTRA reordering of DistTrain (§6.1, Algorithm 2). All groups wait for the slowest, so the largest
sum of sizes is to be as small as possible: multiway number partitioning. Items are dealt out from
the largest down, each to the group with the least work so far (LPT: at most 4/3 of the optimum),
and then the heaviest group swaps items with lighter ones until that helps no more.

Two things differ from the printed algorithm. It sorts in ascending order, which is list
scheduling (2 - 1/m) instead of the 4/3 that the text claims. And it lets a group have any number
of items: with heavy-tailed sizes some would get one and others hundreds, but each group has to
fill the same number of microbatches, so here a full group gets no more.

An item is what has a place in a microbatch of its own, such as a packed sequence. Counts are
equal, so microbatches can be formed of any assignment; microbatches of several items come from
another call, for the items of one group. Rejected: dealing out samples and packing them into
sequences afterwards, which may take more sequences than a group has; Karmarkar-Karp differencing,
which needs a repair of the counts and gains nothing over swaps; swaps alone, from the natural
order: a thousand times as many.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from torchmm.balance.compiled import Float64s, Int64s, compiled

TOLERANCE = 1e-4
"""The heaviest group may have this share more than the bound before swaps set in."""
SWAPS_PER_ITEM = 2
"""Swaps are given up at this many per item; a few hundred are usual for 2,000 items."""


def balance_groups(sizes_N: ArrayLike, groups: int) -> Int64s:
    """Assign items to groups of equal count so that the largest sum of sizes is small.

    Deterministic: equal inputs give equal groups, on every rank.

    Args:
        sizes_N: cost of each item, in any unit.
        groups: G, a divisor of the number of items.

    Returns:
        (G, N / G): indices of each group's items, ascending.

    Raises:
        ValueError: sizes are negative or not finite, or the groups cannot be of equal count.
    """
    sizes = _checked(sizes_N, groups)
    by_size = np.argsort(-sizes, kind="stable")
    ordered = sizes[by_size]
    members, loads = _deal(ordered, groups)
    limit = load_bound(sizes, groups) * (1 + TOLERANCE)
    _improve(ordered, members, loads, limit, SWAPS_PER_ITEM * len(sizes))
    return np.sort(by_size[members], axis=1)


def load_bound(sizes_N: ArrayLike, groups: int) -> float:
    """A sum of sizes that the heaviest of `groups` groups of equal count cannot stay below.

    The mean, or the largest item with the smallest possible company.

    Raises:
        ValueError: as `balance_groups`.
    """
    sizes = _checked(sizes_N, groups)
    company = len(sizes) // groups - 1
    smallest = np.partition(sizes, company)[:company].sum()
    return float(max(sizes.sum() / groups, sizes.max() + smallest))


def _checked(sizes_N: ArrayLike, groups: int) -> Float64s:
    sizes = np.ascontiguousarray(sizes_N, dtype=np.float64)
    if sizes.ndim != 1 or groups < 1 or len(sizes) % groups or not len(sizes):
        raise ValueError(
            f"sizes of shape {sizes.shape} for {groups} groups: pass one size per item, and a "
            "multiple of the number of groups"
        )
    if not (np.isfinite(sizes).all() and sizes.min() >= 0):
        bad = int(np.flatnonzero(~(np.isfinite(sizes) & (sizes >= 0)))[0])
        raise ValueError(f"size of item {bad} is {sizes[bad]}: sizes must be finite and >= 0")
    return sizes


@compiled
def _deal(sizes_N: Float64s, groups: int) -> tuple[Int64s, Float64s]:
    """Items in descending order of size, each to the lightest group that is not full.

    Returns members (G, N / G), in descending order of size, and loads (G,).
    """
    room = sizes_N.shape[0] // groups
    members = np.empty((groups, room), np.int64)
    loads = np.zeros(groups)
    counts = np.zeros(groups, np.int64)
    heap = np.arange(groups)
    open_groups = groups
    for item in range(sizes_N.shape[0]):
        group = heap[0]
        members[group, counts[group]] = item
        loads[group] += sizes_N[item]
        counts[group] += 1
        if counts[group] == room:
            open_groups -= 1
            group = heap[open_groups]
        position = 0
        while 2 * position + 1 < open_groups:  # let it sink to its place
            child = 2 * position + 1
            if child + 1 < open_groups and _lighter(loads, heap[child + 1], heap[child]):
                child += 1
            if not _lighter(loads, heap[child], group):
                break
            heap[position] = heap[child]
            position = child
        heap[position] = group
    return members, loads


@compiled
def _lighter(loads: Float64s, one: int, other: int) -> bool:
    """Whether a group has less work; of equal ones the first."""
    return loads[one] < loads[other] or (loads[one] == loads[other] and one < other)


@compiled
def _improve(sizes_N: Float64s, members: Int64s, loads: Float64s, limit: float, swaps: int) -> None:
    """Swap items of the heaviest group, in place, until it is within the limit or nothing helps."""
    for _ in range(swaps):
        heavy = int(np.argmax(loads))
        light = int(np.argmin(loads))
        if loads[heavy] <= limit:
            return
        mine, other = _best_swap(sizes_N, members, heavy, light, loads[heavy] - loads[light])
        group = 0
        while mine < 0 and group < loads.shape[0]:
            gap = loads[heavy] - loads[group]
            mine, other = _best_swap(sizes_N, members, heavy, group, gap)
            light = group
            group += 1
        if mine < 0:
            return
        given = members[heavy, mine]
        taken = members[light, other]
        moved = sizes_N[given] - sizes_N[taken]
        _replace(sizes_N, members[heavy], mine, taken)
        _replace(sizes_N, members[light], other, given)
        loads[heavy] -= moved
        loads[light] += moved


@compiled
def _best_swap(
    sizes_N: Float64s, members: Int64s, heavy: int, light: int, gap: float
) -> tuple[int, int]:
    """Positions whose exchange makes two groups most alike; (-1, -1) if none makes them more so.

    Both groups are in descending order of size, so one pass over both finds the item nearest to
    half the gap below every item of the heavy one.
    """
    room = members.shape[1]
    # What is left of the gap must be clearly less: rounding errors would let swaps go in circles.
    least = 0.999 * gap
    found_mine = -1
    found_other = -1
    below = 0
    for mine in range(room):
        size = sizes_N[members[heavy, mine]]
        while below < room and sizes_N[members[light, below]] > size - gap / 2:
            below += 1
        for other in range(max(below - 1, 0), min(below + 1, room)):
            left = abs(gap - 2 * (size - sizes_N[members[light, other]]))
            if left < least:
                least, found_mine, found_other = left, mine, other
    return found_mine, found_other


@compiled
def _replace(sizes_N: Float64s, group: Int64s, position: int, item: int) -> None:
    """Put an item in the place of another, and the group in order again."""
    while position > 0 and sizes_N[group[position - 1]] < sizes_N[item]:
        group[position] = group[position - 1]
        position -= 1
    while position < group.shape[0] - 1 and sizes_N[group[position + 1]] > sizes_N[item]:
        group[position] = group[position + 1]
        position += 1
    group[position] = item
