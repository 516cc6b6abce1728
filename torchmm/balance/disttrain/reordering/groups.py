"""Assignment of the items of a global batch to data-parallel groups: equal counts, equal work.

INTRA reordering of DistTrain (§6.1, Algorithm 2). All groups wait for the slowest group, so the
largest sum of sizes is minimized (multiway number partitioning). Items are assigned in descending
order of size, each to the group with the least work so far. This is LPT scheduling, at most 4/3 of
the optimum. Then the group with the most work swaps items with other groups as long as this reduces
the maximum:

    items 9, 8, 7, 3, 2, 1      group 0: 9 + 3 + 2 = 14 (full before 1)
                                group 1: 8 + 7 + 1 = 16

The implementation differs from the printed algorithm in two points:

- The paper sorts in ascending order. This is list scheduling with a factor of 2 - 1/m, instead of
  the 4/3 that the text states.
- The paper does not limit the number of items of a group. With heavy-tailed sizes, some groups
  would have one item and others hundreds. Each group must fill the same number of microbatches, so
  a full group receives no more items.

An item fills one microbatch, or one packed sequence of a microbatch. Counts are equal, so
microbatches can be formed from any assignment. Microbatches of several items come from a second
call for the items of one group.

Assignment of samples before packing can need more sequences than a group has. Karmarkar-Karp
differencing needs a repair of the counts and is not better than swaps. Swaps alone, from the
original order, need a thousand times as many swaps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from torchmm.balance.compiled import Float64s, Int64s, compiled

TOLERANCE = 1e-4
"""Swaps start only if the largest sum exceeds the lower bound by more than this fraction."""
SWAPS_PER_ITEM = 2
"""Maximum number of swaps per item. A few hundred swaps are typical for 2,000 items."""


def balance_groups(sizes_N: ArrayLike, groups: int) -> Int64s:
    """Assign items to groups of equal count so that the largest sum of sizes is small.

    Deterministic: equal inputs produce equal groups on every rank.

    Args:
        sizes_N: Cost of each item, in any unit.
        groups: Number G of groups, a divisor of the number of items.

    Returns:
        (G, N / G): item indices of each group, ascending.

    Raises:
        ValueError: Sizes are negative or not finite, or groups cannot have equal counts.
    """
    sizes = _checked(sizes_N, groups)
    by_size = np.argsort(-sizes, kind="stable")
    ordered = sizes[by_size]
    members, loads = _deal(ordered, groups)
    limit = load_bound(sizes, groups) * (1 + TOLERANCE)
    _improve(ordered, members, loads, limit, SWAPS_PER_ITEM * len(sizes))
    return np.sort(by_size[members], axis=1)


def load_bound(sizes_N: ArrayLike, groups: int) -> float:
    """Return a lower bound of the largest sum of sizes of `groups` groups of equal count.

    The bound is the mean, or the largest item together with the smallest items that fill its group.

    Raises:
        ValueError: As for `balance_groups`.
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
    """Assign items in descending order of size, each to the lightest group that is not full.

    Returns:
        Members (G, N / G), in descending order of size; loads (G,).
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
        while 2 * position + 1 < open_groups:  # sift down in the heap
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
    """Return True if a group has less work. Ties are broken by index."""
    return loads[one] < loads[other] or (loads[one] == loads[other] and one < other)


@compiled
def _improve(sizes_N: Float64s, members: Int64s, loads: Float64s, limit: float, swaps: int) -> None:
    """Swap items of the largest group in place until it is within the limit or no swap helps."""
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
    """Return the positions of the swap that equalizes two groups best, or (-1, -1) if none helps.

    Both groups are in descending order of size. One pass over both therefore finds, for every item
    of the heavy group, the item whose size is smaller by about half the gap.
    """
    room = members.shape[1]
    # The remaining gap must be clearly smaller. Rounding errors could cause endless swaps.
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
    """Replace an item and restore the descending order of the group."""
    while position > 0 and sizes_N[group[position - 1]] < sizes_N[item]:
        group[position] = group[position - 1]
        position -= 1
    while position < group.shape[0] - 1 and sizes_N[group[position + 1]] > sizes_N[item]:
        group[position] = group[position + 1]
        position += 1
    group[position] = item
