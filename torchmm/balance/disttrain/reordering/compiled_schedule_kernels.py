"""Compiled loops over the program of a step, for `compiled_schedule` and `microbatch_order`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.numba_utils import (
    Float64s,
    Index,
    Int64s,
    Uint64s,
    acceptance_threshold,
    cached_njit,
    cooling_factor,
    next_random,
    nonan_njit,
    random_index,
)
from torchmm.balance.simulation.graph_kernels import time_lanes

# [Note: a schedule as a recurrence]
#
# An operator starts when its predecessors have ended (`graph_kernels.time_lanes`): the previous
# operator on its rank, and operators on other ranks whose results it needs.
#
# Operators are sorted by the last *slot* (index in the order of microbatches) that they depend on,
# and topologically within a slot:
#
#     operator  0 ...       ...          ...              N - 1
#              |  slot 0   |  slot 1   | ... |  slot M - 1       |
#              ^begin[0]   ^begin[1]         ^begin[M - 1]       ^begin[M]
#
# A change of slot s does not change end times before `begin[s]`. After a swap of slots i < j,
# `advance_lanes` therefore starts at `begin[i]`.
#
# Many groups are annealed at once. The last axis of arrays has one *lane* for each of G groups, and
# all lanes try to swap the same two slots. Indices are then read once for all lanes, and arithmetic
# uses vector registers: 30 groups take about as long as four groups. Lanes that reject the swap
# swap back. Their end times are stale until the next iteration, which therefore starts at the
# earlier slot of its swap and the previous swap (`stale`).
#
# Durations of the lanes, (V * M + C + 1, G), each in the microbatch order of its group:
#
#     v * M + s    row `varying[v]` in slot s
#     V * M + c    row `fixed[c]`: equal for all microbatches, so a swap does not move it
#     V * M + C    0: operators that only wait for a further result


class ScheduleTables(NamedTuple):
    """Operators of a program, sorted by slot and topologically within a slot.

    Indices are unsigned, because numba adds a wraparound check to signed indices.
    """

    first_source_N: Uint64s
    """Operator that must end before each operator. The number of operators if there is none."""
    second_source_N: Uint64s
    """Second operator that must end before each operator, or the first one again."""
    duration_index_N: Uint64s
    """Index of the duration of each operator."""
    slot_offsets_M: Int64s
    """Offsets of the operators of each slot, shape (M + 1,)."""
    last_R: Uint64s
    """Last operator of each rank."""
    idle_start_M: Int64s
    """Operator before the first forward of each slot, if a backward follows on the first rank."""
    idle_end_M: Int64s
    """Operator that this backward waits for. -1 if no backward follows."""


class LaneCosts(NamedTuple):
    """Durations of several groups, in the slot order of each group.

    Durations that are equal for all microbatches are stored once: `varying` rows of M slots come
    first, then one entry for each fixed row, then a 0.
    """

    cost_index_N: Uint64s
    """Index of the duration of each operator."""
    varying_V: Int64s
    """Rows that differ between microbatches."""
    fixed_C: Int64s
    """Rows that are equal for all microbatches."""
    costs_RG: Float64s


@cached_njit
def fill_lanes(
    lanes: LaneCosts, costs_GKM: Float64s, orders_GM: Int64s, first: int, last: int
) -> None:
    """Write the durations of slots `first` to `last` of each group in its order."""
    groups, _, slots = costs_GKM.shape
    for group in range(groups):
        for index, row in enumerate(lanes.varying_V):
            for slot in range(first, last):
                cost = costs_GKM[group, row, orders_GM[group, slot]]
                lanes.costs_RG[index * slots + slot, group] = cost
        base = len(lanes.varying_V) * slots
        for index, row in enumerate(lanes.fixed_C):
            lanes.costs_RG[base + index, group] = costs_GKM[group, row, 0]


@nonan_njit
def advance_lanes(
    tables: ScheduleTables, lanes: LaneCosts, ends_NG: Float64s, first: int, makespan_G: Float64s
) -> None:
    """Write the end times of the operators from `first` on, and the makespans."""
    last = len(tables.duration_index_N)
    time_lanes(
        tables.first_source_N,
        tables.second_source_N,
        lanes.cost_index_N,
        lanes.costs_RG,
        ends_NG,
        first,
        last,
    )
    makespan_G[:] = 0.0
    for step in tables.last_R:
        for g in range(len(makespan_G)):
            end_g = ends_NG[step, g]
            makespan_G[g] = end_g if end_g > makespan_G[g] else makespan_G[g]


@cached_njit
def fill_intervals(
    tables: ScheduleTables,
    lanes: LaneCosts,
    costs_GKM: Float64s,
    entry_GM: Float64s,
    size_GM: Float64s,
    first_interval_GM: Float64s,
    reserved: int,
) -> Int64s:
    """Run Algorithm 3 of DistTrain for each group. See `fill_interval_orders`.

    Args:
        tables: Operators of the program.
        lanes: Scratch memory; overwritten.
        costs_GKM: Durations by row and microbatch.
        entry_GM: Forward time on the first rank, with which its intervals are filled.
        size_GM: Size that decides which microbatches come first and last.
        first_interval_GM: Duration of the first interval if a microbatch is the first.
        reserved: Number of the smallest microbatches that are reserved for the end.

    Returns:
        (G, M): microbatch of each slot.
    """
    groups, _, slots = costs_GKM.shape
    orders = np.empty((groups, slots), np.int64)
    ends = np.zeros((len(tables.duration_index_N) + 1, groups))
    to_fill = np.empty(groups)
    warmup = 0  # slots with a forward before the first backward
    while warmup < slots and tables.idle_end_M[warmup] < 0:
        warmup += 1
    last = slots - reserved - 1  # last slot with a choice
    for group in range(groups):
        order = np.argsort(size_GM[group], kind="mergesort")
        if last > 0:
            order = np.append(np.append(order[:1], order[reserved + 1 :]), order[reserved:0:-1])
        orders[group] = order
        to_fill[group] = first_interval_GM[group, order[0]]
    fill_lanes(lanes, costs_GKM, orders, 0, 1)
    for slot in range(1, last + 1):
        first = tables.slot_offsets_M[slot - 1]
        stop = tables.slot_offsets_M[slot]
        time_lanes(
            tables.first_source_N,
            tables.second_source_N,
            lanes.cost_index_N,
            lanes.costs_RG,
            ends,
            first,
            stop,
        )
        for group in range(groups):
            if slot > warmup:
                since = ends[tables.idle_start_M[slot], group]
                target = ends[tables.idle_end_M[slot], group] - since
            else:
                target = to_fill[group] / (min(warmup, last) + 1 - slot)
            _swap_closest_to_front(orders[group, slot : last + 1], entry_GM[group], target)
            to_fill[group] -= entry_GM[group, orders[group, slot]]
        fill_lanes(lanes, costs_GKM, orders, slot, slot + 1)
    return orders


@cached_njit
def _swap_closest_to_front(order: Int64s, entry_M: Float64s, target: float) -> None:
    """Swap the microbatch whose forward is closest to the target to the front."""
    best = 0
    for other in range(1, len(order)):
        if abs(entry_M[order[other]] - target) < abs(entry_M[order[best]] - target):
            best = other
    order[0], order[best] = order[best], order[0]


@cached_njit
def swap_slots(
    lanes: LaneCosts, orders_MG: Int64s, one: Index, other: Index, is_swapped_G: NDArray[np.bool_]
) -> None:
    """Swap two slots in the lanes that `is_swapped_G` selects."""
    slots, groups = orders_MG.shape
    for index in range(len(lanes.varying_V)):
        first_costs = lanes.costs_RG[index * slots + one]
        second_costs = lanes.costs_RG[index * slots + other]
        for g in range(groups):
            a = first_costs[g]
            b = second_costs[g]
            first_costs[g] = b if is_swapped_G[g] else a
            second_costs[g] = a if is_swapped_G[g] else b
    for g in range(groups):
        a = orders_MG[one, g]
        b = orders_MG[other, g]
        orders_MG[one, g] = b if is_swapped_G[g] else a
        orders_MG[other, g] = a if is_swapped_G[g] else b


@nonan_njit
def anneal(
    tables: ScheduleTables,
    lanes: LaneCosts,
    orders_MG: Int64s,
    temperature_G: Float64s,
    steps: int,
    seed: int,
) -> Int64s:
    """Improve the order of each group by simulated annealing with swaps of slots.

    Args:
        tables: Operators of the program.
        lanes: Durations in the order of `orders_MG`; overwritten.
        orders_MG: Microbatch of each slot; overwritten.
        temperature_G: Initial temperature: increase of the makespan that is accepted with
            probability 1/e.
        steps: Number of attempted swaps. The temperature decreases to 1/50.
        seed: Random seed.

    Returns:
        The best orders (M, G).
    """
    slots, groups = orders_MG.shape
    ends = np.zeros((len(tables.duration_index_N) + 1, groups))
    now = np.empty(groups)
    new = np.empty(groups)
    advance_lanes(tables, lanes, ends, 0, now)
    best = now.copy()
    best_orders = orders_MG.copy()
    all_groups = np.ones(groups, np.bool_)
    is_reverted = np.zeros(groups, np.bool_)
    state = np.uint64(seed * 2 + 1)
    temperature = 1.0
    cooling = cooling_factor(steps)
    stale = slots  # first slot of the previous swap, which some lanes have reverted
    for _ in range(steps if slots > 1 else 0):
        state = next_random(state)
        one = random_index(state, slots)
        other = (one + 1 + random_index(state >> np.uint64(16), slots - 1)) % slots
        first = min(one, other)
        swap_slots(lanes, orders_MG, one, other, all_groups)
        advance_lanes(tables, lanes, ends, tables.slot_offsets_M[min(first, stale)], new)
        stale = first
        temperature *= cooling
        rise = acceptance_threshold(state, temperature)
        better = False
        for g in range(groups):
            is_reverted[g] = new[g] > now[g] + rise * temperature_G[g]
            now[g] = now[g] if is_reverted[g] else new[g]
            better |= now[g] < best[g]
        swap_slots(lanes, orders_MG, one, other, is_reverted)
        if better:
            for g in range(groups):
                if now[g] < best[g]:
                    best[g] = now[g]
                    best_orders[:, g] = orders_MG[:, g]
    return best_orders
