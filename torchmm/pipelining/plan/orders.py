"""Compute orders: the actions that each task requires, and a completeness check.

The backward pass of a task is one B action, or an I and a W action as in zero-bubble schedules
(arXiv 2401.10241). The preceding stage depends on the I action. No action depends on the W action.
A frozen stage has no W action. A stage whose inputs need no gradient has a B action, because
splitting it would not make any result available earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder


class BackwardTypes(NamedTuple):
    """Action types of the backward pass of a task."""

    first: ActionType | None
    """Computes gradients of inputs, if needed. None if the task has no backward pass."""
    deferred: ActionType | None
    """Can run at any later time. None if the backward pass is not split."""


def inputs_need_gradient(graph: StageGraph, stage: int, microbatch: int) -> bool:
    """Return True if tasks of a stage send gradients to preceding stages."""
    return any(
        graph.needs_backward(source, microbatch) and graph.task_count(source, microbatch)
        for source in graph.layout.sources[stage]
    )


def backward_types(graph: StageGraph, stage: int, microbatch: int, *, split: bool) -> BackwardTypes:
    """Return the action types of the backward pass of a task.

    Args:
        graph: Tasks of the step.
        stage: Stage of the task.
        microbatch: Microbatch of the task.
        split: Whether to split backward passes that have both I and W.
    """
    if not graph.needs_backward(stage, microbatch):
        return BackwardTypes(None, None)
    if not split or not inputs_need_gradient(graph, stage, microbatch):
        return BackwardTypes(ActionType.B, None)
    return BackwardTypes(
        ActionType.I, ActionType.W if graph.layout.stages[stage].trainable else None
    )


def action_in_step(graph: StageGraph, action: Action) -> Action | None:
    """Return the action that replaces an action if parts of the model are frozen, or None."""
    if action.type is ActionType.F:
        return action
    split = action.type is not ActionType.B
    kinds = backward_types(graph, action.stage, action.microbatch, split=split)
    if not split or kinds.first is None:
        return action if kinds.first else None
    if kinds.first is ActionType.B:  # no gradient to send: B takes the position of W
        return action._replace(type=ActionType.B) if action.type is ActionType.W else None
    return action if action.type in (ActionType.I, kinds.deferred) else None


def split_by_rank(graph: StageGraph, actions: Iterable[Action]) -> ComputeOrder:
    """Split a global order of actions by rank. The result is valid if the global order is."""
    rows: list[list[Action]] = [[] for _ in range(graph.layout.rank_count)]
    stages = graph.layout.stages
    for action in actions:
        ranks = stages[action.stage].ranks
        rank = ranks[0] if len(ranks) == 1 else graph.rank(action.task)
        rows[rank].append(action)
    return tuple(map(tuple, rows))


def order_problems(graph: StageGraph, order: ComputeOrder) -> list[str]:
    """Return missing, duplicate and superfluous actions of an order. Empty if it is complete.

    Dependencies are checked when the lowered plan is validated.
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


def _task_problems(graph: StageGraph, task: Task, types: list[ActionType]) -> Iterator[str]:
    full = backward_types(graph, task.stage, task.microbatch, split=False)
    halves = backward_types(graph, task.stage, task.microbatch, split=True)
    allowed = [{t for t in kinds if t} for kinds in (full, halves)]
    backward = {t for t in types if t is not ActionType.F}
    if ActionType.F not in types:
        yield f"{Action(ActionType.F, *task)} is missing"
    if backward in allowed:
        return
    actual = ", ".join(str(Action(t, *task)) for t in COMPUTE if t in backward) or "no backward"
    if not allowed[0]:
        yield f"{actual} is set, but neither it nor an earlier stage is trained; remove it"
        return
    expected = " or ".join(
        " and ".join(str(Action(t, *task)) for t in COMPUTE if t in kinds)
        for kinds in (allowed if allowed[0] != allowed[1] else allowed[:1])
    )
    yield f"found {actual}, expected {expected}"
