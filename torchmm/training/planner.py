"""Plans in a run: who plans which step when, and with what measured times.

Searched schedules (`StepPlanner`).

On the first rank of every pipeline a process searches the order of the next step while this one
trains, lowers and validates it and tunes its layers (`planning.ahead`); when the step begins,
that rank sends the best plan so far to the others of its pipeline as numbers. Every data-parallel
replica does so for its own data. What a process has not finished in time is used as far as it is;
where there is nothing yet, the natural order and static ones are compared on every rank, which all
find the same. A plan that does not fit the step (a sample turned out corrupt) is dropped likewise.
If the process dies, ranks search before each step.

Times of actions are FLOPs multiplied by rates, one for each module and kind of action, which follow
the measured steps. Runs that have to repeat to the bit (`training.deterministic`, or `background =
false`) plan with FLOPs alone, in all evaluations, before the step begins.

Rejected: letting ranks search the same order on their own beside training, which needs as many
cores as there are ranks, and budgets in evaluations, which nobody can know.

Other schedules (`Replanner`) are planned anew when measured times have drifted. After every step
all ranks add up what their actions took; they then know the same and decide the same, so that the
plans of a pipeline's ranks stay one. Losses change by rounding only: another order adds up the same
gradients.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from torchmm.balance.compiled import Float64s
from torchmm.balance.costs.flops import task_durations
from torchmm.balance.order_search.search import Budget
from torchmm.balance.planners import search_order
from torchmm.balance.rates import SMOOTHING, ActionKind, DriftMonitor, Total, step_totals
from torchmm.common.batch import Microbatch, MicrobatchMeta, ModuleDescription
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.actions import COMPUTE, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.numbers import decode_plan
from torchmm.pipelining.plan.plan import ActionRecord, ComputeOrder, Durations, PipelinePlan
from torchmm.planning.ahead import (
    PlannedStep,
    PlanningProcess,
    PlanningProcessError,
    PlanningSetup,
    PlanRequest,
    work_of,
)
from torchmm.planning.step import step_graph
from torchmm.training.pictures import draw_schedules
from torchmm.training.pipeline import Pipeline, Specs
from torchmm.training.step import StepOutcome

REMEMBERED = 5
"""Steps whose median time is the next one's budget."""
HEADER = 7
"""Numbers that are sent in front of a plan, beside what there is to do."""
NOTHING, PLANNED, SEARCH_HERE = 0.0, 1.0, 2.0
"""The first of them: what the leader has."""

Metas = Sequence[Sequence[MicrobatchMeta]]


@dataclass(frozen=True)
class PlanFigures:
    """What planning a step took and promises; None where nothing is known."""

    predicted_ms: float | None = None
    planner_ms: float | None = None
    planner_evaluations: int | None = None
    gain_over_natural: float | None = None


class StepPlanner:
    """Plans the steps of a run with a searched schedule; does nothing under others.

    Collective over all ranks, as are its methods.

    Args:
        modules: encoders, LLM and generator, whole.
        deterministic: plan with all evaluations and without measured times.
        steps: of the run.
        start: makes the planning process.

    Attributes:
        figures: of the last step that was planned.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        modules: Sequence[ModuleDescription],
        mesh: ParallelMesh,
        logger: logging.Logger,
        *,
        deterministic: bool,
        steps: int,
        start: Callable[[PlanningSetup], PlanningProcess] = PlanningProcess,
    ) -> None:
        self._pipeline, self._mesh, self._logger = pipeline, mesh, logger
        self._config = pipeline.config
        self.figures = PlanFigures()
        self.active = self._config.schedule == "searched" and mesh.pipeline_size > 1
        self._process: PlanningProcess | None = None
        self._planned: PlannedStep | None = None
        self._died = False
        if not self.active:
            return
        pipeline.ready, pipeline.planner = self._ready, self._order
        self._setup = PlanningSetup(
            pipeline.layout,
            self._config,
            tuple(modules),
            pipeline.sharding,
            pipeline.message_sizes,
            pipeline.dtype,
            pipeline.tuning,
        )
        self._kinds: list[ActionKind] = self._setup.kinds
        self._rates: dict[ActionKind, float] = {}
        self._metas: Sequence[MicrobatchMeta] = ()
        self._asked: tuple[MicrobatchMeta, ...] = ()
        self._asked_next: tuple[MicrobatchMeta, ...] = ()
        self._flops_RK: Float64s | None = None
        self._search_in_full = False
        self._step, self._steps = 0, steps
        self._spans_s: list[float] = []
        self._background = self._config.search.background and not deterministic
        if self._background:
            self._group, self._leader, planners = _pipeline_group(mesh)
            if mesh.rank == self._leader:
                self._process = start(replace(self._setup, planners=planners))

    def begin(self, step: int, metas: Callable[[], Metas | None]) -> None:
        """Takes the plan of the step that begins now, and lets the one behind it be planned.

        Args:
            step: its number.
            metas: of the next step, by data-parallel rank; None at the end of the data.
        """
        self._step, self._planned = step, None
        if self._process is None:
            return
        self._asked, self._asked_next = self._asked_next, ()
        try:
            self._planned = self._process.take(step)
            upcoming = metas() if step < self._steps else None
            if upcoming is not None:
                seconds = None
                if self._spans_s:
                    seconds = self._config.search.time_share * median(self._spans_s)
                own = self._asked_next = tuple(upcoming[self._mesh.data_parallel_rank])
                self._process.submit(PlanRequest(step + 1, own, self._all_rates(), seconds))
        except PlanningProcessError as error:
            self._give_up(error)

    def observe(self, outcome: StepOutcome, step_ms: float) -> None:
        """Takes in a step's measured times.

        Args:
            step_ms: from its begin.
        """
        if not self.active or not self._background:
            return
        if self._flops_RK is None:  # planned here
            self._flops_RK = work_of(outcome.plan, self._kinds, self._durations(outcome.plan))
        measured = _measured_ms(outcome.result.records or (), outcome.plan, self._kinds)
        flops = self._flops_RK[self._mesh.pipeline_rank].tolist()
        totals = torch.tensor([measured, flops], dtype=torch.float64)
        dist.all_reduce(totals, group=self._group)
        for kind, measured_ms, work in zip(self._kinds, *totals.tolist(), strict=True):
            if measured_ms > 0 and work > 0:
                rate = measured_ms / work
                old = self._rates.get(kind, rate)
                self._rates[kind] = SMOOTHING * rate + (1 - SMOOTHING) * old
        self._spans_s = [*self._spans_s, step_ms / 1e3][-REMEMBERED:]

    def draw(self, directory: Path, step: int, outcome: StepOutcome) -> None:
        """A picture of the step that `save_timeline` has saved, on rank 0; not collective."""
        if self.active and self._mesh.rank == 0:
            draw_schedules(directory, step, outcome.plan, self._durations(outcome.plan))

    def _durations(self, plan: PipelinePlan) -> Durations:
        """FLOPs of a plan's actions."""
        return task_durations(plan.graph, self._setup.modules, self._metas)

    def _all_rates(self) -> dict[ActionKind, float]:
        """Rates of halves of backwards too, and of modules without any work so far."""
        if not self._rates:
            return {}
        found: dict[ActionKind, float] = {}
        for kind in self._kinds:
            found[kind] = self._rates.get(kind, median(self._rates.values()))
        for module, _ in self._kinds:
            for half in (ActionType.I, ActionType.W):
                found[module, half] = found[module, ActionType.B]
        return found

    def close(self) -> None:
        """Ends the planning process; not collective."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _ready(self, metas: Sequence[MicrobatchMeta], specs: Specs) -> PipelinePlan | None:
        """The plan of the step that begins, if the process had one; called by `Pipeline.plan`."""
        self._metas, self._flops_RK, self._search_in_full = metas, None, True
        if not self._background:
            return None
        status, numbers = self._receive(self._fitting(metas))
        if numbers is None:
            # The first step, which nobody could plan before: in full. Else there is no time.
            self._search_in_full = status == SEARCH_HERE or not self._rates
            return None
        setup = self._setup
        graph = step_graph(setup.layout, setup.config, metas, setup.sharding)
        return decode_plan(numbers, graph, specs(graph))

    def _order(self, graph: StageGraph, durations: Durations) -> ComputeOrder:
        """The order of the step that begins, where there is no plan yet."""
        begin_s = time.perf_counter()
        evaluations = self._config.search.evaluations if self._search_in_full else 1
        return self._plan_here(graph, durations, Budget(evaluations=evaluations), begin_s)

    def _plan_here(
        self, graph: StageGraph, durations: Durations, budget: Budget, begin_s: float
    ) -> ComputeOrder:
        found = search_order(self._config, graph, durations, budget)
        planner_ms = (time.perf_counter() - begin_s) * 1e3
        gain = found.gain_over_natural
        self.figures = PlanFigures(None, planner_ms, found.evaluations, gain)
        return found.order

    def _fitting(self, metas: Sequence[MicrobatchMeta]) -> PlannedStep | None:
        """What the process had for this step; None on ranks without one."""
        planned, say = self._planned, self._logger.info
        if planned is None:
            if self._rates and self._process is not None:
                say("step %d: no plan in time; the natural order is used", self._step)
            return None
        if tuple(metas) != self._asked:
            say("step %d: has other samples than planned; the natural order is used", self._step)
            return None
        if not planned.finished:
            say(
                "step %d: planning had not finished; the best of %d orders is used",
                self._step, planned.evaluations,
            )  # fmt: skip
        return planned

    def _receive(self, planned: PlannedStep | None) -> tuple[float, np.ndarray | None]:
        """What the leader has, on all ranks of the pipeline."""
        work_shape = self._setup.layout.rank_count, len(self._kinds)
        header = torch.zeros(HEADER + prod(work_shape), dtype=torch.float64)
        if planned is not None:
            of_plan = planned.predicted, planned.natural, planned.planner_ms, planned.evaluations
            values = [PLANNED, *of_plan, float(planned.in_ms), float(len(planned.numbers))]
            header[:HEADER] = torch.tensor(values, dtype=torch.float64)
            header[HEADER:] = torch.from_numpy(planned.flops_RK).flatten()
        elif self._died:
            header[0] = SEARCH_HERE
        dist.broadcast(header, self._leader, group=self._group)
        status, predicted, natural, planner_ms, evaluations, in_ms, length = header[
            :HEADER
        ].tolist()
        if status != PLANNED:
            return status, None
        numbers = torch.zeros(int(length), dtype=torch.int32)
        if planned is not None:
            numbers = torch.from_numpy(planned.numbers)
        dist.broadcast(numbers, self._leader, group=self._group)
        gain = natural / predicted - 1 if np.isfinite(natural) and predicted > 0 else None
        predicted_ms = predicted if in_ms else None
        self.figures = PlanFigures(predicted_ms, planner_ms, int(evaluations), gain)
        self._flops_RK = header[HEADER:].reshape(work_shape).numpy()
        return status, numbers.numpy()

    def _give_up(self, error: PlanningProcessError) -> None:
        self._logger.warning(
            "%s; from here on each step is planned before it begins, which takes its time", error
        )
        self._died = True
        self.close()


def _measured_ms(
    records: Sequence[ActionRecord], plan: PipelinePlan, kinds: Sequence[ActionKind]
) -> list[float]:
    """Of this rank's actions, by kind."""
    stages, found = plan.graph.layout.stages, dict.fromkeys(kinds, 0.0)
    for record in records:
        if record.action.type in (ActionType.F, ActionType.B):
            kind = stages[record.action.stage].module, record.action.type
            found[kind] += record.end_ms - record.start_ms
    return list(found.values())


def _pipeline_group(mesh: ParallelMesh) -> tuple[dist.ProcessGroup, int, int]:
    """The ranks that work on the same samples, on the CPU, the first of them, and how many of such
    first ranks this machine has; collective."""
    ranks = mesh.mesh.mesh  # pipeline, replicate, shard, tensor
    here = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))  # torchrun's
    own: tuple[dist.ProcessGroup, int] | None = None
    leaders = 0
    for members in ranks.permute(1, 2, 0, 3).flatten(2, 3).flatten(0, 1).tolist():
        group = dist.new_group(members, backend="gloo")
        leaders += members[0] // here == mesh.rank // here
        if mesh.rank in members:
            own = group, members[0]
    assert own is not None
    return *own, leaders


SHOWN = 3


class Replanner:
    """Watches a run's steps and tells its pipeline with which times to plan.

    Args:
        drift: as `parallel.replan_drift`; 0: nothing is watched.
        modules: encoders, LLM and generator, whole.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        modules: Sequence[ModuleDescription],
        drift: float,
        logger: logging.Logger,
    ) -> None:
        self._pipeline, self._modules, self._logger = pipeline, modules, logger
        watched = drift > 0 and pipeline.layout.rank_count > 1
        self._monitor = DriftMonitor(drift) if watched else None
        kinds = sorted(COMPUTE, key=lambda kind: kind.value)
        self._kinds: list[ActionKind] = [
            (module.name, kind) for module in modules for kind in kinds
        ]

    def observe(self, step: int, outcome: StepOutcome, microbatches: Sequence[Microbatch]) -> None:
        """Takes in a step of training; collective over all ranks."""
        if self._monitor is None:
            return
        graph = outcome.plan.graph
        metas, targets = [m.meta for m in microbatches], [m.target_count for m in microbatches]
        flops = task_durations(graph, self._modules, metas, targets)
        own = step_totals(outcome.result.records or (), graph, flops)
        rows = [own.get(kind, Total(0.0, 0.0)) for kind in self._kinds]
        totals = torch.tensor(rows, dtype=torch.float64, device=self._pipeline.device)
        dist.all_reduce(totals)
        by_kind = {
            kind: Total(*row) for kind, row in zip(self._kinds, totals.tolist(), strict=True)
        }
        if changes := self._monitor.observe(by_kind):
            self._pipeline.factors = self._monitor.factors
            told = ", ".join(
                f"{module} {kind.value} {times:.2f}x" for (module, kind), times in changes[:SHOWN]
            )
            more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
            self._logger.info(
                "step %d: times drifted from those planned with (%s%s): the next steps are planned "
                "anew", step, told, more,
            )  # fmt: skip
