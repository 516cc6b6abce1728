"""The order a step was planned in beside the static one: timeline/step-N.schedules.svg.

Three steps on one time axis: the searched order and the separated schedule as they were to be by
the mean times of the step itself, and what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchmm.balance.costs.step_costs import PlanCosts
from torchmm.balance.rates import Kind, step_totals
from torchmm.balance.simulation.simulator import simulate
from torchmm.common.files import replace_atomically
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder, PipelinePlan
from torchmm.pipelining.schedules.separated import Durations, separated
from torchmm.pipelining.view.draw import Panel, draw_timelines
from torchmm.pipelining.view.records import read_records


def draw_schedules(directory: Path, step: int, plan: PipelinePlan, durations: Durations) -> None:
    """Draws a step whose records `save_timeline` has written.

    Args:
        durations: FLOPs of the plan's actions.
    """
    records, _ = read_records(directory / f"step-{step}.json")
    graph = plan.graph
    rates = {
        kind: total.measured_ms / total.flops
        for kind, total in step_totals(records, graph, durations).items()
        if total.flops > 0
    }
    chosen = tuple(tuple(a for a in row if a.type in COMPUTE) for row in plan.actions)
    costs = _costs(graph, chosen, durations, rates)
    static = separated(graph, costs.compute_ms.__getitem__)
    panels = [
        Panel(label, simulate(lower_plan(order, graph, {}), costs).records, graph.layout)
        for label, order in (("searched (predicted)", chosen), ("separated (predicted)", static))
    ]
    picture = draw_timelines(
        f"step {step}: searched and static order",
        [*panels, Panel("searched (measured)", records, graph.layout)],
    )
    replace_atomically(directory / f"step-{step}.schedules.svg", picture.encode())


def _costs(
    graph: StageGraph, order: ComputeOrder, durations: Durations, rates: Mapping[Kind, float]
) -> PlanCosts:
    """Of the order's actions, in milliseconds."""
    modules = [stage.module for stage in graph.layout.stages]
    return PlanCosts(
        {
            action: durations(action) * rates.get((modules[action.stage], action.type), 0.0)
            for row in order
            for action in row
        }
    )
