"""What a step's records say: where ranks were idle and why, and how long each module computed.

A *bubble* is a time in which a rank computes nothing, classified as in Optimus, Table 1. Records
may come from a simulation or from a real step. `uniform_timeline` is a small simulator for drawing
a plan that has not run: it takes durations as given and knows neither memory nor bandwidth.

Rejected: subtracting compute from the makespan, which gives the same total but no classes; reading
idle time off WAIT records, which a simulated step does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.plan.transfers import action_inputs

BubbleClass = Literal["warmup", "cooldown", "other", "dp_all_gather", "dp_reduce_scatter", "tp"]
"""Why a rank is idle.

warmup: before its first compute action. cooldown: from its last compute action to the end of the
step. other: waiting in between; all of the step on a rank that computes nothing.
dp_all_gather, dp_reduce_scatter: in UNSHARD, in REDUCE_GRAD. tp: waiting inside a layer, which
takes finer records than one per action: here it is part of the compute time, and its sum is 0.
"""
BUBBLE_CLASSES: tuple[BubbleClass, ...] = get_args(BubbleClass)

_Doing = Literal["compute", "wait"] | BubbleClass  # what a rank does at a time

_COLLECTIVES: dict[ActionType, BubbleClass] = {
    ActionType.UNSHARD: "dp_all_gather",
    ActionType.REDUCE_GRAD: "dp_reduce_scatter",
}


class Bubble(NamedTuple):
    """A time in which a rank computes nothing, for one reason."""

    rank: int
    kind: BubbleClass
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """Where the time of a step went.

    Attributes:
        makespan_ms: from the start of the step to the end of its last record.
        busy_ms: by rank: time in which at least one compute action ran.
        bubbles: the rest, by rank and time.
        module_ms: by module: by rank: time of its compute actions.
    """

    makespan_ms: float
    busy_ms: tuple[float, ...]
    bubbles: tuple[Bubble, ...]
    module_ms: Mapping[str, tuple[float, ...]]

    @cached_property
    def bubble_ms(self) -> dict[BubbleClass, float]:
        """Idle time by class, summed over ranks; with `busy_ms` it adds up to ranks x makespan."""
        sums = dict.fromkeys(BUBBLE_CLASSES, 0.0)
        for bubble in self.bubbles:
            sums[bubble.kind] += bubble.end_ms - bubble.start_ms
        return sums

    @cached_property
    def bubble_share(self) -> dict[BubbleClass, float]:
        """Idle time by class as a share of ranks x makespan, 0..1."""
        total_ms = len(self.busy_ms) * self.makespan_ms
        return {k: ms / total_ms if total_ms else 0.0 for k, ms in self.bubble_ms.items()}

    @property
    def bubble_fraction(self) -> float:
        """Idle share of ranks x makespan, 0..1."""
        return sum(self.bubble_share.values())

    def mean_module_ms(self) -> dict[str, float]:
        """Compute time by module, mean over ranks."""
        return {module: sum(ms) / len(ms) for module, ms in self.module_ms.items()}


def analyze_timeline(records: Sequence[ActionRecord], layout: StageLayout) -> Timeline:
    """Classify the idle time of a step and sum up compute time.

    Args:
        records: of all ranks, in any order; actions that are neither compute nor a collective
            (sends, receives, waits) are idle time wherever no compute runs alongside them.
        layout: the stages the records' actions belong to.

    Raises:
        ValueError: a record has a rank, stage or time that cannot be.
    """
    by_rank: list[list[ActionRecord]] = [[] for _ in range(layout.rank_count)]
    module_ms = {stage.module: [0.0] * layout.rank_count for stage in layout.stages}
    for record in records:
        _check_record(record, layout)
        by_rank[record.rank].append(record)
        if record.action.type in COMPUTE:
            module = layout.stages[record.action.stage].module
            module_ms[module][record.rank] += record.end_ms - record.start_ms
    makespan_ms = max((record.end_ms for record in records), default=0.0)
    busy_ms: list[float] = []
    bubbles: list[Bubble] = []
    for rank, own in enumerate(by_rank):
        pieces = list(_pieces(own, makespan_ms))
        busy_ms.append(sum(end - start for doing, start, end in pieces if doing == "compute"))
        bubbles += _bubbles(rank, pieces)
    return Timeline(
        makespan_ms, tuple(busy_ms), tuple(bubbles), {m: tuple(ms) for m, ms in module_ms.items()}
    )


def _check_record(record: ActionRecord, layout: StageLayout) -> None:
    """Raise a ValueError for what would make sums meaningless."""
    if not 0 <= record.rank < layout.rank_count:
        remedy = f"the layout has ranks 0..{layout.rank_count - 1}; use the layout of the same step"
    elif not 0 <= record.action.stage < len(layout.stages):
        remedy = f"the layout has {len(layout.stages)} stages; use the layout of the same step"
    elif not 0 <= record.start_ms <= record.end_ms < float("inf"):
        remedy = "use times since the start of the step, with end times after start times"
    else:
        return
    raise ValueError(
        f"record of {record.action} on rank {record.rank}, {record.start_ms} to "
        f"{record.end_ms} ms: {remedy}"
    )


def _pieces(
    records: Sequence[ActionRecord], makespan_ms: float
) -> Iterator[tuple[_Doing, float, float]]:
    """What one rank does in [0, makespan]: (compute, a collective's class or wait, start, end).

    Compute counts first, so that a collective that runs alongside it is no bubble; records may
    overlap.
    """
    precedence: tuple[_Doing, ...] = ("compute", "dp_all_gather", "dp_reduce_scatter")
    changes: list[tuple[float, int, _Doing]] = [(makespan_ms, 0, "wait")]
    for record in records:
        computes = record.action.type in COMPUTE
        doing = "compute" if computes else _COLLECTIVES.get(record.action.type)
        if doing is not None:
            changes += [(record.start_ms, 1, doing), (record.end_ms, -1, doing)]
    running: dict[_Doing, int] = dict.fromkeys((*precedence, "wait"), 0)
    now: _Doing = "wait"
    since_ms = 0.0
    # At equal times starts come first, so that two actions back to back make one piece.
    for time_ms, change, what in sorted(changes, key=lambda c: (c[0], -c[1])):
        running[what] += change
        new: _Doing = next((d for d in precedence if running[d]), "wait")
        if new != now or time_ms == makespan_ms:
            if time_ms > since_ms:
                yield now, since_ms, time_ms
            now, since_ms = new, time_ms


def _bubbles(rank: int, pieces: Sequence[tuple[_Doing, float, float]]) -> Iterator[Bubble]:
    """The pieces of a rank that are no compute, waits classified by when they happen."""
    compute = [(start, end) for doing, start, end in pieces if doing == "compute"]
    for doing, start, end in pieces:
        if doing == "compute":
            continue
        if doing != "wait":
            yield Bubble(rank, doing, start, end)
        elif compute and end <= compute[0][0]:
            yield Bubble(rank, "warmup", start, end)
        elif compute and start >= compute[-1][1]:
            yield Bubble(rank, "cooldown", start, end)
        else:
            yield Bubble(rank, "other", start, end)


def uniform_timeline(
    order: Sequence[Sequence[Action]],
    graph: StageGraph,
    duration_ms: Callable[[Action], float],
    transfer_ms: float = 0.0,
) -> list[ActionRecord]:
    """Time an order of compute actions: each rank runs its own one after the other, without gaps
    but for what it waits for.

    Args:
        order: by rank; the actions of a lowered plan may be given too, those that do not compute
            are left out.
        duration_ms: of a compute action.
        transfer_ms: from the end of an action to the earliest start of one on another rank that
            needs its result.

    Raises:
        ValueError: the order cannot be executed; the message has each waiting rank's next action.
            Or a time is negative.
    """
    if transfer_ms < 0:
        raise ValueError(f"transfer_ms = {transfer_ms}: must be 0 or more")
    queues = [[a for a in actions if a.type in COMPUTE] for actions in order]
    position, free_ms = [0] * len(queues), [0.0] * len(queues)
    finished: dict[tuple[ActionType, Task], tuple[int, float]] = {}
    records: list[ActionRecord] = []
    while len(records) < sum(map(len, queues)):
        before = len(records)
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                action = queue[position[rank]]
                start_ms = _earliest_start(action, rank, graph, finished, transfer_ms)
                if start_ms is None:
                    break
                start_ms = max(start_ms, free_ms[rank])
                free_ms[rank] = start_ms + duration_ms(action)
                records.append(ActionRecord(rank, action, start_ms, free_ms[rank]))
                # I gives the same gradients to the stages before it as B.
                kind = ActionType.B if action.type is ActionType.I else action.type
                finished[kind, action.task] = (rank, free_ms[rank])
                position[rank] += 1
        if len(records) == before:
            waiting = [
                f"rank {rank}: {queue[position[rank]]}"
                for rank, queue in enumerate(queues)
                if position[rank] < len(queue)
            ]
            raise ValueError(
                f"no rank can continue; next would be {', '.join(waiting)}, whose inputs come "
                "later in the order or are missing"
            )
    return sorted(records, key=lambda r: (r.rank, r.start_ms))


def _earliest_start(
    action: Action,
    rank: int,
    graph: StageGraph,
    finished: Mapping[tuple[ActionType, Task], tuple[int, float]],
    transfer_ms: float,
) -> float | None:
    """Return when all inputs of an action are on its rank, or None if some do not exist yet."""
    start_ms = 0.0
    for kind, task, _ in action_inputs(action, graph):
        if (kind, task) not in finished:
            return None
        where, end_ms = finished[kind, task]
        start_ms = max(start_ms, end_ms + (transfer_ms if where != rank else 0.0))
    return start_ms
