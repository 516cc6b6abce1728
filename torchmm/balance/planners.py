"""Planners by the names that recipes use: like schedules, but they also decide which replica of a
stage runs which task.

`torchmm.pipelining.schedules` has orders that follow from the graph alone. What needs costs and the
balance package is here: a planner gets durations and returns the graph with its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchmm.balance.optimus import optimus
from torchmm.balance.plan_costs import PlanCosts
from torchmm.config import ParallelConfig
from torchmm.pipelining.actions import COMPUTE, Action
from torchmm.pipelining.colocated import colocated_layout
from torchmm.pipelining.graph import StageGraph, StageLayout
from torchmm.pipelining.layouts import ModuleLayers
from torchmm.pipelining.plan import ComputeOrder
from torchmm.pipelining.separated import Durations


class Planner(NamedTuple):
    """What a name stands for."""

    layout: Callable[[ParallelConfig, Sequence[ModuleLayers]], StageLayout]
    """Of the modules, as the recipe's section says."""
    plan: Callable[[ParallelConfig, StageGraph, Durations], tuple[StageGraph, ComputeOrder]]
    """The step's graph with replicas chosen, and the order of every rank."""


def costs_of(graph: StageGraph, durations: Durations) -> PlanCosts:
    """Costs of nothing but actions.

    Args:
        durations: in any unit: all together are made to take a second, so that what they are in
            does not matter.
    """
    found = {Action(k, *t): float(durations(Action(k, *t))) for t in graph.tasks() for k in COMPUTE}
    total = sum(found.values())
    scale = 1000.0 / total if total > 0 else 1.0
    return PlanCosts({action: value * scale for action, value in found.items()})


def layout_optimus(config: ParallelConfig, modules: Sequence[ModuleLayers]) -> StageLayout:
    """Encoders in pipelines of their own, in stages of single layers unless the recipe wants
    fewer: a stage is the least that can be put into a bubble.

    Raises:
        ValueError: the modules cannot be cut like this.
    """
    encoders = {module.name: module for module in modules if module.kind == "encoder"}
    pipelines = {name: config.sizes_given(name).get("pipeline", 1) for name in encoders}
    slices = {
        name: config.slices(name) or max(1, len(module.costs) // pipelines[name])
        for name, module in encoders.items()
    }
    return colocated_layout(
        modules, config.pipeline, config.virtual_stages, pipelines=pipelines, slices=slices
    )


def plan_optimus(
    config: ParallelConfig, graph: StageGraph, durations: Durations
) -> tuple[StageGraph, ComputeOrder]:
    """Optimus: encoders in the bubbles of the LLM's own schedule.

    Raises:
        ValueError: the layout is not colocated.
    """
    costs = costs_of(graph, durations)
    planned = optimus(graph, costs, llm_schedule=config.llm_schedule, granularity=config.bubbles)
    return planned.graph, planned.order


PLANNERS: dict[str, Planner] = {"optimus": Planner(layout_optimus, plan_optimus)}
