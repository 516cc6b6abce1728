"""Naive checks of compute orders, independent of the code under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.plan import ActionRecord, ComputeOrder

F, B, I, W = ActionType.F, ActionType.B, ActionType.I, ActionType.W  # noqa: E741


def chain(ranks: int, chunks: int = 1, trainable: Sequence[bool] = ()) -> StageLayout:
    """Return a layout of one module with one layer per stage. Stage s is on rank s % ranks."""
    count = ranks * chunks
    flags = [*trainable, *[True] * (count - len(trainable))]
    stages = tuple(
        StageSpec(s, "llm", s, s + 1, (s % ranks,), segment=s // ranks, trainable=flags[s])
        for s in range(count)
    )
    return StageLayout(stages, tuple((s, s + 1) for s in range(count - 1)))


def dependencies(graph: StageGraph, action: Action, done: dict[tuple[str, Task], float]) -> list:
    """Return the keys of the results that an action requires."""
    task = Task(*action[1:4])
    if action.type is F:
        return [("F", graph.producer(m)) for m in graph.incoming(task)]
    if action.type is W:
        return [("gradient", task)]
    consumers = [graph.consumer(m) for m in graph.outgoing(task) if graph.sends_gradient(m)]
    return [("F", task), *(("gradient", c) for c in consumers)]


def simulate_order(
    graph: StageGraph, order: ComputeOrder, duration: Callable[[Action], float]
) -> list[ActionRecord]:
    """Return the start and end of every action, if each action starts as early as possible.

    Fail if the order deadlocks.
    """
    ended: dict[tuple[str, Task], float] = {}
    position, free = [0] * len(order), [0.0] * len(order)
    records = []
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                required = dependencies(graph, action, ended)
                if any(key not in ended for key in required):
                    break
                start = max([free[rank], *(ended[key] for key in required)])
                free[rank] = start + duration(action)
                key = {F: "F", B: "gradient", I: "gradient", W: "W"}[action.type]
                ended[key, Task(*action[1:4])] = free[rank]
                records.append(ActionRecord(rank, action, start, free[rank]))
                position[rank] += 1
                progress = True
    stuck = {r: str(a[position[r]]) for r, a in enumerate(order) if position[r] < len(a)}
    assert not stuck, f"deadlock: {stuck}"
    return records


def makespan(records: Sequence[ActionRecord]) -> float:
    return max(record.end_ms for record in records)


def peaks(order: ComputeOrder) -> list[int]:
    """Return the maximum number of tasks between F and the end of backward, for each rank.

    Only for steps in which all modules are trained. I actions keep the activations for W.
    """
    result = []
    for actions in order:
        alive = peak = 0
        for action in actions:
            alive += {F: 1, B: -1, I: 0, W: -1}[action.type]
            peak = max(peak, alive)
        result.append(peak)
    return result


def assert_complete(graph: StageGraph, order: ComputeOrder, *, split: bool = False) -> None:
    """Check that every task runs once on its rank, with the required backward pass."""
    actual = sorted((rank, *action[:4]) for rank, row in enumerate(order) for action in named(row))
    expected = []
    for task in graph.tasks():
        kinds = "F"
        if graph.needs_backward(task.stage, task.microbatch):
            passed_on = any(graph.sends_gradient(message) for message in graph.incoming(task))
            trained = graph.layout.stages[task.stage].trainable
            kinds += ("IW" if trained else "I") if split and passed_on else "B"
        expected += [(graph.rank(task), kind, *task) for kind in kinds]
    assert actual == sorted(expected)


def named(row: Sequence[Action]) -> list[tuple]:
    return [(action.type.value, *action[1:]) for action in row]


def microbatches_in_flight(records: Sequence[ActionRecord]) -> int:
    """Return the maximum number of microbatches between their first and their last action."""
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    for _, action, start, end in records:
        started[action.microbatch] = min(start, started.get(action.microbatch, start))
        ended[action.microbatch] = max(end, ended.get(action.microbatch, end))
    return max(sum(started[m] <= t < ended[m] for m in started) for t in started.values())
