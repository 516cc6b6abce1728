"""Graph of operators on device queues, the core of the simulator.

An operator is in a queue of a device: a compute stream, a copy engine, or the channel between two
ranks (PipeWeaver, section 4.1). A queue runs its operators sequentially in the order in which they
were added, like a CUDA stream. An operator starts when its dependencies have ended and its queue is
free.

Times are integers, because floating-point sums depend on their order (`graph_kernels`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchmm.balance.numba_utils import Int32s, Int64s
from torchmm.balance.picoseconds import (
    MAX_DURATION_MS,
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
# Queues run in order, so a queue is a chain of edges, and an operator starts at the end of the
# longest path to it. An example with three queues, with operators numbered in the order of `add`:
#
#     rank 0     0 --> 2 -----------> 5     5 depends on 2 (same queue) and on 4
#     channel        1                      1 depends on 0
#     rank 1             3 --> 4            3 depends on 1
#
# `compile` renumbers operators by their position in a topological order. Every edge then leads from
# a smaller to a larger position, and one pass over the arrays computes all times. Edges are stored
# by
# target: O operators, E edges, `pointers` (O + 1) and `sources` (E), both by position. `compile`
# reports all problems at once. A compiled graph has no cycle.


class OperatorGraph:
    """Graph under construction. Operators are numbered in the order in which they are added."""

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
        """Append an operator to a queue.

        Args:
            queue: Key of the queue. None for an operator without a device.
            duration_ms: Time that the operator occupies the queue.
            after: Operators that must end first.
            name: Name for error messages.

        Returns:
            Number of the operator.
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
        """Add a dependency: operator `after` starts after operator `before` has ended."""
        self._sources.append(before)
        self._targets.append(after)

    def compile(self) -> CompiledOperatorGraph:
        """Return the graph as arrays, ready to be timed.

        Raises:
            SimulationError: A duration is negative or not a number, an edge names an operator that
                does not exist, or the graph has a cycle. The error message lists all problems.
        """
        count = len(self._names)
        edges = np.array([self._sources, self._targets], np.int32)
        known = ((edges >= 0) & (edges < count)).all(axis=0)
        problems = self._duration_problems()
        durations = np.zeros(count)
        if not problems:
            durations = np.rint(np.array(self._durations_ms, np.float64) * PICOSECONDS_PER_MS)
        problems += [
            f"an edge leads from {_operator_name(self._names, s)} to "
            f"{_operator_name(self._names, t)}, but operators are 0 to {count - 1}"
            for s, t in edges[:, ~known].T.tolist()
        ]
        sources, targets = edges[:, known]
        try:
            graph = CompiledOperatorGraph.build(
                durations.astype(np.int64), sources, targets, tuple(self._names)
            )
        except SimulationError as error:
            raise SimulationError([*problems, *error.problems]) from None
        if problems:
            raise SimulationError(problems)
        return graph

    def _duration_problems(self) -> list[str]:
        problems = [
            f"{_operator_name(self._names, node)} has {text}"
            for node, duration_ms in enumerate(self._durations_ms)
            if (text := duration_problem(duration_ms))
        ]
        total_ms = sum(d for d in self._durations_ms if not duration_problem(d))
        if total_ms > MAX_DURATION_MS:
            problems.append(
                f"all operators together take {total_ms:g} ms, more than {MAX_DURATION_MS:g}; are "
                "the durations in milliseconds?"
            )
        return problems


@dataclass(frozen=True)
class CompiledOperatorGraph:
    """Graph as arrays in topological order. The position of an operator is its index in this order.

    Attributes:
        names: Name of each operator.
        operator_at: Operator at each position.
        position: Position of each operator.
        duration_ps: Duration by position.
        pointers: Offsets into `sources`, by position.
        sources: The operator at position p depends on the positions
            `sources[pointers[p] : pointers[p + 1]]`.
    """

    names: tuple[str, ...]
    operator_at: Int32s
    position: Int32s
    duration_ps: Int64s
    pointers: Int32s
    sources: Int32s

    @classmethod
    def build(
        cls, duration_ps: Int64s, sources: Int32s, targets: Int32s, names: tuple[str, ...] = ()
    ) -> CompiledOperatorGraph:
        """Sort operators along their edges.

        Args:
            duration_ps: Duration of each operator.
            sources: Operator at the start of each edge.
            targets: Operator at the end of each edge.
            names: Name of each operator, for error messages.

        Raises:
            SimulationError: The graph has a cycle.
        """
        count = len(duration_ps)
        missing = np.bincount(targets, minlength=count).astype(np.int32)
        order = sort_topologically(*group_edges(sources, targets, count), missing)
        if len(order) < count:
            raise SimulationError([_cycle_message(names, sources, targets, missing)])
        position = np.empty(count, np.int32)
        position[order] = np.arange(count, dtype=np.int32)
        pointers, sorted_sources = group_edges(position[targets], position[sources], count)
        return cls(names, order, position, duration_ps[order], pointers, sorted_sources)

    def times_ps(
        self, release_ps: Mapping[int, int] | None = None, movable: Sequence[bool] | None = None
    ) -> tuple[Int64s, Int64s]:
        """Return start and end of every operator in picoseconds.

        Args:
            release_ps: Minimum start of operators.
            movable: Whether each operator runs as late as the other operators allow. All other
                operators run as early as possible.
        """
        start_ps = np.zeros(len(self.position), np.int64)
        end_ps = np.empty(len(self.position), np.int64)
        for node, time_ps in (release_ps or {}).items():
            start_ps[self.position[node]] = time_ps
        time_nodes(self.duration_ps, self.pointers, self.sources, start_ps, end_ps)
        if movable is not None:
            moves = np.array(movable, bool)[self.operator_at]
            defer_nodes(self.pointers, self.sources, moves, start_ps, end_ps)
        return start_ps[self.position], end_ps[self.position]


def _operator_name(names: Sequence[str], operator: int) -> str:
    name = names[operator] if 0 <= operator < len(names) else ""
    return f"operator {operator}" + (f" ({name})" if name else "")


def _cycle_message(names: Sequence[str], sources: Int32s, targets: Int32s, missing: Int32s) -> str:
    """Return an error message with one cycle, which is traced back from an unsorted operator."""
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
    cycle = [*path[path.index(node) :], node][::-1]
    return (
        "operators form a cycle: "
        + ", then ".join(_operator_name(names, n) for n in cycle)
        + "; remove one of these edges, or add operators to their queues in another order"
    )
