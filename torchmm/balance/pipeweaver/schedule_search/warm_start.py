"""Orders of earlier steps, with which the search of the next step starts.

    remembered = WarmStart()
    starts = remembered.starts(dispatcher)      orders that are evaluated first
    remembered.add(dispatcher, found.segments)

Good orders are similar from step to step: which microbatches come first, by their work, and how far
encoders run ahead. Microbatches are therefore sorted by work. Each segment gets the relative
position of the corresponding segment of the earlier step. This is the segment of the microbatch
with the same rank, of the same module, and with the same relative sub-microbatch and segment index.
A step with the same work as an earlier step, in any microbatch order, uses the order of this step.
Other steps use the order of the last step.

Work is measured in FLOPs, which do not depend on measured times.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from torchmm.balance.numba_utils import Uint32s
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher

MAX_STEPS = 64
"""Maximum number of remembered steps."""
SIGNIFICANT_DIGITS = 3
"""Number of significant digits of FLOPs in comparisons."""

MicrobatchWork = tuple[float, ...]
"""Work of a microbatch: total, by module, and numbers of sub-microbatches."""
StepShape = tuple[MicrobatchWork, ...]
"""Work of the microbatches of a step, ascending."""


@dataclass(frozen=True)
class _SegmentPositions:
    """Relative positions (0 to 1) of the segments of a step, by microbatch rank, module,
    sub-microbatch and segment."""

    microbatches: int
    sub_microbatches: dict[tuple[int, str], int]
    of: dict[tuple[int, str, int, int], float]

    def lookup(self, rank: int, module: str, part: tuple[int, int], segment: int) -> float | None:
        """Return the position of the corresponding segment of a step with other sizes.

        Args:
            rank: Rank of the microbatch by work.
            module: Name of the module.
            part: Index of the sub-microbatch, and number of sub-microbatches.
            segment: Index of the segment.
        """
        count = self.sub_microbatches.get((rank, module))
        if not count:
            return None
        return self.of.get((rank, module, part[0] * count // part[1], segment))


class WarmStart:
    """Orders of earlier steps with one layout."""

    def __init__(self) -> None:
        self._positions_by_shape: OrderedDict[StepShape, _SegmentPositions] = OrderedDict()

    def starts(self, dispatcher: Dispatcher) -> list[Uint32s]:
        """Return orders of the segments of a step, best candidate first.

        The list is empty before the first call of `add`.
        """
        ranks, shape = _rank_microbatches(dispatcher)
        candidates = [self._positions_by_shape[shape]] if shape in self._positions_by_shape else []
        latest = next(reversed(self._positions_by_shape.values()), None)
        if latest is not None and latest not in candidates:
            candidates.append(latest)
        return [_transfer_order(positions, dispatcher, ranks) for positions in candidates]

    def add(self, dispatcher: Dispatcher, order: Uint32s) -> None:
        """Store the order of a step."""
        ranks, shape = _rank_microbatches(dispatcher)
        position = np.argsort(order) / len(order)
        counts = _sub_microbatch_counts(dispatcher)
        sub_microbatches = {(ranks[m], module): count for (m, module), count in counts.items()}
        of = {
            (ranks[s.microbatch], s.module, s.sub_microbatch, s.segment): float(position[index])
            for index, s in enumerate(dispatcher.segments)
        }
        self._positions_by_shape.pop(shape, None)
        self._positions_by_shape[shape] = _SegmentPositions(len(ranks), sub_microbatches, of)
        if len(self._positions_by_shape) > MAX_STEPS:
            self._positions_by_shape.popitem(last=False)


def _rank_microbatches(dispatcher: Dispatcher) -> tuple[list[int], StepShape]:
    """Return the rank of each microbatch by work, and the work of all microbatches."""
    graph = dispatcher.graph
    modules = list(dict.fromkeys(stage.module for stage in graph.layout.stages))
    flops = np.zeros((graph.microbatches, len(modules)))
    counts = _sub_microbatch_counts(dispatcher)
    sub_microbatches = [
        [counts[m, module] for module in modules] for m in range(graph.microbatches)
    ]
    for action, value in dispatcher.costs.flops.items():
        flops[action.microbatch, modules.index(graph.layout.stages[action.stage].module)] += value
    rows = np.concatenate([flops.sum(1, keepdims=True), flops, sub_microbatches], axis=1)
    work = [
        tuple(float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in row) for row in rows.tolist()
    ]
    rising = sorted(range(len(work)), key=lambda index: (work[index], index))
    ranks = [0] * len(work)
    for rank, index in enumerate(rising):
        ranks[index] = rank
    return ranks, tuple(work[index] for index in rising)


def _sub_microbatch_counts(dispatcher: Dispatcher) -> dict[tuple[int, str], int]:
    """Return the number of sub-microbatches by microbatch and module."""
    graph = dispatcher.graph
    return {
        (microbatch, stage.module): graph.task_count(stage.index, microbatch)
        for stage in graph.layout.stages
        for microbatch in range(graph.microbatches)
    }


def _transfer_order(
    earlier: _SegmentPositions, dispatcher: Dispatcher, ranks: list[int]
) -> Uint32s:
    """Return the order of a step in which segments have the positions of another step."""
    graph = dispatcher.graph
    count = len(ranks)
    counts = _sub_microbatch_counts(dispatcher)
    positions: list[float | None] = []
    first_position: dict[int, float] = {}
    for segment in dispatcher.segments:
        rank = ranks[segment.microbatch] * earlier.microbatches // count
        part = segment.sub_microbatch, counts[segment.microbatch, segment.module]
        position = earlier.lookup(rank, segment.module, part, segment.segment)
        positions.append(position)
        if position is not None:
            first_position[segment.microbatch] = min(
                first_position.get(segment.microbatch, 1.0), position
            )
    # Segments without a counterpart get the position of the first segment of their microbatch.
    middle = [index / graph.microbatches for index in range(graph.microbatches)]
    filled = [
        first_position.get(segment.microbatch, middle[segment.microbatch])
        if position is None
        else position
        for segment, position in zip(dispatcher.segments, positions, strict=True)
    ]
    return np.argsort(np.array(filled), kind="stable").astype(np.uint32)
