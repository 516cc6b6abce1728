"""Operators on device queues, timed and weighed: the core of the simulator.

A graph has *operators* and *tensors*, as SEMU's (PipeWeaver §4.1). An operator lies on a queue of
a device: a compute stream, a copy engine, the channel between two ranks. A queue runs its
operators one at a time in the order in which they were added, as a CUDA stream does. An operator
starts when what it depends on has ended and its queue is free; a tensor lives from the start of
its producer to the last end among its consumers.

Since queues are in order, a queue is a chain of edges and the start of an operator the longest
path to it: one pass along a topological order. Rejected: queues that take what is ready first,
which streams do not do, and which would make the order, and with it every edit, depend on all
times. Rejected: floating-point times, whose sums depend on their order (`graph_kernels`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from torchmm.balance.compiled import Int32s, Int64s
from torchmm.balance.picoseconds import (
    LONGEST_MS,
    PICOSECONDS_PER_MS,
    SimulationError,
    duration_problem,
)
from torchmm.balance.simulation.graph_kernels import sort_topologically, time_nodes


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory of one device over time.

    Attributes:
        times_ms: of each change, ascending.
        used_bytes: from that change to the next. At equal times the order is that of execution.
    """

    times_ms: NDArray[np.float64]
    used_bytes: Int64s

    @property
    def peak_bytes(self) -> int:
        """The most that is used at once."""
        return int(self.used_bytes.max(initial=0))


@dataclass(frozen=True)
class SimulatedGraph:
    """When operators ran, and what memory their tensors took.

    Attributes:
        start_ps, end_ps: by operator, in picoseconds from the begin.
        changes: of memory, by device, in order: (time in picoseconds, rank among equal times,
            bytes).
    """

    start_ps: Int64s
    end_ps: Int64s
    changes: Mapping[Hashable, list[tuple[int, int, int]]]

    @property
    def memory(self) -> dict[Hashable, MemoryTimeline]:
        """By device."""
        return {device: memory_timeline(changes) for device, changes in self.changes.items()}

    @property
    def makespan_ms(self) -> float:
        """End of the last operator."""
        return int(self.end_ps.max(initial=0)) / PICOSECONDS_PER_MS


class OperatorGraph:
    """A graph under construction. Operators are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._durations_ms: list[float] = []
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._last: dict[Hashable, int] = {}
        self._tensors: list[tuple[Hashable, int, int, tuple[int, ...]]] = []

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

    def add_tensor(
        self, device: Hashable, nbytes: int, producer: int, consumers: Iterable[int] = ()
    ) -> None:
        """Lets a tensor live on a device from the start of its producer to the end of the last of
        producer and consumers."""
        self._tensors.append((device, nbytes, producer, tuple(consumers)))

    def compile(self) -> CompiledGraph:
        """The graph as arrays, ready to be timed.

        Raises:
            SimulationError: a duration or size is negative or no number, an edge or tensor names
                an operator that does not exist, or operators wait for each other in a circle. All
                problems are listed.
        """
        problems = [*self._cost_problems(), *self._reference_problems()]
        count = len(self._names)
        known = [
            0 <= s < count and 0 <= t < count
            for s, t in zip(self._sources, self._targets, strict=True)
        ]
        sources = np.array(self._sources, np.int32)[np.array(known, bool)]
        targets = np.array(self._targets, np.int32)[np.array(known, bool)]
        pointers, by_source = _grouped(sources, count)
        missing = np.bincount(targets, minlength=count).astype(np.int32)
        order = sort_topologically(pointers, targets[by_source], missing)
        if len(order) < count:
            problems.append(self._circle(sources, targets, missing))
        if problems:
            raise SimulationError(problems)
        durations = np.rint(np.array(self._durations_ms, np.float64) * PICOSECONDS_PER_MS)
        return _compiled(
            tuple(self._names), durations.astype(np.int64), sources, targets, order, self._tensors
        )

    def _called(self, node: int) -> str:
        name = self._names[node] if 0 <= node < len(self._names) else ""
        return f"operator {node}" + (f" ({name})" if name else "")

    def _cost_problems(self) -> list[str]:
        problems = [
            f"{self._called(node)} has {text}"
            for node, duration_ms in enumerate(self._durations_ms)
            if (text := duration_problem(duration_ms))
        ]
        total_ms = sum(d for d in self._durations_ms if not duration_problem(d))
        if total_ms > LONGEST_MS:
            problems.append(
                f"all operators together take {total_ms:g} ms, more than {LONGEST_MS:g}; are the "
                "durations in milliseconds?"
            )
        for device, nbytes, producer, _ in self._tensors:
            if not 0 <= nbytes < inf:
                problems.append(
                    f"a tensor of {self._called(producer)} on {device} has {nbytes} bytes; give 0 "
                    "or more"
                )
        return problems

    def _reference_problems(self) -> list[str]:
        count = len(self._names)
        remedy = f"there are operators 0 to {count - 1}"
        problems = [
            f"an edge leads from {self._called(s)} to {self._called(t)}; {remedy}"
            for s, t in zip(self._sources, self._targets, strict=True)
            if not (0 <= s < count and 0 <= t < count)
        ]
        for device, _, producer, consumers in self._tensors:
            problems += [
                f"a tensor on {device} names operator {node}; {remedy}"
                for node in (producer, *consumers)
                if not 0 <= node < count
            ]
        return problems

    def _circle(self, sources: Int32s, targets: Int32s, missing: Int32s) -> str:
        """Names one circle: from any unsorted operator back and back along unsorted ones."""
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
            "operators wait for each other in a circle: "
            + ", then ".join(self._called(n) for n in circle)
            + "; remove one of these edges, or add operators to their queues in another order"
        )


@dataclass(frozen=True)
class CompiledGraph:
    """A graph as arrays in topological order; *place* is a node's position in it.

    Attributes:
        names: by operator.
        node_at: by place.
        place: by operator.
        duration_ps: by place.
        pointers, sources: the node at place p comes after the places
            `sources[pointers[p] : pointers[p + 1]]`.
        tensors: (device, bytes, producer, consumers), by operator.
    """

    names: tuple[str, ...]
    node_at: Int32s
    place: Int32s
    duration_ps: Int64s
    pointers: Int32s
    sources: Int32s
    tensors: Sequence[tuple[Hashable, int, int, tuple[int, ...]]]

    def makespan_ps(self, duration_ps: Int64s) -> int:
        """Only the end of the last operator, for other durations than the graph's own.

        Args:
            duration_ps: by place.
        """
        start_ps = np.empty_like(duration_ps)
        end_ps = np.empty_like(duration_ps)
        return time_nodes(duration_ps, self.pointers, self.sources, start_ps, end_ps)

    def simulate(self) -> SimulatedGraph:
        """Start and end of every operator and the memory of every device."""
        start_ps = np.empty_like(self.duration_ps)
        end_ps = np.empty_like(self.duration_ps)
        time_nodes(self.duration_ps, self.pointers, self.sources, start_ps, end_ps)
        start_ps, end_ps = start_ps[self.place], end_ps[self.place]
        return SimulatedGraph(start_ps, end_ps, self._changes(start_ps, end_ps))

    def _changes(
        self, start_ps: Int64s, end_ps: Int64s
    ) -> dict[Hashable, list[tuple[int, int, int]]]:
        """What is given back at an instant may be used at that instant; tensors that are born and
        die in one all count together."""
        changes: dict[Hashable, list[tuple[int, int, int]]] = {}
        for device, nbytes, producer, consumers in self.tensors:
            birth = int(start_ps[producer])
            death = max(int(end_ps[n]) for n in (producer, *consumers))
            both = (birth, 1, nbytes), (death, 0 if death > birth else 2, -nbytes)
            changes.setdefault(device, []).extend(both)
        return {device: sorted(found) for device, found in changes.items()}


def memory_timeline(
    changes: Sequence[tuple[int, int, int]], begin_bytes: int = 0
) -> MemoryTimeline:
    """Sums up changes, given in order; see `SimulatedGraph`.

    Args:
        begin_bytes: what is used before all changes.
    """
    times_ps = np.array([0] + [change[0] for change in changes], np.int64)
    used = np.cumsum(np.array([begin_bytes] + [change[2] for change in changes], np.int64))
    return MemoryTimeline(times_ps / PICOSECONDS_PER_MS, used)


def _grouped(keys: Int32s, count: int) -> tuple[Int32s, Int64s]:
    """(begin of each key's group and, last, the end; the indices sorted by key)."""
    pointers = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(keys, minlength=count), out=pointers[1:])
    return pointers, np.argsort(keys, kind="stable")


def _compiled(
    names: tuple[str, ...],
    durations_ps: Int64s,
    sources: Int32s,
    targets: Int32s,
    order: Int32s,
    tensors: Sequence[tuple[Hashable, int, int, tuple[int, ...]]],
) -> CompiledGraph:
    """Numbers a sorted graph anew, so that a pass walks through memory in order."""
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    pointers, by_target = _grouped(place[targets], len(order))
    return CompiledGraph(
        names, order, place, durations_ps[order], pointers, place[sources[by_target]], tensors
    )
