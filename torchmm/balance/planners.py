"""Planners by the names that recipes use: like schedules, but they also decide which replica of a
stage runs which task.

`torchmm.pipelining.schedules` has orders that follow from the graph alone. What needs costs and the
balance package is here: a planner gets durations and returns the graph with its choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torchmm.balance.optimus import optimus
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.actions import COMPUTE, Action
from torchmm.pipelining.colocated import colocated_layout
from torchmm.pipelining.graph import StageGraph, StageLayout
from torchmm.pipelining.plan import ComputeOrder
from torchmm.pipelining.separated import Durations


class Planner(NamedTuple):
    """What a name stands for."""

    layout: Callable[..., StageLayout]
    """Of the modules, pipeline ranks and virtual stages; own sizes of encoders as keywords."""
    plan: Callable[[StageGraph, Durations], tuple[StageGraph, ComputeOrder]]
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


def plan_optimus(graph: StageGraph, durations: Durations) -> tuple[StageGraph, ComputeOrder]:
    """Optimus: encoders in the bubbles of the LLM's interleaved 1F1B.

    Raises:
        ValueError: the layout is not colocated.
    """
    planned = optimus(graph, costs_of(graph, durations))
    return planned.graph, planned.order


PLANNERS: dict[str, Planner] = {"optimus": Planner(colocated_layout, plan_optimus)}
