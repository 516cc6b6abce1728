"""When devices are idle inside a step: what is left between an LLM's pieces of work.

An action is *pieces* of communication and computation in turn. While a tensor-parallel collective
runs, a device's compute units are idle (a *TP bubble*, Optimus §2.2); while it computes, its links
are. Intervals are flat arrays of picoseconds, for compiled loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Int64s
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.pipelining.plan.actions import Action

ALWAYS_PS = 1 << 60
"""Farther from the step than anything in it."""

Pieces = Callable[[Action], Sequence[float]]
"""Action -> times in ms of communication, computation, communication, ... in turn."""


class FreeTime(NamedTuple):
    """When something of each device is idle; its first interval has no begin, its last no end."""

    pointers: Int64s
    """Device d has the intervals `pointers[d]` to `pointers[d + 1]`."""
    start_ps: Int64s
    end_ps: Int64s

    def of_devices(self, sources: Sequence[int]) -> FreeTime:
        """The intervals of other devices: the first has those of `sources[0]` here, and so on."""
        slices = [slice(self.pointers[s], self.pointers[s + 1]) for s in sources]
        pointers = np.cumsum([0, *(own.stop - own.start for own in slices)])
        starts = np.concatenate([self.start_ps[own] for own in slices])
        return FreeTime(pointers, starts, np.concatenate([self.end_ps[own] for own in slices]))

    def mirrored(self) -> FreeTime:
        """The same with time running backwards."""
        spans = [slice(a, b) for a, b in zip(self.pointers[:-1], self.pointers[1:], strict=True)]
        starts = np.concatenate([-self.end_ps[span][::-1] for span in spans])
        return FreeTime(
            self.pointers, starts, np.concatenate([-self.start_ps[span][::-1] for span in spans])
        )


class Spans(NamedTuple):
    """What a rank does, in order: each (2, n), starts and ends."""

    communication_ps: Int64s
    computation_ps: Int64s


def spans_of(actions: Sequence[Action], start_ps: Int64s, end_ps: Int64s, pieces: Pieces) -> Spans:
    """The pieces of consecutive actions. The last piece of an action takes what rounding leaves."""
    cuts: dict[tuple, tuple[Int64s, ...]] = {}
    found: list[tuple[Int64s, ...]] = []
    for action, duration in zip(actions, (end_ps - start_ps).tolist(), strict=True):
        given = tuple(pieces(action))
        key = (given, duration)
        if key not in cuts:
            cuts[key] = _cut(given, duration)
        found.append(cuts[key])
    both = []
    for kind in (0, 1):
        counts = [len(cut[2 * kind]) for cut in found]
        offsets = np.repeat(start_ps, counts)
        starts = np.concatenate([cut[2 * kind] for cut in found]) + offsets
        ends = np.concatenate([cut[2 * kind + 1] for cut in found]) + offsets
        both.append(np.stack((starts, ends)))
    return Spans(*both)


def _cut(pieces_ms: Sequence[float], duration_ps: int) -> tuple[Int64s, ...]:
    """Starts and ends of communication, starts and ends of computation, in an action."""
    sums = np.cumsum(np.array([0.0, *pieces_ms])) * PICOSECONDS_PER_MS
    edges = np.minimum(np.rint(sums).astype(np.int64), duration_ps)
    edges[-1] = duration_ps
    start = edges[:-1]
    end = edges[1:]
    some = end > start
    kinds = [some & (np.arange(len(start)) % 2 == kind) for kind in (0, 1)]
    return start[kinds[0]], end[kinds[0]], start[kinds[1]], end[kinds[1]]


def complement(busy: Sequence[Int64s]) -> FreeTime:
    """What is left of all time, by device; spans that touch leave nothing in between.

    Args:
        busy: by device: (2, n), starts and ends in order.
    """
    starts, ends, pointers = [], [], [0]
    for spans in busy:
        start = np.concatenate(([-ALWAYS_PS], spans[1]))
        end = np.concatenate((spans[0], [ALWAYS_PS]))
        some = end > start
        starts.append(start[some])
        ends.append(end[some])
        pointers.append(pointers[-1] + int(some.sum()))
    return FreeTime(np.array(pointers, np.int64), np.concatenate(starts), np.concatenate(ends))
