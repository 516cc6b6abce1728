"""Time and memory of orders that do not come from the dispatcher.

Costs and rules are those of the dispatcher, so orders of static planners can be compared with the
result of a search. `simulate` returns the same times for a lowered plan, but is a hundred times
slower.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchmm.balance.numba_utils import Int32s, Int64s
from torchmm.balance.picoseconds import PICOSECONDS_PER_MS, SimulationError
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.dispatcher_kernel import DispatchTables
from torchmm.balance.simulation.graph_kernels import group_edges
from torchmm.balance.simulation.operator_graph import CompiledOperatorGraph
from torchmm.pipelining.plan.plan import ComputeOrder


class OrderTime(NamedTuple):
    """Time and memory of an order."""

    makespan_ms: float
    peak_bytes: tuple[int, ...]
    """Maximum of static bytes and saved activations of each rank."""
    fits: bool
    """Whether no rank exceeds the memory limit of the costs."""


def time_order(dispatcher: Dispatcher, order: ComputeOrder) -> OrderTime:
    """Return time and memory of an order.

    Args:
        dispatcher: Dispatcher of the step.
        order: F and B actions of every rank, without split backward passes.

    Raises:
        ValueError: The order has other actions than the step, or deadlocks.
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
        graph = CompiledOperatorGraph.build(*step_operators(tables, flat))
    except SimulationError:
        raise ValueError("ranks wait for each other in this order") from None
    end_ps = graph.times_ps()[1][: len(flat)].max(initial=0)
    costs = dispatcher.costs
    peaks = list(costs.static_bytes or (0,) * len(rows))
    for rank, actions in enumerate(np.split(flat, np.cumsum([len(row) for row in rows])[:-1])):
        saved = tables.allocated_bytes[actions]
        freed = tables.freed_bytes[actions]
        peaks[rank] += int((np.cumsum(saved) - np.cumsum(freed) + freed).max(initial=0))
    limit = costs.memory_limit_bytes
    fits = limit is None or max(peaks) <= limit
    return OrderTime(float(end_ps) / PICOSECONDS_PER_MS, tuple(peaks), fits)


def step_operators(
    tables: DispatchTables, order: Int32s | None = None
) -> tuple[Int64s, Int32s, Int32s]:
    """Return durations, sources and targets of the operators of a step.

    The first operators are the actions. The others are transfers.

    Args:
        tables: Actions of the step.
        order: All actions, rank by rank. None if ranks run all actions, and channels all transfers,
            in parallel.
    """
    count = len(tables.queue)
    pointers = tables.pointers.astype(np.int32)
    source = np.repeat(np.arange(count, dtype=np.int32), np.diff(pointers))
    target = tables.target.astype(np.int32)
    sent = np.flatnonzero(tables.channel >= 0).astype(np.int32)
    if order is not None:
        # A channel carries the messages of one rank, in the order of the actions that send them.
        position = np.empty(count, np.int32)
        position[order] = np.arange(count, dtype=np.int32)
        sent = group_edges(position[source[sent]], sent, count)[1]
        sent = group_edges(tables.channel[sent], sent, len(tables.channel_offsets) - 1)[1]
    transfer = np.arange(count, count + len(sent), dtype=np.int32)
    direct = tables.channel < 0
    sources = [source[direct], source[sent], transfer]
    targets = [target[direct], transfer, target[sent]]
    if order is not None:
        for queue, operators in (
            (tables.queue[order] // 2, order),
            (tables.channel[sent], transfer),
        ):
            follows = queue[1:] == queue[:-1]
            sources.append(operators[:-1][follows])
            targets.append(operators[1:][follows])
    durations = np.concatenate((tables.duration_ps, tables.wire_ps[sent]))
    return durations, np.concatenate(sources), np.concatenate(targets)
