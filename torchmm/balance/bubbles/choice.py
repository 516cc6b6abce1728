"""Which of Optimus' schedules a step gets: the simulator plays all of them, the fastest one runs.

The bubble scheduler promises times under simplifications: messages never wait for each other, and
what runs inside the LLM's actions never has to run in front of them. So a fine schedule may take
longer than a coarse one, and one with fillers longer than one without. Each candidate is therefore
lowered and simulated with all costs, transfers, gathers and reductions among them:

    coarse, fine, fine with fillers      x      orders of the LLM (`llm_orders`)

Coarse ones come first: they need the least time to plan, and whatever comes after is not longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from typing import Literal, NamedTuple

from torchmm.balance.bubbles.llm_orders import llm_orders
from torchmm.balance.bubbles.optimus import optimus_steps
from torchmm.balance.bubbles.scheduler import Granularity
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder, Gathering
from torchmm.pipelining.schedules.fillers import encoder_stages, fill_tensor_bubbles

Bubbles = Literal["coarse", "fine", "filled"]
"""Where encoders may run: before and after the LLM; also between its actions; also inside them."""


class StepOrder(NamedTuple):
    """How a step is to be run."""

    graph: StageGraph
    """With the replica that runs each task."""
    order: ComputeOrder
    fills: bool = False
    """Whether encoders' actions fill LLM actions (`fill_tensor_bubbles`)."""


@dataclass(frozen=True)
class BubbleChoice:
    """The best of the candidates that were played so far.

    Attributes:
        step: how to run it.
        bubbles: what kind of candidate it is.
        simulated: its step.
        coarse_ms: the shortest step of a coarse candidate.
        played: how many candidates were.
    """

    step: StepOrder
    bubbles: Bubbles
    simulated: SimulatedStep
    coarse_ms: float
    played: int


def bubble_choices(
    graph: StageGraph,
    costs: PlanCosts,
    *,
    llm_schedule: str,
    granularity: Granularity,
    sharding: Gathering,
    tensor_share: float = 0.0,
    evaluations: int = 256,
) -> Iterator[BubbleChoice]:
    """The best one after each candidate; steps that fit into memory come before others.

    Args:
        graph: of a colocated layout.
        costs: of the graph.
        llm_schedule: see `optimus`; of "searched" what was not searched is a candidate too.
        evaluations: see `optimus`.
        granularity: "coarse": no other candidates.
        sharding: as the plan will be lowered.
        tensor_share: of LLM actions, in which encoders may run; 0: no candidates with fillers.

    Raises:
        SimulationError: a cost is missing or no duration.
        ValueError: the layout is not colocated, or does not suit the LLM's schedule.
    """
    kinds: Sequence[Bubbles] = ("coarse", "fine") if granularity == "fine" else ("coarse",)
    if tensor_share:
        kinds = (*kinds, "filled")
        costs = replace(costs, tensor_ms=llm_tensor_ms(graph, costs, tensor_share))
    best: BubbleChoice | None = None
    played = 0
    orders = tee(llm_orders(graph, costs, llm_schedule, evaluations), len(kinds))
    for kind, own in zip(kinds, orders, strict=True):
        places: Granularity = "coarse" if kind == "coarse" else granularity
        fills = kind == "filled"
        for found in optimus_steps(
            graph, costs, own, places, sharding, evaluations=evaluations, inside=fills
        ):
            plan = lower_plan(
                found.order, found.graph, {}, sharding, reduces_early=costs.runs_beside
            )
            if fills:
                plan = fill_tensor_bubbles(plan, costs.compute_ms.__getitem__, tensor_share)
            step = simulate(plan, costs)
            played += 1
            coarse_ms = step.makespan_ms if best is None else best.coarse_ms
            if kind == "coarse":
                coarse_ms = min(coarse_ms, step.makespan_ms)
            made = StepOrder(found.graph, found.order, fills)
            choice = BubbleChoice(made, kind, step, coarse_ms, played)
            if best is None or _key(choice) <= _key(best):
                best = choice
            best = replace(best, coarse_ms=coarse_ms, played=played)
            yield best


def _key(choice: BubbleChoice) -> tuple[bool, float]:
    return not choice.simulated.fits, choice.simulated.makespan_ms


def llm_tensor_ms(graph: StageGraph, costs: PlanCosts, share: float) -> dict[Action, float]:
    """Time of each LLM action in which its ranks only communicate: a share of it."""
    encoders = encoder_stages(graph)
    return {a: share * ms for a, ms in costs.compute_ms.items() if a.stage not in encoders}
