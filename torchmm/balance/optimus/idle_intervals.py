"""Idle intervals of devices in a step: the bubbles between and inside LLM actions.

An action alternates between *pieces* of communication and computation:

    action          | comm | compute     | comm | compute |
    compute units   | idle | busy        | idle | busy    |     idle: TP bubble (Optimus §2.2)
    links           | busy | idle        | busy | idle    |

Intervals are flat arrays in picoseconds, for compiled loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from torchmm.balance.numba_utils import Int64s
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.pipelining.plan.actions import Action

INFINITY_PS = 1 << 60
"""Time beyond every step, used as infinity in interval lists."""

ActionPieces = Callable[[Action], Sequence[float]]
"""Function from an action to the ms of communication, computation, communication, and so on."""


class IdleIntervals(NamedTuple):
    """Idle intervals of each device. The first has no start and the last has no end."""

    pointers: Int64s
    """Offsets of the intervals. Device d has intervals `pointers[d]` to `pointers[d + 1]`."""
    start_ps: Int64s
    end_ps: Int64s

    def select_devices(self, sources: Sequence[int]) -> IdleIntervals:
        """Return the intervals of other devices: entry i has those of device `sources[i]`."""
        slices = [slice(self.pointers[s], self.pointers[s + 1]) for s in sources]
        pointers = np.cumsum([0, *(interval.stop - interval.start for interval in slices)])
        starts = np.concatenate([self.start_ps[interval] for interval in slices])
        return IdleIntervals(
            pointers, starts, np.concatenate([self.end_ps[interval] for interval in slices])
        )

    def reversed_time(self) -> IdleIntervals:
        """Return the intervals in negated time."""
        spans = [slice(a, b) for a, b in zip(self.pointers[:-1], self.pointers[1:], strict=True)]
        starts = np.concatenate([-self.end_ps[span][::-1] for span in spans])
        return IdleIntervals(
            self.pointers, starts, np.concatenate([-self.start_ps[span][::-1] for span in spans])
        )


class BusyIntervals(NamedTuple):
    """Busy intervals of a rank, sorted by time. Arrays have shape (2, n): starts and ends."""

    communication_ps: Int64s
    computation_ps: Int64s


def busy_intervals(
    actions: Sequence[Action], start_ps: Int64s, end_ps: Int64s, pieces: ActionPieces
) -> BusyIntervals:
    """Return the communication and computation intervals of consecutive actions.

    The last piece of an action absorbs rounding errors.
    """
    cuts: dict[tuple, tuple[Int64s, ...]] = {}
    action_cuts: list[tuple[Int64s, ...]] = []
    for action, duration in zip(actions, (end_ps - start_ps).tolist(), strict=True):
        durations_ms = tuple(pieces(action))
        key = (durations_ms, duration)
        if key not in cuts:
            cuts[key] = _split_action(durations_ms, duration)
        action_cuts.append(cuts[key])
    intervals = []
    for kind in (0, 1):
        counts = [len(cut[2 * kind]) for cut in action_cuts]
        offsets = np.repeat(start_ps, counts)
        starts = np.concatenate([cut[2 * kind] for cut in action_cuts]) + offsets
        ends = np.concatenate([cut[2 * kind + 1] for cut in action_cuts]) + offsets
        intervals.append(np.stack((starts, ends)))
    return BusyIntervals(*intervals)


def _split_action(pieces_ms: Sequence[float], duration_ps: int) -> tuple[Int64s, ...]:
    """Return starts and ends of communication, then of computation, within an action."""
    sums = np.cumsum(np.array([0.0, *pieces_ms])) * PICOSECONDS_PER_MS
    edges = np.minimum(np.rint(sums).astype(np.int64), duration_ps)
    edges[-1] = duration_ps
    start = edges[:-1]
    end = edges[1:]
    is_positive = end > start
    kinds = [is_positive & (np.arange(len(start)) % 2 == kind) for kind in (0, 1)]
    return start[kinds[0]], end[kinds[0]], start[kinds[1]], end[kinds[1]]


def complement_intervals(busy: Sequence[Int64s]) -> IdleIntervals:
    """Return the idle intervals of each device.

    Adjacent busy intervals have no idle interval between them.

    Args:
        busy: Busy intervals of each device, shape (2, n), starts and ends sorted by time.
    """
    starts, ends, pointers = [], [], [0]
    for spans in busy:
        start = np.concatenate(([-INFINITY_PS], spans[1]))
        end = np.concatenate((spans[0], [INFINITY_PS]))
        is_idle = end > start
        starts.append(start[is_idle])
        ends.append(end[is_idle])
        pointers.append(pointers[-1] + int(is_idle.sum()))
    return IdleIntervals(np.array(pointers, np.int64), np.concatenate(starts), np.concatenate(ends))
