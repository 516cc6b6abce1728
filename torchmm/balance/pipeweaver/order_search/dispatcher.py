"""A step's tasks as the flat arrays that the dispatcher's compiled loop works on.

From priorities of segments to a compute order and its time: PipeWeaver's dual-queue dispatcher.

A *segment* is one pass of a microbatch's part over the ranks of a module (PipeWeaver §5); schedule
search decides which segment goes first (§6.1), and this decides all else (§6.2). Every rank has a
queue of forwards and one of backwards that are ready. Whenever it is idle it takes the one with
the highest priority; if both queues have one, it takes forwards and backwards in turn. While the
first forward of the queue does not fit into a rank's memory, it takes backwards only.

What the paper leaves open is decided so:
- Segments that are not ready block nobody: the best *ready* one is taken.
- Backwards have the priority of their segment's forwards.
- A rank with something ready and allowed is never idle, not even for something better to come.
- If no rank may go on because of memory, that is a result (`blocked` says why), not an error: a
  search has to learn which priorities do that.

`evaluate` is for search: it takes a quarter of a millisecond for a step of 7,000 tasks. A plan
lowered from the order of `dispatch` takes the same time to the picosecond in `simulate`, as long
as receives are posted in time.

Rejected: going from start to start, as the paper has it: a rank whose next start is known must be
notified when something arrives earlier, and a lost wake-up shows in no check of dependencies, only
in idle ranks. Rejected: forwards further down the queue that would fit where the first one does
not: the first would wait for ever longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Uint32s
from torchmm.balance.picoseconds import (
    PICOSECONDS_PER_MS,
    SimulationError,
    duration_problem,
    to_picoseconds,
)
from torchmm.balance.pipeweaver.order_search.dispatcher_kernel import (
    DispatchTables,
    is_permutation,
    play,
)
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.plan.orders import by_rank
from torchmm.pipelining.plan.plan import ComputeOrder
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
    indices = segment_indices(graph.layout)
    stages = graph.layout.stages
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
    graph: StageGraph, costs: PlanCosts, units: Mapping[Task, int]
) -> tuple[list[Action], DispatchTables]:
    """Numbers the F and B of a step.

    Args:
        costs: of the graph; split backwards are not used.
        units: by task: its segment's number.

    Returns:
        The actions by number, and the arrays.

    Raises:
        SimulationError: a cost is missing, negative or no number; all such are listed.
    """
    actions: list[Action] = []
    for task in graph.tasks():
        actions.append(Action(ActionType.F, *task))
        if graph.needs_backward(task.stage, task.microbatch):
            actions.append(Action(ActionType.B, *task))
    travels = list(transfers(graph))
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
    rows = []
    waits = set()
    for transfer, wire in zip(travels, wires, strict=True):
        kind = ActionType.B if transfer.backward else ActionType.F
        target = number[Action(kind, *transfer.consumer)]
        channel = channels.get((transfer.destination, transfer.source), -1)
        rows.append((number[Action(kind, *transfer.producer)], target, channel, wire))
        waits.add(target)
    for action, target in number.items():
        # Other backwards wait for gradients, which come from forwards after their own.
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
        f"{task} saves {costs.kept_bytes[task]} bytes; must be 0 or more"
        for task in graph.tasks()
        if not 0 <= costs.kept_bytes.get(task, 0) < UNLIMITED_BYTES
    ]
    ranks = graph.layout.rank_count
    if costs.static_bytes and len(costs.static_bytes) != ranks:
        problems.append(f"static_bytes of {len(costs.static_bytes)} ranks for a plan of {ranks}")
    if problems:
        raise SimulationError(problems)


@dataclass(frozen=True)
class Dispatched:
    """What came of some priorities.

    Attributes:
        makespan_ms: of the step; infinite if it cannot be finished.
        order: F and B of every rank; of those that ran, if it cannot be finished.
        peak_bytes: by rank: the most memory of static bytes and what tasks keep.
        blocked: by rank that could not go on: why; empty if the step is finished.
    """

    makespan_ms: float
    order: ComputeOrder
    peak_bytes: tuple[int, ...]
    blocked: tuple[str, ...] = ()


class Dispatcher:
    """Times a step under any priorities of its segments.

    Not included are gathers and reductions of parameters, which come before and after all of it,
    and the memory of messages: leave room for it in the costs' limit.

    Args:
        graph: of the step, on any layout.
        costs: of the graph. An action takes at least one picosecond.

    Attributes:
        segments: in natural order; priorities are given as a permutation of their indices.
        groups: indices of the segments of each module and microbatch, which may be ordered as one
            (PipeWeaver §6.1), in natural order.

    Raises:
        SimulationError: a cost is missing, negative or no number; all such are listed.
    """

    def __init__(self, graph: StageGraph, costs: PlanCosts) -> None:
        self.graph, self.costs = graph, costs
        segments, of_task = segments_of(graph)
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
    def natural_order(self) -> Uint32s:
        """Segments by microbatch, encoders before the LLM."""
        return np.arange(len(self.segments), dtype=np.uint32)

    def order_of_groups(self, groups: Sequence[int]) -> Uint32s:
        """The order of segments that follows from an order of groups.

        Args:
            groups: indices into `groups`, those with the highest priority first.
        """
        return np.array([s for group in groups for s in self.groups[group]], np.uint32)

    def evaluate(self, order: Uint32s | None = None) -> float:
        """Time of the step in milliseconds; infinite if memory does not allow to finish it.

        Args:
            order: permutation of the segments' indices, those with the highest priority first;
                None for the natural order.

        Raises:
            ValueError: it is no permutation.
        """
        makespan_ps, done = self._play(self._checked(order))
        return makespan_ps / PICOSECONDS_PER_MS if done == len(self.actions) else inf

    def dispatch(self, order: Uint32s | None = None) -> Dispatched:
        """The same with all that came of it.

        Args:
            order: as for `evaluate`.

        Raises:
            ValueError: it is no permutation.
        """
        checked = self._checked(order)
        makespan_ps, done = self._play(checked)
        started = self._sequence[:done]
        makespan_ms = makespan_ps / PICOSECONDS_PER_MS
        blocked: tuple[str, ...] = ()
        if done < len(self.actions):
            makespan_ms = inf
            blocked = self._blocked(started, checked)
        static = self.costs.static_bytes or (0,) * len(self._peak_bytes)
        return Dispatched(
            makespan_ms,
            by_rank(self.graph, [self.actions[index] for index in started.tolist()]),
            tuple(n + peak for n, peak in zip(static, self._peak_bytes.tolist(), strict=True)),
            blocked,
        )

    def _play(self, order: Uint32s) -> tuple[int, int]:
        """End in picoseconds, and how many actions ran."""
        return play(order, self.tables, self._sequence, self._peak_bytes, self._used_bytes)

    def _checked(self, order: Uint32s | None) -> Uint32s:
        if order is None:
            return self.natural_order
        given = np.ascontiguousarray(order, np.uint32)
        if not is_permutation(given, len(self.segments)):
            raise ValueError(
                f"an order of {len(given)} segments; list each of 0 to "
                f"{len(self.segments) - 1} once"
            )
        return given

    def _blocked(self, started: Uint32s, order: Uint32s) -> tuple[str, ...]:
        """What each rank would do next if it had the memory; nothing runs any more."""
        missing = self.tables.missing.copy()
        tables = self.tables
        for action in started.tolist():
            for edge in range(tables.pointers[action], tables.pointers[action + 1]):
                missing[tables.target[edge]] -= 1
        missing[started] = -1
        place = np.argsort(order)
        wanted: dict[int, int] = {}
        for action in np.flatnonzero(missing == 0).tolist():
            rank = int(tables.queue[action]) // 2
            other = wanted.setdefault(rank, action)
            if place[tables.unit[action]] < place[tables.unit[other]]:
                wanted[rank] = action
        return tuple(
            f"rank {rank}: {self.actions[action]} requires {tables.takes_bytes[action]} "
            f"bytes, but only {tables.limit_bytes[rank] - self._used_bytes[rank]} of "
            f"{tables.limit_bytes[rank]} are free, and no backward pass can run"
            for rank, action in sorted(wanted.items())
        )
