"""Plans in a run: who plans which step when, and with what measured times.

    planner = StepPlanner(pipeline, tuning, mesh, logger, ...)
    plan = planner.plan(step, microbatches, loader.next_metas)     before each step
    planner.learn(step, outcome, microbatches, step_ms)            after it

Static schedules are planned when the step begins, on every rank alike. With `parallel.replan_drift`
they, and Optimus' too, are planned with measured times once these have drifted from those planned
with (Optimus §6): FLOPs, or of Optimus the times of the device's profile.

Searched schedules take longer, and so does Optimus where it plays its candidates through
(`balance.bubbles.choice`). On the first rank of every pipeline a process searches the order of the
next step while this one trains, lowers and validates it and tunes its layers
(`planning.ahead`); when the step begins, that rank sends the best plan so far to the others of its
pipeline as numbers. Every data-parallel replica does so for its own data. What a process has not
finished in time is used as far as it is; where there is nothing yet, the natural order and static
ones are compared on every rank (of Optimus the first coarse order is taken), which all find the
same. A plan that does not fit the step (a
sample turned out corrupt) is dropped too. If the process dies, ranks search before each step.
Runs that have to repeat to the bit (`training.deterministic`, or `background = false`) search with
the times of the device's profile, in all evaluations, before the step begins.

Orders are searched with the costs that forecasts use (`planning.step.searched_costs`): times,
transfers and bytes of the device. Measured times correct them: a constant and a rate for each
module, kind of action and rank (`balance.rates`). After every step all ranks add up what their
actions took; they then know the same and decide the same, so that the plans of a pipeline's ranks
stay one. Losses change only by rounding: another order adds up the same gradients.

Rejected: letting ranks search the same order on their own during training, which needs as many
cores as there are ranks, and budgets in evaluations, which nobody can know.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchmm.balance.bubbles.choice import StepOrder
from torchmm.balance.compiled import Int32s
from torchmm.balance.costs.flops import task_durations
from torchmm.balance.costs.model import CostModel
from torchmm.balance.order_search.best_order import LEAST_GAIN
from torchmm.balance.order_search.search import Budget
from torchmm.balance.planners import PLANNERS, plan_by_costs, search_budget
from torchmm.balance.rates import (
    ActionFit,
    ActionKind,
    ActionTimes,
    Change,
    DriftMonitor,
    RankKind,
    Rates,
    Spread,
    Total,
    rank_totals,
    step_totals,
)
from torchmm.balance.recomputation.tuning import LayerTuning, Tuner
from torchmm.balance.transfer_times import TransferTimes, between_ranks_ms, message_stamps
from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.parallel.gather import exchange_device
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import Durations, PipelinePlan
from torchmm.pipelining.run.messages import message_specs
from torchmm.pipelining.run.runtime import channel_pairs
from torchmm.planning.ahead import (
    KeptPlanning,
    PlannedStep,
    PlanningProcess,
    PlanningSetup,
    PlanRequest,
)
from torchmm.planning.executions import run_costs, run_profile
from torchmm.planning.resolved import Resolved
from torchmm.planning.step import modelled_totals, searched_costs
from torchmm.training.pictures import plot_prediction, plot_schedules, save_timeline
from torchmm.training.pipeline import Pipeline
from torchmm.training.step import StepOutcome

REMEMBERED = 5
"""Steps whose median time is the next one's budget."""
HEADER = 6
"""Numbers that are sent ahead of a plan."""
NOTHING, PLANNED, SEARCH_HERE = 0.0, 1.0, 2.0
"""The first of them: what the leader has."""
SHOWN = 3
"""Kinds of actions that a message about drift names."""

Metas = Sequence[Sequence[MicrobatchMeta]]


@dataclass(frozen=True)
class PlanFigures:
    """What planning a step took and promises; None where nothing is known."""

    predicted_ms: float | None = None
    planner: str | None = None
    planner_ms: float | None = None
    planner_evaluations: int | None = None
    gain_over_natural: float | None = None


def search_costs(run: Resolved, pipeline: Pipeline, mesh: ParallelMesh) -> CostModel | None:
    """What orders of a run's steps are searched with; None: they are not."""
    if run.recipe.parallel.schedule not in PLANNERS or mesh.pipeline_size == 1:
        return None
    return run_costs(run, pipeline.descriptions, run_profile(run.recipe, mesh.device))


class StepPlanner:
    """Plans the steps of a run. Collective over all ranks, as are `plan` and `learn`.

    Args:
        tuning: how plans choose what layers recompute; None: they do not.
        costs: of the run's device, that orders are searched with; None: they are not.
        deterministic: search with all evaluations and without measured times.
        steps: of the run.
        start: makes the planning process.

    Attributes:
        figures: of the last step that was planned, where its order was searched.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        tuning: LayerTuning | None,
        mesh: ParallelMesh,
        logger: logging.Logger,
        costs: CostModel | None,
        *,
        deterministic: bool,
        steps: int,
        start: Callable[[PlanningSetup], PlanningProcess] = PlanningProcess,
    ) -> None:
        self._pipeline, self._tuning, self._mesh, self._logger = pipeline, tuning, mesh, logger
        self._costs = costs
        config = self._config = pipeline.config
        self.figures = PlanFigures()
        self._rates = Rates()
        self._times = ActionTimes()
        self._searches = costs is not None
        self._ahead: _PlannedAhead | None = None
        self._monitor: DriftMonitor | None = None
        self._modelled: dict[ActionKind, Total] = {}
        """What the step was planned with, where orders are searched here."""
        # Searched orders follow measured times in any case.
        watches = config.replan_drift > 0 and config.schedule != "searched"
        if watches and pipeline.layout.rank_count > 1:
            self._monitor = DriftMonitor(config.replan_drift, self._rates)
        elif costs is not None and config.search.background and not deterministic:
            self._ahead = _PlannedAhead(pipeline, tuning, mesh, logger, costs, steps, start)

    def plan(
        self,
        step: int,
        microbatches: Sequence[Microbatch],
        upcoming: Callable[[], Metas | None] = lambda: None,
    ) -> PipelinePlan:
        """The plan of the step that begins; collective over the ranks of its pipeline.

        Args:
            step: its number.
            microbatches: of this data-parallel rank.
            upcoming: metadata of the next step, by data-parallel rank; None at the data's end.

        Raises:
            PlanError: the schedule cannot run them, or they do not fit into memory.
        """
        if not self._searches:
            factors = self._monitor.factors if self._monitor else None
            return self._pipeline.plan_training(microbatches, factors=factors, tuning=self._tuning)
        budget: Budget | None = search_budget(self._config.search)
        rates: dict[ActionKind, float] = {}
        metas = [m.meta for m in microbatches]
        names = [module.name for module in self._pipeline.descriptions]
        if self._monitor is not None:
            rates = Rates(self._monitor.ms_per_flop).complete(names)
        if self._ahead is not None:
            rates = self._rates.complete(names)
            known = _Known(rates, self._times.fits())
            status, planned = self._ahead.plan(step, metas, upcoming, known)
            if planned is not None:
                self.figures = planned.figures
                return self._pipeline.read_plan(planned.numbers, metas)
            if rates and status != SEARCH_HERE:
                budget = None  # no time; only the first step, unplanned so far, is worth all
        search = partial(self._search, metas, rates, budget, time.perf_counter())
        return self._pipeline.plan_training(
            microbatches, factors=rates, search=search, tuning=self._tuning
        )

    def _search(
        self,
        metas: Sequence[MicrobatchMeta],
        rates: dict[ActionKind, float],
        budget: Budget | None,
        begin_s: float,
        graph: StageGraph,
        durations: Durations,
    ) -> StepOrder:
        """Args:
        budget: None: ranks wait, so nothing is tried but the natural order and those of static
            planners, all of them with layers as they are, which takes a tenth of the time; of
            Optimus the first coarse order that is not refused.
        """
        assert self._costs is not None
        modules = self._pipeline.descriptions
        sharding = self._pipeline.sharding
        costs = searched_costs(
            graph, modules, metas, self._costs, layerwise=sharding == "layer", rates=rates
        )
        self._modelled = modelled_totals(graph, costs, task_durations(graph, modules, metas))
        tuner = None
        judges = budget is not None or self._config.schedule == "optimus"
        if judges and self._tuning is not None:
            # Of whole microbatches, as ranks that share their tokens have to agree.
            sizes = self._pipeline.message_sizes
            specs = message_specs(graph, sizes, metas, self._pipeline.dtype)
            tuner = Tuner(graph, modules, metas, self._tuning, specs=specs)
        given = budget or Budget(evaluations=1)
        found = plan_by_costs(self._config, graph, costs, sharding, given, tuner)
        planner_ms = (time.perf_counter() - begin_s) * 1e3
        self.figures = PlanFigures(
            None, found.planner, planner_ms, found.evaluations, found.gain_over_natural
        )
        return found.step

    def learn(
        self, step: int, outcome: StepOutcome, microbatches: Sequence[Microbatch], step_ms: float
    ) -> None:
        """Takes in a step's measured times; collective over all ranks.

        Args:
            step_ms: from its begin.
        """
        if self._ahead is None and self._monitor is None:
            return
        graph = outcome.plan.graph
        metas = [m.meta for m in microbatches]
        targets = [m.target_count for m in microbatches]
        flops = task_durations(graph, self._pipeline.descriptions, metas, targets)
        every = self._of_all_ranks(rank_totals(outcome.result.records or (), graph, flops), graph)
        totals = step_totals(every)
        self._rates.learn(totals)
        self._times.learn(every)
        if self._ahead is not None:
            self._ahead.remember(step_ms, self.figures.predicted_ms, outcome)
        if self._monitor is not None and self._searches:  # on all ranks alike
            modelled = {(0, *kind): total for kind, total in self._modelled.items()}
            self._monitor.expect(step_totals(self._of_all_ranks(modelled, graph)))
        if self._monitor is not None and (changes := self._monitor.observe(totals)):
            self._report_drift(step, changes)

    def _of_all_ranks(self, own: dict[RankKind, Total], graph: StageGraph) -> dict[RankKind, Total]:
        """Sums over data-parallel replicas and tensor-parallel ranks, by rank of the plan."""
        kinds = sorted(COMPUTE, key=lambda kind: kind.value)
        ranks = range(graph.layout.rank_count)
        modules = [module.name for module in self._pipeline.descriptions]
        every = [(rank, name, kind) for rank in ranks for name in modules for kind in kinds]
        rows = [own.get(key, Total(0.0, 0.0)) for key in every]
        totals = torch.tensor(rows, dtype=torch.float64, device=exchange_device())
        dist.all_reduce(totals)
        return {key: Total(*row) for key, row in zip(every, totals.tolist(), strict=True)}

    def _report_drift(self, step: int, changes: Sequence[Change]) -> None:
        shown = ", ".join(
            f"{module} {kind.value} {times:.2f}x" for (module, kind), times in changes[:SHOWN]
        )
        more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        self._logger.info(
            "step %d: times drifted from those planned with (%s%s): the next steps are planned "
            "anew", step, shown, more,
        )  # fmt: skip

    def draw(
        self, directory: Path, step: int, outcome: StepOutcome, microbatches: Sequence[Microbatch]
    ) -> None:
        """Pictures and records of a step into a directory; collective over all ranks."""
        save_timeline(directory, step, outcome, microbatches, self._mesh)
        if self._mesh.rank == 0:
            metas = [m.meta for m in microbatches]
            flops = task_durations(outcome.plan.graph, self._pipeline.descriptions, metas)
            reorders = self._searches and self._config.schedule == "searched"
            plot = plot_schedules if reorders else plot_prediction
            plot(directory, step, outcome.plan, flops)

    def close(self) -> None:
        """Ends the planning process; not collective."""
        if self._ahead is not None:
            self._ahead.close()


class _Known(NamedTuple):
    """What was measured of actions."""

    rates: dict[ActionKind, float]
    fits: dict[RankKind, ActionFit]


@dataclass(frozen=True)
class _Received:
    """A plan that the leader of a pipeline has sent."""

    numbers: Int32s
    figures: PlanFigures


class _PlannedAhead:
    """Plans that the process on a pipeline's first rank makes, on all ranks of the pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        tuning: LayerTuning | None,
        mesh: ParallelMesh,
        logger: logging.Logger,
        costs: CostModel,
        steps: int,
        start: Callable[[PlanningSetup], PlanningProcess],
    ) -> None:
        self._mesh, self._logger, self._steps = mesh, logger, steps
        self._time_share = pipeline.config.search.time_share
        self._spans_s: list[float] = []
        self._spread = Spread()
        self._transfers = TransferTimes()
        self._channels = channel_pairs(pipeline.layout)
        # Of tensor-parallel ranks, which are alike, one: all times of a channel are of two clocks.
        self._speaks = any(mesh.rank == alike[0] for share in mesh.shares for alike in share)
        self._asked: tuple[MicrobatchMeta, ...] = ()
        self._group, self._leader, leaders = _pipeline_group(mesh)
        self._process: KeptPlanning | None = None
        if mesh.rank == self._leader:
            setup = PlanningSetup(
                pipeline.layout,
                pipeline.config,
                tuple(pipeline.descriptions),
                pipeline.sharding,
                costs,
                pipeline.message_sizes,
                pipeline.dtype,
                tuning,
                leaders,
            )
            self._process = KeptPlanning(setup, start, logger)

    def plan(
        self,
        step: int,
        metas: Sequence[MicrobatchMeta],
        upcoming: Callable[[], Metas | None],
        known: _Known,
    ) -> tuple[float, _Received | None]:
        """The plan of the step that begins, if there is one, and what the leader has; lets the
        process go on with the next step."""
        planned = None
        if self._process is not None:
            asked, self._asked = self._asked, ()
            planned = self._process.take(step)
            self._submit(self._process, step + 1, upcoming, known)
            planned = self._fitting(step, planned, tuple(metas) == asked)
        return self._exchange(planned)

    def _submit(
        self,
        process: KeptPlanning,
        step: int,
        upcoming: Callable[[], Metas | None],
        known: _Known,
    ) -> None:
        metas = upcoming() if step <= self._steps else None
        if metas is not None:
            seconds = self._time_share * median(self._spans_s) if self._spans_s else None
            self._asked = tuple(metas[self._mesh.data_parallel_rank])
            gain = self._spread.least_gain
            least_gain = LEAST_GAIN if gain is None else gain
            request = PlanRequest(
                step,
                self._asked,
                known.rates,
                seconds,
                least_gain,
                known.fits,
                dict(self._transfers.ms),
            )
            process.submit(request)

    def _fitting(
        self, step: int, planned: PlannedStep | None, as_asked: bool
    ) -> PlannedStep | None:
        """What the process had for this step, if that is what the step has become."""
        say = self._logger.info
        if planned is not None and not as_asked:
            say("step %d: has other samples than planned; the natural order is used", step)
            return None
        if planned is not None and not planned.finished:
            say(
                "step %d: planning had not finished; the best of %d orders is used",
                step, planned.evaluations,
            )  # fmt: skip
        return planned

    def _exchange(self, planned: PlannedStep | None) -> tuple[float, _Received | None]:
        """What the leader has, on all ranks of the pipeline."""
        header = torch.full((HEADER,), nan, dtype=torch.float64)
        header[0] = SEARCH_HERE if self._process is not None and self._process.lost else NOTHING
        numbers = np.zeros(0, np.int32)
        if planned is not None:
            numbers = planned.numbers
            promised = [planned.predicted_ms, planned.gain_over_natural]
            values = [PLANNED, *(nan if value is None else value for value in promised)]
            values += [planned.planner_ms, planned.evaluations, len(numbers)]
            header = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(header, self._leader, group=self._group)
        status, *figures, length = header.tolist()
        if status != PLANNED:
            return status, None
        received = torch.from_numpy(numbers if len(numbers) else np.zeros(int(length), np.int32))
        dist.broadcast(received, self._leader, group=self._group)
        predicted_ms, gain, planner_ms, evaluations = figures
        known = PlanFigures(
            None if isnan(predicted_ms) else predicted_ms,
            planned.planner if planned is not None else None,  # only the first rank records it
            planner_ms,
            int(evaluations),
            None if isnan(gain) else gain,
        )
        return status, _Received(received.numpy(), known)

    def remember(self, step_ms: float, predicted_ms: float | None, outcome: StepOutcome) -> None:
        """How long a step took: so long may the next one be planned. How long its plan was
        predicted to take and took: so exact is the next prediction. And what its messages took;
        collective over the ranks of the pipeline."""
        if predicted_ms is not None:
            self._spread.observe(predicted_ms, outcome.span_ms)
        self._spans_s = [*self._spans_s, step_ms / 1e3][-REMEMBERED:]
        records = outcome.result.records if self._speaks else None
        stamps = message_stamps(records or (), self._channels)
        dist.all_reduce(torch.from_numpy(stamps), group=self._group)
        self._transfers.learn(between_ranks_ms(stamps, self._channels))

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()


def _pipeline_group(mesh: ParallelMesh) -> tuple[dist.ProcessGroup, int, int]:
    """The ranks that work on the same samples, on the CPU, the first of them, and how many of such
    first ranks this machine has; collective."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))  # torchrun's
    own: tuple[dist.ProcessGroup, int] | None = None
    leaders = 0
    for share in mesh.shares:
        members = [rank for alike in share for rank in alike]
        group = dist.new_group(members, backend="gloo")
        leaders += members[0] // here == mesh.rank // here
        if mesh.rank in members:
            own = group, members[0]
    assert own is not None
    return *own, leaders
