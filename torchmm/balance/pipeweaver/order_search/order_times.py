"""How long a step takes in an order that is given, and the memory it needs.

For orders that do not come from the dispatcher, by the dispatcher's own costs and rules: what
static planners make is compared with what a search has found. `simulate` says the same, and more,
of a lowered plan, in a hundred times the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Int64s, compiled
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS
from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.order_search.dispatcher_kernel import DispatchTables
from torchmm.pipelining.plan.plan import ComputeOrder


class OrderTime(NamedTuple):
    """What an order takes."""

    makespan_ms: float
    peak_bytes: tuple[int, ...]
    """By rank: the most memory of static bytes and what tasks keep."""
    fits: bool
    """Whether that is within the costs' limit."""


def time_order(dispatcher: Dispatcher, order: ComputeOrder) -> OrderTime:
    """Plays an order through.

    Args:
        order: the F and B of every rank; no split backwards.

    Raises:
        ValueError: it has other actions than the step, or ranks wait for each other.
    """
    number = {action: index for index, action in enumerate(dispatcher.actions)}
    rows = [[number.get(action, -1) for action in row] for row in order]
    flat = np.array([index for row in rows for index in row], np.int64)
    if sorted(flat.tolist()) != list(range(len(number))):
        raise ValueError(f"an order of {len(flat)} actions for a step of {len(number)} others")
    begins = np.cumsum([0, *map(len, rows)])
    peak = np.zeros(len(rows), np.int64)
    end_ps, done = _play_rows(flat, begins, dispatcher.tables, peak)
    if done < len(flat):
        raise ValueError("ranks wait for each other; the order is not legal")
    costs = dispatcher.costs
    static = costs.static_bytes or (0,) * len(rows)
    peaks = tuple(n + used for n, used in zip(static, peak.tolist(), strict=True))
    limit = costs.memory_limit_bytes
    return OrderTime(end_ps / PICOSECONDS_PER_MS, peaks, limit is None or max(peaks) <= limit)


@compiled
def _play_rows(
    rows: Int64s, begins: Int64s, tables: DispatchTables, peak: Int64s
) -> tuple[int, int]:
    """End in picoseconds, and how many actions ran; writes the peak of every rank."""
    missing = tables.missing.copy()
    ready_ps = np.zeros(len(rows), np.int64)
    channel_ps = np.zeros(len(tables.room) - 1, np.int64)
    ranks = len(begins) - 1
    place = begins[:-1].copy()
    free_ps = np.zeros(ranks, np.int64)
    used = np.zeros(ranks, np.int64)
    done, before = 0, -1
    while done > before:
        before = done
        for rank in range(ranks):
            while place[rank] < begins[rank + 1] and missing[rows[place[rank]]] == 0:
                action = rows[place[rank]]
                used[rank] += tables.takes_bytes[action]
                peak[rank] = max(peak[rank], used[rank])
                used[rank] -= tables.gives_bytes[action]
                start_ps = max(free_ps[rank], ready_ps[action])
                end_ps = start_ps + tables.duration_ps[action]
                free_ps[rank] = end_ps
                for edge in range(tables.pointers[action], tables.pointers[action + 1]):
                    arrives_ps = end_ps
                    channel = tables.channel[edge]
                    if channel >= 0:
                        arrives_ps = max(end_ps, channel_ps[channel]) + tables.wire_ps[edge]
                        channel_ps[channel] = arrives_ps
                    target = tables.target[edge]
                    ready_ps[target] = max(ready_ps[target], arrives_ps)
                    missing[target] -= 1
                place[rank] += 1
                done += 1
    return free_ps.max(), done
