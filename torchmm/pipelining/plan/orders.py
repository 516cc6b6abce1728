"""What compute orders are made of: which actions a task needs, and whether an order has them all.

A task that needs a backward gets either one B or, split as in zero-bubble schedules (arXiv
2401.10241), an I that the stage before waits for and a W that nobody waits for. A split makes sense
only where both halves exist: a frozen stage has no W, and a stage whose inputs need no gradient
has nothing to hand back early, so it keeps its B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder


class BackwardKinds(NamedTuple):
    """Actions of a task's backward."""

    first: ActionType | None
    """Gives the gradients of the inputs, if any are needed; None: no backward at all."""
    deferred: ActionType | None
    """May come any time later."""


def inputs_need_gradient(graph: StageGraph, stage: int, microbatch: int) -> bool:
    """Whether a gradient goes back from the stage's tasks of a microbatch."""
    return any(
        graph.needs_backward(source, microbatch) and graph.parts(source, microbatch)
        for source in graph.layout.sources[stage]
    )


def backward_kinds(graph: StageGraph, stage: int, microbatch: int, *, split: bool) -> BackwardKinds:
    """Backward of the stage's tasks of a microbatch.

    Args:
        split: I and W where both exist, else B for all.
    """
    if not graph.needs_backward(stage, microbatch):
        return BackwardKinds(None, None)
    if not split or not inputs_need_gradient(graph, stage, microbatch):
        return BackwardKinds(ActionType.B, None)
    return BackwardKinds(
        ActionType.I, ActionType.W if graph.layout.stages[stage].trainable else None
    )


def needed_action(graph: StageGraph, action: Action) -> Action | None:
    """What a step has in the place of an action of one that trains everything; None: nothing."""
    if action.type is ActionType.F:
        return action
    split = action.type is not ActionType.B
    kinds = backward_kinds(graph, action.stage, action.microbatch, split=split)
    if not split or kinds.first is None:
        return action if kinds.first else None
    if kinds.first is ActionType.B:  # nothing to hand back early: the W is all there is
        return action._replace(type=ActionType.B) if action.type is ActionType.W else None
    return action if action.type in (ActionType.I, kinds.deferred) else None


def by_rank(graph: StageGraph, actions: Iterable[Action]) -> ComputeOrder:
    """Each rank's part of one order of all actions: legal if that one is."""
    rows: list[list[Action]] = [[] for _ in range(graph.layout.rank_count)]
    stages = graph.layout.stages
    for action in actions:
        ranks = stages[action.stage].ranks
        rank = ranks[0] if len(ranks) == 1 else graph.rank(action.task)
        rows[rank].append(action)
    return tuple(map(tuple, rows))


def order_problems(graph: StageGraph, order: ComputeOrder) -> list[str]:
    """Every action that an order lacks, has twice or should not have; empty if it is complete.

    Says nothing about dependencies: that is the validation of the lowered plan.
    """
    if len(order) != graph.layout.rank_count:
        return [f"{len(order)} ranks, the layout has {graph.layout.rank_count}"]
    tasks = set(graph.tasks())
    seen: dict[Task, list[ActionType]] = {task: [] for task in graph.tasks()}
    problems = []
    for rank, actions in enumerate(order):
        for action in actions:
            task = action.task
            if action.type not in COMPUTE:
                problems.append(f"rank {rank}: {action} is not one of F, B, I, W")
            elif task not in tasks:
                problems.append(f"rank {rank}: {action} is not a task of this step")
            elif graph.rank(task) != rank:
                problems.append(f"rank {rank}: {action} belongs to rank {graph.rank(task)}")
            elif action.type in seen[task]:
                problems.append(f"rank {rank}: {action} occurs twice")
            else:
                seen[task].append(action.type)
    for task, types in seen.items():
        rank = graph.rank(task)
        problems += (f"rank {rank}: {text}" for text in _task_problems(graph, task, types))
    return problems


def _task_problems(graph: StageGraph, task: Task, found: list[ActionType]) -> Iterator[str]:
    whole = backward_kinds(graph, task.stage, task.microbatch, split=False)
    parts = backward_kinds(graph, task.stage, task.microbatch, split=True)
    legal = [{t for t in kinds if t} for kinds in (whole, parts)]
    backward = {t for t in found if t is not ActionType.F}
    if ActionType.F not in found:
        yield f"{Action(ActionType.F, *task)} is missing"
    if backward in legal:
        return
    has = ", ".join(str(Action(t, *task)) for t in COMPUTE if t in backward) or "no backward"
    if not legal[0]:
        yield f"{has} is set, but neither it nor an earlier stage is trained; remove it"
        return
    wanted = " or ".join(
        " and ".join(str(Action(t, *task)) for t in COMPUTE if t in kinds)
        for kinds in (legal if legal[0] != legal[1] else legal[:1])
    )
    yield f"found {has}, expected {wanted}"
