"""Plans of the steps of a pipeline, on its first rank (PipeWeaver section 7.1).

A process plans the next step while a step trains. It sends every plan that is better than the last
one, so a step gets the best plan so far:

    training process    | step 7 trains      | take plan 8 | step 8 trains ...
    planning process    | search step 8: plan, better plan | search step 9 ...

A search starts with orders of earlier steps (`warm_start`). It ends after its fraction of the step
time, with a provably optimal order, or with the next request. Searched schedules always have a
process. Other schedules get one if planning is slow and enough steps remain.

If no plan arrives in time, or the step has changed (a sample was corrupt), the training process
plans before the step. Static schedules get the same plan in both cases. A search before a step must
be short: default and static orders only, unless no step was measured yet or no process will plan.

The process runs only on idle cores, because training has priority. If it never has a plan in time,
a process with a small fraction of the cores replaces it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median

from torchmm.balance.online_calibration import PredictionSpread
from torchmm.balance.pipeweaver.background.planning_worker import PlanningWorker, plan_synchronously
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest, StepTimings
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget
from torchmm.balance.pipeweaver.schedule_search.step_search import MIN_GAIN
from torchmm.balance.schedules import build_search_budget
from torchmm.balance.section import SearchConfig
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.step_process import Priority, RestartingProcess, StepProcess
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.planner import NextStepMetas

TIMED_STEPS = 5
"""Number of steps whose median time is the planning time of the next step."""
MAX_EXITS = 6
"""Exits of the process, without a plan in between, after which it is not restarted."""
STARVED_STEPS = 10
"""Steps in a row without a plan in time after which a process gets a share of the cores."""

StartPlanning = Callable[[PlanningSetup, Priority], StepProcess[PlannedStep]]


def start_planning(setup: PlanningSetup, priority: Priority = "idle") -> StepProcess[PlannedStep]:
    """Start a planning process."""
    return StepProcess(PlanningWorker(setup), "planning", priority)


class PlanLeader:
    """Source of the plans of the steps of a pipeline.

    Args:
        setup: Constants of the run.
        data_parallel_rank: Rank whose microbatches are planned.
        logger: Logger of this rank.
        steps: Number of steps of the run.
        in_background: Whether a process may plan while the preceding step trains.
        start: Function that starts the process.
    """

    def __init__(
        self,
        setup: PlanningSetup,
        data_parallel_rank: int,
        logger: logging.Logger,
        steps: int,
        *,
        in_background: bool,
        start: StartPlanning = start_planning,
    ) -> None:
        self.setup = setup
        self._data_parallel_rank, self._logger, self._steps = data_parallel_rank, logger, steps
        self._searches = setup.model is not None
        self._spans_s: list[float] = []
        self._spread = PredictionSpread()
        self._requested: PlanRequest | None = None
        self._priority: Priority = "idle"
        self._missed_steps = 0
        """Steps in a row without a plan in time."""
        self._process = RestartingProcess(
            lambda: start(setup, self._priority),
            logger,
            task="planning a step",
            fallback=(
                "the original order is used"
                if self._searches
                else "steps are planned synchronously"
            ),
            final_fallback="each step is planned synchronously, which delays training",
            max_deaths=MAX_EXITS if in_background else 0,
        )
        if in_background and self._searches:
            self._process.restart()

    def plan(
        self,
        step: int,
        metas: Sequence[MicrobatchMeta],
        upcoming: NextStepMetas,
        measured: StepTimings,
    ) -> PlannedStep:
        """Return the plan of a step that begins, and request the plan of the next step.

        Args:
            step: Number of the step.
            metas: Sizes of the microbatches of the step.
            upcoming: As for `Planner.plan`.
            measured: Measured times to plan with.

        Raises:
            PlanError, ValueError: As for `plan_synchronously`.
        """
        current = PlanRequest(step, tuple(metas), measured)
        requested, self._requested = self._requested, None
        planned = self._process.take(step)
        if planned is not None:
            self._missed_steps = 0
        elif self._process.is_running and requested is not None and requested.step == step:
            self._report_miss(requested)
        self._request(step + 1, upcoming, measured)
        if planned is not None and self._matches_step(planned, requested, current):
            return planned
        with self._process.compute_locally(self._steps - step):
            return plan_synchronously(self.setup, current, self._budget(measured))

    def record_step(self, step_ms: float, predicted_ms: float | None, measured_ms: float) -> None:
        """Store times of a step, which limit the planning time and the error of the next one.

        Args:
            step_ms: Time of the step.
            predicted_ms: Predicted time of its plan. None if it is unknown.
            measured_ms: Measured time of its plan.
        """
        if predicted_ms is not None:
            self._spread.observe(predicted_ms, measured_ms)
        self._spans_s = [*self._spans_s, step_ms / 1e3][-TIMED_STEPS:]

    def close(self) -> None:
        """Kill the process."""
        self._process.close()

    def _request(self, step: int, upcoming: NextStepMetas, measured: StepTimings) -> None:
        """Request the plan of a step, if its microbatches are known."""
        if step > self._steps or not self._process.accepts(step):
            return
        metas = upcoming()
        if metas is None:
            return
        fraction = SearchConfig.from_parent(self.setup.config).time_fraction
        seconds = fraction * median(self._spans_s) if self._spans_s else None
        gain = self._spread.min_gain
        min_gain = MIN_GAIN if gain is None else gain
        microbatches = tuple(metas[self._data_parallel_rank])
        self._requested = PlanRequest(step, microbatches, measured, seconds, min_gain)
        self._process.submit(step, self._requested)

    def _report_miss(self, requested: PlanRequest) -> None:
        """Log that there was no plan in time. Replace a process that never has one."""
        if self._searches and not requested.rates:
            return  # The search may have had too little time, because no step was measured.
        self._missed_steps += 1
        fallback = "the original order is used" if self._searches else "it is planned synchronously"
        self._logger.info("step %d: the plan is late; %s", requested.step, fallback)
        if self._missed_steps % STARVED_STEPS:
            return
        self._logger.warning(
            "no plan was ready in time for %d steps, because the planning process has no "
            "free core, or hangs. It is restarted with a fraction of the cores. If this "
            "continues, use fewer threads or data workers per rank, or set "
            "parallel.search.background = false",
            self._missed_steps,
        )
        self._priority = "low"
        self._process.restart()

    def _matches_step(
        self, planned: PlannedStep, requested: PlanRequest | None, current: PlanRequest
    ) -> bool:
        """Return True if the process planned the step as it is now."""
        if requested is None or requested.microbatches != current.microbatches:
            fallback = "the original order is used" if self._searches else "it is planned again"
            self._logger.info(
                "step %d: the samples differ from the planned samples; %s", current.step, fallback
            )
            return False
        # A search uses the rates that were known at the time of the request.
        if not self._searches and requested.rates != current.rates:
            return False
        if not planned.finished:
            self._logger.info(
                ("step %d: the time limit of planning is reached; the best of %d schedules is "
                "used"),
                current.step, planned.statistics["planner_evaluations"],
            )  # fmt: skip
        return True

    def _budget(self, measured: StepTimings) -> SearchBudget | None:
        """Return the budget of a search before a step. None for a search without time."""
        if measured.rates and not self._process.is_lost:
            return None  # A full search is worth its time only before the first step.
        return build_search_budget(SearchConfig.from_parent(self.setup.config))
