"""Orders of the LLM alone, into whose bubbles encoders are then put.

A classic schedule, by name, for each sequence in which the LLM may take the microbatches, which is
free: a step's loss is the sum over all. Where they have different numbers of images, small encoder
tasks are wanted first, before a wide lead of the encoder has been built up, and last, when nothing
hides backwards any more (the idea of DistTrain's reordering inside a group).

Interleaved 1F1B also comes with fewer forwards before the first backwards (Optimus' figure 12):
later microbatches are then needed later. Deferring forwards in the published order does not find
that, as their order stays. Whether it pays depends on the step, so both are candidates.

"searched" is PipeWeaver's search (§6.1) of the LLM's stages as if there were no encoders, from each
of these sequences. Orders of interleaved 1F1B come before, as whoever compares candidates is then
never worse off than with it.

Rejected: scoring every order of the search by the step that it makes with encoders, which takes a
thousand times as long as an evaluation of the LLM alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torchmm.balance.pipeweaver.order_search.best_order import search_within_memory
from torchmm.balance.pipeweaver.order_search.search import Budget, Settings
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.colocated import backbone_order, encoder_names
from torchmm.pipelining.schedules.names import order_named

SEARCHED = "searched"
"""In the place of a classic schedule's name."""
INTERLEAVED = "interleaved_1f1b"
"""Searched orders begin with it too."""

V = TypeVar("V")


def llm_orders(
    graph: StageGraph, costs: PlanCosts, llm_schedule: str, evaluations: int
) -> Iterator[ComputeOrder]:
    """Orders of the backbone's actions, by pipeline rank; each once.

    Args:
        graph: of a colocated layout.
        costs: of the graph.
        llm_schedule: name of a classic schedule, or "searched".
        evaluations: of each search.

    Raises:
        ValueError: the layout is not colocated, or does not suit the LLM's schedule.
    """
    seen: set[ComputeOrder] = set()
    taken = list(sequences(graph, costs))
    named = INTERLEAVED if llm_schedule == SEARCHED else llm_schedule
    schedules = [(order_named(named), sequence) for sequence in taken]
    if named == INTERLEAVED:
        adjusted = partial(interleaved_1f1b, adjusted=True)
        schedules += [(adjusted, sequence) for sequence in taken]
    if llm_schedule == SEARCHED:
        search = partial(_searched, graph, costs, evaluations)
        schedules += [(partial(search, sequence), sequence) for sequence in taken]
    for schedule, sequence in schedules:
        order = backbone_order(graph, schedule, sequence)
        if order not in seen:
            seen.add(order)
            yield order


def sequences(graph: StageGraph, costs: PlanCosts) -> Iterator[Sequence[int]]:
    """Orders in which the LLM may take the microbatches: as they are, and if encoder work differs
    between them, small ones first, and small ones at both ends."""
    natural = list(range(graph.microbatches))
    yield natural
    encoders = set(encoder_names(graph.layout))
    work_ms = [0.0] * graph.microbatches
    for action, duration_ms in costs.compute_ms.items():
        if graph.layout.stages[action.stage].module in encoders:
            work_ms[action.microbatch] += duration_ms
    rising = sorted(natural, key=work_ms.__getitem__)
    if len(set(work_ms)) > 1:
        yield rising
        yield rising[::2] + rising[1::2][::-1]


def _searched(
    graph: StageGraph,
    costs: PlanCosts,
    evaluations: int,
    sequence: Sequence[int],
    backbone: StageGraph,
) -> ComputeOrder:
    """The best order of a graph's backbone that a search finds."""
    step = search_within_memory(backbone, _backbone_costs(graph, costs, sequence, backbone))
    return step.search(Budget(evaluations), Settings()).order


def _backbone_costs(
    graph: StageGraph, costs: PlanCosts, sequence: Sequence[int], backbone: StageGraph
) -> PlanCosts:
    """Costs of a graph's backbone, in the numbers of its own stages, microbatches and ranks."""
    encoders = set(encoder_names(graph.layout))
    offset = next(s.index for s in graph.layout.stages if s.module not in encoders)
    own = range(offset, offset + len(backbone.layout.stages))
    place = {microbatch: index for index, microbatch in enumerate(sequence)}

    def task_in(of: Mapping[Task, V]) -> dict[Task, V]:
        return {
            Task(t.stage - offset, place[t.microbatch], t.sub_microbatch): value
            for t, value in of.items()
            if t.stage in own
        }

    def action_in(of: Mapping[Action, V]) -> dict[Action, V]:
        return {
            a._replace(stage=a.stage - offset, microbatch=place[a.microbatch]): value
            for a, value in of.items()
            if a.stage in own
        }

    def message_in(of: Mapping[tuple[Message, bool], V]) -> dict[tuple[Message, bool], V]:
        return {
            (
                Message(m.source - offset, m.destination - offset, place[m[2]], m[3]),
                backward,
            ): value
            for (m, backward), value in of.items()
            if m.source in own and m.destination in own
        }

    compute = action_in(costs.compute_ms)
    for task in backbone.tasks():  # of a frozen LLM some have no backward, which schedules drop
        for kind in (ActionType.F, ActionType.B):
            compute.setdefault(Action(kind, *task), 0.0)
    kept = task_in(costs.kept_bytes)
    if not kept:  # nobody knows bytes: in proportion to the forward's work
        kept = {t: round(1e6 * compute[Action(ActionType.F, *t)]) for t in backbone.tasks()}
    return replace(
        costs,
        compute_ms=compute,
        tensor_ms={},
        transfer_ms=message_in(costs.transfer_ms),
        kept_bytes=kept,
        kept_for_weights_bytes=task_in(costs.kept_for_weights_bytes),
        temporary_bytes=action_in(costs.temporary_bytes),
        static_bytes=costs.static_bytes[:: graph.layout.mirrors],
        update_bytes=(),
        flops={},
    )
