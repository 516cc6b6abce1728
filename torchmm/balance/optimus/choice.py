"""Choose one of the schedules of Optimus for a step: simulate all of them, run the fastest.

The bubble scheduler predicts times under simplifications: messages never wait for each other, and
all planned pieces fit into the LLM's actions. So a fine schedule may take longer than a coarse one.
Each candidate is therefore lowered and simulated with all costs, including transfers, gathers and
reductions:

    coarse, fine, launched (fine, with pieces in TP bubbles)   x   orders of the LLM (`llm_orders`)

Coarse candidates come first, because they need the least planning time. Launched ones (`launches`)
are taken only if they are shorter than all others.

**Memory.** Encoders run ahead of the LLM, and backwards that fit into no bubble come after it;
until then their activations are kept. Where a candidate needs more than there is, its layers are
tuned (`recomputation.tuning`): tasks whose activations wait longest recompute them, chosen task by
task. Of the best one, whose backwards are then longer, encoders are placed once more with these
times. Steps that fit with everything kept are not touched. Rejected: fewer forwards ahead as a rule
of the scheduler; which tasks are in memory together is known only when all are placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import tee
from math import inf
from typing import Literal

from torchmm.balance.optimus.launch_choice import plan_launches
from torchmm.balance.optimus.launches import with_launches
from torchmm.balance.optimus.llm_orders import llm_orders
from torchmm.balance.optimus.order import OptimusStep, optimus_steps
from torchmm.balance.optimus.scheduler import Granularity
from torchmm.balance.pipeweaver.recomputation.costs import StageRecompute, charged
from torchmm.balance.pipeweaver.recomputation.tuning import Tuner
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.errors import PlanError
from torchmm.pipelining.checks.rules import RuleBook
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder, Gathering, Launch
from torchmm.pipelining.schedules.colocated import encoder_stages

ROUNDS = 3
"""In which encoders are placed once more with the times of what is recomputed."""

Bubbles = Literal["coarse", "fine", "launched"]
"""Where encoders run: before and after the LLM; also between its actions; also inside them."""


@dataclass(frozen=True)
class StepOrder:
    """How a step is to be run."""

    graph: StageGraph
    """With the replica that runs each task."""
    order: ComputeOrder
    launches: Mapping[Action, Launch] = field(default_factory=dict)
    """What LLM actions launch (`with_launches`)."""


@dataclass(frozen=True)
class BubbleChoice:
    """The best of the candidates that were played so far.

    Attributes:
        step: how to run it.
        bubbles: what kind of candidate it is.
        simulated: its step, tuned if it would not fit otherwise.
        coarse_ms: the shortest step of a coarse candidate; infinite if none fits, but another does.
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
    tuner: Tuner | None = None,
) -> Iterator[BubbleChoice]:
    """The best one after each candidate; steps that fit into memory come before others, and of
    those the leanest first.

    Args:
        graph: of a colocated layout.
        costs: of the graph.
        llm_schedule: see `optimus`; of "searched" what was not searched is a candidate too.
        evaluations: see `optimus`.
        granularity: "coarse": no other candidates.
        sharding: as the plan will be lowered.
        tensor_share: fraction of LLM actions in which they communicate, and encoders may run in
            pieces; 0: they may not.
        tuner: of the step: candidates that do not fit are tuned before they are compared.

    Raises:
        SimulationError: a cost is missing or no duration.
        ValueError: the layout is not colocated, or does not suit the LLM's schedule.
    """
    kinds: Sequence[Bubbles] = ("coarse", "fine") if granularity == "fine" else ("coarse",)
    if tensor_share:
        kinds = (*kinds, "launched")
        costs = replace(costs, tensor_ms=tensor_ms(graph, costs, tensor_share))
    if tuner is not None:
        costs = replace(costs, memory_limit_bytes=tuner.tuning.memory_limit_bytes)
    compared = _Compared(costs, sharding, tuner)
    steps = partial(_candidates, graph, sharding=sharding, evaluations=evaluations)
    orders = tee(llm_orders(graph, costs, llm_schedule, evaluations), len(kinds))
    for kind, own in zip(kinds, orders, strict=True):
        for found in steps(costs, own, kind):
            yield compared.best_with(found, kind)
    for _ in range(ROUNDS):
        best = compared.best
        if best is None or not compared.recomputing_shows:
            return
        llm = tuple(rank.actions for rank in compared.found.schedule.llm)
        kind = best.bubbles
        longer = best.simulated.costs
        for found in steps(longer, [llm], kind):
            now = compared.best_with(found, kind)
        yield now
        if _key(now.simulated) >= _key(best.simulated):
            return


def _candidates(
    graph: StageGraph,
    costs: PlanCosts,
    orders: Iterable[ComputeOrder],
    kind: Bubbles,
    *,
    sharding: Gathering,
    evaluations: int,
) -> Iterator[OptimusStep]:
    """Yield the candidates of one kind. Pieces are launched from orders without and with a place
    for them."""
    steps = partial(
        optimus_steps,
        graph,
        costs,
        granularity="coarse" if kind == "coarse" else "fine",
        sharding=sharding,
        evaluations=evaluations,
    )
    between, inside = tee(orders)
    yield from steps(between)
    if kind == "launched":
        yield from steps(inside, inside=True)


_Key = tuple[int, float]
"""How many bytes more than there are a step needs, and how long it takes."""


class _Compared:
    """Candidates that were played through with all costs.

    Attributes:
        best: the best of them.
        found: what that comes from.
        recomputing_shows: whether it is longer than if everything was kept.
    """

    found: OptimusStep
    recomputing_shows: bool

    def __init__(self, costs: PlanCosts, sharding: Gathering, tuner: Tuner | None) -> None:
        self._costs, self._sharding = costs, sharding
        self._tuner = tuner
        self.best: BubbleChoice | None = None
        self._coarse: _Key | None = None
        self._played = 0

    def best_with(self, found: OptimusStep, kind: Bubbles) -> BubbleChoice:
        """The best after one more candidate; of equal ones the last, which are more deliberate, but
        for those that launch."""
        kept, step = self._play(found, kind)
        if kind == "launched" and not kept.plan.launches:
            kind = "fine"  # no piece fits
        key = _key(step)
        self._played += 1
        if kind == "coarse":
            self._coarse = key if self._coarse is None else min(self._coarse, key)
        best = self.best
        # Candidates that launch have to be better than the others.
        if (
            best is None
            or key < _key(best.simulated)
            or (kind != "launched" and key == _key(best.simulated))
        ):
            self.found = found
            self.recomputing_shows = step.makespan_ms > kept.makespan_ms
            made = StepOrder(found.graph, found.order, kept.plan.launches)
            best = BubbleChoice(made, kind, step, inf, 0)
        assert self._coarse is not None  # they come first
        missing, coarse_ms = self._coarse
        if missing and best.simulated.fits:
            coarse_ms = inf
        self.best = replace(best, coarse_ms=coarse_ms, played=self._played)
        return self.best

    def _play(self, found: OptimusStep, kind: Bubbles) -> tuple[SimulatedStep, SimulatedStep]:
        """With everything kept, and as it would run."""
        costs = self._costs
        tuner = self._tuner
        specs = {} if tuner is None else tuner.specs
        early = costs.runs_beside
        plan = lower_plan(found.order, found.graph, specs, self._sharding, reduces_early=early)
        if kind == "launched":
            plan = with_launches(plan, plan_launches(plan, costs))
        book = RuleBook(plan)
        step = simulate(plan, costs, book)
        if tuner is None or step.fits or self._hopeless(step):
            return step, step
        try:
            tuned = tuner.tune(plan, book).plan
        except PlanError:
            return step, step
        return step, simulate(tuned, charged(costs, tuned.recompute, self._choices), book)

    def _hopeless(self, step: SimulatedStep) -> bool:
        """Whether the best step is shorter already, and fits: recomputing only adds time."""
        if self.best is None or not self.best.simulated.fits:
            return False
        return step.makespan_ms > self.best.simulated.makespan_ms

    @cached_property
    def _choices(self) -> dict[int, StageRecompute]:
        assert self._tuner is not None
        return self._tuner.choices_at(self._costs)


def _key(step: SimulatedStep) -> _Key:
    limit = step.costs.memory_limit_bytes
    missing = 0 if limit is None else max(0, max(step.peak_bytes, default=0) - limit)
    return missing, step.makespan_ms


def tensor_ms(graph: StageGraph, costs: PlanCosts, share: float) -> dict[Action, float]:
    """Return the communication time of all actions: of the LLM a share, of encoders their costs."""
    encoders = encoder_stages(graph)
    of_llm = {a: share * ms for a, ms in costs.compute_ms.items() if a.stage not in encoders}
    return {**costs.tensor_ms, **of_llm}
