"""Time and memory of a step in an order that does not come from the dispatcher.

Costs and rules are those of the dispatcher, so that the orders of static planners can be compared
with the result of a search. `simulate` returns the same of a lowered plan, and needs a hundred
times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Int32s, Int64s
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS, SimulationError
from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.order_search.dispatcher_kernel import DispatchTables
from torchmm.balance.simulation.graph_kernels import group_edges
from torchmm.balance.simulation.operator_graph import CompiledGraph
from torchmm.pipelining.plan.plan import ComputeOrder


class OrderTime(NamedTuple):
    """Time and memory of an order."""

    makespan_ms: float
    peak_bytes: tuple[int, ...]
    """By rank, the maximum of static bytes and the bytes that tasks keep."""
    fits: bool
    """Whether no rank exceeds the memory limit of the costs."""


def time_order(dispatcher: Dispatcher, order: ComputeOrder) -> OrderTime:
    """Return time and memory of an order.

    Args:
        order: F and B of every rank, without split backwards.

    Raises:
        ValueError: The order has other actions than the step, or ranks wait for each other.
    """
    number = {action: index for index, action in enumerate(dispatcher.actions)}
    rows = [[number.get(action, -1) for action in row] for row in order]
    flat = np.array([index for row in rows for index in row], np.int32)
    if sorted(flat.tolist()) != list(range(len(number))):
        raise ValueError(
            f"an order of {len(flat)} actions for a step of {len(number)} different actions"
        )
    tables = dispatcher.tables
    try:
        graph = CompiledGraph.build(*step_operators(tables, flat))
    except SimulationError:
        raise ValueError("ranks wait for each other in this order") from None
    end_ps = graph.times_ps()[1][: len(flat)].max(initial=0)
    costs = dispatcher.costs
    peaks = list(costs.static_bytes or (0,) * len(rows))
    for rank, own in enumerate(np.split(flat, np.cumsum([len(row) for row in rows])[:-1])):
        kept = tables.takes_bytes[own]
        freed = tables.gives_bytes[own]
        peaks[rank] += int((np.cumsum(kept) - np.cumsum(freed) + freed).max(initial=0))
    limit = costs.memory_limit_bytes
    fits = limit is None or max(peaks) <= limit
    return OrderTime(float(end_ps) / PICOSECONDS_PER_MS, tuple(peaks), fits)


def step_operators(
    tables: DispatchTables, order: Int32s | None = None
) -> tuple[Int64s, Int32s, Int32s]:
    """Return durations, sources and targets of the operators of a step.

    The first operators are the actions. The others are transfers.

    Args:
        order: All actions, rank by rank. If None, ranks run actions in parallel, and channels carry
            transfers in parallel.
    """
    count = len(tables.queue)
    pointers = tables.pointers.astype(np.int32)
    source = np.repeat(np.arange(count, dtype=np.int32), np.diff(pointers))
    target = tables.target.astype(np.int32)
    sent = np.flatnonzero(tables.channel >= 0).astype(np.int32)
    if order is not None:
        # A channel carries the messages of one rank, in the order of the actions that send them.
        place = np.empty(count, np.int32)
        place[order] = np.arange(count, dtype=np.int32)
        sent = group_edges(place[source[sent]], sent, count)[1]
        sent = group_edges(tables.channel[sent], sent, len(tables.room) - 1)[1]
    transfer = np.arange(count, count + len(sent), dtype=np.int32)
    direct = tables.channel < 0
    before = [source[direct], source[sent], transfer]
    after = [target[direct], transfer, target[sent]]
    if order is not None:
        for queue, operators in (
            (tables.queue[order] // 2, order),
            (tables.channel[sent], transfer),
        ):
            follows = queue[1:] == queue[:-1]
            before.append(operators[:-1][follows])
            after.append(operators[1:][follows])
    durations = np.concatenate((tables.duration_ps, tables.wire_ps[sent]))
    return durations, np.concatenate(before), np.concatenate(after)
