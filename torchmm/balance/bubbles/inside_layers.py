"""Optimus with kernels in bubbles inside of the LLM's layers: what its steps take at best.

`optimus` makes plans of whole actions. Here encoders are placed kernel by kernel, as in the paper,
so that tensor-parallel bubbles are filled too; the LLM's order may be any, a searched one included
(PipeWeaver's search, on the LLM alone).

A plan has whole actions. Here they stand where their last kernels are, and take as long as what of
them is *not* inside of the LLM's actions: so the one simulator times these steps like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchmm.balance.bubbles.encoder_kernels import hidden_ms, kernel_work, whole_actions
from torchmm.balance.bubbles.encoder_work import encoder_work
from torchmm.balance.bubbles.llm_timeline import llm_timeline
from torchmm.balance.bubbles.optimus import order_of, place_encoders, sequences
from torchmm.balance.bubbles.scheduler import BubbleSchedule, fill_bubbles
from torchmm.balance.order_search.best_order import plan_searched
from torchmm.balance.order_search.search import Budget
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.batch import ModuleDescription
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ComputeOrder, Gathering
from torchmm.pipelining.schedules.colocated import backbone_order, encoder_names
from torchmm.pipelining.schedules.names import order_named

SEARCHED = "searched"
"""In the place of a schedule's name."""


class KernelStep(NamedTuple):
    """What `optimus_kernels` returns."""

    graph: StageGraph
    """The step's, with the replica that runs each encoder task."""
    order: ComputeOrder
    schedule: BubbleSchedule
    """Of kernels."""
    hidden_ms: dict[Action, float]
    """By encoder action: how long its kernels are inside of the LLM's actions."""

    def costs(self, costs: PlanCosts) -> PlanCosts:
        """Costs of the step without what is hidden."""
        compute, tensor = dict(costs.compute_ms), dict(costs.tensor_ms)
        for action, hidden in self.hidden_ms.items():
            if action in compute:
                compute[action] = max(0.0, compute[action] - hidden)
                tensor[action] = min(tensor.get(action, 0.0), compute[action])
        return replace(costs, compute_ms=compute, tensor_ms=tensor)


def optimus_kernels(
    graph: StageGraph,
    costs: PlanCosts,
    modules: Sequence[ModuleDescription],
    *,
    llm_schedule: str = "interleaved_1f1b",
    sharding: Gathering = "none",
    evaluations: int = 256,
) -> KernelStep:
    """The shortest step found.

    Args:
        graph: of a colocated layout (`torchmm.pipelining.schedules.colocated`).
        costs: of the graph.
        modules: encoders, LLM and generator, whole.
        llm_schedule: name of a classic schedule for the LLM alone, or "searched".
        sharding: as for `optimus`.
        evaluations: as for `fill_bubbles`, and of the LLM's search.

    Raises:
        SimulationError: a cost is missing or no duration.
        ValueError: as for `optimus`; no searched order fits into memory.
    """
    names = encoder_names(graph.layout)
    encoders = [module for name in names for module in modules if module.name == name]
    works = [kernel_work(graph, costs, module) for module in encoders]
    best: BubbleSchedule | None = None
    for sequence in sequences(graph, costs):
        schedule = _schedule(llm_schedule, costs, sequence, evaluations)
        order = backbone_order(graph, schedule, sequence)
        timeline = llm_timeline(graph, order, costs, sharding=sharding)
        found = fill_bubbles(timeline, works, evaluations=evaluations)
        if best is None or found.total_ms < best.total_ms:
            best = found
    assert best is not None
    placed = place_encoders(graph, best)
    actions = whole_actions(best, [encoder_work(graph, costs, name) for name in names])
    return KernelStep(placed, order_of(actions, placed), best, hidden_ms(best, placed))


def _schedule(
    name: str, costs: PlanCosts, sequence: Sequence[int], evaluations: int
) -> Callable[[StageGraph], ComputeOrder]:
    """Of a backbone that takes microbatches in some sequence."""
    if name != SEARCHED:
        return order_named(name)

    def searched(backbone: StageGraph) -> ComputeOrder:
        stages = max(action.stage for action in costs.compute_ms) + 1
        offset = stages - len(backbone.layout.stages)
        place = {microbatch: index for index, microbatch in enumerate(sequence)}
        compute = {
            action._replace(stage=action.stage - offset, microbatch=place[action.microbatch]): ms
            for action, ms in costs.compute_ms.items()
            if action.stage >= offset
        }
        return plan_searched(backbone, PlanCosts(compute), Budget(evaluations=evaluations)).order

    return searched
