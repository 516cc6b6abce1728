"""Searched schedules in a run: who plans which step when, and with what measured times.

On the first rank of every pipeline a process searches the order of the next step while this one
trains (`planning_process`); when the step begins, that rank sends the best order so far to the
others of its pipeline, which have the same metadata, so that numbers of actions say all. Every
data-parallel replica does so for its own data. What a process has not finished in time is used as
far as it is; where there is nothing yet, the natural order and static ones are compared on every
rank, which all find the same. A plan that does not fit the step (a sample turned out corrupt) is
dropped likewise. If the process dies, ranks search before each step. All orders are lowered and
validated like any other.

Times of actions are FLOPs multiplied by rates, one for each module and kind of action, which follow
the measured steps. Runs that have to repeat to the bit (`training.deterministic`, or `background =
false`) plan with FLOPs alone, in all evaluations, before the step begins.

Rejected: letting ranks search the same order on their own beside training, which needs as many
cores as there are ranks, and budgets in evaluations, which nobody can know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from torchmm.balance.drift import SMOOTHING, Kind, Total, step_totals
from torchmm.balance.planners import search_order
from torchmm.balance.search import Budget
from torchmm.balance.searched import decode_order, numbered_actions
from torchmm.batch import MicrobatchMeta, ModuleDescription
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipeline import Pipeline
from torchmm.pipelining.actions import ActionType
from torchmm.pipelining.graph import StageGraph
from torchmm.pipelining.plan import ComputeOrder
from torchmm.pipelining.separated import Durations
from torchmm.planning_process import (
    PlannedStep,
    PlanningProcess,
    PlanningProcessError,
    PlanningSetup,
    PlanRequest,
    step_counts,
)
from torchmm.schedule_picture import draw_schedules
from torchmm.step import StepOutcome

KINDS = (ActionType.F, ActionType.B)
REMEMBERED = 5
"""Steps whose median time is the next one's budget."""
HEADER = 6
"""Numbers that are sent in front of an order."""
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
        pipeline.planner = self._order
        self._kinds: list[Kind] = [(module.name, kind) for module in modules for kind in KINDS]
        self._rates: dict[Kind, float] = {}
        self._durations: Durations | None = None
        self._step, self._steps = 0, steps
        self._spans_s: list[float] = []
        self._background = self._config.search.background and not deterministic
        if self._background:
            self._group, self._leader = _pipeline_group(mesh)
            if mesh.rank == self._leader:
                setup = PlanningSetup(
                    pipeline.layout, self._config, tuple(modules), pipeline.sharding
                )
                self._process = start(setup)

    def begin(self, step: int, metas: Callable[[], Metas | None]) -> None:
        """Takes the plan of the step that begins now, and lets the one behind it be planned.

        Args:
            step: its number.
            metas: of the next step, by data-parallel rank; None at the end of the data.
        """
        self._step, self._planned = step, None
        if self._process is None:
            return
        try:
            self._planned = self._process.take(step)
            upcoming = metas() if step < self._steps else None
            if upcoming is not None:
                seconds = None
                if self._spans_s:
                    seconds = self._config.search.time_share * median(self._spans_s)
                own = tuple(upcoming[self._mesh.data_parallel_rank])
                self._process.submit(PlanRequest(step + 1, own, self._all_rates(), seconds))
        except PlanningProcessError as error:
            self._give_up(error)

    def observe(self, outcome: StepOutcome, step_ms: float) -> None:
        """Takes in a step's measured times.

        Args:
            step_ms: from its begin.
        """
        if not self.active or not self._background or self._durations is None:
            return
        graph = outcome.plan.graph
        own = step_totals(outcome.result.records or (), graph, self._durations)
        rows = [own.get(kind, Total(0.0, 0.0)) for kind in self._kinds]
        totals = torch.tensor(rows, dtype=torch.float64)
        dist.all_reduce(totals, group=self._group)
        for kind, (measured_ms, flops) in zip(self._kinds, totals.tolist(), strict=True):
            if measured_ms > 0 and flops > 0:
                rate = measured_ms / flops * self._pipeline.factors.get(kind, 1.0)
                old = self._rates.get(kind, rate)
                self._rates[kind] = SMOOTHING * rate + (1 - SMOOTHING) * old
        self._spans_s = [*self._spans_s, step_ms / 1e3][-REMEMBERED:]

    def draw(self, directory: Path, step: int, outcome: StepOutcome) -> None:
        """A picture of the step that `save_timeline` has saved, on rank 0; not collective."""
        if self.active and self._mesh.rank == 0 and self._durations is not None:
            draw_schedules(directory, step, outcome.plan, self._durations)

    def _all_rates(self) -> dict[Kind, float]:
        """Rates of halves of backwards too, and of modules without any work so far."""
        if not self._rates:
            return {}
        found: dict[Kind, float] = {}
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

    def _order(self, graph: StageGraph, durations: Durations) -> ComputeOrder:
        """The order of the step that begins; called by `Pipeline.plan`."""
        begin_s = time.perf_counter()
        self._durations = durations
        if not self._background:
            budget = Budget(evaluations=self._config.search.evaluations)
            return self._plan_here(graph, durations, budget, begin_s)
        status, found = self._receive(graph, self._fitting(graph))
        if found is not None:
            return found
        # The first step, which nobody could plan before: in full. Else there is no time.
        in_full = status == SEARCH_HERE or not self._rates
        budget = Budget(evaluations=self._config.search.evaluations if in_full else 1)
        return self._plan_here(graph, durations, budget, begin_s)

    def _plan_here(
        self, graph: StageGraph, durations: Durations, budget: Budget, begin_s: float
    ) -> ComputeOrder:
        found = search_order(self._config, graph, durations, budget)
        planner_ms = (time.perf_counter() - begin_s) * 1e3
        gain = found.gain_over_natural
        self.figures = PlanFigures(None, planner_ms, found.evaluations, gain)
        return found.order

    def _fitting(self, graph: StageGraph) -> PlannedStep | None:
        """What the process had for this step; None on ranks without one."""
        planned, say = self._planned, self._logger.info
        if planned is None:
            if self._rates and self._process is not None:
                say("step %d: no plan in time; the natural order is used", self._step)
            return None
        if dict(planned.counts) != step_counts(graph):
            say("step %d: has other images than planned; the natural order is used", self._step)
            return None
        if not planned.finished:
            say(
                "step %d: planning had not finished; the best of %d orders is used",
                self._step, planned.evaluations,
            )  # fmt: skip
        return planned

    def _receive(
        self, graph: StageGraph, planned: PlannedStep | None
    ) -> tuple[float, ComputeOrder | None]:
        """What the leader has, on all ranks of the pipeline."""
        header = torch.zeros(HEADER, dtype=torch.float64)
        numbers = torch.zeros(len(numbered_actions(graph)), dtype=torch.int32)
        if planned is not None:
            of_plan = planned.predicted, planned.natural, planned.planner_ms, planned.evaluations
            values = [PLANNED, *of_plan, float(planned.in_ms)]
            header[:] = torch.tensor(values, dtype=torch.float64)
            numbers[:] = torch.from_numpy(planned.numbers)
        elif self._died:
            header[0] = SEARCH_HERE
        dist.broadcast(header, self._leader, group=self._group)
        status, predicted, natural, planner_ms, evaluations, in_ms = header.tolist()
        if status != PLANNED:
            return status, None
        dist.broadcast(numbers, self._leader, group=self._group)
        gain = natural / predicted - 1 if np.isfinite(natural) and predicted > 0 else None
        predicted_ms = predicted if in_ms else None
        self.figures = PlanFigures(predicted_ms, planner_ms, int(evaluations), gain)
        return status, decode_order(graph, numbers.numpy())

    def _give_up(self, error: PlanningProcessError) -> None:
        self._logger.warning(
            "%s; from here on each step is planned before it begins, which takes its time", error
        )
        self._died = True
        self.close()


def _pipeline_group(mesh: ParallelMesh) -> tuple[dist.ProcessGroup, int]:
    """The ranks that work on the same samples, on the CPU, and the first of them; collective."""
    ranks = mesh.mesh.mesh  # pipeline, replicate, shard, tensor
    own: tuple[dist.ProcessGroup, int] | None = None
    for members in ranks.permute(1, 2, 0, 3).flatten(2, 3).flatten(0, 1).tolist():
        group = dist.new_group(members, backend="gloo")
        if mesh.rank in members:
            own = group, members[0]
    assert own is not None
    return own
