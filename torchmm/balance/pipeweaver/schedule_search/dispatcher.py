"""PipeWeaver dual-queue dispatcher: from segment priorities to a compute order and its time.

A *segment* is one pass of a sub-microbatch over the ranks of a module (PipeWeaver §5). The schedule
search decides the priorities of segments (§6.1). The dispatcher decides everything else (§6.2).
Every rank has a queue of forward tasks and a queue of backward tasks that are ready:

    rank 0   forward queue    F(3) F(5) F(7)     sorted by the priority of the segment
             backward queue   B(2) B(4)
             next             F(3), then B(2), then F(5), ...   alternate if both have a task

An idle rank starts the task with the highest priority. If both queues have tasks, it alternates
between forward and backward. While the first forward task exceeds the memory of the rank, it runs
only backward tasks.

The paper leaves some choices open:

- Segments that are not ready block no other segment. The best *ready* task is started.
- Backward tasks have the priority of their segment.
- A rank with a ready task that fits is never idle, even if a task with a higher priority arrives
  soon.
- If no rank can continue because of memory, this is a result (`blocked` contains the reason) and
  not an error, because a search must learn which priorities cause it.

`evaluate` is for search: it takes 0.25 ms for a step of 7,000 tasks. A plan lowered from the order
of `dispatch` has exactly the same time in `simulate`, if receives are posted in time.

The paper iterates over start times. A rank with a known next start then has to be notified if a
task arrives earlier. A lost notification fails no dependency check and only causes idle time, so
the implementation iterates over events instead. Later forward tasks that fit do not overtake a
first forward task that does not fit, because it could then wait indefinitely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from torchmm.balance.numba_utils import Uint32s
from torchmm.balance.picoseconds import (
    PICOSECONDS_PER_MS,
    SimulationError,
    duration_problem,
    to_picoseconds,
)
from torchmm.balance.pipeweaver.schedule_search.dispatcher_kernel import (
    DispatchTables,
    is_permutation,
    simulate_dispatch,
)
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.plan.orders import split_by_rank
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.plan.transfers import Transfer, transfers

UNLIMITED_BYTES = 1 << 62


class Segment(NamedTuple):
    """Pass of a sub-microbatch over the ranks of a module, with one priority on all ranks.

    This is the pipeline segment of PipeWeaver. Its forward and backward tasks have the same order.
    """

    module: str
    microbatch: int
    sub_microbatch: int
    segment: int
    """Index of the pass over the ranks of the module."""


def segment_indices(layout: StageLayout) -> list[int]:
    """Return the index of the pass over the ranks of its module for each stage.

    A new pass starts when a rank occurs for the second time, so no segment has two stages on a
    rank.
    """
    passes: dict[str, tuple[int, set[int]]] = {}
    indices = []
    for stage in layout.stages:
        index, seen = passes.get(stage.module, (0, set()))
        if seen & set(stage.ranks):
            index, seen = index + 1, set()
        passes[stage.module] = index, seen | set(stage.ranks)
        indices.append(index)
    return indices


def build_segments(graph: StageGraph) -> tuple[list[Segment], dict[Task, int]]:
    """Return all segments in the default order, and the segment index of each task.

    The default order is by microbatch, then in data flow order.
    """
    indices = segment_indices(graph.layout)
    stages = graph.layout.stages
    of_task = {
        task: Segment(stages[task.stage].module, *task[1:], indices[task.stage])
        for task in graph.tasks()
    }
    modules = list(dict.fromkeys(stage.module for stage in stages))
    segments = sorted(
        set(of_task.values()),
        key=lambda s: (s.microbatch, modules.index(s.module), s.sub_microbatch, s.segment),
    )
    index_of = {segment: index for index, segment in enumerate(segments)}
    return segments, {task: index_of[segment] for task, segment in of_task.items()}


def build_tables(
    graph: StageGraph, costs: PlanCosts, units: Mapping[Task, int]
) -> tuple[list[Action], DispatchTables]:
    """Build numbered F and B actions of a step, and the arrays of the dispatcher.

    Args:
        graph: Tasks of the step.
        costs: Costs of the graph. Costs of split backward passes are not used.
        units: Segment index of each task.

    Returns:
        The actions by number, and the arrays.

    Raises:
        SimulationError: A cost is missing, negative or not a number. The message lists all of them.
    """
    actions: list[Action] = []
    for task in graph.tasks():
        actions.append(Action(ActionType.F, *task))
        if graph.needs_backward(task.stage, task.microbatch):
            actions.append(Action(ActionType.B, *task))
    step_transfers = list(transfers(graph))
    _check_costs(graph, costs, actions, step_transfers)
    number = {action: index for index, action in enumerate(actions)}
    tasks = [Task(*action[1:4]) for action in actions]
    backward = np.array([action.type is ActionType.B for action in actions], bool)
    kept = np.array([costs.saved_bytes.get(task, 0) for task in tasks], np.int64)
    # A forward action without a backward action frees its memory when it ends.
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
            *_edge_arrays(number, costs, step_transfers, count),
            action_at,
            _memory_limits(costs, count),
        )
    )


def _edge_arrays(
    number: Mapping[Action, int], costs: PlanCosts, step_transfers: list[Transfer], ranks: int
) -> tuple[np.ndarray, ...]:
    """Return pending_inputs, pointers, target, channel, wire_ps, channel_offsets and
    inbound_offsets of `DispatchTables`."""
    wires = [
        0 if t.source == t.destination else to_picoseconds(costs.transfer_ms.get(t[:2], 0.0))
        for t in step_transfers
    ]
    ends = sorted({(t.destination, t.source) for t in step_transfers if t.destination != t.source})
    channels = {pair: index for index, pair in enumerate(ends if any(wires) else [])}
    rows = []
    waits = set()
    for transfer, wire in zip(step_transfers, wires, strict=True):
        kind = ActionType.B if transfer.backward else ActionType.F
        target = number[Action(kind, *transfer.consumer)]
        channel = channels.get((transfer.destination, transfer.source), -1)
        rows.append((number[Action(kind, *transfer.producer)], target, channel, wire))
        waits.add(target)
    for action, target in number.items():
        # Other backward actions wait for gradients and thereby for their forward action.
        if action.type is ActionType.B and target not in waits:
            rows.append((number[action._replace(type=ActionType.F)], target, -1, 0))
    table = np.array(rows, np.int64).reshape(-1, 4)
    source, target, channel, wire = table[np.argsort(table[:, 0], kind="stable")].T
    receivers = np.array([destination for destination, _ in channels], np.int64)
    return (
        np.bincount(target, minlength=len(number)).astype(np.int32),
        _group_offsets(source, len(number)),
        target.astype(np.uint32),
        channel.astype(np.int32),
        np.ascontiguousarray(wire),
        _group_offsets(channel[channel >= 0], len(channels)),
        _group_offsets(receivers, ranks),
    )


def _group_offsets(keys: np.ndarray, count: int) -> np.ndarray:
    """Return the offsets of the groups of sorted keys."""
    begins = np.zeros(count + 1, np.uint32)
    np.cumsum(np.bincount(keys, minlength=count), out=begins[1:])
    return begins


def _memory_limits(costs: PlanCosts, ranks: int) -> np.ndarray:
    if costs.memory_limit_bytes is None:
        return np.full(ranks, UNLIMITED_BYTES, np.int64)
    static = costs.static_bytes or (0,) * ranks
    return np.array([costs.memory_limit_bytes - nbytes for nbytes in static], np.int64)


def _check_costs(
    graph: StageGraph, costs: PlanCosts, actions: list[Action], step_transfers: list[Transfer]
) -> None:
    """Raise a SimulationError that lists all invalid costs."""
    problems = []
    for action in actions:
        if action not in costs.compute_ms:
            problems.append(f"{action} has no duration; compute the costs from this graph")
        elif text := duration_problem(costs.compute_ms[action]):
            problems.append(f"{action} has {text}")
    for transfer in step_transfers:
        if text := duration_problem(costs.transfer_ms.get(transfer[:2], 0.0)):
            back = "gradient of " if transfer.backward else ""
            problems.append(f"the {back}{transfer.message} has {text}")
    problems += [
        f"{task} saves {costs.saved_bytes[task]} bytes; must be 0 or more"
        for task in graph.tasks()
        if not 0 <= costs.saved_bytes.get(task, 0) < UNLIMITED_BYTES
    ]
    ranks = graph.layout.rank_count
    if costs.static_bytes and len(costs.static_bytes) != ranks:
        problems.append(f"static_bytes of {len(costs.static_bytes)} ranks for a plan of {ranks}")
    if problems:
        raise SimulationError(problems)


@dataclass(frozen=True)
class DispatchResult:
    """Result of dispatching with given priorities.

    Attributes:
        makespan_ms: Step time. Infinite if the step cannot finish.
        order: F and B actions of every rank. If the step cannot finish, only those that ran.
        peak_bytes: Maximum of static bytes and activations of each rank.
        blocked: Reason for each rank that cannot continue. Empty if the step finishes.
    """

    makespan_ms: float
    order: ComputeOrder
    peak_bytes: tuple[int, ...]
    blocked: tuple[str, ...] = ()


class Dispatcher:
    """Simulator of a step under any priorities of its segments.

    All-gathers and reductions of parameters run before and after these actions and are not
    included. The memory of messages is not included either, so the memory limit of the costs must
    leave space for it.

    Args:
        graph: Tasks of the step, with any layout.
        costs: Costs of the graph. An action takes at least one picosecond.

    Attributes:
        segments: Segments in the default order. Priorities are permutations of their indices.
        groups: Indices of the segments of each module and microbatch in the default order. A search
            can order them as one (PipeWeaver §6.1).

    Raises:
        SimulationError: A cost is missing, negative or not a number. The message lists all of them.
    """

    def __init__(self, graph: StageGraph, costs: PlanCosts) -> None:
        self.graph, self.costs = graph, costs
        segments, of_task = build_segments(graph)
        self.segments: tuple[Segment, ...] = tuple(segments)
        self.actions, self.tables = build_tables(graph, costs, of_task)
        groups: dict[tuple[str, int], list[int]] = {}
        for index, segment in enumerate(segments):
            groups.setdefault(segment[:2], []).append(index)
        self.groups: tuple[tuple[int, ...], ...] = tuple(map(tuple, groups.values()))
        ranks = graph.layout.rank_count
        self._sequence = np.empty(len(self.actions), np.uint32)
        self._peak_bytes = np.empty(ranks, np.int64)
        self._used_bytes = np.empty(ranks, np.int64)

    @cached_property
    def default_order(self) -> Uint32s:
        """Segments by microbatch, with encoders before the LLM."""
        return np.arange(len(self.segments), dtype=np.uint32)

    def order_of_groups(self, groups: Sequence[int]) -> Uint32s:
        """Return the order of segments that an order of groups defines.

        Args:
            groups: Indices into `groups`, highest priority first.
        """
        return np.array([s for group in groups for s in self.groups[group]], np.uint32)

    def evaluate(self, order: Uint32s | None = None) -> float:
        """Return the step time in milliseconds. Infinite if the step does not fit into memory.

        Args:
            order: Permutation of segment indices, highest priority first. None for the default
                order.

        Raises:
            ValueError: The order is not a permutation.
        """
        makespan_ps, done = self._simulate(self._check_order(order))
        return makespan_ps / PICOSECONDS_PER_MS if done == len(self.actions) else inf

    def dispatch(self, order: Uint32s | None = None) -> DispatchResult:
        """Return the complete result of an order.

        Args:
            order: Order as for `evaluate`.

        Raises:
            ValueError: The order is not a permutation.
        """
        checked = self._check_order(order)
        makespan_ps, done = self._simulate(checked)
        started = self._sequence[:done]
        makespan_ms = makespan_ps / PICOSECONDS_PER_MS
        blocked: tuple[str, ...] = ()
        if done < len(self.actions):
            makespan_ms = inf
            blocked = self._blocked(started, checked)
        static = self.costs.static_bytes or (0,) * len(self._peak_bytes)
        return DispatchResult(
            makespan_ms,
            split_by_rank(self.graph, [self.actions[index] for index in started.tolist()]),
            tuple(n + peak for n, peak in zip(static, self._peak_bytes.tolist(), strict=True)),
            blocked,
        )

    def _simulate(self, order: Uint32s) -> tuple[int, int]:
        """Return the end time in picoseconds, and the number of actions that ran."""
        return simulate_dispatch(
            order, self.tables, self._sequence, self._peak_bytes, self._used_bytes
        )

    def _check_order(self, order: Uint32s | None) -> Uint32s:
        if order is None:
            return self.default_order
        checked = np.ascontiguousarray(order, np.uint32)
        if not is_permutation(checked, len(self.segments)):
            raise ValueError(
                f"an order of {len(checked)} segments; list each of 0 to "
                f"{len(self.segments) - 1} once"
            )
        return checked

    def _blocked(self, started: Uint32s, order: Uint32s) -> tuple[str, ...]:
        """Return the next action of each blocked rank with the memory that it requires."""
        missing = self.tables.pending_inputs.copy()
        tables = self.tables
        for action in started.tolist():
            for edge in range(tables.pointers[action], tables.pointers[action + 1]):
                missing[tables.target[edge]] -= 1
        missing[started] = -1
        priority = np.argsort(order)
        next_actions: dict[int, int] = {}
        for action in np.flatnonzero(missing == 0).tolist():
            rank = int(tables.queue[action]) // 2
            other = next_actions.setdefault(rank, action)
            if priority[tables.segment[action]] < priority[tables.segment[other]]:
                next_actions[rank] = action
        return tuple(
            f"rank {rank}: {self.actions[action]} requires {tables.allocated_bytes[action]} "
            f"bytes, but only {tables.limit_bytes[rank] - self._used_bytes[rank]} of "
            f"{tables.limit_bytes[rank]} are free, and no backward pass can run"
            for rank, action in sorted(next_actions.items())
        )
