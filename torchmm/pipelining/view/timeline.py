"""Analysis of the records of a step: bubbles by cause, and compute time by module.

A *bubble* is a period in which a rank computes nothing. The classes follow Optimus, Table 1:

    rank 0   | UNSHARD |    F F F F    idle    B B B B   | REDUCE_GRAD |   idle    |
             all-gather                other              reduce-scatter  cooldown

Records come from a simulation or from a real step. Idle time is the time without compute records,
because a simulated step has no WAIT records. `simulate_order` is a small simulator for plans that
have not run. It uses the given durations, without memory or bandwidth.
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
"""Cause of a bubble.

warmup: Before the first compute action of the rank.
cooldown: From the last compute action of the rank to the end of the step.
other: Between compute actions, and the complete step on a rank without compute actions.
dp_all_gather, dp_reduce_scatter: During UNSHARD and REDUCE_GRAD.
tp: Inside a layer. Records per action do not show it, so it is 0 and included in compute time.
"""
BUBBLE_CLASSES: tuple[BubbleClass, ...] = get_args(BubbleClass)

_Activity = Literal["compute", "wait"] | BubbleClass  # activity of a rank at a time

_COLLECTIVES: dict[ActionType, BubbleClass] = {
    ActionType.UNSHARD: "dp_all_gather",
    ActionType.REDUCE_GRAD: "dp_reduce_scatter",
}


class Bubble(NamedTuple):
    """A period in which a rank computes nothing, with one cause."""

    rank: int
    kind: BubbleClass
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """Compute time and bubbles of a step.

    Attributes:
        makespan_ms: Time from the start of the step to the end of its last record.
        busy_ms: Time in which at least one compute action runs, by rank.
        bubbles: Remaining time, sorted by rank and time.
        module_ms: Time of the compute actions of each module, by rank.
    """

    makespan_ms: float
    busy_ms: tuple[float, ...]
    bubbles: tuple[Bubble, ...]
    module_ms: Mapping[str, tuple[float, ...]]

    @cached_property
    def bubble_ms(self) -> dict[BubbleClass, float]:
        """Idle time by class, summed over ranks. With `busy_ms` the sum is ranks x makespan."""
        sums = dict.fromkeys(BUBBLE_CLASSES, 0.0)
        for bubble in self.bubbles:
            sums[bubble.kind] += bubble.end_ms - bubble.start_ms
        return sums

    @cached_property
    def bubble_fractions(self) -> dict[BubbleClass, float]:
        """Idle time by class as a fraction of ranks x makespan, 0 to 1."""
        total_ms = len(self.busy_ms) * self.makespan_ms
        return {k: ms / total_ms if total_ms else 0.0 for k, ms in self.bubble_ms.items()}

    @property
    def bubble_fraction(self) -> float:
        """Idle time as a fraction of ranks x makespan, 0 to 1."""
        return sum(self.bubble_fractions.values())

    def mean_module_ms(self) -> dict[str, float]:
        """Return the compute time of each module, averaged over ranks."""
        return {module: sum(ms) / len(ms) for module, ms in self.module_ms.items()}


def analyze_timeline(records: Sequence[ActionRecord], layout: StageLayout) -> Timeline:
    """Classify the idle time of a step, and sum the compute time.

    Args:
        records: Records of all ranks, in any order. Sends, receives and waits are idle time unless
            computation runs at the same time.
        layout: Layout of the step.

    Raises:
        ValueError: A record has an invalid rank, stage or time.
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
    for rank, rank_records in enumerate(by_rank):
        pieces = list(_activities(rank_records, makespan_ms))
        busy_ms.append(sum(end - start for doing, start, end in pieces if doing == "compute"))
        bubbles += _bubbles(rank, pieces)
    return Timeline(
        makespan_ms, tuple(busy_ms), tuple(bubbles), {m: tuple(ms) for m, ms in module_ms.items()}
    )


def _check_record(record: ActionRecord, layout: StageLayout) -> None:
    """Raise a ValueError if a record would make sums meaningless."""
    if not 0 <= record.rank < layout.rank_count:
        fix = f"the layout has ranks 0..{layout.rank_count - 1}; use the layout of the same step"
    elif not 0 <= record.action.stage < len(layout.stages):
        fix = f"the layout has {len(layout.stages)} stages; use the layout of the same step"
    elif not 0 <= record.start_ms <= record.end_ms < float("inf"):
        fix = "use times since the start of the step, with end times after start times"
    else:
        return
    raise ValueError(
        f"record of {record.action} on rank {record.rank}, {record.start_ms} to "
        f"{record.end_ms} ms: {fix}"
    )


def _activities(
    records: Sequence[ActionRecord], makespan_ms: float
) -> Iterator[tuple[_Activity, float, float]]:
    """Yield (activity, start, end) of a rank in [0, makespan].

    The activity is "compute", the class of a collective, or "wait". Computation has precedence, so
    a collective that overlaps with it is not a bubble. Records can overlap.
    """
    precedence: tuple[_Activity, ...] = ("compute", "dp_all_gather", "dp_reduce_scatter")
    changes: list[tuple[float, int, _Activity]] = [(makespan_ms, 0, "wait")]
    for record in records:
        computes = record.action.type in COMPUTE
        doing = "compute" if computes else _COLLECTIVES.get(record.action.type)
        if doing is not None:
            changes += [(record.start_ms, 1, doing), (record.end_ms, -1, doing)]
    running: dict[_Activity, int] = dict.fromkeys((*precedence, "wait"), 0)
    now: _Activity = "wait"
    since_ms = 0.0
    # At equal times, starts are first, so that two consecutive actions are one period.
    for time_ms, change, activity in sorted(changes, key=lambda c: (c[0], -c[1])):
        running[activity] += change
        new: _Activity = next((d for d in precedence if running[d]), "wait")
        if new != now or time_ms == makespan_ms:
            if time_ms > since_ms:
                yield now, since_ms, time_ms
            now, since_ms = new, time_ms


def _bubbles(rank: int, pieces: Sequence[tuple[_Activity, float, float]]) -> Iterator[Bubble]:
    """Yield the bubbles of a rank. The class of a wait depends on its time."""
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


def simulate_order(
    order: Sequence[Sequence[Action]],
    graph: StageGraph,
    duration_ms: Callable[[Action], float],
    transfer_ms: float = 0.0,
) -> list[ActionRecord]:
    """Simulate a compute order. Each rank runs its actions in order, as early as possible.

    Args:
        order: Actions of each rank. Actions of a lowered plan that do not compute are skipped.
        graph: Graph of the step.
        duration_ms: Returns the duration of a compute action.
        transfer_ms: Time from the end of an action to the earliest start of a dependent action on
            a different rank.

    Returns:
        Records, sorted by rank and start time.

    Raises:
        ValueError: The order cannot be executed, or a time is negative. The error message lists
            the next action of each waiting rank.
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
                # I produces the same gradients for the preceding stages as B.
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
    """Return the time at which all inputs of an action are on its rank, or None if unknown."""
    start_ms = 0.0
    for kind, task, _ in action_inputs(action, graph):
        if (kind, task) not in finished:
            return None
        where, end_ms = finished[kind, task]
        start_ms = max(start_ms, end_ms + (transfer_ms if where != rank else 0.0))
    return start_ms
