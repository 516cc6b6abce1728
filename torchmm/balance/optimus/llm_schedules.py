"""LLM schedules without encoders, whose bubbles encoders then fill.

The candidates are the product of schedules and microbatch sequences. The loss of a step is a sum
over microbatches, so the LLM can run microbatches in any sequence. If the number of images differs,
small encoder tasks are best at the start, before encoders are far ahead. They are also best at the
end, when no LLM computation hides backward passes. This is the idea of DistTrain reordering within
a group.

- Classic schedules by name, for each sequence.
- Interleaved 1F1B with fewer forward passes before the first backward pass (Optimus, Fig. 12).
  Later microbatches are then needed later. Deferral of forward passes cannot reach this schedule,
  because it does not change the action order. The benefit depends on the step, so both variants are
  candidates.
- "searched": PipeWeaver search (§6.1) of the LLM stages without encoders, from each sequence.
  Interleaved 1F1B candidates come first, so the result is never worse than these.

A search that scores each order by the step with encoders would take a thousand times longer per
evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, SearchSettings
from torchmm.balance.pipeweaver.schedule_search.step_search import build_limited_search
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.schedules.classic import interleaved_1f1b
from torchmm.pipelining.schedules.colocated import backbone_order, encoder_names
from torchmm.pipelining.schedules.registry import find_order

SEARCHED = "searched"
"""Replaces the name of a classic schedule."""
INTERLEAVED = "interleaved_1f1b"
"""Schedule that is also a candidate for searched schedules."""

T = TypeVar("T")


def llm_schedules(
    graph: StageGraph, costs: PlanCosts, llm_schedule: str, evaluations: int
) -> Iterator[ComputeOrder]:
    """Yield distinct action orders of the LLM by pipeline rank.

    Args:
        graph: Tasks of a colocated layout.
        costs: Costs of the graph.
        llm_schedule: Name of a classic schedule, or "searched".
        evaluations: Evaluations of each search.

    Raises:
        ValueError: The layout is not colocated, or does not match the LLM schedule.
    """
    seen: set[ComputeOrder] = set()
    sequences = list(microbatch_sequences(graph, costs))
    named = INTERLEAVED if llm_schedule == SEARCHED else llm_schedule
    schedules = [(find_order(named), sequence) for sequence in sequences]
    if named == INTERLEAVED:
        adjusted = partial(interleaved_1f1b, adjusted=True)
        schedules += [(adjusted, sequence) for sequence in sequences]
    if llm_schedule == SEARCHED:
        search = partial(_search_llm_schedule, graph, costs, evaluations)
        schedules += [(partial(search, sequence), sequence) for sequence in sequences]
    for schedule, sequence in schedules:
        order = backbone_order(graph, schedule, sequence)
        if order not in seen:
            seen.add(order)
            yield order


def microbatch_sequences(graph: StageGraph, costs: PlanCosts) -> Iterator[Sequence[int]]:
    """Yield sequences in which the LLM may run the microbatches.

    The first is the default sequence. If encoder work differs between microbatches, two others
    follow: small microbatches first, and small microbatches at both ends.
    """
    default = list(range(graph.microbatches))
    yield default
    encoders = set(encoder_names(graph.layout))
    work_ms = [0.0] * graph.microbatches
    for action, duration_ms in costs.compute_ms.items():
        if graph.layout.stages[action.stage].module in encoders:
            work_ms[action.microbatch] += duration_ms
    ascending = sorted(default, key=work_ms.__getitem__)
    if len(set(work_ms)) > 1:
        yield ascending
        yield ascending[::2] + ascending[1::2][::-1]


def _search_llm_schedule(
    graph: StageGraph,
    costs: PlanCosts,
    evaluations: int,
    sequence: Sequence[int],
    backbone: StageGraph,
) -> ComputeOrder:
    """Return the best order that a search finds for the LLM stages of a graph."""
    step = build_limited_search(backbone, _backbone_costs(graph, costs, sequence, backbone))
    return step.search(SearchBudget(evaluations), SearchSettings()).order


def _backbone_costs(
    graph: StageGraph, costs: PlanCosts, sequence: Sequence[int], backbone: StageGraph
) -> PlanCosts:
    """Return the costs of the LLM stages, with their local stage, microbatch and rank indices."""
    encoders = set(encoder_names(graph.layout))
    offset = next(s.index for s in graph.layout.stages if s.module not in encoders)
    llm_stages = range(offset, offset + len(backbone.layout.stages))
    local_index = {microbatch: index for index, microbatch in enumerate(sequence)}

    def task_in(of: Mapping[Task, T]) -> dict[Task, T]:
        return {
            Task(t.stage - offset, local_index[t.microbatch], t.sub_microbatch): value
            for t, value in of.items()
            if t.stage in llm_stages
        }

    def action_in(of: Mapping[Action, T]) -> dict[Action, T]:
        return {
            a._replace(stage=a.stage - offset, microbatch=local_index[a.microbatch]): value
            for a, value in of.items()
            if a.stage in llm_stages
        }

    def message_in(of: Mapping[tuple[Message, bool], T]) -> dict[tuple[Message, bool], T]:
        return {
            (
                Message(m.source - offset, m.destination - offset, local_index[m[2]], m[3]),
                backward,
            ): value
            for (m, backward), value in of.items()
            if m.source in llm_stages and m.destination in llm_stages
        }

    compute = action_in(costs.compute_ms)
    # A frozen LLM has tasks without a backward pass, which schedules drop.
    for task in backbone.tasks():
        for kind in (ActionType.F, ActionType.B):
            compute.setdefault(Action(kind, *task), 0.0)
    kept = task_in(costs.saved_bytes)
    if not kept:  # without byte costs, activations are proportional to the forward time
        kept = {t: round(1e6 * compute[Action(ActionType.F, *t)]) for t in backbone.tasks()}
    return replace(
        costs,
        compute_ms=compute,
        tp_comm_ms={},
        transfer_ms=message_in(costs.transfer_ms),
        saved_bytes=kept,
        saved_for_weights_bytes=task_in(costs.saved_for_weights_bytes),
        temporary_bytes=action_in(costs.temporary_bytes),
        static_bytes=costs.static_bytes[:: graph.layout.mirror_count],
        update_bytes=(),
        flops={},
    )
