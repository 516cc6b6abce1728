"""A simulated graph that is edited and timed again, only where an edit has consequences.

SEMU's temporal reuse (PipeWeaver §4.2): searching a schedule means asking again and again for the
times of a graph that differs from the last one in a few durations or edges. Operators behind an
edit are timed along a topological order until nothing moves any more; all others keep their times.
New edges may make the order invalid; then the places between their ends are dealt anew (Pearce and
Kelly, JEA 2006). `checkpoint` and `restore` go back to an earlier state without undoing edits one
by one.

Rejected: an undo log; copying the arrays of ten thousand operators takes less time than one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from torchmm.balance.compiled import Int64s
from torchmm.balance.picoseconds import (
    PICOSECONDS_PER_MS,
    SimulationError,
    duration_problem,
    to_picoseconds,
)
from torchmm.balance.simulation.graph_kernels import (
    LinkedEdges,
    Ordering,
    Times,
    link_edges,
    mark_dirty,
    reach,
    settle,
    time_nodes,
    unlink_edge,
)
from torchmm.balance.simulation.operator_graph import CompiledGraph


@dataclass(frozen=True)
class Checkpoint:
    """State of an `IncrementalTimes`, to be handed to its `restore`."""

    times: Times
    order: Ordering
    edges: LinkedEdges
    free: tuple[int, ...]


class IncrementalTimes:
    """Start and end of operators under edits; operators are numbered as in the `OperatorGraph`.

    Edits are cheap; the times are brought up to date when one is asked for.

    Attributes:
        timed: how many operators were timed since construction, for measuring reuse.
    """

    def __init__(self, graph: CompiledGraph) -> None:
        count = len(graph.node_at)
        self._names = graph.names
        # Nodes are the graph's places, so that walking along the order walks through memory.
        self._node_of = graph.place
        self._times = Times(
            graph.duration_ps.copy(), np.empty(count, np.int64), np.empty(count, np.int64)
        )
        time_nodes(self._times.duration_ps, graph.pointers, graph.sources, *self._times[1:])
        places = np.arange(count, dtype=np.int32)
        self._order = Ordering(places, places.copy(), np.zeros((count >> 6) + 1, np.uint64))
        used = len(graph.sources)
        capacity = len(graph.sources) + 16
        self._edges = _empty_edges(count, capacity)
        self._edges.source[:used] = graph.sources
        self._edges.target[:used] = np.repeat(places, np.diff(graph.pointers))
        link_edges(self._edges, 0, used)
        self._free = list(range(used, capacity))
        self.timed = count

    def set_durations(self, durations_ms: Mapping[int, float]) -> None:
        """Changes how long operators take.

        Raises:
            SimulationError: an operator does not exist, or a duration is negative or no number;
                nothing is changed then.
        """
        problems = [
            f"{self._called(operator)} has {text}"
            for operator, duration_ms in durations_ms.items()
            if (text := duration_problem(duration_ms))
        ]
        self._check(durations_ms, problems)
        nodes = self._node_of[np.fromiter(durations_ms, np.int64, len(durations_ms))]
        self._times.duration_ps[nodes] = [to_picoseconds(ms) for ms in durations_ms.values()]
        mark_dirty(self._order, nodes.astype(np.int64))

    def add_edge(self, before: int, after: int) -> None:
        """Makes an operator wait for another one.

        Raises:
            SimulationError: one does not exist, or both would wait for each other; nothing is
                changed then.
        """
        self._check((before, after))
        source = int(self._node_of[before])
        target = int(self._node_of[after])
        if not self._make_room(source, target):
            raise SimulationError(
                [
                    f"{self._called(after)} cannot wait for {self._called(before)}, which waits "
                    "for it already; remove an edge on the way first"
                ]
            )
        if not self._free:
            count = len(self._edges.source)
            self._edges = _grown(self._edges)
            self._free = list(range(count, 2 * count))
        edge = self._free.pop()
        self._edges.source[edge], self._edges.target[edge] = source, target
        link_edges(self._edges, edge, edge + 1)
        self._mark(target)

    def remove_edge(self, before: int, after: int) -> None:
        """Takes away one edge between two operators, or one link of a queue's chain.

        Raises:
            SimulationError: there is no such edge.
        """
        self._check((before, after))
        target = int(self._node_of[after])
        edge = unlink_edge(self._edges, int(self._node_of[before]), target)
        if edge < 0:
            raise SimulationError(
                [f"no edge leads from {self._called(before)} to {self._called(after)}"]
            )
        self._free.append(edge)
        self._mark(target)

    def checkpoint(self) -> Checkpoint:
        """The present state; later edits do not touch it."""
        self._settle()
        return Checkpoint(
            deepcopy(self._times),
            deepcopy(self._order),
            deepcopy(self._edges),
            tuple(self._free),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint, which can be used again."""
        self._times = deepcopy(checkpoint.times)
        self._order = deepcopy(checkpoint.order)
        self._edges = deepcopy(checkpoint.edges)
        self._free = list(checkpoint.free)

    @property
    def makespan_ps(self) -> int:
        """End of the last operator, in picoseconds."""
        self._settle()
        return int(self._times.end_ps.max(initial=0))

    @property
    def makespan_ms(self) -> float:
        """End of the last operator."""
        return self.makespan_ps / PICOSECONDS_PER_MS

    def times_ps(self) -> tuple[Int64s, Int64s]:
        """Start and end by operator, in picoseconds."""
        self._settle()
        return self._times.start_ps[self._node_of], self._times.end_ps[self._node_of]

    def _settle(self) -> None:
        self.timed += settle(self._times, self._order, self._edges)

    def _make_room(self, source: int, target: int) -> bool:
        """Changes the order so that a new edge leads forward: only places between those of its
        ends are dealt anew. False, with nothing changed, if the edge would close a circle."""
        position, node_at, _ = self._order
        low = position[target]
        high = position[source]
        if high < low:
            return True
        behind = reach(target, True, high, position, self._edges)
        if source in behind:
            return False
        self._settle()  # which places are to be timed must not depend on the order
        before = reach(source, False, low, position, self._edges)
        moved = np.concatenate([n[np.argsort(position[n])] for n in (before, behind)])
        places = np.sort(position[moved])
        position[moved], node_at[places] = places, moved
        return True

    def _mark(self, node: int) -> None:
        mark_dirty(self._order, np.array([node], np.int64))

    def _called(self, operator: int) -> str:
        name = self._names[operator] if 0 <= operator < len(self._names) else ""
        return f"operator {operator}" + (f" ({name})" if name else "")

    def _check(self, operators: Iterable[int], problems: list[str] | None = None) -> None:
        count = len(self._names)
        found = [
            f"there is no operator {operator}, only 0 to {count - 1}"
            for operator in operators
            if not 0 <= operator < count
        ]
        if found := found + (problems or []):
            raise SimulationError(found)


def _empty_edges(nodes: int, capacity: int) -> LinkedEdges:
    return LinkedEdges._make(np.full(size, -1, np.int32) for size in (capacity,) * 4 + (nodes,) * 2)


def _grown(edges: LinkedEdges) -> LinkedEdges:
    """The same edges with twice the room."""
    room = np.full(len(edges.source), -1, np.int32)
    by_edge = [np.concatenate((array, room)) for array in edges[:4]]
    return LinkedEdges._make((*by_edge, *edges[4:]))
