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
        missing: by node: edges that lead to it; overwritten, left above 0 on and behind cycles.

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


@loop
def time_nodes(
    duration_ps: Int64s, pointers: Int32s, sources: Int32s, start_ps: Int64s, end_ps: Int64s
) -> int:
    """Earliest start and end of every node; the arrays are in topological order.

    Args:
        pointers: node n comes after `sources[pointers[n] : pointers[n + 1]]`.
        start_ps, end_ps: written.

    Returns:
        The last end.
    """
    makespan = 0
    first = pointers[0]
    for node in range(len(duration_ps)):
        start = 0
        last = pointers[node + 1]
        for edge in range(first, last):
            end = end_ps[sources[edge]]
            start = max(start, end)
        first = last
        end = start + duration_ps[node]
        start_ps[node] = start
        end_ps[node] = end
        makespan = max(makespan, end)
    return makespan


class LinkedEdges(NamedTuple):
    """Edges that can be added and removed: lists linked by edge numbers, -1 at their ends."""

    source: Int32s
    """By edge."""
    target: Int32s
    next_in: Int32s
    """By edge: the next one of the same target."""
    next_out: Int32s
    first_in: Int32s
    """By node."""
    first_out: Int32s


class Times(NamedTuple):
    """By node: what an incremental simulation keeps up to date."""

    duration_ps: Int64s
    start_ps: Int64s
    end_ps: Int64s


class Ordering(NamedTuple):
    """A topological order that edits may change, and which places of it are to be timed again."""

    position: Int32s
    """By node."""
    node_at: Int32s
    """By position."""
    dirty: Words
    """One bit by position."""


@loop
def link_edges(edges: LinkedEdges, begin: int, stop: int) -> None:
    """Enters the edges [begin, stop) into the lists of their ends."""
    for edge in range(begin, stop):
        source = edges.source[edge]
        target = edges.target[edge]
        edges.next_in[edge] = edges.first_in[target]
        edges.first_in[target] = edge
        edges.next_out[edge] = edges.first_out[source]
        edges.first_out[source] = edge


@loop
def unlink_edge(edges: LinkedEdges, source: int, target: int) -> int:
    """Takes one edge between two nodes out of both lists.

    Returns:
        Its number, or -1 if there is none.
    """
    before = -1
    edge = edges.first_out[source]
    while edge >= 0 and edges.target[edge] != target:
        before, edge = edge, edges.next_out[edge]
    if edge < 0:
        return -1
    if before < 0:
        edges.first_out[source] = edges.next_out[edge]
    else:
        edges.next_out[before] = edges.next_out[edge]
    before = -1
    other = edges.first_in[target]
    while other != edge:
        before, other = other, edges.next_in[other]
    if before < 0:
        edges.first_in[target] = edges.next_in[edge]
    else:
        edges.next_in[before] = edges.next_in[edge]
    return edge


@loop
def mark_dirty(order: Ordering, nodes: Int64s) -> None:
    """Notes that nodes are to be timed again."""
    for node in nodes:
        place = order.position[node]
        order.dirty[place >> 6] |= np.uint64(1) << np.uint64(place & 63)


@inner
def _time(node: int, times: Times, edges: LinkedEdges) -> None:
    start = 0
    edge = edges.first_in[node]
    while edge >= 0:
        start = max(start, times.end_ps[edges.source[edge]])
        edge = edges.next_in[edge]
    times.start_ps[node] = start
    times.end_ps[node] = start + times.duration_ps[node]


@inner
def _time_behind(begin: int, times: Times, order: Ordering, edges: LinkedEdges) -> int:
    for place in range(begin, len(order.node_at)):
        _time(order.node_at[place], times, edges)
    return len(order.node_at) - begin


@loop
def settle(times: Times, order: Ordering, edges: LinkedEdges) -> int:
    """Times dirty nodes again, and behind them those whose start moves; along the order, so each
    node at most once. Where they become many, as when what changes is on the longest path, all
    that are left of the order are timed in one go, which takes a third of the time for each.

    Returns:
        How many nodes were timed.
    """
    timed = 0
    limit = max(64, len(order.node_at) >> 6)
    for index in range(len(order.dirty)):
        while order.dirty[index]:
            if timed > limit:
                order.dirty[index:] = 0
                return timed + _time_behind(index << 6, times, order, edges)
            bit = trailing_zeros(order.dirty[index])
            order.dirty[index] ^= np.uint64(1) << bit
            node = order.node_at[(index << 6) + np.int64(bit)]
            timed += 1
            end = times.end_ps[node]
            _time(node, times, edges)
            if times.end_ps[node] == end:
                continue
            edge = edges.first_out[node]
            while edge >= 0:
                place = order.position[edges.target[edge]]
                order.dirty[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
                edge = edges.next_out[edge]
    return timed


@compiled
def reach(begin: int, forward: bool, limit: int, position: Int32s, edges: LinkedEdges) -> Int32s:
    """Nodes that can be reached along (or against) the edges, `begin` first, without leaving the
    places up to (or from) a limit."""
    seen = np.zeros(len(position), np.bool_)
    found = np.empty(len(position), np.int32)
    seen[begin] = True
    found[0] = begin
    count, done = 1, 0
    while done < count:
        node = found[done]
        done += 1
        edge = edges.first_out[node] if forward else edges.first_in[node]
        while edge >= 0:
            other = edges.target[edge] if forward else edges.source[edge]
            inside = position[other] <= limit if forward else position[other] >= limit
            if inside and not seen[other]:
                seen[other] = True
                found[count] = other
                count += 1
            edge = edges.next_out[edge] if forward else edges.next_in[edge]
    return found[:count]
