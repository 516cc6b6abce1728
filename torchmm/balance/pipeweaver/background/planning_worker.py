"""Planning of a step from a request.

    PlanningWorker(setup)                             in the planning process, while a step trains
    plan_synchronously(setup, request, budget)    in the training process, before the step

Both return the same plan of a static schedule, because it depends only on the sizes of the
microbatches. A searched plan depends on its planning time: default and static orders are compared
first, then the orders of the search. All plans are complete: lowered, validated and, if layers are
tuned, with the layers that recompute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import inf

from torchmm.balance.numba_utils import Int32s
from torchmm.balance.optimus.schedule_selection import StepOrder
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuner
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget
from torchmm.balance.pipeweaver.schedule_search.warm_start import WarmStart
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.schedules import (
    BackgroundSearch,
    PlanCallback,
    PlannedOrder,
    improve_order,
    plan_with_costs,
)
from torchmm.balance.step_plans import compute_search_costs, plan_step_with_costs
from torchmm.common.errors import PlanError
from torchmm.common.processes import gc_disabled
from torchmm.common.step_process import RequestStatus, StepProcessError
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import MessageSpecs
from torchmm.pipelining.plan.serialization import encode_plan
from torchmm.pipelining.run.messages import message_specs
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.step import step_graph

MIN_SEND_INTERVAL_S = 0.05
"""Minimum time between plans of a search that are sent."""
MIN_SEARCH_FRACTION = 0.8
"""Minimum fraction of the time that is spent searching rather than making plans of orders."""


class StepContext:
    """Tasks, costs and plans of one step. Most of them are computed on first access."""

    def __init__(self, setup: PlanningSetup, request: PlanRequest) -> None:
        self.setup, self.request = setup, request
        self._begin_s = time.perf_counter()
        self.plan_build_s = 0.0
        """Time of making the last plan of an order."""

    @property
    def elapsed_s(self) -> float:
        """Time since the request arrived."""
        return time.perf_counter() - self._begin_s

    @cached_property
    def graph(self) -> StageGraph:
        """Tasks of the step."""
        setup = self.setup
        return step_graph(setup.layout, setup.config, self.request.microbatches, setup.sharding)

    @cached_property
    def costs(self) -> PlanCosts:
        """Costs of the schedule search."""
        setup = self.setup
        request = self.request
        assert setup.model is not None, "no search is required"
        return compute_search_costs(
            self.graph,
            setup.modules,
            request.microbatches,
            setup.model,
            layerwise=setup.sharding == "layer",
            rates=request.rates,
            fits=request.measured.fits,
            rank_pair_ms=request.measured.rank_pair_ms,
        )

    @cached_property
    def tuner(self) -> LayerTuner | None:
        """Selection of the layers that recompute, if layers are tuned."""
        setup = self.setup
        metas = self.request.microbatches
        if setup.tuning is None:
            return None
        return LayerTuner(
            self.graph, setup.modules, metas, setup.tuning, specs=self.message_specs(self.graph)
        )

    def message_specs(self, graph: StageGraph) -> MessageSpecs:
        """Return the tensors of messages with all tokens of a microbatch."""
        setup = self.setup
        metas = self.request.microbatches
        return message_specs(graph, setup.sizes, metas, setup.dtype) if setup.sizes else {}

    def encoded_plan(self, step: StepOrder | None) -> Int32s:
        """Return the encoded plan of an order, or of the schedule if None.

        Raises:
            PlanError: The schedule cannot run the step, or it does not fit into memory.
        """
        setup = self.setup
        begin_s = time.perf_counter()
        plan = plan_step_with_costs(
            setup.layout,
            setup.config,
            setup.modules,
            self.request.microbatches,
            specs=self.message_specs,
            sharding=setup.sharding,
            factors=self.request.rates or None,
            search=None if step is None else lambda graph, durations: step,
            reduces_early=setup.reduces_early,
            tuning=setup.tuning,
        )
        encoded = encode_plan(plan)
        self.plan_build_s = time.perf_counter() - begin_s
        return encoded

    def build_planned_step(
        self, numbers: Int32s, best: PlannedOrder | None = None, *, finished: bool = True
    ) -> PlannedStep:
        """Return the plan of an order, or of the schedule if None, with its statistics."""
        statistics = dict(best.statistics) if best else {}
        if not self.request.rates:
            statistics.pop("predicted_step_ms", None)  # measured times are still unknown
        statistics["planner_ms"] = self.elapsed_s * 1e3
        return PlannedStep(self.request.step, numbers, statistics, finished)


@gc_disabled()
def plan_synchronously(
    setup: PlanningSetup, request: PlanRequest, budget: SearchBudget | None = None
) -> PlannedStep:
    """Return the plan of a step that is not planned yet.

    Args:
        setup: Constants of the run.
        request: Step to plan.
        budget: Limit of a search. If None, only default and static orders are compared without
            tuned layers, which takes a tenth of the time, because all ranks wait. Optimus uses the
            first coarse order that fits.

    Raises:
        PlanError: As for `plan_step_with_costs`.
        ValueError: No order fits into memory.
    """
    work = StepContext(setup, request)
    if setup.model is None:
        return work.build_planned_step(work.encoded_plan(None))
    uses_tuner = budget is not None or setup.config.schedule == "optimus"
    tuner = work.tuner if uses_tuner else None
    limits = budget or SearchBudget(evaluations=1)
    best = plan_with_costs(setup.config, work.graph, work.costs, setup.sharding, limits, tuner)
    # Predictions of these orders are not compared with measured steps, so they are not reported.
    statistics = {**best.statistics, "predicted_step_ms": None}
    return work.build_planned_step(
        work.encoded_plan(best.step), replace(best, statistics=statistics)
    )


class PlanningWorker:
    """Work of the planning process, which plans the steps of a run. See `StepProcess`."""

    def __init__(self, setup: PlanningSetup) -> None:
        self._setup = setup
        self._warm_start = WarmStart()

    @gc_disabled()
    def __call__(
        self, request: PlanRequest, progress: RequestStatus
    ) -> PlannedStep | StepProcessError | None:
        """Return the plan of a step. Send improved plans during a search."""
        setup = self._setup
        try:
            work = StepContext(setup, request)
            if setup.model is None:
                return work.build_planned_step(work.encoded_plan(None))
            callback = _PlanSender(progress, work)
            search = BackgroundSearch(request.min_gain, work.tuner, self._warm_start, setup.workers)
            best = improve_order(
                setup.config, work.graph, work.costs, setup.sharding, callback, search
            )
            return None if progress.is_superseded() else callback.plan(best, finished=True)
        except (OSError, ValueError, PlanError) as error:
            return StepProcessError(f"the planning process cannot plan a step: {error}")


class _PlanSender(PlanCallback):
    """Sender of the plans of the best orders of a search."""

    def __init__(self, progress: RequestStatus, work: StepContext) -> None:
        self._progress, self._work = progress, work
        self._sent_ms, self._sent_s = inf, 0.0
        self._step: StepOrder | None = None
        self._made: Int32s | None = None

    def remaining_s(self) -> float | None:
        """Return the time left for the search. Making the plan takes additional time."""
        work = self._work
        if work.request.seconds is None:
            return None
        return max(1e-3, work.request.seconds - work.elapsed_s - work.plan_build_s)

    def on_improvement(self, best_ms: float, make: Callable[[], PlannedOrder]) -> bool:
        """Send the best order if there was enough time since the last one.

        Returns False if the search should stop.
        """
        plan_build_s = self._work.plan_build_s
        pause_s = max(
            MIN_SEND_INTERVAL_S, plan_build_s * MIN_SEARCH_FRACTION / (1 - MIN_SEARCH_FRACTION)
        )
        if best_ms < self._sent_ms and self._work.elapsed_s - self._sent_s > pause_s:
            self.on_plan(make())
            self._sent_ms = best_ms
        return not self._progress.is_superseded()

    def on_plan(self, best: PlannedOrder) -> None:
        """Send the plan of an order."""
        self._progress.send_preliminary(self.plan(best, finished=False))

    def plan(self, best: PlannedOrder, *, finished: bool) -> PlannedStep:
        """Return the plan of an order."""
        if self._made is None or best.step != self._step:
            self._made = self._work.encoded_plan(best.step)
            self._step = best.step
        self._sent_ms = best.predicted_ms
        self._sent_s = self._work.elapsed_s
        return self._work.build_planned_step(self._made, best, finished=finished)
