"""The clock of simulator and searches: earliest times of operators on queues, compiled.

A queue runs its operators in order, so it is a chain of edges, and an operator starts at the end of
the longest path to it. Operators are numbered along the edges (*topological order*): the operators
that must have ended before operator n are `sources[pointers[n] : pointers[n + 1]]`, all less than
n. One walk through memory then times all operators.

    group_edges, sort_topologically   make this form (`operator_graph`)
    time_nodes                        times of operators in picoseconds
    time_lanes                        ends for many sets of durations side by side
    defer_nodes                       the latest times of operators that may move

Times of `time_nodes` are integers. Integer sums do not depend on their order, so a subgraph and a
graph that contains it agree to the last bit.

The dispatcher and the placement of encoder kernels have loops of their own, because they choose the
next operator by the time at which it can start.
"""

from __future__ import annotations

import numpy as np

from torchmm.balance.compiled import Float64s, Int32s, Int64s, Words, compiled, loop, without_nans


@compiled
def group_edges(keys: Int32s, values: Int32s, count: int) -> tuple[Int32s, Int32s]:
    """Return where the values of each key begin (count + 1), and the values sorted by key."""
    pointers = np.zeros(count + 1, np.int32)
    for key in keys:
        pointers[key + 1] += 1
    for key in range(count):
        pointers[key + 1] += pointers[key]
    place = pointers[:-1].copy()
    grouped = np.empty_like(values)
    for edge in range(len(keys)):
        grouped[place[keys[edge]]] = values[edge]
        place[keys[edge]] += 1
    return pointers, grouped


@compiled
def sort_topologically(pointers: Int32s, targets: Int32s, missing: Int32s) -> Int32s:
    """Return operators in an order in which edges lead forward (Kahn), first come, first served.

    Args:
        pointers: The edges of operator n lead to `targets[pointers[n] : pointers[n + 1]]`.
        missing: By operator, edges that lead to it. Overwritten, left above 0 on cycles and after
            them.

    Returns:
        The sorted operators; fewer than all if there is a cycle.
    """
    order = np.empty(len(missing), np.int32)
    count = 0
    for node in range(len(missing)):
        if missing[node] == 0:
            order[count] = node
            count += 1
    done = 0
    while done < count:
        node = order[done]
        done += 1
        for edge in range(pointers[node], pointers[node + 1]):
            target = targets[edge]
            missing[target] -= 1
            if missing[target] == 0:
                order[count] = target
                count += 1
    return order[:count]


@loop
def time_nodes(
    duration_ps: Int64s, pointers: Int32s, sources: Int32s, start_ps: Int64s, end_ps: Int64s
) -> None:
    """Write the earliest start and end of every operator.

    Args:
        start_ps: No operator starts before its value here. Overwritten.
        end_ps: Written.
    """
    first = pointers[0]
    for node in range(len(duration_ps)):
        start = start_ps[node]
        last = pointers[node + 1]
        for edge in range(first, last):
            start = max(start, end_ps[sources[edge]])
        first = last
        start_ps[node] = start
        end_ps[node] = start + duration_ps[node]


@compiled
def defer_nodes(
    pointers: Int32s, sources: Int32s, movable: np.ndarray, start_ps: Int64s, end_ps: Int64s
) -> None:
    """Move operators that may move as late as the others, which stay where they are, allow."""
    latest = np.full(len(movable), end_ps.max(), np.int64)
    for node in range(len(movable) - 1, -1, -1):
        if movable[node]:
            start_ps[node] += latest[node] - end_ps[node]
            end_ps[node] = latest[node]
        for edge in range(pointers[node], pointers[node + 1]):
            latest[sources[edge]] = min(latest[sources[edge]], start_ps[node])


@without_nans
def time_lanes(
    before_N: Words,
    need_N: Words,
    place_N: Words,
    costs_RG: Float64s,
    ends_NG: Float64s,
    first: int,
    last: int,
) -> None:
    """Write the ends of operators `first` to `last`, each for G sets of durations.

    The arithmetic runs in vector registers over the last axis. Two sources for each operator,
    instead of `pointers`, make searches of orders 13 % faster. Kernels of other files call this
    function: if it is to do something else, rename it (see `compiled`).

    Args:
        before_N, need_N: The operators before each operator.
        place_N: Index of the duration of each operator in `costs_RG`.
        ends_NG: (N + 1, G): ends of operators before `first`; written from `first` on; then zeros,
            for operators without an operator before them.
    """
    groups = ends_NG.shape[1]
    for node in range(first, last):
        before = ends_NG[before_N[node]]
        need = ends_NG[need_N[node]]
        cost = costs_RG[place_N[node]]
        end = ends_NG[node]
        for g in range(groups):
            end[g] = (before[g] if before[g] > need[g] else need[g]) + cost[g]
