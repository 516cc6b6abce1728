"""Compiled loops over a step's program; `program` and `microbatches` say what they are for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.compiled import (
    Float64s,
    Index,
    Int64s,
    Words,
    acceptable_rise,
    compiled,
    cooling_factor,
    next_random,
    random_index,
    without_nans,
)
from torchmm.balance.simulation.graph_kernels import time_lanes

# [Note: a schedule as a recurrence]
#
# An operator starts when the operators before it have ended (`graph_kernels.time_lanes`): the one
# before on its rank, and those on other ranks whose results it needs.
#
# Operators are sorted by the last *slot* (place in the order of microbatches) that they depend on,
# within a slot along the edges:
#
#     operator  0 ...       ...          ...              N - 1
#              |  slot 0   |  slot 1   | ... |  slot M - 1       |
#              ^begin[0]   ^begin[1]         ^begin[M - 1]       ^begin[M]
#
# Other microbatches in slot s and later ones leave all ends before `begin[s]` as they are. So a
# swap of slots i < j is timed by `advance_lanes` from `begin[i]` on.
#
# Many groups are annealed at once: arrays have a last axis of *lanes*, one for each of G groups,
# and all lanes try to swap the same two slots at the same time. What to do next is looked up once
# for all, and the arithmetic runs in vector registers: 30 groups take about as long as four alone.
# Lanes to which the swap is of no use swap back. Their ends are those of the rejected order until
# the next turn, which therefore begins at the earlier one of its own and the last swap (`stale`).
#
# Durations of the lanes, (V * M + C + 1, G), each in its own order of microbatches:
#
#     v * M + s    row `varying[v]` in slot s
#     V * M + c    row `fixed[c]`: the same for all microbatches, so no swap has to move it
#     V * M + C    0: of operators that only wait for a further result


class ProgramTables(NamedTuple):
    """Operators of a program, sorted by slot and along the edges.

    Unsigned indices, because signed indices may count from the end.
    """

    before_N: Words
    """By operator: an operator that must have ended; the number of operators if there is none."""
    need_N: Words
    """The same of a second operator, or of the first one again."""
    row_N: Words
    """By operator: its place in the durations."""
    begin_M: Int64s
    """By slot, and one more: the first operator that depends on it or on a later one."""
    last_R: Words
    """By rank: its last operator."""
    idle_from_M: Int64s
    """By slot: the operator before its first forward, if a backward follows on the first rank."""
    idle_to_M: Int64s
    """By slot: the operator that this backward waits for; -1: none follows."""


class LaneCosts(NamedTuple):
    """Durations of several groups side by side, in the order of each group's slots.

    Rows that are the same for all microbatches are held once: `varying` rows of M slots come
    first, then one place for each other row, then a 0.
    """

    place_N: Words
    """By operator: where its duration is."""
    varying_V: Int64s
    """Rows that differ between microbatches."""
    fixed_C: Int64s
    """The others."""
    costs_RG: Float64s


@compiled
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


@without_nans
def advance_lanes(
    tables: ProgramTables, lanes: LaneCosts, ends_NG: Float64s, first: int, makespan_G: Float64s
) -> None:
    """Write the ends of the operators from `first` on, and the makespans."""
    last = len(tables.row_N)
    time_lanes(tables.before_N, tables.need_N, lanes.place_N, lanes.costs_RG, ends_NG, first, last)
    makespan_G[:] = 0.0
    for step in tables.last_R:
        for g in range(len(makespan_G)):
            end_g = ends_NG[step, g]
            makespan_G[g] = end_g if end_g > makespan_G[g] else makespan_G[g]


@compiled
def fill_intervals(
    tables: ProgramTables,
    lanes: LaneCosts,
    costs_GKM: Float64s,
    entry_GM: Float64s,
    size_GM: Float64s,
    first_interval_GM: Float64s,
    held: int,
) -> Int64s:
    """Algorithm 3 of DistTrain for each group; `reorder_microbatches` says what it does.

    Args:
        lanes: overwritten.
        costs_GKM: durations by row and microbatch.
        entry_GM: forward on the first rank, which is to fill its intervals.
        size_GM: what decides which microbatches come first and last.
        first_interval_GM: time of the first interval if a microbatch is the first.
        held: smallest microbatches kept for the end.

    Returns:
        (G, M): microbatch of each slot.
    """
    groups, _, slots = costs_GKM.shape
    orders = np.empty((groups, slots), np.int64)
    ends = np.zeros((len(tables.row_N) + 1, groups))
    to_fill = np.empty(groups)
    warmup = 0  # slots whose forwards come before the first backward
    while warmup < slots and tables.idle_to_M[warmup] < 0:
        warmup += 1
    last = slots - held - 1  # of the slots to choose for
    for group in range(groups):
        order = np.argsort(size_GM[group], kind="mergesort")
        if last > 0:
            order = np.append(np.append(order[:1], order[held + 1 :]), order[held:0:-1])
        orders[group] = order
        to_fill[group] = first_interval_GM[group, order[0]]
    fill_lanes(lanes, costs_GKM, orders, 0, 1)
    for slot in range(1, last + 1):
        first = tables.begin_M[slot - 1]
        stop = tables.begin_M[slot]
        time_lanes(tables.before_N, tables.need_N, lanes.place_N, lanes.costs_RG, ends, first, stop)
        for group in range(groups):
            if slot > warmup:
                since = ends[tables.idle_from_M[slot], group]
                target = ends[tables.idle_to_M[slot], group] - since
            else:
                target = to_fill[group] / (min(warmup, last) + 1 - slot)
            _take_closest(orders[group, slot : last + 1], entry_GM[group], target)
            to_fill[group] -= entry_GM[group, orders[group, slot]]
        fill_lanes(lanes, costs_GKM, orders, slot, slot + 1)
    return orders


@compiled
def _take_closest(order: Int64s, entry_M: Float64s, target: float) -> None:
    """Bring the microbatch whose forward is closest to the target to the front."""
    best = 0
    for other in range(1, len(order)):
        if abs(entry_M[order[other]] - target) < abs(entry_M[order[best]] - target):
            best = other
    order[0], order[best] = order[best], order[0]


@compiled
def swap_slots(
    lanes: LaneCosts, orders_MG: Int64s, one: Index, other: Index, which_G: NDArray[np.bool_]
) -> None:
    """Exchange two slots in the lanes marked by `which_G`."""
    slots, groups = orders_MG.shape
    for index in range(len(lanes.varying_V)):
        here = lanes.costs_RG[index * slots + one]
        there = lanes.costs_RG[index * slots + other]
        for g in range(groups):
            a = here[g]
            b = there[g]
            here[g] = b if which_G[g] else a
            there[g] = a if which_G[g] else b
    for g in range(groups):
        a = orders_MG[one, g]
        b = orders_MG[other, g]
        orders_MG[one, g] = b if which_G[g] else a
        orders_MG[other, g] = a if which_G[g] else b


@without_nans
def anneal(
    tables: ProgramTables,
    lanes: LaneCosts,
    orders_MG: Int64s,
    heat_G: Float64s,
    steps: int,
    seed: int,
) -> Int64s:
    """Swap slots, worse orders being accepted ever more seldom.

    Args:
        lanes: filled for `orders_MG`; both are changed.
        heat_G: rise of the makespan that is accepted with a probability of 1/e at first.
        steps: swaps tried; the last ones at a fiftieth of the heat.

    Returns:
        The best orders (M, G).
    """
    slots, groups = orders_MG.shape
    ends = np.zeros((len(tables.row_N) + 1, groups))
    now = np.empty(groups)
    new = np.empty(groups)
    advance_lanes(tables, lanes, ends, 0, now)
    best = now.copy()
    best_orders = orders_MG.copy()
    everyone = np.ones(groups, np.bool_)
    back = np.zeros(groups, np.bool_)
    state = np.uint64(seed * 2 + 1)
    heat = 1.0
    cooling = cooling_factor(steps)
    stale = slots  # the first slot of the last swap, which some lane has taken back
    for _ in range(steps if slots > 1 else 0):
        state = next_random(state)
        one = random_index(state, slots)
        other = (one + 1 + random_index(state >> np.uint64(16), slots - 1)) % slots
        first = min(one, other)
        swap_slots(lanes, orders_MG, one, other, everyone)
        advance_lanes(tables, lanes, ends, tables.begin_M[min(first, stale)], new)
        stale = first
        heat *= cooling
        rise = acceptable_rise(state, heat)
        better = False
        for g in range(groups):
            back[g] = new[g] > now[g] + rise * heat_G[g]
            now[g] = now[g] if back[g] else new[g]
            better |= now[g] < best[g]
        swap_slots(lanes, orders_MG, one, other, back)
        if better:
            for g in range(groups):
                if now[g] < best[g]:
                    best[g] = now[g]
                    best_orders[:, g] = orders_MG[:, g]
    return best_orders
