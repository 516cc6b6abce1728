"""Orders of earlier steps: where the search of the next one begins.

    remembered = RememberedOrders()
    starts = remembered.starts(dispatcher)      tried before all else
    remembered.add(dispatcher, found.segments)

What a good order looks like changes little from step to step: which microbatches come first, by
the work they have, and how far encoders run ahead. So microbatches are taken in the order of their
work, and every segment gets the place that the corresponding one had: of the microbatch with the
same rank among all, the same module, the part and the segment that lie equally far. A step that
has the same work as one before, whatever the order of its microbatches, gets that one's whole
order; any other the order of the step that was last.

Work is counted in FLOPs, which measured times do not change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from torchmm.balance.compiled import Uint32s
from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher

MOST = 64
"""Steps that are remembered."""
ALIKE = 3
"""Digits of FLOPs that count."""

Work = tuple[float, ...]
"""Of a microbatch: all of it, then by module, and numbers of parts."""
Shape = tuple[Work, ...]
"""Of a step: its microbatches' work, rising."""


@dataclass(frozen=True)
class _Places:
    """Of a step's segments, by rank of the microbatch, module, part and segment: 0 to 1."""

    microbatches: int
    parts: dict[tuple[int, str], int]
    of: dict[tuple[int, str, int, int], float]

    def near(self, rank: int, module: str, part: tuple[int, int], segment: int) -> float | None:
        """Where a step that is larger or smaller has the corresponding segment.

        Args:
            part: which, of how many.
        """
        count = self.parts.get((rank, module))
        if not count:
            return None
        return self.of.get((rank, module, part[0] * count // part[1], segment))


class RememberedOrders:
    """Of one process, for steps on one layout."""

    def __init__(self) -> None:
        self._of_shape: OrderedDict[Shape, _Places] = OrderedDict()

    def starts(self, dispatcher: Dispatcher) -> list[Uint32s]:
        """Orders of a step's segments, the most promising first; none before any was added."""
        ranks, shape = _ranked(dispatcher)
        found = [self._of_shape[shape]] if shape in self._of_shape else []
        latest = next(reversed(self._of_shape.values()), None)
        if latest is not None and latest not in found:
            found.append(latest)
        return [_transferred(places, dispatcher, ranks) for places in found]

    def add(self, dispatcher: Dispatcher, order: Uint32s) -> None:
        """Takes in what was found for a step."""
        ranks, shape = _ranked(dispatcher)
        place = np.argsort(order) / len(order)
        counts = _part_counts(dispatcher)
        parts = {(ranks[m], module): count for (m, module), count in counts.items()}
        of = {
            (ranks[s.microbatch], s.module, s.sub_microbatch, s.segment): float(place[index])
            for index, s in enumerate(dispatcher.segments)
        }
        self._of_shape.pop(shape, None)
        self._of_shape[shape] = _Places(len(ranks), parts, of)
        if len(self._of_shape) > MOST:
            self._of_shape.popitem(last=False)


def _ranked(dispatcher: Dispatcher) -> tuple[list[int], Shape]:
    """By microbatch: its rank among all by work; and the work of all."""
    graph = dispatcher.graph
    modules = list(dict.fromkeys(stage.module for stage in graph.layout.stages))
    flops = np.zeros((graph.microbatches, len(modules)))
    counts = _part_counts(dispatcher)
    parts = [[counts[m, module] for module in modules] for m in range(graph.microbatches)]
    for action, value in dispatcher.costs.flops.items():
        flops[action.microbatch, modules.index(graph.layout.stages[action.stage].module)] += value
    rows = np.concatenate([flops.sum(1, keepdims=True), flops, parts], axis=1)
    work = [tuple(float(f"{value:.{ALIKE}g}") for value in row) for row in rows.tolist()]
    rising = sorted(range(len(work)), key=lambda index: (work[index], index))
    ranks = [0] * len(work)
    for rank, index in enumerate(rising):
        ranks[index] = rank
    return ranks, tuple(work[index] for index in rising)


def _part_counts(dispatcher: Dispatcher) -> dict[tuple[int, str], int]:
    """Sub-microbatches, by microbatch and module."""
    graph = dispatcher.graph
    return {
        (microbatch, stage.module): graph.parts(stage.index, microbatch)
        for stage in graph.layout.stages
        for microbatch in range(graph.microbatches)
    }


def _transferred(places: _Places, dispatcher: Dispatcher, ranks: list[int]) -> Uint32s:
    """The order of a step in which segments come as those of another did."""
    graph = dispatcher.graph
    count = len(ranks)
    counts = _part_counts(dispatcher)
    wanted: list[float | None] = []
    own: dict[int, float] = {}
    for segment in dispatcher.segments:
        rank = ranks[segment.microbatch] * places.microbatches // count
        part = segment.sub_microbatch, counts[segment.microbatch, segment.module]
        place = places.near(rank, segment.module, part, segment.segment)
        wanted.append(place)
        if place is not None:
            own[segment.microbatch] = min(own.get(segment.microbatch, 1.0), place)
    # What the other step did not have comes with the first of its microbatch.
    middle = [index / graph.microbatches for index in range(graph.microbatches)]
    filled = [
        own.get(segment.microbatch, middle[segment.microbatch]) if place is None else place
        for segment, place in zip(dispatcher.segments, wanted, strict=True)
    ]
    return np.argsort(np.array(filled), kind="stable").astype(np.uint32)
