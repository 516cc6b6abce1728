"""Compiled loops of the simulator over flat arrays; `operator_graph` and `incremental` call them.

Times are whole picoseconds: integer sums do not depend on their order, so a subgraph timed on its
own, a graph timed as a whole and one timed again after an edit agree to the last bit. Nodes are
numbered along the edges (*topological order*), which makes a full pass one walk through memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Int32s, Int64s, Words, compiled, inner, loop, trailing_zeros


@compiled
def sort_topologically(pointers: Int32s, targets: Int32s, missing: Int32s) -> Int32s:
    """Nodes in an order in which edges lead forward (Kahn), first come, first served.

    Args:
        pointers: the edges of node n lead to `targets[pointers[n] : pointers[n + 1]]`.
        missing: by node: edges that lead to it; overwritten, left above 0 on cycles and after them.

    Returns:
        The sorted nodes; fewer than all if there is a cycle.
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


class Graph(NamedTuple):
    """What waits for what, by place in the topological order."""

    pointers: Int32s
    """The node at place p comes after `sources[pointers[p] : pointers[p + 1]]`."""
    sources: Int32s
    out_pointers: Int32s
    """And before `targets[out_pointers[p] : out_pointers[p + 1]]`."""
    targets: Int32s


class Times(NamedTuple):
    """By place: what an incremental simulation keeps up to date."""

    duration_ps: Int64s
    start_ps: Int64s
    end_ps: Int64s


@loop
def time_nodes(
    duration_ps: Int64s, pointers: Int32s, sources: Int32s, start_ps: Int64s, end_ps: Int64s
) -> None:
    """Earliest start and end of every node; the arrays are in topological order.

    Args:
        pointers, sources: see `Graph`.
        start_ps: no node starts before its value here; overwritten.
        end_ps: written.
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


@inner
def _time(node: int, times: Times, graph: Graph) -> None:
    start = 0
    for edge in range(graph.pointers[node], graph.pointers[node + 1]):
        start = max(start, times.end_ps[graph.sources[edge]])
    times.start_ps[node] = start
    times.end_ps[node] = start + times.duration_ps[node]


@loop
def settle(times: Times, graph: Graph, dirty: Words) -> int:
    """Times dirty nodes again, and after them those whose start moves; along the order, so each
    node at most once. Where they become many, as when what changes is on the longest path, all
    that are left of the order are timed in one go, which takes a third of the time for each.

    Args:
        dirty: one bit for each place; cleared.

    Returns:
        How many nodes were timed.
    """
    timed = 0
    nodes = len(times.duration_ps)
    limit = max(64, nodes >> 6)
    for index in range(len(dirty)):
        while dirty[index]:
            if timed > limit:
                dirty[index:] = 0
                for rest in range(index << 6, nodes):
                    _time(rest, times, graph)
                return timed + nodes - (index << 6)
            bit = trailing_zeros(dirty[index])
            dirty[index] ^= np.uint64(1) << bit
            node = (index << 6) + np.int64(bit)
            timed += 1
            end = times.end_ps[node]
            _time(node, times, graph)
            if times.end_ps[node] == end:
                continue
            for edge in range(graph.out_pointers[node], graph.out_pointers[node + 1]):
                target = graph.targets[edge]
                dirty[target >> 6] |= np.uint64(1) << np.uint64(target & 63)
    return timed
