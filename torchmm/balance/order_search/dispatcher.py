"""A step's tasks as the flat arrays that the dispatcher's compiled loop works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from torchmm.balance.costs.step_costs import PlanCosts
from torchmm.balance.order_search.dispatcher_kernel import DispatchTables
from torchmm.balance.simulation.operator_graph import (
    SimulationError,
    duration_problem,
    to_picoseconds,
)
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.plan.transfers import Transfer, transfers

UNLIMITED_BYTES = 1 << 62


class Segment(NamedTuple):
    """What has one priority on all ranks: a pass of one microbatch's part over a module's ranks.

    PipeWeaver's pipeline segment; its forward and its backward tasks are ordered alike.
    """

    module: str
    microbatch: int
    sub_microbatch: int
    segment: int
    """Which pass over the module's ranks."""


def segment_indices(layout: StageLayout) -> list[int]:
    """By stage: which pass over its module's ranks it belongs to: a new one begins where a rank
    comes for the second time, so that no segment has two stages on one rank."""
    passes: dict[str, tuple[int, set[int]]] = {}
    indices = []
    for stage in layout.stages:
        index, seen = passes.get(stage.module, (0, set()))
        if seen & set(stage.ranks):
            index, seen = index + 1, set()
        passes[stage.module] = index, seen | set(stage.ranks)
        indices.append(index)
    return indices


def segments_of(graph: StageGraph) -> tuple[list[Segment], dict[Task, int]]:
    """All segments in natural order (by microbatch, then as the data goes), and each task's."""
    indices, stages = segment_indices(graph.layout), graph.layout.stages
    of_task = {
        task: Segment(stages[task.stage].module, *task[1:], indices[task.stage])
        for task in graph.tasks()
    }
    modules = list(dict.fromkeys(stage.module for stage in stages))
    found = sorted(
        set(of_task.values()),
        key=lambda s: (s.microbatch, modules.index(s.module), s.sub_microbatch, s.segment),
    )
    number = {segment: index for index, segment in enumerate(found)}
    return found, {task: number[segment] for task, segment in of_task.items()}


def build_tables(
    graph: StageGraph, costs: PlanCosts, units: Mapping[Task, int], training: bool
) -> tuple[list[Action], DispatchTables]:
    """Numbers the F and B of a step.

    Args:
        costs: of the graph; split backwards are not used.
        units: by task: its segment's number.
        training: False for forwards only.

    Returns:
        The actions by number, and the arrays.

    Raises:
        SimulationError: a cost is missing, negative or no number; all such are listed.
    """
    actions: list[Action] = []
    for task in graph.tasks():
        actions.append(Action(ActionType.F, *task))
        if training and graph.needs_backward(task.stage, task.microbatch):
            actions.append(Action(ActionType.B, *task))
    travels = list(transfers(graph, training))
    _check(graph, costs, actions, travels)
    number = {action: index for index, action in enumerate(actions)}
    tasks = [Task(*action[1:4]) for action in actions]
    backward = np.array([action.type is ActionType.B for action in actions], bool)
    kept = np.array([costs.kept_bytes.get(task, 0) for task in tasks], np.int64)
    # A forward without a backward gives its memory back itself.
    passing = np.array([Action(ActionType.B, *task) not in number for task in tasks], bool)
    ranks = np.array([graph.rank(task) for task in tasks], np.int32)
    queue = (2 * ranks + backward).astype(np.uint32)
    unit = np.array([units[task] for task in tasks], np.uint32)
    count = graph.layout.rank_count
    action_at = np.zeros((len(set(units.values())), 2 * count), np.uint32)
    action_at[unit, queue] = np.arange(len(actions))
    durations = [max(1, to_picoseconds(costs.compute_ms[action])) for action in actions]
    return actions, DispatchTables._make(
        (
            queue,
            unit,
            np.array(durations, np.int64),
            np.where(backward, 0, kept),
            np.where(backward | passing, kept, 0),
            *_edge_arrays(number, costs, travels, count),
            action_at,
            _limits(costs, count),
        )
    )


def _edge_arrays(
    number: Mapping[Action, int], costs: PlanCosts, travels: list[Transfer], ranks: int
) -> tuple[np.ndarray, ...]:
    """missing, pointers, target, channel, wire_ps, room and inbound of `DispatchTables`."""
    wires = [
        0 if t.source == t.destination else to_picoseconds(costs.transfer_ms.get(t[:2], 0.0))
        for t in travels
    ]
    ends = sorted({(t.destination, t.source) for t in travels if t.destination != t.source})
    channels = {pair: index for index, pair in enumerate(ends if any(wires) else [])}
    rows, waits = [], set()
    for transfer, wire in zip(travels, wires, strict=True):
        kind = ActionType.B if transfer.backward else ActionType.F
        target = number[Action(kind, *transfer.consumer)]
        channel = channels.get((transfer.destination, transfer.source), -1)
        rows.append((number[Action(kind, *transfer.producer)], target, channel, wire))
        waits.add(target)
    for action, target in number.items():
        # Other backwards wait for gradients, which come from forwards behind their own.
        if action.type is ActionType.B and target not in waits:
            rows.append((number[action._replace(type=ActionType.F)], target, -1, 0))
    table = np.array(rows, np.int64).reshape(-1, 4)
    source, target, channel, wire = table[np.argsort(table[:, 0], kind="stable")].T
    receivers = np.array([destination for destination, _ in channels], np.int64)
    return (
        np.bincount(target, minlength=len(number)).astype(np.int32),
        _begins(source, len(number)),
        target.astype(np.uint32),
        channel.astype(np.int32),
        np.ascontiguousarray(wire),
        _begins(channel[channel >= 0], len(channels)),
        _begins(receivers, ranks),
    )


def _begins(keys: np.ndarray, count: int) -> np.ndarray:
    """Where each key's group begins if sorted by key, and where the last ends."""
    begins = np.zeros(count + 1, np.uint32)
    np.cumsum(np.bincount(keys, minlength=count), out=begins[1:])
    return begins


def _limits(costs: PlanCosts, ranks: int) -> np.ndarray:
    if costs.memory_limit_bytes is None:
        return np.full(ranks, UNLIMITED_BYTES, np.int64)
    static = costs.static_bytes or (0,) * ranks
    return np.array([costs.memory_limit_bytes - nbytes for nbytes in static], np.int64)


def _check(
    graph: StageGraph, costs: PlanCosts, actions: list[Action], travels: list[Transfer]
) -> None:
    """Raises for all impossible costs at once."""
    problems = []
    for action in actions:
        if action not in costs.compute_ms:
            problems.append(f"{action} has no duration; compute the costs from this graph")
        elif text := duration_problem(costs.compute_ms[action]):
            problems.append(f"{action} has {text}")
    for transfer in travels:
        if text := duration_problem(costs.transfer_ms.get(transfer[:2], 0.0)):
            back = "gradient of " if transfer.backward else ""
            problems.append(f"the {back}{transfer.message} has {text}")
    problems += [
        f"{task} keeps {costs.kept_bytes[task]} bytes; give 0 or more"
        for task in graph.tasks()
        if not 0 <= costs.kept_bytes.get(task, 0) < UNLIMITED_BYTES
    ]
    ranks = graph.layout.rank_count
    if costs.static_bytes and len(costs.static_bytes) != ranks:
        problems.append(f"static_bytes of {len(costs.static_bytes)} ranks for a plan of {ranks}")
    if problems:
        raise SimulationError(problems)
