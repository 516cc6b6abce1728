"""A simulated graph that is timed again only where a change of durations has consequences.

SEMU's temporal reuse (PipeWeaver §4.2): planning means asking again and again for the times of a
graph that differs from the last one in a few durations. `checkpoint` and `restore` go back to an
earlier state without undoing changes one by one.

Rejected: an undo log; copying the arrays of ten thousand operators takes less time than one pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchmm.balance.compiled import Int64s
from torchmm.balance.picoseconds import (
    PICOSECONDS_PER_MS,
    SimulationError,
    duration_problem,
    to_picoseconds,
)
from torchmm.balance.simulation.graph_kernels import Graph, Times, settle, time_nodes
from torchmm.balance.simulation.operator_graph import CompiledGraph, grouped

# [Note: timing again]
#
# Arrays are by *place* in the topological order: edges lead to later places, so one walk from left
# to right settles everything. A changed duration makes its place dirty; `settle` visits dirty
# places in order and marks those that wait for a place whose end has moved:
#
#     place   0   1   2   3   4   5   6   7
#     dirty   .   .   X   .   .   .   .   .      the duration at 2 is new; 4 and 6 wait for 2
#             .   .   .   .   X   .   X   .      2 ends later: both are dirty; 7 waits for 4
#             .   .   .   .   .   .   X   .      4 starts later, but 6 is yet to come
#
# Between changes and the next question times are out of date; after `settle` nothing is dirty and
# all times are those of a graph timed from nothing, to the picosecond.


class IncrementalTimes:
    """Start and end of operators, numbered as in the `OperatorGraph`, under changing durations.

    Changes are cheap; the times are brought up to date when one is asked for.

    Attributes:
        timed: how many operators were timed since construction, for measuring reuse.
    """

    def __init__(self, graph: CompiledGraph) -> None:
        count = len(graph.place)
        self._compiled = graph
        out_pointers, by_source = grouped(graph.sources, count)
        targets = np.repeat(np.arange(count, dtype=np.int32), np.diff(graph.pointers))[by_source]
        self._graph = Graph(graph.pointers, graph.sources, out_pointers, targets)
        start_ps = np.zeros(count, np.int64)
        self._times = Times(graph.duration_ps.copy(), start_ps, np.empty(count, np.int64))
        time_nodes(self._times.duration_ps, graph.pointers, graph.sources, *self._times[1:])
        self._dirty = np.zeros((count >> 6) + 1, np.uint64)
        self.timed = count

    def set_durations(self, durations_ms: Mapping[int, float]) -> None:
        """Changes how long operators take.

        Raises:
            SimulationError: an operator does not exist, or a duration is negative or no number;
                nothing is changed then.
        """
        names = self._compiled.names
        problems = [
            f"there is no operator {operator}, only 0 to {len(names) - 1}"
            for operator in durations_ms
            if not 0 <= operator < len(names)
        ]
        problems += [
            f"{self._compiled.called(operator)} has {text}"
            for operator, duration_ms in durations_ms.items()
            if (text := duration_problem(duration_ms))
        ]
        if problems:
            raise SimulationError(problems)
        places = self._compiled.place[np.fromiter(durations_ms, np.int64, len(durations_ms))]
        self._times.duration_ps[places] = [to_picoseconds(ms) for ms in durations_ms.values()]
        bits = np.uint64(1) << (places & 63).astype(np.uint64)
        np.bitwise_or.at(self._dirty, places >> 6, bits)

    def checkpoint(self) -> Times:
        """The present state; later changes do not touch it."""
        self._settle()
        return Times(*(array.copy() for array in self._times))

    def restore(self, checkpoint: Times) -> None:
        """Goes back to a checkpoint, which can be used again."""
        self._times = Times(*(array.copy() for array in checkpoint))
        self._dirty[:] = 0

    @property
    def makespan_ms(self) -> float:
        """End of the last operator."""
        self._settle()
        return int(self._times.end_ps.max(initial=0)) / PICOSECONDS_PER_MS

    def times_ps(self) -> tuple[Int64s, Int64s]:
        """Start and end by operator, in picoseconds."""
        self._settle()
        place = self._compiled.place
        return self._times.start_ps[place], self._times.end_ps[place]

    def _settle(self) -> None:
        self.timed += settle(self._times, self._graph, self._dirty)
