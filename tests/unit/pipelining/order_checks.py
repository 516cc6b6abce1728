"""Plays compute orders through, independently of the code under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.plan import ActionRecord, ComputeOrder

F, B, I, W = ActionType.F, ActionType.B, ActionType.I, ActionType.W  # noqa: E741


def chain(ranks: int, chunks: int = 1, trainable: Sequence[bool] = ()) -> StageLayout:
    """One module, one layer per stage; stage s on rank s % ranks."""
    count = ranks * chunks
    flags = [*trainable, *[True] * (count - len(trainable))]
    stages = tuple(
        StageSpec(s, "llm", s, s + 1, (s % ranks,), segment=s // ranks, trainable=flags[s])
        for s in range(count)
    )
    return StageLayout(stages, tuple((s, s + 1) for s in range(count - 1)))


def needs(graph: StageGraph, action: Action, done: dict[tuple[str, Task], float]) -> list:
    """Keys of what must have ended before an action."""
    task = Task(*action[1:4])
    if action.type is F:
        return [("F", graph.producer(m)) for m in graph.incoming(task)]
    if action.type is W:
        return [("gradient", task)]
    consumers = [graph.consumer(m) for m in graph.outgoing(task) if graph.carries_gradient(m)]
    return [("F", task), *(("gradient", c) for c in consumers)]


def play(
    graph: StageGraph, order: ComputeOrder, duration: Callable[[Action], float]
) -> list[ActionRecord]:
    """When every action runs if each starts as early as its rank and its inputs allow.

    Fails if the order gets stuck.
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
                wanted = needs(graph, action, ended)
                if any(key not in ended for key in wanted):
                    break
                start = max([free[rank], *(ended[key] for key in wanted)])
                free[rank] = start + duration(action)
                key = {F: "F", B: "gradient", I: "gradient", W: "W"}[action.type]
                ended[key, Task(*action[1:4])] = free[rank]
                records.append(ActionRecord(rank, action, start, free[rank]))
                position[rank] += 1
                progress = True
    stuck = {r: str(a[position[r]]) for r, a in enumerate(order) if position[r] < len(a)}
    assert not stuck, f"waits for ever: {stuck}"
    return records


def makespan(records: Sequence[ActionRecord]) -> float:
    return max(record.end_ms for record in records)


def peaks(order: ComputeOrder) -> list[int]:
    """By rank: most tasks between their F and the end of their backward at a time.

    Only for steps in which everything is trained. I keeps the activations for W.
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
    """Every task on its rank: F once, and the backward it needs once."""
    found = sorted((rank, *action[:4]) for rank, row in enumerate(order) for action in named(row))
    wanted = []
    for task in graph.tasks():
        kinds = "F"
        if graph.needs_backward(task.stage, task.microbatch):
            passed_on = any(graph.carries_gradient(message) for message in graph.incoming(task))
            trained = graph.layout.stages[task.stage].trainable
            kinds += ("IW" if trained else "I") if split and passed_on else "B"
        wanted += [(graph.rank(task), kind, *task) for kind in kinds]
    assert found == sorted(wanted)


def named(row: Sequence[Action]) -> list[tuple]:
    return [(action.type.value, *action[1:]) for action in row]


def microbatches_in_flight(records: Sequence[ActionRecord]) -> int:
    """Most microbatches between their first action and their last at a time."""
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    for _, action, start, end in records:
        begun[action.microbatch] = min(start, begun.get(action.microbatch, start))
        ended[action.microbatch] = max(end, ended.get(action.microbatch, end))
    return max(sum(begun[m] <= t < ended[m] for m in begun) for t in begun.values())
