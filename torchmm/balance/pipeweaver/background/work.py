"""How the plan of a step is made from a request: beside training, or before the step begins.

    plan_until_closed(connection, setup, directory)     what the process does
    plan_before_step(setup, request, budget)            the same step where there is no time

Where the schedule alone decides, both give the same plan, number for number: it follows from the
microbatches' sizes, and from nothing that is known only when the step begins. A searched one is as
good as the time it had: natural and static orders first, then what the search finds. All are whole:
lowered, validated and, where layers are tuned, with what they recompute.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path

from torchmm.balance.compiled import Int32s
from torchmm.balance.optimus.choice import StepOrder
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.pipeweaver.order_search.remembered import RememberedOrders
from torchmm.balance.pipeweaver.order_search.search import Budget
from torchmm.balance.pipeweaver.recomputation.tuning import Tuner
from torchmm.balance.schedules import (
    Improvements,
    PlannedOrder,
    Search,
    improve_order,
    plan_by_costs,
)
from torchmm.balance.step_costs import PlanCosts
from torchmm.balance.step_plans import plan_costed_step, searched_costs
from torchmm.common.errors import PlanError
from torchmm.common.files import Handover
from torchmm.common.processes import ignore_signals, without_collection, yield_to_others
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.numbers import encode_plan
from torchmm.pipelining.plan.plan import MessageSpecs
from torchmm.pipelining.run.messages import message_specs
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.step import step_graph

LEAVE_EVERY_S = 0.05
"""Improvements that come faster are left together."""
SEARCHING_SHARE = 0.8
"""Least share of the time that is spent searching rather than making plans of improvements."""


class StepWork:
    """What is needed to plan one step."""

    def __init__(self, setup: PlanningSetup, request: PlanRequest) -> None:
        self.setup, self.request = setup, request
        self._begin_s = time.perf_counter()
        self.making_s = 0.0
        """How long it took to make the last plan of an order."""

    @property
    def elapsed_s(self) -> float:
        """Since the request came."""
        return time.perf_counter() - self._begin_s

    @cached_property
    def graph(self) -> StageGraph:
        """The step's tasks."""
        setup = self.setup
        return step_graph(setup.layout, setup.config, self.request.microbatches, setup.sharding)

    @cached_property
    def costs(self) -> PlanCosts:
        """What orders are searched with."""
        setup = self.setup
        request = self.request
        assert setup.model is not None, "nothing is searched"
        return searched_costs(
            self.graph,
            setup.modules,
            request.microbatches,
            setup.model,
            layerwise=setup.sharding == "layer",
            rates=request.rates,
            fits=request.measured.fits,
            between_ms=request.measured.between_ms,
        )

    @cached_property
    def tuner(self) -> Tuner | None:
        """Of the step's layers."""
        setup = self.setup
        metas = self.request.microbatches
        if setup.tuning is None:
            return None
        return Tuner(
            self.graph, setup.modules, metas, setup.tuning, specs=self.message_specs(self.graph)
        )

    def message_specs(self, graph: StageGraph) -> MessageSpecs:
        """Of whole microbatches, whatever part of their tokens a rank has."""
        setup = self.setup
        metas = self.request.microbatches
        return message_specs(graph, setup.sizes, metas, setup.dtype) if setup.sizes else {}

    def numbers(self, step: StepOrder | None) -> Int32s:
        """The plan of an order, checked; None: the schedule's.

        Raises:
            PlanError: the schedule cannot run the step, or it does not fit into memory.
        """
        setup = self.setup
        begin_s = time.perf_counter()
        plan = plan_costed_step(
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
        found = encode_plan(plan)
        self.making_s = time.perf_counter() - begin_s
        return found

    def planned(
        self, numbers: Int32s, best: PlannedOrder | None = None, *, finished: bool = True
    ) -> PlannedStep:
        """Return the plan of an order, or of the schedule if None, with its statistics."""
        statistics = dict(best.statistics) if best else {}
        if not self.request.rates:
            statistics.pop("predicted_ms", None)  # measured times are still unknown
        statistics["planner_ms"] = self.elapsed_s * 1e3
        return PlannedStep(self.request.step, numbers, statistics, finished)


@without_collection()
def plan_before_step(
    setup: PlanningSetup, request: PlanRequest, budget: Budget | None = None
) -> PlannedStep:
    """The plan of a step that nobody has planned.

    Args:
        budget: of a search; None: ranks wait, so nothing is tried but the natural order and those
            of static planners, all of them with layers as they are, which takes a tenth of the
            time; of Optimus the first coarse order that is not refused.

    Raises:
        PlanError: as of `plan_costed_step`.
        ValueError: nothing fits into memory.
    """
    work = StepWork(setup, request)
    if setup.model is None:
        return work.planned(work.numbers(None))
    judges = budget is not None or setup.config.schedule == "optimus"
    tuner = work.tuner if judges else None
    given = budget or Budget(evaluations=1)
    best = plan_by_costs(setup.config, work.graph, work.costs, setup.sharding, given, tuner)
    # Predictions of these orders are not compared with measured steps, so they are not reported.
    statistics = {**best.statistics, "predicted_ms": None}
    return work.planned(work.numbers(best.step), replace(best, statistics=statistics))


def plan_until_closed(connection: Connection, setup: PlanningSetup, directory: Path) -> None:
    """What the process does: plans the newest request, until the other side is closed."""
    ignore_signals()  # launchers send them to whole groups; the training process ends this one
    if setup.has_low_priority:
        yield_to_others(setup.idle)
    gc.freeze()  # of what it imports nothing is garbage: looking there took a sixth of planning
    plans = plans_in(directory)
    remembered = RememberedOrders()
    try:
        while True:
            request = connection.recv()
            while connection.poll():
                request = connection.recv()
            plan_request(connection, plans, setup, request, remembered)
    except (EOFError, ConnectionError):
        return
    except (OSError, ValueError, PlanError) as error:
        with suppress(ConnectionError):
            connection.send(f"the planning process cannot plan a step: {error}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # the other side may have been killed


def plans_in(directory: Path) -> Handover:
    """Where the process leaves what it has."""
    return Handover(directory / "plan.npz")


@without_collection()
def plan_request(
    connection: Connection,
    plans: Handover,
    setup: PlanningSetup,
    request: PlanRequest,
    remembered: RememberedOrders,
) -> None:
    """Plans one step and leaves what it finds, until a newer request comes."""
    work = StepWork(setup, request)
    if setup.model is None:
        plans.put(work.planned(work.numbers(None)).arrays())
        connection.send(request.step)
        return
    planning = _Planning(connection, plans, work)
    search = Search(request.least_gain, work.tuner, remembered, setup.workers)
    best = improve_order(setup.config, work.graph, work.costs, setup.sharding, planning, search)
    if not connection.poll():
        planning.leave(best, finished=True)
        connection.send(request.step)


class _Planning(Improvements):
    """Leaves a step's best plans."""

    def __init__(self, connection: Connection, plans: Handover, work: StepWork) -> None:
        self._connection, self._plans = connection, plans
        self._work = work
        self._left_ms, self._left_s = inf, 0.0
        self._step: StepOrder | None = None
        self._made: Int32s | None = None

    def seconds_left(self) -> float | None:
        """For the search: what plans take to be made comes on top."""
        work = self._work
        if work.request.seconds is None:
            return None
        return max(1e-3, work.request.seconds - work.elapsed_s - work.making_s)

    def seen(self, best_ms: float, make: Callable[[], PlannedOrder]) -> bool:
        """Whether the search may go on."""
        making_s = self._work.making_s
        pause_s = max(LEAVE_EVERY_S, making_s * SEARCHING_SHARE / (1 - SEARCHING_SHARE))
        if best_ms < self._left_ms and self._work.elapsed_s - self._left_s > pause_s:
            self.leave(make())
            self._left_ms = best_ms
        return not self._connection.poll()

    def leave(self, best: PlannedOrder, *, finished: bool = False) -> None:
        if self._made is None or best.step != self._step:
            self._made = self._work.numbers(best.step)
            self._step = best.step
        self._left_ms = best.predicted_ms
        self._left_s = self._work.elapsed_s
        self._plans.put(self._work.planned(self._made, best, finished=finished).arrays())
