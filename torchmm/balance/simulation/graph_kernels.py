"""Compiled loops of the simulator over flat arrays, called by `operator_graph`.

Times are whole picoseconds. Integer sums do not depend on their order, so a subgraph and a graph
that contains it agree to the last bit. Nodes are numbered along the edges (*topological order*), so
that one walk through memory times all of them.
"""

from __future__ import annotations

import numpy as np

from torchmm.balance.compiled import Int32s, Int64s, compiled, loop


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


@loop
def time_nodes(
    duration_ps: Int64s, pointers: Int32s, sources: Int32s, start_ps: Int64s, end_ps: Int64s
) -> None:
    """Earliest start and end of every node; the arrays are in topological order.

    Args:
        pointers, sources: the node at place p comes after the places
            `sources[pointers[p] : pointers[p + 1]]`.
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
