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

from torchmm.balance.numba_utils import Float64s, Int64s, cached_njit

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
    sizes = _check_sizes(sizes_N, groups)
    by_size = np.argsort(-sizes, kind="stable")
    ordered = sizes[by_size]
    members, loads = _assign_largest_first(ordered, groups)
    limit = load_bound(sizes, groups) * (1 + TOLERANCE)
    _swap_items(ordered, members, loads, limit, SWAPS_PER_ITEM * len(sizes))
    return np.sort(by_size[members], axis=1)


def load_bound(sizes_N: ArrayLike, groups: int) -> float:
    """Return a lower bound of the largest sum of sizes of `groups` groups of equal count.

    The bound is the mean, or the largest item together with the smallest items that fill its group.

    Raises:
        ValueError: As for `balance_groups`.
    """
    sizes = _check_sizes(sizes_N, groups)
    companions = len(sizes) // groups - 1
    smallest = np.partition(sizes, companions)[:companions].sum()
    return float(max(sizes.sum() / groups, sizes.max() + smallest))


def _check_sizes(sizes_N: ArrayLike, groups: int) -> Float64s:
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


@cached_njit
def _assign_largest_first(sizes_N: Float64s, groups: int) -> tuple[Int64s, Float64s]:
    """Assign items in descending order of size, each to the lightest group that is not full.

    Returns:
        Members (G, N / G), in descending order of size; loads (G,).
    """
    capacity = sizes_N.shape[0] // groups
    members = np.empty((groups, capacity), np.int64)
    loads = np.zeros(groups)
    counts = np.zeros(groups, np.int64)
    heap = np.arange(groups)
    open_groups = groups
    for item in range(sizes_N.shape[0]):
        group = heap[0]
        members[group, counts[group]] = item
        loads[group] += sizes_N[item]
        counts[group] += 1
        if counts[group] == capacity:
            open_groups -= 1
            group = heap[open_groups]
        position = 0
        while 2 * position + 1 < open_groups:  # sift down in the heap
            child = 2 * position + 1
            if child + 1 < open_groups and _has_less_work(loads, heap[child + 1], heap[child]):
                child += 1
            if not _has_less_work(loads, heap[child], group):
                break
            heap[position] = heap[child]
            position = child
        heap[position] = group
    return members, loads


@cached_njit
def _has_less_work(loads: Float64s, one: int, other: int) -> bool:
    """Return True if a group has less work. Ties are broken by index."""
    return loads[one] < loads[other] or (loads[one] == loads[other] and one < other)


@cached_njit
def _swap_items(
    sizes_N: Float64s, members: Int64s, loads: Float64s, limit: float, swaps: int
) -> None:
    """Swap items of the largest group in place until it is within the limit or no swap helps."""
    for _ in range(swaps):
        heavy = int(np.argmax(loads))
        light = int(np.argmin(loads))
        if loads[heavy] <= limit:
            return
        heavy_position, light_position = _best_swap(
            sizes_N, members, heavy, light, loads[heavy] - loads[light]
        )
        group = 0
        while heavy_position < 0 and group < loads.shape[0]:
            gap = loads[heavy] - loads[group]
            heavy_position, light_position = _best_swap(sizes_N, members, heavy, group, gap)
            light = group
            group += 1
        if heavy_position < 0:
            return
        heavy_item = members[heavy, heavy_position]
        light_item = members[light, light_position]
        moved = sizes_N[heavy_item] - sizes_N[light_item]
        _replace_item(sizes_N, members[heavy], heavy_position, light_item)
        _replace_item(sizes_N, members[light], light_position, heavy_item)
        loads[heavy] -= moved
        loads[light] += moved


@cached_njit
def _best_swap(
    sizes_N: Float64s, members: Int64s, heavy: int, light: int, gap: float
) -> tuple[int, int]:
    """Return the positions of the swap that equalizes two groups best, or (-1, -1) if none helps.

    Both groups are in descending order of size. One pass over both therefore finds, for every item
    of the heavy group, the item whose size is smaller by about half the gap.
    """
    capacity = members.shape[1]
    # The remaining gap must be clearly smaller. Rounding errors could cause endless swaps.
    smallest_gap = 0.999 * gap
    best_heavy = -1
    best_light = -1
    below = 0
    for heavy_position in range(capacity):
        size = sizes_N[members[heavy, heavy_position]]
        while below < capacity and sizes_N[members[light, below]] > size - gap / 2:
            below += 1
        for light_position in range(max(below - 1, 0), min(below + 1, capacity)):
            remaining_gap = abs(gap - 2 * (size - sizes_N[members[light, light_position]]))
            if remaining_gap < smallest_gap:
                smallest_gap, best_heavy, best_light = remaining_gap, heavy_position, light_position
    return best_heavy, best_light


@cached_njit
def _replace_item(sizes_N: Float64s, group: Int64s, position: int, item: int) -> None:
    """Replace an item and restore the descending order of the group."""
    while position > 0 and sizes_N[group[position - 1]] < sizes_N[item]:
        group[position] = group[position - 1]
        position -= 1
    while position < group.shape[0] - 1 and sizes_N[group[position + 1]] > sizes_N[item]:
        group[position] = group[position + 1]
        position += 1
    group[position] = item
