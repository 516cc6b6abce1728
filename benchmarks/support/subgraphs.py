"""Operators that occur again and again, simulated once: layers, stages, symmetric ranks.

SEMU's spatial reuse (PipeWeaver §4.2). A subgraph is a value: its operators with their queues,
times and order, its buffers and the class of device it runs on. Two layers of equal shape on equal
devices are equal subgraphs, whoever built them, and have one result in the cache. Subgraphs nest:
a stage is made of layers, a layer of operators. In the graph around it, a subgraph is one operator:
it starts as a unit, on separate queues, and ends with its last operator.

Tensor- and data-parallel copies of a rank do the same at the same time, so one represents all;
`copies` says how many.

Rejected: one flat graph of all operators, which is the same to the picosecond and is checked
against it in tests, but has to be simulated completely if a microbatch changes; reuse by name,
which is wrong as soon as two things of one name differ.
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
    """An operator of a subgraph, or a subgraph in another one."""

    queue: Hashable
    """Parts of a queue run in their order; None for a part that needs no queue."""
    work: float | Subgraph
    """Duration in milliseconds, or what is to be done."""
    after: tuple[int, ...] = ()
    """Indices of parts that must have ended."""
    copies: int = 1
    """Devices that do this at the same time, of which one is simulated."""


class Buffer(NamedTuple):
    """A tensor inside a subgraph, alive from the start of its producer to the last end among
    producer and consumers (indices of parts)."""

    nbytes: int
    producer: int
    consumers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Subgraph:
    """Work of one device, as one unit.

    Attributes:
        parts: operators and subgraphs.
        buffers: what they need memory for.
        device_class: the kind of device the times hold for; keeps apart what would be equal.
    """

    parts: tuple[Part, ...]
    buffers: tuple[Buffer, ...] = ()
    device_class: str = ""

    def __post_init__(self) -> None:
        # Looked up more often than made; hashing a stage means hashing all of its layers.
        key = hash((self.parts, self.buffers, self.device_class))
        object.__setattr__(self, "_hash", key)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SubgraphResult:
    """What a subgraph takes.

    Attributes:
        duration_ps: from its start to its end, in picoseconds.
        busy_ps: by queue of its own: time in which it has work.
        device_ps: time of all operators that are no subgraphs, times their copies.
        changes: of memory, in order: (picoseconds from its start, rank among equal times, bytes).
    """

    duration_ps: int
    busy_ps: dict[Hashable, int]
    device_ps: int
    changes: list[tuple[int, int, int]]

    @property
    def duration_ms(self) -> float:
        """From its start to its end."""
        return self.duration_ps / PICOSECONDS_PER_MS

    @property
    def memory(self) -> MemoryTimeline:
        """Used bytes over time."""
        times_ps = np.array([0, *(change[0] for change in self.changes)], np.int64)
        used = np.cumsum([0, *(change[2] for change in self.changes)])
        return MemoryTimeline(times_ps / PICOSECONDS_PER_MS, used)

    @property
    def peak_bytes(self) -> int:
        """The most memory its buffers need at once."""
        return self.memory.peak_bytes


class SubgraphCache:
    """Simulates subgraphs, each once.

    Attributes:
        simulated: how many subgraphs were simulated.
        reused: how often a result was there already.
    """

    def __init__(self) -> None:
        self._results: dict[Subgraph, SubgraphResult] = {}
        self.simulated = 0
        self.reused = 0

    def simulate(self, subgraph: Subgraph) -> SubgraphResult:
        """What a subgraph takes, those in it included.

        Raises:
            SimulationError: a duration or size is negative or no number, or an index is of no part
                or makes a circle.
        """
        found = self._results.get(subgraph)
        if found is not None:
            self.reused += 1
            return found
        found = self._simulate(subgraph)
        self._results[subgraph] = found
        self.simulated += 1
        return found

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
    """What buffers take and give back; see `SubgraphResult`.

    What is given back at an instant may be used at that instant; buffers that are born and die in
    one all count together.

    Args:
        start_ps, end_ps: by operator.
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
