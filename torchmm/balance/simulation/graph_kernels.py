"""Compiled kernels for the times of operators on queues, used by the simulator and searches.

A queue runs its operators in order, so it is a chain of edges. An operator starts at the end of the
longest path to it. Operators have topological order: the operators that must end before operator n
are `sources[pointers[n] : pointers[n + 1]]`, all less than n. One pass over the arrays therefore
computes all times:

    start[n] = max(release[n], max of end[s] over sources s of n)
    end[n]   = start[n] + duration[n]

    group_edges, sort_topologically   build this form (`operator_graph`)
    time_nodes                        times of operators in picoseconds
    time_lanes                        end times for many sets of durations, vectorized
    defer_nodes                       latest times of movable operators

Times of `time_nodes` are integers. Integer sums do not depend on their order, so times of a
subgraph and of a graph that contains it are bitwise identical.

The dispatcher and the placement of encoder kernels have separate loops, because they select the
next operator by its earliest start time.
"""

from __future__ import annotations

import numpy as np

from torchmm.balance.numba_utils import (
    Float64s,
    Int32s,
    Int64s,
    Uint64s,
    cached_njit,
    nonan_njit,
    norefcount_njit,
)


@cached_njit
def group_edges(keys: Int32s, values: Int32s, count: int) -> tuple[Int32s, Int32s]:
    """Return the offsets of the values of each key (count + 1), and the values sorted by key."""
    pointers = np.zeros(count + 1, np.int32)
    for key in keys:
        pointers[key + 1] += 1
    for key in range(count):
        pointers[key + 1] += pointers[key]
    next_index = pointers[:-1].copy()
    grouped = np.empty_like(values)
    for edge in range(len(keys)):
        grouped[next_index[keys[edge]]] = values[edge]
        next_index[keys[edge]] += 1
    return pointers, grouped


@cached_njit
def sort_topologically(pointers: Int32s, targets: Int32s, missing: Int32s) -> Int32s:
    """Return operators in topological order (algorithm of Kahn with a FIFO queue).

    Args:
        pointers: The edges of operator n lead to `targets[pointers[n] : pointers[n + 1]]`.
        missing: Number of incoming edges of each operator. Overwritten: values remain above 0 on
            cycles and after them.

    Returns:
        The sorted operators, without those on or after a cycle.
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


@norefcount_njit
def time_nodes(
    duration_ps: Int64s, pointers: Int32s, sources: Int32s, start_ps: Int64s, end_ps: Int64s
) -> None:
    """Write the earliest start and end of every operator.

    Args:
        duration_ps: Duration of each operator.
        pointers: Offsets of the sources of each operator.
        sources: Operators that must end first.
        start_ps: Minimum start of each operator. Overwritten with its start.
        end_ps: Overwritten with the end of each operator.
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


@cached_njit
def defer_nodes(
    pointers: Int32s, sources: Int32s, movable: np.ndarray, start_ps: Int64s, end_ps: Int64s
) -> None:
    """Move movable operators as late as the fixed operators allow, in place."""
    latest = np.full(len(movable), end_ps.max(), np.int64)
    for node in range(len(movable) - 1, -1, -1):
        if movable[node]:
            start_ps[node] += latest[node] - end_ps[node]
            end_ps[node] = latest[node]
        for edge in range(pointers[node], pointers[node + 1]):
            latest[sources[edge]] = min(latest[sources[edge]], start_ps[node])


@nonan_njit
def time_lanes(
    first_source_N: Uint64s,
    second_source_N: Uint64s,
    cost_index_N: Uint64s,
    costs_RG: Float64s,
    ends_NG: Float64s,
    first: int,
    last: int,
) -> None:
    """Write the ends of operators [first, last) for G sets of durations.

    The arithmetic is vectorized over the last axis. Two sources per operator instead of `pointers`
    make schedule searches 13 % faster. Kernels in other files call this function. Rename it if its
    behavior changes (see `cached_njit`).

    Args:
        first_source_N: First source of each operator.
        second_source_N: Second source of each operator.
        cost_index_N: Index of the duration of each operator in `costs_RG`.
        costs_RG: Durations for G sets.
        ends_NG: Shape (N + 1, G). Ends of operators before `first` are read, and ends from `first`
            are written. The last row has zeros, for operators without a source.
        first: First operator to time.
        last: Operator after the last operator to time.
    """
    groups = ends_NG.shape[1]
    for node in range(first, last):
        first_end = ends_NG[first_source_N[node]]
        second_end = ends_NG[second_source_N[node]]
        cost = costs_RG[cost_index_N[node]]
        end = ends_NG[node]
        for g in range(groups):
            end[g] = (first_end[g] if first_end[g] > second_end[g] else second_end[g]) + cost[g]
