"""Plans with encoders in the LLM's bubbles: from a layout and costs to an order of actions.

The bubble scheduler (`scheduler`) says when each action runs; here its times become the order
of every rank and the replica of every encoder task, which is all that a plan knows. The runtime
then runs everything as early as that order allows: where transfers take no time, the simulated step
is not longer than what the scheduler promises. Where they do, it can be: messages between two ranks
wait for each other and for receives, which the scheduler leaves out.

A plan places whole actions: slicing encoder stages makes them small enough for bubbles between LLM
actions. Bubbles inside an LLM action (tensor parallelism) count as one, at its begin. If encoders
may use them, their actions are placed in pieces, as groups of their kernels. In the order, an
action comes after the LLM action that its last piece is in, which then launches the pieces
(`launches`). Pieces that do not fit run after it, so the step may take longer than promised.

The LLM's own order is one of a few (`llm_orders`); all are tried and the shortest step is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Int64s
from torchmm.balance.optimus.encoder_work import (
    EncoderWork,
    encoder_work,
    in_pieces,
    pipeline_stages,
)
from torchmm.balance.optimus.llm_orders import llm_orders
from torchmm.balance.optimus.llm_timeline import llm_timeline
from torchmm.balance.optimus.scheduler import BubbleSchedule, Granularity, fill_bubbles
from torchmm.balance.step_costs import PlanCosts
from torchmm.costs.sizes import Array
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ComputeOrder, Gathering
from torchmm.pipelining.schedules.colocated import encoder_names

PIECES = 8
"""Per encoder action where bubbles inside the LLM's actions count: a layer has four products
forward, twice as many backward."""


class OptimusStep(NamedTuple):
    """What `optimus` returns."""

    graph: StageGraph
    """The step's, with the replica that runs each encoder task."""
    order: ComputeOrder
    schedule: BubbleSchedule


def optimus(
    graph: StageGraph,
    costs: PlanCosts,
    *,
    llm_schedule: str = "interleaved_1f1b",
    granularity: Granularity = "fine",
    sharding: Gathering = "none",
    evaluations: int = 256,
) -> OptimusStep:
    """The shortest step found, by what its schedule promises.

    Args:
        graph: of a colocated layout (`torchmm.pipelining.schedules.colocated`).
        costs: of the graph. Where ranks compute while gradients are reduced, encoders' backwards
            run beside the reduction of the LLM's.
        llm_schedule: name of a classic schedule for the LLM alone, or "searched".
        granularity: coarse: encoders before and after the LLM only.
        sharding: as the plan will be lowered.
        evaluations: as for `fill_bubbles`, and of each search of the LLM's order.

    Raises:
        SimulationError: a cost is missing or no duration.
        ValueError: the layout is not colocated, or does not suit the LLM's schedule.
    """
    orders = llm_orders(graph, costs, llm_schedule, evaluations)
    found = optimus_steps(graph, costs, orders, granularity, sharding, evaluations=evaluations)
    return min(found, key=lambda step: step.schedule.total_ms)


def optimus_steps(
    graph: StageGraph,
    costs: PlanCosts,
    orders: Iterable[ComputeOrder],
    granularity: Granularity,
    sharding: Gathering,
    *,
    evaluations: int = 256,
    inside: bool = False,
) -> Iterator[OptimusStep]:
    """Yield a step for each of some orders of the LLM (`llm_orders`); as `optimus`.

    Args:
        inside: whether encoders may run while an LLM action communicates, for its `tensor_ms`.
    """
    encoders = encoder_names(graph.layout)
    works = [encoder_work(graph, costs, name) for name in encoders]
    placed_works = [in_pieces(work, PIECES) for work in works] if inside else works

    def pieces(action: Action) -> tuple[float, float]:
        tensor_ms = costs.tensor_ms.get(action, 0.0) if inside else 0.0
        return tensor_ms, costs.compute_ms[action] - tensor_ms

    for order in orders:
        timeline = llm_timeline(
            graph,
            order,
            costs,
            pieces,
            sharding=sharding,
            reduction_hides=costs.runs_beside,
        )
        found = fill_bubbles(timeline, placed_works, granularity, evaluations=evaluations)
        if inside:
            found = whole_actions(found, works)
        placed = place_encoders(graph, found)
        yield OptimusStep(placed, order_of(found, placed, behind=inside), found)


def whole_actions(schedule: BubbleSchedule, works: Sequence[EncoderWork]) -> BubbleSchedule:
    """Return the schedule with actions instead of kernels: each starts when its last kernel does.

    Args:
        schedule: of works whose actions are cut into kernels (`in_pieces`).
        works: the `encoder_work`s of the same encoders.
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


def place_encoders(graph: StageGraph, schedule: BubbleSchedule) -> StageGraph:
    """The graph with the replica that a schedule gives each encoder task."""
    replicas = {
        (work.name, *task): int(pipeline)
        for work, pipelines in zip(schedule.works, schedule.pipeline_N, strict=True)
        for task, pipeline in zip(work.tasks, pipelines, strict=True)
    }
    return replace(graph, replica=replicas)


def order_of(schedule: BubbleSchedule, graph: StageGraph, behind: bool = False) -> ComputeOrder:
    """Each rank's actions in the order of a schedule's times.

    Args:
        graph: with the replicas of the schedule.
        behind: whether what starts inside of an LLM action comes behind it, or before it.
    """
    around = partial(_around, schedule, behind)
    layout = graph.layout
    rows: list[list[tuple[tuple[int, ...], Action]]] = [[] for _ in range(layout.rank_count)]
    for rank, own in enumerate(schedule.llm):
        for action, start in zip(own.actions, own.start_ps.tolist(), strict=True):
            for mirror, same in enumerate(layout.mirrored[action.stage]):
                # All mirrors come to it at one place, or they would wait for each other.
                entry = (*_place(action, start), 1), action._replace(stage=same)
                rows[rank * layout.mirrors + mirror].append(entry)
    for action, replica, start in _encoder_starts(schedule, graph):
        place = around(layout.stages[action.stage].ranks[replica], action, start)
        for same in layout.mirrored[action.stage]:
            entry = place, action._replace(stage=same)
            rows[layout.stages[same].ranks[replica]].append(entry)
    return tuple(tuple(action for _, action in sorted(row, key=itemgetter(0))) for row in rows)


def _encoder_starts(
    schedule: BubbleSchedule, graph: StageGraph
) -> Iterator[tuple[Action, int, int]]:
    """Encoders' actions, of mirrors those of the first, with their replicas and starts."""
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


def _around(
    schedule: BubbleSchedule, behind: bool, rank: int, action: Action, start_ps: int
) -> tuple[int, ...]:
    """Sorts an encoder's action: before or behind the LLM action of its rank that it starts in."""
    own = schedule.llm[rank // schedule.works[0].tensor_groups]
    index = int(np.searchsorted(own.start_ps, start_ps, side="right")) - 1
    if index < 0 or start_ps >= own.end_ps[index]:
        return _place(action, start_ps)
    inside = _place(own.actions[index], int(own.start_ps[index]))
    return *inside, 2 * behind, *_place(action, start_ps)


def _place(action: Action, start_ps: int) -> tuple[int, ...]:
    """Sorts actions; of those that start together, some take no time and come first, in the order
    of the data."""
    forward = action.type is ActionType.F
    return start_ps, not forward, action.stage if forward else -action.stage
