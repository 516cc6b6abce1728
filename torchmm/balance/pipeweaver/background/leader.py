"""Where the plan of a step comes from, on the first rank of its pipeline.

A process makes it while the step before trains (`torchmm.balance.pipeweaver.background`); where
there is none in time, or the step has become another one (a sample turned out corrupt), it is made
here before the step begins. Searched orders always have such a process, schedules once it is worth
one (`StepWork`).

What a schedule says is the same wherever it is planned, so nothing depends on who was faster. A
search before a step has to be short: natural order and static ones, unless no step was measured
yet, or no process is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import median

from torchmm.balance.pipeweaver.background.process import KeptPlanning, PlanningProcess
from torchmm.balance.pipeweaver.background.requests import (
    Measured,
    PlanningSetup,
    PlanRequest,
)
from torchmm.balance.pipeweaver.background.work import plan_before_step
from torchmm.balance.pipeweaver.order_search.best_order import LEAST_GAIN
from torchmm.balance.pipeweaver.order_search.search import Budget
from torchmm.balance.rates import Spread
from torchmm.balance.schedules import search_budget
from torchmm.balance.section import SearchConfig
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.processes import StepWork
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.planner import Upcoming

REMEMBERED = 5
"""Steps whose median time is the next one's budget."""


class PlanLeader:
    """Has the plans of a pipeline made.

    Args:
        setup: of the run.
        share: data-parallel rank.
        steps: of the run.
        beside: whether a process may plan beside training.
        start: makes it.
    """

    def __init__(
        self,
        setup: PlanningSetup,
        share: int,
        logger: logging.Logger,
        steps: int,
        *,
        beside: bool,
        start: Callable[[PlanningSetup], PlanningProcess] = PlanningProcess,
    ) -> None:
        self.setup = setup
        self._share, self._logger, self._steps = share, logger, steps
        self._beside, self._start = beside, start
        self._searches = setup.model is not None
        self._spans_s: list[float] = []
        self._spread = Spread()
        self._asked: PlanRequest | None = None
        self._planning = StepWork()
        self._process: KeptPlanning | None = None
        if beside and self._searches:
            self._process = KeptPlanning(setup, start, logger)

    def plan(
        self,
        step: int,
        metas: Sequence[MicrobatchMeta],
        upcoming: Upcoming,
        measured: Measured,
    ) -> PlannedStep:
        """The plan of the step that begins; lets the process go on with the next one.

        Args:
            metas: of the step's microbatches, as they have become.
            measured: what to plan with.

        Raises:
            PlanError, ValueError: as of `plan_before_step`.
        """
        own = PlanRequest(step, tuple(metas), measured)
        if self._process is not None:
            asked, self._asked = self._asked, None
            planned = self._process.take(step)
            self._submit(self._process, step + 1, upcoming, measured)
            if planned is not None and self._fits(planned, asked, own):
                return planned
        with self._planning.timed():
            planned = plan_before_step(self.setup, own, self._budget(measured))
        self._consider_a_process()
        return planned

    def remember(self, step_ms: float, predicted_ms: float | None, measured_ms: float) -> None:
        """How long a step took: so long may the next one be planned. And how long its plan was
        predicted to take and took: so exact is the next prediction."""
        if predicted_ms is not None:
            self._spread.observe(predicted_ms, measured_ms)
        self._spans_s = [*self._spans_s, step_ms / 1e3][-REMEMBERED:]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()

    def _submit(
        self,
        process: KeptPlanning,
        step: int,
        upcoming: Upcoming,
        measured: Measured,
    ) -> None:
        metas = upcoming() if step <= self._steps else None
        if metas is None:
            return
        share_s = SearchConfig.of(self.setup.config).time_share
        seconds = share_s * median(self._spans_s) if self._spans_s else None
        gain = self._spread.least_gain
        least_gain = LEAST_GAIN if gain is None else gain
        self._asked = PlanRequest(step, tuple(metas[self._share]), measured, seconds, least_gain)
        process.submit(self._asked)

    def _fits(self, planned: PlannedStep, asked: PlanRequest | None, own: PlanRequest) -> bool:
        """Whether what the process had is of what the step has become."""
        say = self._logger.info
        step = own.step
        if asked is None or asked.microbatches != own.microbatches:
            instead = "the natural order is used" if self._searches else "it is planned again"
            say("step %d: has other samples than planned; %s", step, instead)
            return False
        # Searched orders are of the rates that were known when they were asked for.
        if not self._searches and asked.rates != own.rates:
            return False  # times have drifted since
        if not planned.finished:
            say(
                "step %d: planning time was over; the best of %d schedules is used",
                step, planned.statistics["planner_evaluations"],
            )  # fmt: skip
        return True

    def _budget(self, measured: Measured) -> Budget | None:
        """Of a search that training waits for."""
        if self._process is not None and measured.rates and not self._process.lost:
            return None  # no time; only the first step, unplanned so far, is worth all
        return search_budget(SearchConfig.of(self.setup.config))

    def _consider_a_process(self) -> None:
        """A schedule gets one once steps take long to plan."""
        if self._planning.worth_a_process and self._beside and self._process is None:
            self._logger.info(
                "planning a step takes %.0f ms of processor time: from here on a process plans the "
                "next step while one trains",
                self._planning.cpu_ms,
            )
            self._process = KeptPlanning(self.setup, self._start, self._logger)
