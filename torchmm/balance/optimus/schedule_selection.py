"""Choice of an Optimus schedule for a step: simulate all candidates and run the fastest.

The bubble scheduler makes two simplifications: pipeline messages never wait for each other, and all
planned pieces fit into LLM actions. A fine schedule can therefore be slower than a coarse schedule.
For this reason, each candidate is lowered and simulated with all costs, including transfers,
all-gathers and reductions:

    coarse, fine, launched (fine, with pieces in TP bubbles)   x   LLM schedules (`llm_schedules`)

Coarse candidates come first, because they need the least planning time. Launched candidates
(`launches`) are selected only if they are faster than all other candidates.

Encoders run ahead of the LLM, and backward passes that fit into no bubble run after the LLM. Their
activations are saved until then. If a candidate exceeds the available memory, activation
checkpointing is tuned (`activation_checkpointing.tuning`): tasks whose activations are saved
longest recompute them, selected per task. Recomputation lengthens backward passes, so encoders of
the best candidate are placed again with these times. Steps that fit without recomputation are
unchanged.

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

from torchmm.balance.optimus.action_order import OptimusStep, optimus_steps
from torchmm.balance.optimus.bubble_scheduler import Granularity
from torchmm.balance.optimus.launch_planning import plan_launches
from torchmm.balance.optimus.launches import add_launches
from torchmm.balance.optimus.llm_schedules import llm_schedules
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    StageRecompute,
    add_recompute_costs,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuner
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.common.errors import PlanError
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ComputeOrder, EncoderLaunch, UnshardMode
from torchmm.pipelining.schedules.colocated import encoder_stages

MAX_ROUNDS = 3
"""Maximum number of times that encoders are placed again with the times of recomputed layers."""

BubbleMode = Literal["coarse", "fine", "launched"]
"""Position of encoder actions: before and after the LLM; also between its actions; also inside
them."""


@dataclass(frozen=True)
class StepOrder:
    """Action order of a step."""

    graph: StageGraph
    """Tasks, with the replica that runs each task."""
    order: ComputeOrder
    launches: Mapping[Action, EncoderLaunch] = field(default_factory=dict)
    """Encoder pieces that LLM actions launch (`add_launches`)."""


@dataclass(frozen=True)
class SelectedSchedule:
    """Best of the candidates that have been simulated.

    Attributes:
        step: Action order of the candidate.
        mode: Kind of the candidate.
        simulated: Simulated step, with recomputation if it does not fit otherwise.
        coarse_ms: Shortest step of a coarse candidate. Infinite if only other candidates fit.
        simulated_count: Number of simulated candidates.
    """

    step: StepOrder
    mode: BubbleMode
    simulated: SimulatedStep
    coarse_ms: float
    simulated_count: int


def select_schedules(
    graph: StageGraph,
    costs: PlanCosts,
    *,
    llm_schedule: str,
    granularity: Granularity,
    sharding: UnshardMode,
    tp_comm_fraction: float = 0.0,
    evaluations: int = 256,
    tuner: LayerTuner | None = None,
) -> Iterator[SelectedSchedule]:
    """Yield the best candidate after each simulated candidate.

    Candidates that fit into memory are better than others. Among others, the lowest memory is best.

    Args:
        graph: Tasks of a colocated layout.
        costs: Costs of the graph.
        llm_schedule: LLM schedule as in `optimus`. "searched" includes the candidates without a
            search.
        granularity: "coarse" excludes all other candidates.
        sharding: Collectives with which the plan will be lowered.
        tp_comm_fraction: Fraction of LLM actions that is tensor-parallel communication, in which
            encoder pieces may run. 0 excludes launched candidates.
        evaluations: Evaluations as in `optimus`.
        tuner: Tuner of the step. Candidates that do not fit are tuned before they are compared.

    Raises:
        SimulationError: A cost is missing or invalid.
        ValueError: The layout is not colocated, or does not match the LLM schedule.
    """
    kinds: Sequence[BubbleMode] = ("coarse", "fine") if granularity == "fine" else ("coarse",)
    if tp_comm_fraction:
        kinds = (*kinds, "launched")
        costs = replace(costs, tp_comm_ms=tp_comm_times_ms(graph, costs, tp_comm_fraction))
    if tuner is not None:
        costs = replace(costs, memory_limit_bytes=tuner.tuning.memory_limit_bytes)
    compared = _CandidateComparison(costs, sharding, tuner)
    steps = partial(_candidates, graph, sharding=sharding, evaluations=evaluations)
    orders = tee(llm_schedules(graph, costs, llm_schedule, evaluations), len(kinds))
    for kind, kind_orders in zip(kinds, orders, strict=True):
        for candidate in steps(costs, kind_orders, kind):
            yield compared.add_candidate(candidate, kind)
    for _ in range(MAX_ROUNDS):
        best = compared.best
        if best is None or not compared.recompute_adds_time:
            return
        llm = tuple(rank.actions for rank in compared.best_step.schedule.llm)
        kind = best.mode
        longer = best.simulated.costs
        for candidate in steps(longer, [llm], kind):
            now = compared.add_candidate(candidate, kind)
        yield now
        if _score(now.simulated) >= _score(best.simulated):
            return


def _candidates(
    graph: StageGraph,
    costs: PlanCosts,
    orders: Iterable[ComputeOrder],
    kind: BubbleMode,
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
    without_tp_bubbles, with_tp_bubbles = tee(orders)
    yield from steps(without_tp_bubbles)
    if kind == "launched":
        yield from steps(with_tp_bubbles, use_tp_bubbles=True)


_Score = tuple[int, float]
"""Missing memory in bytes, and duration of a step in ms."""


class _CandidateComparison:
    """Candidates that have been simulated with all costs.

    Attributes:
        best: Best candidate.
        best_step: Schedule of the best candidate.
        recompute_adds_time: Whether recomputation makes the best candidate slower.
    """

    best_step: OptimusStep
    recompute_adds_time: bool

    def __init__(self, costs: PlanCosts, sharding: UnshardMode, tuner: LayerTuner | None) -> None:
        self._costs, self._sharding = costs, sharding
        self._tuner = tuner
        self.best: SelectedSchedule | None = None
        self._coarse: _Score | None = None
        self._simulated_count = 0

    def add_candidate(self, candidate: OptimusStep, kind: BubbleMode) -> SelectedSchedule:
        """Return the best candidate after one more candidate.

        Of equal candidates, the later one is best, except for launched candidates.
        """
        unrecomputed, step = self._simulate(candidate, kind)
        if kind == "launched" and not unrecomputed.plan.launches:
            kind = "fine"  # no piece fits into a TP bubble
        key = _score(step)
        self._simulated_count += 1
        if kind == "coarse":
            self._coarse = key if self._coarse is None else min(self._coarse, key)
        best = self.best
        # Launched candidates must be strictly better.
        if (
            best is None
            or key < _score(best.simulated)
            or (kind != "launched" and key == _score(best.simulated))
        ):
            self.best_step = candidate
            self.recompute_adds_time = step.makespan_ms > unrecomputed.makespan_ms
            step_order = StepOrder(candidate.graph, candidate.order, unrecomputed.plan.launches)
            best = SelectedSchedule(step_order, kind, step, inf, 0)
        assert self._coarse is not None  # coarse candidates come first
        missing, coarse_ms = self._coarse
        if missing and best.simulated.fits:
            coarse_ms = inf
        self.best = replace(best, coarse_ms=coarse_ms, simulated_count=self._simulated_count)
        return self.best

    def _simulate(
        self, candidate: OptimusStep, kind: BubbleMode
    ) -> tuple[SimulatedStep, SimulatedStep]:
        """Return the simulated step without recomputation, and with it if required."""
        costs = self._costs
        tuner = self._tuner
        specs = {} if tuner is None else tuner.specs
        early = costs.overlaps_communication
        plan = lower_plan(
            candidate.order, candidate.graph, specs, self._sharding, reduces_early=early
        )
        if kind == "launched":
            plan = add_launches(plan, plan_launches(plan, costs))
        book = PlanRules(plan)
        step = simulate(plan, costs, book)
        if tuner is None or step.fits or self._cannot_be_best(step):
            return step, step
        try:
            tuned = tuner.tune(plan, book).plan
        except PlanError:
            return step, step
        return step, simulate(
            tuned, add_recompute_costs(costs, tuned.recompute, self._choices), book
        )

    def _cannot_be_best(self, step: SimulatedStep) -> bool:
        """Return True if recomputation in a candidate cannot make it the best.

        The best candidate fits and is already faster than this candidate without recomputation.
        """
        if self.best is None or not self.best.simulated.fits:
            return False
        return step.makespan_ms > self.best.simulated.makespan_ms

    @cached_property
    def _choices(self) -> dict[int, StageRecompute]:
        assert self._tuner is not None
        return self._tuner.scaled_choices(self._costs)


def _score(step: SimulatedStep) -> _Score:
    limit = step.costs.memory_limit_bytes
    missing = 0 if limit is None else max(0, max(step.peak_bytes, default=0) - limit)
    return missing, step.makespan_ms


def tp_comm_times_ms(graph: StageGraph, costs: PlanCosts, share: float) -> dict[Action, float]:
    """Return the communication time of all actions.

    LLM actions use a fraction of their duration, and encoder actions use the costs.
    """
    encoders = encoder_stages(graph)
    llm_ms = {a: share * ms for a, ms in costs.compute_ms.items() if a.stage not in encoders}
    return {**costs.tp_comm_ms, **llm_ms}
