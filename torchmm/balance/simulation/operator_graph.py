"""Operators on device queues: the core of the simulator.

An operator lies on a queue of a device: a compute stream, a copy engine, the channel between two
ranks (PipeWeaver §4.1). A queue runs its operators one at a time in the order in which they were
added, as a CUDA stream does. An operator starts when what it depends on has ended and its queue is
free.

Rejected: queues that take what is ready first, which streams do not do, and which would make the
order depend on all times. Rejected: floating-point times, whose sums depend on their order
(`graph_kernels`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchmm.balance.compiled import Int32s, Int64s
from torchmm.balance.picoseconds import (
    LONGEST_MS,
    PICOSECONDS_PER_MS,
    SimulationError,
    duration_problem,
)
from torchmm.balance.simulation.graph_kernels import (
    defer_nodes,
    group_edges,
    sort_topologically,
    time_nodes,
)

# [Note: queues as chains]
#
# Since queues are in order, a queue is a chain of edges, and an operator starts at the end of the
# longest path to it. Three queues, operators numbered as they were added:
#
#     rank 0     0 --> 2 -----------> 5     waits for 2, which is before it on its queue, and for 4
#     channel        1                      waits for 0
#     rank 1             3 --> 4            3 waits for 1
#
# `compile` numbers operators anew by *place* in a topological order, so that every edge leads from
# a smaller place to a larger one and times are one walk through memory. Edges are given by what
# they lead to: O operators, E edges, `pointers` (O + 1), `sources` (E), both by place. What is
# wrong is found before that, all of it at once; a compiled graph has no circle.


class OperatorGraph:
    """A graph under construction. Operators are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._durations_ms: list[float] = []
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._last: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(
        self, queue: Hashable, duration_ms: float, after: Iterable[int] = (), name: str = ""
    ) -> int:
        """Puts an operator at the end of a queue.

        Args:
            queue: any key; None for an operator that needs no device.
            duration_ms: how long it occupies the queue.
            after: operators that must have ended.
            name: for messages.

        Returns:
            Its number.
        """
        node = len(self._names)
        self._names.append(name)
        self._durations_ms.append(duration_ms)
        if queue is not None:
            before = self._last.get(queue)
            self._last[queue] = node
            if before is not None:
                self.add_edge(before, node)
        for source in after:
            self.add_edge(source, node)
        return node

    def add_edge(self, before: int, after: int) -> None:
        """Makes an operator wait for another one, added earlier or later."""
        self._sources.append(before)
        self._targets.append(after)

    def compile(self) -> CompiledGraph:
        """Return the graph as arrays, ready to be timed.

        Raises:
            SimulationError: A duration is negative or not a number, an edge names an operator that
                does not exist, or operators wait for each other in a circle. All problems are
                listed.
        """
        count = len(self._names)
        edges = np.array([self._sources, self._targets], np.int32)
        known = ((edges >= 0) & (edges < count)).all(axis=0)
        problems = self._duration_problems()
        durations = np.zeros(count)
        if not problems:
            durations = np.rint(np.array(self._durations_ms, np.float64) * PICOSECONDS_PER_MS)
        problems += [
            f"an edge leads from {_called(self._names, s)} to {_called(self._names, t)}, but "
            f"operators are 0 to {count - 1}"
            for s, t in edges[:, ~known].T.tolist()
        ]
        sources, targets = edges[:, known]
        try:
            graph = CompiledGraph.build(
                durations.astype(np.int64), sources, targets, tuple(self._names)
            )
        except SimulationError as error:
            raise SimulationError([*problems, *error.problems]) from None
        if problems:
            raise SimulationError(problems)
        return graph

    def _duration_problems(self) -> list[str]:
        problems = [
            f"{_called(self._names, node)} has {text}"
            for node, duration_ms in enumerate(self._durations_ms)
            if (text := duration_problem(duration_ms))
        ]
        total_ms = sum(d for d in self._durations_ms if not duration_problem(d))
        if total_ms > LONGEST_MS:
            problems.append(
                f"all operators together take {total_ms:g} ms, more than {LONGEST_MS:g}; are the "
                "durations in milliseconds?"
            )
        return problems


@dataclass(frozen=True)
class CompiledGraph:
    """A graph as arrays in topological order; *place* is the position of an operator in it.

    Attributes:
        names: By operator.
        node_at: By place.
        place: By operator.
        duration_ps: By place.
        pointers, sources: The operator at place p comes after the places
            `sources[pointers[p] : pointers[p + 1]]`.
    """

    names: tuple[str, ...]
    node_at: Int32s
    place: Int32s
    duration_ps: Int64s
    pointers: Int32s
    sources: Int32s

    @classmethod
    def build(
        cls, duration_ps: Int64s, sources: Int32s, targets: Int32s, names: tuple[str, ...] = ()
    ) -> CompiledGraph:
        """Sort operators along their edges.

        Args:
            duration_ps: By operator.
            sources, targets: By edge, the operators at its ends.
            names: By operator, for messages.

        Raises:
            SimulationError: Operators wait for each other in a circle.
        """
        count = len(duration_ps)
        missing = np.bincount(targets, minlength=count).astype(np.int32)
        order = sort_topologically(*group_edges(sources, targets, count), missing)
        if len(order) < count:
            raise SimulationError([_circle(names, sources, targets, missing)])
        place = np.empty(count, np.int32)
        place[order] = np.arange(count, dtype=np.int32)
        pointers, sorted_sources = group_edges(place[targets], place[sources], count)
        return cls(names, order, place, duration_ps[order], pointers, sorted_sources)

    def times_ps(
        self, release_ps: Mapping[int, int] | None = None, movable: Sequence[bool] | None = None
    ) -> tuple[Int64s, Int64s]:
        """Return start and end of every operator in picoseconds.

        Args:
            release_ps: Operators that may not start before a time.
            movable: By operator, whether it runs as late as the operators that are not movable
                allow. All others run as early as possible.
        """
        start_ps = np.zeros(len(self.place), np.int64)
        end_ps = np.empty(len(self.place), np.int64)
        for node, time_ps in (release_ps or {}).items():
            start_ps[self.place[node]] = time_ps
        time_nodes(self.duration_ps, self.pointers, self.sources, start_ps, end_ps)
        if movable is not None:
            moves = np.array(movable, bool)[self.node_at]
            defer_nodes(self.pointers, self.sources, moves, start_ps, end_ps)
        return start_ps[self.place], end_ps[self.place]


def _called(names: Sequence[str], operator: int) -> str:
    name = names[operator] if 0 <= operator < len(names) else ""
    return f"operator {operator}" + (f" ({name})" if name else "")


def _circle(names: Sequence[str], sources: Int32s, targets: Int32s, missing: Int32s) -> str:
    """Return a message that names one circle: from an unsorted operator back along others."""
    before = {
        target: source
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True)
        if missing[source] > 0 and missing[target] > 0
    }
    node = next(iter(before))
    path = []
    while node not in path:
        path.append(node)
        node = before[node]
    circle = [*path[path.index(node) :], node][::-1]
    return (
        "operators form a cycle: "
        + ", then ".join(_called(names, n) for n in circle)
        + "; remove one of these edges, or add operators to their queues in another order"
    )
