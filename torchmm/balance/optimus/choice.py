"""Choice of an Optimus schedule for a step: simulate all candidates and run the fastest.

The bubble scheduler makes two simplifications: pipeline messages never wait for each other, and all
planned pieces fit into LLM actions. A fine schedule can therefore be slower than a coarse schedule.
For this reason, each candidate is lowered and simulated with all costs, including transfers,
all-gathers and reductions:

    coarse, fine, launched (fine, with pieces in TP bubbles)   x   LLM schedules (`llm_orders`)

Coarse candidates come first, because they need the least planning time. Launched candidates
(`launches`) are selected only if they are faster than all other candidates.

Encoders run ahead of the LLM, and backward passes that fit into no bubble run after the LLM. Their
activations are saved until then. If a candidate exceeds the available memory, activation
checkpointing is tuned (`recomputation.tuning`): tasks whose activations are saved longest recompute
them, selected per task. Recomputation lengthens backward passes, so encoders of the best candidate
are placed again with these times. Steps that fit without recomputation are unchanged.

A limit on forward passes ahead of the LLM cannot replace this: the set of tasks that are in memory
at the same time is known only after all tasks are placed.
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
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder, EncoderLaunch, UnshardMode
from torchmm.pipelining.schedules.colocated import encoder_stages

ROUNDS = 3
"""Maximum number of times that encoders are placed again with the times of recomputed layers."""

Bubbles = Literal["coarse", "fine", "launched"]
"""Position of encoder actions: before and after the LLM; also between its actions; also inside
them."""


@dataclass(frozen=True)
class StepOrder:
    """Action order of a step."""

    graph: StageGraph
    """Tasks, with the replica that runs each task."""
    order: ComputeOrder
    launches: Mapping[Action, EncoderLaunch] = field(default_factory=dict)
    """Encoder pieces that LLM actions launch (`with_launches`)."""


@dataclass(frozen=True)
class BubbleChoice:
    """Best of the candidates that have been simulated.

    Attributes:
        step: Action order of the candidate.
        bubbles: Kind of the candidate.
        simulated: Simulated step, with recomputation if it does not fit otherwise.
        coarse_ms: Shortest step of a coarse candidate. Infinite if only other candidates fit.
        played: Number of simulated candidates.
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
    sharding: UnshardMode,
    tensor_share: float = 0.0,
    evaluations: int = 256,
    tuner: Tuner | None = None,
) -> Iterator[BubbleChoice]:
    """Yield the best candidate after each simulated candidate.

    Candidates that fit into memory are better than others. Among others, the lowest memory is best.

    Args:
        graph: Tasks of a colocated layout.
        costs: Costs of the graph.
        llm_schedule: LLM schedule as in `optimus`. "searched" includes the candidates without a
            search.
        granularity: "coarse" excludes all other candidates.
        sharding: Collectives with which the plan will be lowered.
        tensor_share: Fraction of LLM actions that is tensor-parallel communication, in which
            encoder pieces may run. 0 excludes launched candidates.
        evaluations: Evaluations as in `optimus`.
        tuner: Tuner of the step. Candidates that do not fit are tuned before they are compared.

    Raises:
        SimulationError: A cost is missing or invalid.
        ValueError: The layout is not colocated, or does not match the LLM schedule.
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
    for kind, kind_orders in zip(kinds, orders, strict=True):
        for candidate in steps(costs, kind_orders, kind):
            yield compared.best_with(candidate, kind)
    for _ in range(ROUNDS):
        best = compared.best
        if best is None or not compared.recomputing_shows:
            return
        llm = tuple(rank.actions for rank in compared.found.schedule.llm)
        kind = best.bubbles
        longer = best.simulated.costs
        for candidate in steps(longer, [llm], kind):
            now = compared.best_with(candidate, kind)
        yield now
        if _key(now.simulated) >= _key(best.simulated):
            return


def _candidates(
    graph: StageGraph,
    costs: PlanCosts,
    orders: Iterable[ComputeOrder],
    kind: Bubbles,
    *,
    sharding: UnshardMode,
    evaluations: int,
) -> Iterator[OptimusStep]:
    """Yield the candidates of one kind.

    Launched candidates come from schedules without and with TP bubbles.
    """
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
"""Missing memory in bytes, and duration of a step in ms."""


class _Compared:
    """Candidates that have been simulated with all costs.

    Attributes:
        best: Best candidate.
        found: Schedule of the best candidate.
        recomputing_shows: Whether recomputation makes the best candidate slower.
    """

    found: OptimusStep
    recomputing_shows: bool

    def __init__(self, costs: PlanCosts, sharding: UnshardMode, tuner: Tuner | None) -> None:
        self._costs, self._sharding = costs, sharding
        self._tuner = tuner
        self.best: BubbleChoice | None = None
        self._coarse: _Key | None = None
        self._played = 0

    def best_with(self, found: OptimusStep, kind: Bubbles) -> BubbleChoice:
        """Return the best candidate after one more candidate.

        Of equal candidates, the later one is best, except for launched candidates.
        """
        unrecomputed, step = self._play(found, kind)
        if kind == "launched" and not unrecomputed.plan.launches:
            kind = "fine"  # no piece fits into a TP bubble
        key = _key(step)
        self._played += 1
        if kind == "coarse":
            self._coarse = key if self._coarse is None else min(self._coarse, key)
        best = self.best
        # Launched candidates must be strictly better.
        if (
            best is None
            or key < _key(best.simulated)
            or (kind != "launched" and key == _key(best.simulated))
        ):
            self.found = found
            self.recomputing_shows = step.makespan_ms > unrecomputed.makespan_ms
            step_order = StepOrder(found.graph, found.order, unrecomputed.plan.launches)
            best = BubbleChoice(step_order, kind, step, inf, 0)
        assert self._coarse is not None  # coarse candidates come first
        missing, coarse_ms = self._coarse
        if missing and best.simulated.fits:
            coarse_ms = inf
        self.best = replace(best, coarse_ms=coarse_ms, played=self._played)
        return self.best

    def _play(self, found: OptimusStep, kind: Bubbles) -> tuple[SimulatedStep, SimulatedStep]:
        """Return the simulated step without recomputation, and with recomputation if it is
        required."""
        costs = self._costs
        tuner = self._tuner
        specs = {} if tuner is None else tuner.specs
        early = costs.runs_beside
        plan = lower_plan(found.order, found.graph, specs, self._sharding, reduces_early=early)
        if kind == "launched":
            plan = with_launches(plan, plan_launches(plan, costs))
        book = PlanRules(plan)
        step = simulate(plan, costs, book)
        if tuner is None or step.fits or self._hopeless(step):
            return step, step
        try:
            tuned = tuner.tune(plan, book).plan
        except PlanError:
            return step, step
        return step, simulate(tuned, charged(costs, tuned.recompute, self._choices), book)

    def _hopeless(self, step: SimulatedStep) -> bool:
        """Return True if recomputation in a candidate cannot make it the best.

        The best candidate fits and is already faster than this candidate without recomputation.
        """
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
    """Return the communication time of all actions.

    LLM actions use a fraction of their duration, and encoder actions use the costs.
    """
    encoders = encoder_stages(graph)
    llm_ms = {a: share * ms for a, ms in costs.compute_ms.items() if a.stage not in encoders}
    return {**costs.tensor_ms, **llm_ms}
