"""Microbatches of ranks that synchronize in every layer: equal work at the same index.

FSDP2 all-gathers the parameters of every layer, and experts exchange tokens in every layer. Ranks
of such a group run each module of microbatch i at the same time. A step therefore takes sum_i
sum_module max_rank cost(module, rank, i). Equal sums per rank do not reduce this time.

    index      0   1   2   3
    rank 0     9   6   4   2       sorted microbatches, one slice per index: similar costs
    rank 1     8   6   3   1       in a column, so ranks wait little for each other

The microbatches of a step are sorted by cost. Slice i of the sorted order is microbatch i of all
ranks of a group. Two modules have no common sorted order, so several orders are compared: by total
cost, and by one module in blocks that are sorted by a second module. Then the slowest microbatches
of each slice are swapped with microbatches of other slices as long as the sum of maxima decreases.
Several groups of ranks synchronize only once per step, so groups receive slices with equal sums.

Within a slice, the most expensive microbatch goes to the rank with the least work so far, which
balances the host work of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchmm.balance.disttrain.reordering.group_balancing import balance_groups
from torchmm.balance.numba_utils import Float64s, Int64s, cached_njit

EVALUATIONS_PER_ITEM = 256
MAX_EVALUATIONS = 1 << 16
"""Maximum number of swaps evaluated for a step: about 10 ns each for two modules."""


def slice_microbatches(costs_KN: Float64s, groups: int, ranks: int) -> Int64s:
    """Assign microbatches to ranks so that the sum of maxima over the ranks of a group is small.

    Equal inputs produce equal results on every rank if costs are whole numbers.

    Args:
        costs_KN: (K, N), the cost of each microbatch in each module.
        groups: Number of groups, which synchronize once per step.
        ranks: Number of ranks per group, which synchronize in every layer. groups x ranks divides
            N.

    Returns:
        (groups * ranks, N / (groups * ranks)): microbatches of each rank, most expensive slice
        first.
    """
    totals_N = costs_KN.sum(axis=0)
    slices_LR = min(
        _sorted_slices(costs_KN, totals_N, ranks),
        key=lambda slices_LR: _slice_maxima(costs_KN, slices_LR).sum(),
    )
    evaluations = min(EVALUATIONS_PER_ITEM * len(totals_N), MAX_EVALUATIONS)
    _swap_microbatches(np.ascontiguousarray(costs_KN.T), slices_LR, evaluations)
    sums_L = _slice_maxima(costs_KN, slices_LR).sum(axis=0)
    by_group_GM = balance_groups(sums_L, groups)
    order_GM = np.argsort(-sums_L[by_group_GM], axis=1, kind="stable")
    members_GMR = slices_LR[np.take_along_axis(by_group_GM, order_GM, axis=1)]
    return _assign_ranks(totals_N, members_GMR)


def _sorted_slices(costs_KN: Float64s, totals_N: Float64s, ranks: int) -> Iterator[Int64s]:
    """Yield slices (L, R) of microbatches that are sorted by their total and by two modules."""
    yield np.argsort(-totals_N, kind="stable").reshape(-1, ranks)
    count = len(totals_N) // ranks
    spread_K = costs_KN.max(axis=1) - costs_KN.mean(axis=1)
    outer, inner = np.argsort(-spread_K, kind="stable")[[0, min(1, len(spread_K) - 1)]]
    by_outer_N = np.argsort(-costs_KN[outer], kind="stable")
    for blocks in range(2, count + 1):
        if count % blocks == 0:
            blocks_BN = by_outer_N.reshape(blocks, -1)
            order_BN = np.argsort(-costs_KN[inner, blocks_BN], axis=1, kind="stable")
            yield np.take_along_axis(blocks_BN, order_BN, axis=1).reshape(-1, ranks)


def _slice_maxima(costs_KN: Float64s, slices_LR: Int64s) -> Float64s:
    """Return the largest cost (K, L) in each slice."""
    return costs_KN[:, slices_LR].max(axis=2)


def _assign_ranks(totals_N: Float64s, members_GMR: Int64s) -> Int64s:
    """Return microbatches (G * R, M) of each rank.

    The most expensive microbatch of a slice is assigned to the rank with the least work.
    """
    groups, count, ranks = members_GMR.shape
    places_GRM = np.empty((groups, ranks, count), np.int64)
    loads_GR = np.zeros((groups, ranks))
    for index in range(count):
        slice_GR = members_GMR[:, index]
        descending_GR = np.argsort(-totals_N[slice_GR], axis=1, kind="stable")
        slice_GR = np.take_along_axis(slice_GR, descending_GR, axis=1)
        ascending_GR = np.argsort(loads_GR, axis=1, kind="stable")
        np.put_along_axis(places_GRM[:, :, index], ascending_GR, slice_GR, axis=1)
        np.put_along_axis(
            loads_GR,
            ascending_GR,
            np.take_along_axis(loads_GR, ascending_GR, axis=1) + totals_N[slice_GR],
            axis=1,
        )
    return places_GRM.reshape(groups * ranks, count)


@cached_njit
def _swap_microbatches(costs_NK: Float64s, slices_LR: Int64s, evaluations: int) -> None:
    """Swap microbatches between slices in place while the sum of maxima decreases.

    Each round selects the slowest microbatch of a slice in one module, and its best swap with a
    microbatch of another slice.
    """
    slices, ranks = slices_LR.shape
    modules = costs_NK.shape[1]
    top_LK = np.empty((slices, modules), np.int64)
    first_LK = np.empty((slices, modules))
    second_LK = np.empty((slices, modules))
    for slice_index in range(slices):
        _find_largest_costs(costs_NK, slices_LR, slice_index, top_LK, first_LK, second_LK)
    unimproved = 0
    pair = 0
    while unimproved < slices * modules and evaluations >= slices * ranks:
        evaluations -= slices * ranks
        slice_index = pair // modules
        rank = top_LK[slice_index, pair % modules]
        pair = (pair + 1) % (slices * modules)
        unimproved += 1
        other, other_rank = _best_swap(
            costs_NK, slices_LR, slice_index, rank, top_LK, first_LK, second_LK
        )
        if other < 0:
            continue
        moved = slices_LR[slice_index, rank]
        slices_LR[slice_index, rank] = slices_LR[other, other_rank]
        slices_LR[other, other_rank] = moved
        _find_largest_costs(costs_NK, slices_LR, slice_index, top_LK, first_LK, second_LK)
        _find_largest_costs(costs_NK, slices_LR, other, top_LK, first_LK, second_LK)
        unimproved = 0


@cached_njit
def _best_swap(
    costs_NK: Float64s,
    slices_LR: Int64s,
    slice_index: int,
    own_rank: int,
    top_LK: Int64s,
    first_LK: Float64s,
    second_LK: Float64s,
) -> tuple[int, int]:
    """Return slice and rank of the microbatch to swap with, or (-1, -1) if no swap helps."""
    slices, ranks = slices_LR.shape
    modules = costs_NK.shape[1]
    best, best_slice, best_rank = 0.0, -1, -1
    for other in range(slices):
        if other == slice_index:
            continue
        for rank in range(ranks):
            gain = 0.0
            for k in range(modules):
                gain += first_LK[slice_index, k] + first_LK[other, k]
                remaining_max = (
                    second_LK[slice_index, k]
                    if top_LK[slice_index, k] == own_rank
                    else first_LK[slice_index, k]
                )
                gain -= max(remaining_max, costs_NK[slices_LR[other, rank], k])
                remaining_max = (
                    second_LK[other, k] if top_LK[other, k] == rank else first_LK[other, k]
                )
                gain -= max(remaining_max, costs_NK[slices_LR[slice_index, own_rank], k])
            if gain > best:
                best, best_slice, best_rank = gain, other, rank
    return best_slice, best_rank


@cached_njit
def _find_largest_costs(
    costs_NK: Float64s,
    slices_LR: Int64s,
    slice_index: int,
    top_LK: Int64s,
    first_LK: Float64s,
    second_LK: Float64s,
) -> None:
    """Find the largest cost of a slice in each module, its position, and the second largest."""
    for k in range(costs_NK.shape[1]):
        top, first, second = 0, -1.0, 0.0
        for rank in range(slices_LR.shape[1]):
            cost = costs_NK[slices_LR[slice_index, rank], k]
            if cost > first:
                top, first, second = rank, cost, max(first, 0.0)
            elif cost > second:
                second = cost
        top_LK[slice_index, k], first_LK[slice_index, k], second_LK[slice_index, k] = (
            top,
            first,
            second,
        )
