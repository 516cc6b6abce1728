"""Optimus plans: convert bubble schedules to action orders.

The bubble scheduler (`bubble_scheduler`) computes a start time for each action. A plan stores only
an order of actions per rank and a replica per encoder task:

    times      rank 0: F0 at 0, e1 at 3, F1 at 5, ...      ->   order   rank 0: F0 e1 F1 ...

The runtime then runs every action as early as the order allows. If transfers take no time, the
simulated step is not longer than the schedule. Otherwise it can be longer, because messages between
two ranks wait for each other and for receives, which the scheduler ignores.

Plans have action granularity. Encoder stages are split into slices that are short enough for
bubbles between LLM actions. Bubbles inside an LLM action (tensor parallelism) are merged into one
bubble at its start. If encoders may use them, their actions are placed in pieces, which are groups
of kernels. In the order, an encoder action follows the LLM action that contains its last piece.
This LLM action launches the pieces (`launches`). Pieces that do not fit run after it, so the step
can be longer than the schedule.

All LLM schedules of `llm_schedules` are tried, and the shortest step is returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from torchmm.balance.numba_utils import Int64s
from torchmm.balance.optimus.bubble_scheduler import BubbleSchedule, Granularity, fill_bubbles
from torchmm.balance.optimus.encoder_work import (
    EncoderWork,
    encoder_work,
    pipeline_stages,
    split_kernels,
)
from torchmm.balance.optimus.llm_schedules import llm_schedules
from torchmm.balance.optimus.llm_timeline import build_llm_timeline
from torchmm.balance.plan_costs import PlanCosts
from torchmm.costs.sizes import Array
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ComputeOrder, UnshardMode
from torchmm.pipelining.schedules.colocated import encoder_names

PIECES_PER_ACTION = 8
"""Pieces per encoder action if TP bubbles are used. A layer has four matmuls forward and eight
backward."""


class OptimusStep(NamedTuple):
    """Result of `best_optimus_step`."""

    graph: StageGraph
    """Tasks of the step, with the replica that runs each encoder task."""
    order: ComputeOrder
    schedule: BubbleSchedule


def best_optimus_step(
    graph: StageGraph,
    costs: PlanCosts,
    *,
    llm_schedule: str = "interleaved_1f1b",
    granularity: Granularity = "fine",
    sharding: UnshardMode = "none",
    evaluations: int = 256,
) -> OptimusStep:
    """Return the step with the shortest bubble schedule.

    Args:
        graph: Tasks of a colocated layout (`torchmm.pipelining.schedules.colocated`).
        costs: Costs of the graph. If ranks compute during gradient reduction, encoder backward
            passes overlap with the reduction of LLM gradients.
        llm_schedule: Name of a classic schedule for the LLM, or "searched".
        granularity: "coarse" runs encoders only before and after the LLM.
        sharding: Collectives with which the plan will be lowered.
        evaluations: Evaluations of `fill_bubbles`, and of each search of an LLM schedule.

    Raises:
        SimulationError: A cost is missing or invalid.
        ValueError: The layout is not colocated, or does not match the LLM schedule.
    """
    orders = llm_schedules(graph, costs, llm_schedule, evaluations)
    steps = optimus_steps(graph, costs, orders, granularity, sharding, evaluations=evaluations)
    return min(steps, key=lambda step: step.schedule.total_ms)


def optimus_steps(
    graph: StageGraph,
    costs: PlanCosts,
    orders: Iterable[ComputeOrder],
    granularity: Granularity,
    sharding: UnshardMode,
    *,
    evaluations: int = 256,
    use_tp_bubbles: bool = False,
) -> Iterator[OptimusStep]:
    """Yield a step for each of several LLM schedules. See `best_optimus_step`.

    Args:
        graph: Tasks of a colocated layout.
        costs: Costs of the graph.
        orders: LLM schedules (`llm_schedules`).
        granularity: "coarse" runs encoders only before and after the LLM.
        sharding: Collectives with which the plan will be lowered.
        evaluations: Evaluations of `fill_bubbles`.
        use_tp_bubbles: Whether encoders may run during the communication (`tp_comm_ms`) of LLM
            actions.
    """
    encoders = encoder_names(graph.layout)
    works = [encoder_work(graph, costs, name) for name in encoders]
    placed_works = (
        [split_kernels(work, PIECES_PER_ACTION) for work in works] if use_tp_bubbles else works
    )

    def pieces(action: Action) -> tuple[float, float]:
        tp_comm_ms = costs.tp_comm_ms.get(action, 0.0) if use_tp_bubbles else 0.0
        return tp_comm_ms, costs.compute_ms[action] - tp_comm_ms

    for order in orders:
        timeline = build_llm_timeline(
            graph,
            order,
            costs,
            pieces,
            sharding=sharding,
            overlaps_reduction=costs.overlaps_communication,
        )
        schedule = fill_bubbles(timeline, placed_works, granularity, evaluations=evaluations)
        if use_tp_bubbles:
            schedule = merge_kernels(schedule, works)
        placed = assign_encoder_replicas(graph, schedule)
        yield OptimusStep(
            placed, build_action_order(schedule, placed, after_llm=use_tp_bubbles), schedule
        )


def merge_kernels(schedule: BubbleSchedule, works: Sequence[EncoderWork]) -> BubbleSchedule:
    """Return the schedule with actions instead of kernels. Each action starts with its last kernel.

    Args:
        schedule: Schedule of works whose actions are split into kernels (`split_kernels`).
        works: Result of `encoder_work` for the same encoders.
    """

    def chosen(start_ps: Int64s, ms_NSK: Array) -> Int64s:
        return start_ps.reshape(*ms_NSK.shape, -1)[..., -1]

    forward = zip(schedule.forward_start_ps, works, strict=True)
    backward = zip(schedule.backward_start_ps, works, strict=True)
    return replace(
        schedule,
        works=tuple(works),
        forward_start_ps=tuple(chosen(starts, work.forward_ms_NSK) for starts, work in forward),
        backward_start_ps=tuple(chosen(starts, work.backward_ms_NSK) for starts, work in backward),
    )


def assign_encoder_replicas(graph: StageGraph, schedule: BubbleSchedule) -> StageGraph:
    """Return the graph with the replica that a schedule assigns to each encoder task."""
    replicas = {
        (work.name, *task): int(pipeline)
        for work, pipelines in zip(schedule.works, schedule.pipeline_N, strict=True)
        for task, pipeline in zip(work.tasks, pipelines, strict=True)
    }
    return replace(graph, replica=replicas)


def build_action_order(
    schedule: BubbleSchedule, graph: StageGraph, after_llm: bool = False
) -> ComputeOrder:
    """Return the actions of each rank, sorted by the times of a schedule.

    Args:
        schedule: Bubble schedule.
        graph: Tasks with the replicas of the schedule.
        after_llm: Whether an encoder action that starts inside an LLM action runs after it, or
            before it.
    """
    sort_key = partial(_encoder_sort_key, schedule, after_llm)
    layout = graph.layout
    rows: list[list[tuple[tuple[int, ...], Action]]] = [[] for _ in range(layout.rank_count)]
    for rank, llm in enumerate(schedule.llm):
        for action, start in zip(llm.actions, llm.start_ps.tolist(), strict=True):
            for mirror, mirror_stage in enumerate(layout.mirror_stages[action.stage]):
                # All mirrors must run it at the mirror_stage position. Otherwise they deadlock.
                entry = (*_action_sort_key(action, start), 1), action._replace(stage=mirror_stage)
                rows[rank * layout.mirror_count + mirror].append(entry)
    for action, replica, start in _encoder_starts(schedule, graph):
        key = sort_key(layout.stages[action.stage].ranks[replica], action, start)
        for mirror_stage in layout.mirror_stages[action.stage]:
            entry = key, action._replace(stage=mirror_stage)
            rows[layout.stages[mirror_stage].ranks[replica]].append(entry)
    return tuple(tuple(action for _, action in sorted(row, key=itemgetter(0))) for row in rows)


def _encoder_starts(
    schedule: BubbleSchedule, graph: StageGraph
) -> Iterator[tuple[Action, int, int]]:
    """Yield encoder actions with their replicas and start times.

    Of mirrors, only the actions of the first are included.
    """
    starts = zip(schedule.forward_start_ps, schedule.backward_start_ps, strict=True)
    for work, (forward, backward) in zip(schedule.works, starts, strict=True):
        for position, slices in enumerate(pipeline_stages(graph, work.name)):
            for index, stage in enumerate(slices):
                for row, task in enumerate(work.tasks):
                    replica = graph.replica[work.name, *task]
                    action = Action(ActionType.F, stage.index, *task)
                    yield action, replica, int(forward[row, position, index])
                    if graph.needs_backward(stage.index, task[0]):
                        start = int(backward[row, position, len(slices) - 1 - index])
                        yield action._replace(type=ActionType.B), replica, start


def _encoder_sort_key(
    schedule: BubbleSchedule, after_llm: bool, rank: int, action: Action, start_ps: int
) -> tuple[int, ...]:
    """Return the sort key of an encoder action.

    If it starts inside an LLM action of its rank, it sorts directly before or after this action.
    """
    llm = schedule.llm[rank // schedule.works[0].devices_per_rank]
    index = int(np.searchsorted(llm.start_ps, start_ps, side="right")) - 1
    if index < 0 or start_ps >= llm.end_ps[index]:
        return _action_sort_key(action, start_ps)
    llm_key = _action_sort_key(llm.actions[index], int(llm.start_ps[index]))
    return *llm_key, 2 * after_llm, *_action_sort_key(action, start_ps)


def _action_sort_key(action: Action, start_ps: int) -> tuple[int, ...]:
    """Return the sort key of an action.

    Of actions with the same start time, some have no duration. They are sorted in data flow order.
    """
    forward = action.type is ActionType.F
    return start_ps, not forward, action.stage if forward else -action.stage
