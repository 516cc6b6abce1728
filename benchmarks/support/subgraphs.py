"""Simulation of repeated subgraphs (layers, stages, symmetric ranks), each simulated once.

This is the spatial reuse of SEMU (PipeWeaver §4.2). A subgraph is a value: its operators with their
queues, durations and order, its buffers and its device class. Two layers of equal shape on equal
devices are equal subgraphs and share one result in the cache. Subgraphs nest: a stage consists of
layers, and a layer consists of operators. In the enclosing graph, a subgraph is one operator. It
starts as a unit, uses separate queues, and ends with its last operator.

Tensor- and data-parallel replicas of a rank run the same operators at the same time. One replica
represents all of them, and `copies` is their number.

Tests compare the results with one flat graph of all operators, which must match exactly. The flat
graph is slower because any changed microbatch requires a simulation of all operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchmm.balance.picoseconds import PICOSECONDS_PER_MS, SimulationError
from torchmm.balance.simulation.operator_graph import OperatorGraph
from torchmm.balance.simulation.simulator import MemoryTimeline


class Part(NamedTuple):
    """Operator or nested subgraph of a subgraph."""

    queue: Hashable
    """Queue that runs its parts sequentially. None if the part uses no queue."""
    work: float | Subgraph
    """Duration in milliseconds, or the nested subgraph."""
    after: tuple[int, ...] = ()
    """Indices of the parts that must end before this part starts."""
    copies: int = 1
    """Number of devices that run this part at the same time. One of them is simulated."""


class Buffer(NamedTuple):
    """Tensor inside a subgraph.

    It is allocated from the start of its producer to the last end of producer and consumers, which
    are indices of parts.
    """

    nbytes: int
    producer: int
    consumers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Subgraph:
    """Operators of one device as one unit.

    Attributes:
        parts: Operators and nested subgraphs.
        buffers: Tensors that the parts allocate.
        device_class: Device type of the durations. Subgraphs of different types are not equal.
    """

    parts: tuple[Part, ...]
    buffers: tuple[Buffer, ...] = ()
    device_class: str = ""

    def __post_init__(self) -> None:
        # The hash of a stage requires the hashes of all its layers, and each subgraph is looked up
        # many times. So the hash is computed once.
        key = hash((self.parts, self.buffers, self.device_class))
        object.__setattr__(self, "_hash", key)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SubgraphResult:
    """Time and memory of a subgraph.

    Attributes:
        duration_ps: Time from its start to its end, in picoseconds.
        busy_ps: Maps each queue of the subgraph to its busy time in picoseconds.
        device_ps: Total time of all operators, multiplied by their copies, in picoseconds.
        changes: Memory changes (picoseconds from the start, rank among equal times, bytes), sorted.
    """

    duration_ps: int
    busy_ps: dict[Hashable, int]
    device_ps: int
    changes: list[tuple[int, int, int]]

    @property
    def duration_ms(self) -> float:
        """Duration in milliseconds."""
        return self.duration_ps / PICOSECONDS_PER_MS

    @property
    def memory(self) -> MemoryTimeline:
        """Memory timeline of the buffers."""
        times_ps = np.array([0, *(change[0] for change in self.changes)], np.int64)
        used = np.cumsum([0, *(change[2] for change in self.changes)])
        return MemoryTimeline(times_ps / PICOSECONDS_PER_MS, used)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the buffers in bytes."""
        return self.memory.peak_bytes


class SubgraphCache:
    """Cache that simulates each distinct subgraph once.

    Attributes:
        simulated: Number of simulated subgraphs.
        reused: Number of cache hits.
    """

    def __init__(self) -> None:
        self._results: dict[Subgraph, SubgraphResult] = {}
        self.simulated = 0
        self.reused = 0

    def simulate(self, subgraph: Subgraph) -> SubgraphResult:
        """Return time and memory of a subgraph, including nested subgraphs.

        Raises:
            SimulationError: A duration or size is negative or not a number, or an index is out of
                range or part of a cycle.
        """
        result = self._results.get(subgraph)
        if result is not None:
            self.reused += 1
            return result
        result = self._simulate(subgraph)
        self._results[subgraph] = result
        self.simulated += 1
        return result

    def _simulate(self, subgraph: Subgraph) -> SubgraphResult:
        graph = OperatorGraph()
        inner: dict[int, SubgraphResult] = {}
        device_ps = 0
        for index, part in enumerate(subgraph.parts):
            if isinstance(part.work, Subgraph):
                inner[index] = self.simulate(part.work)
                device_ps += inner[index].device_ps * part.copies
                graph.add(part.queue, inner[index].duration_ms, part.after)
            else:
                graph.add(part.queue, part.work, part.after)
        _check(subgraph)
        start_ps, end_ps = (times.tolist() for times in graph.compile().times_ps())
        busy_ps: Counter[Hashable] = Counter()
        changes = memory_changes(subgraph.buffers, start_ps, end_ps)
        for index, part in enumerate(subgraph.parts):
            busy_ps[part.queue] += end_ps[index] - start_ps[index]
            if index in inner:
                begin = start_ps[index]
                changes += [(begin + t, rank, n) for t, rank, n in inner[index].changes]
            else:
                device_ps += (end_ps[index] - start_ps[index]) * part.copies
        return SubgraphResult(max(end_ps, default=0), dict(busy_ps), device_ps, sorted(changes))


def memory_changes(
    buffers: Iterable[Buffer], start_ps: Sequence[int], end_ps: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return the memory changes of buffers, as in `SubgraphResult.changes`.

    At equal times, buffers are freed before others are allocated. Buffers that are allocated and
    freed at the same time are all counted at once.

    Args:
        buffers: Buffers with producers and consumers.
        start_ps: Start of each operator in picoseconds.
        end_ps: End of each operator in picoseconds.
    """
    changes = []
    for nbytes, producer, consumers in buffers:
        birth = start_ps[producer]
        death = max(end_ps[n] for n in (producer, *consumers))
        changes += [(birth, 1, nbytes), (death, 0 if death > birth else 2, -nbytes)]
    return sorted(changes)


def _check(subgraph: Subgraph) -> None:
    count = len(subgraph.parts)
    problems = [
        f"{buffer}: give 0 bytes or more, and parts among 0 to {count - 1}"
        for buffer in subgraph.buffers
        if buffer.nbytes < 0
        or not all(0 <= n < count for n in (buffer.producer, *buffer.consumers))
    ]
    if problems:
        raise SimulationError(problems)
