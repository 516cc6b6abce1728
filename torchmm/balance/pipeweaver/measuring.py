"""Planner of schedules that are searched with a cost model, or replanned with measured times.

Searches use the same costs as simulations (`balance.step_plans.searched_costs`): times, transfers
and memory of the device. Measured times correct the costs by a constant and a rate per module,
action type and rank (`balance.rates`). After each step, all ranks sum the times of their actions:

    step i     run, record times --> all-reduce --> rates, transfer times
    step i+1   run                   plan of step i+2 with the new times (background process)

With `parallel.replan_threshold`, static schedules and Optimus are planned again with measured times
if the times have changed (Optimus section 6). Static schedules compare measured times with FLOPs,
and Optimus compares them with the times of the device profile.

A searched schedule depends on its planning time. If the planning process has no plan in time, the
planner compares the natural order and static schedules. Runs that must be bitwise reproducible
(`training.deterministic`, or `background = false`) search before each step with the device profile
and all evaluations. Every schedule produces the same gradients up to rounding.

Only one rank searches, because independent searches of the same schedule need one core per rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchmm.balance.costs.model import CostModel
from torchmm.balance.extension import plans_schedule
from torchmm.balance.pipeweaver.background.leader import StartPlanning, start_planning
from torchmm.balance.pipeweaver.background.requests import Measured, PlanRequest
from torchmm.balance.pipeweaver.background.work import StepWork
from torchmm.balance.pipeweaver.planners import BackgroundPlanner
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning
from torchmm.balance.rates import (
    ActionKind,
    ActionTimes,
    Change,
    DriftMonitor,
    RankKind,
    Rates,
    Total,
    rank_totals,
    step_totals,
)
from torchmm.balance.run_costs import run_costs, run_profile, run_tuning
from torchmm.balance.section import SearchConfig
from torchmm.balance.step_plans import modeled_totals
from torchmm.balance.transfer_times import TransferTimes, between_ranks_ms, message_stamps
from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.costs.flops import task_durations
from torchmm.parallel.gather import exchange_device
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.run.runtime import StepResult, channel_pairs
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.planner import StepPlan, Upcoming
from torchmm.planning.resolved import Resolved
from torchmm.training.pipeline import Pipeline

SHOWN = 3
"""Maximum number of action types in a message about drift."""


def build_measuring_planner(
    run: Resolved, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> MeasuringPlanner:
    """Return the planner of a run with a cost model or measured times. Collective over all ranks.

    Raises:
        ConfigError: `simulation.device` is unknown.
    """
    recipe = run.recipe
    costs = None
    if plans_schedule(recipe.parallel.schedule):
        costs = run_costs(run, pipeline.descriptions, run_profile(recipe, mesh.device))
    layerwise = pipeline.sharding == "layer"
    return MeasuringPlanner(
        pipeline,
        run_tuning(run, pipeline.descriptions, mesh.device, layerwise=layerwise),
        mesh,
        logger,
        costs,
        deterministic=recipe.training.deterministic,
        steps=recipe.training.steps,
    )


class MeasuringPlanner(BackgroundPlanner):
    """Planner of the steps of a pipeline with a cost model and measured times.

    Construction is collective over all ranks.

    Args:
        pipeline: Pipeline as for `BackgroundPlanner`.
        tuning: Selection of layers as for `BackgroundPlanner`.
        mesh: Mesh as for `BackgroundPlanner`.
        logger: Logger of this rank.
        costs: Cost model of the schedule search. None for static schedules with
            `parallel.replan_threshold`.
        deterministic: Whether to search with all evaluations and without measured times.
        steps: Number of steps of the run.
        start: Function that starts the planning process.
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
        start: StartPlanning = start_planning,
    ) -> None:
        config = pipeline.config
        self._rates = Rates()
        self._times = ActionTimes()
        self._transfers = TransferTimes()
        self._channels = channel_pairs(pipeline.layout)
        # Tensor-parallel ranks have the same messages, so one of them reports times.
        self._speaks = any(mesh.rank == alike[0] for share in mesh.shares for alike in share)
        self._searches = costs is not None
        self._learns = False
        """Whether searches in the background use measured times."""
        self._modeled: dict[ActionKind, Total] = {}
        """Modeled times of the step on the rank that plans, if they are compared with measured
        times."""
        self._monitor: DriftMonitor | None = None
        # The search uses measured times in any case.
        if config.replan_threshold > 0 and config.schedule != "searched":
            self._monitor = DriftMonitor(config.replan_threshold, self._rates)
        elif costs is not None:
            self._learns = SearchConfig.from_parent(config).background and not deterministic
        in_background = (
            self._learns if self._searches else SearchConfig.from_parent(config).background
        )
        super().__init__(
            pipeline, tuning, mesh, logger, costs,
            in_background=in_background, steps=steps, start=start,
        )  # fmt: skip

    def _measured(self) -> Measured:
        """Return times for a schedule search, or factors for the FLOPs of a static schedule."""
        names = [module.name for module in self._pipeline.descriptions]
        if self._monitor is not None and self._searches:
            return Measured(Rates(self._monitor.ms_per_flop).complete(names))
        if self._monitor is not None:
            return Measured(self._monitor.factors)
        if not self._learns:
            return Measured()
        return Measured(self._rates.complete(names), self._times.fits(), dict(self._transfers.ms))

    def _make_plan(
        self, step: int, metas: Sequence[MicrobatchMeta], upcoming: Upcoming
    ) -> PlannedStep:
        planned = super()._make_plan(step, metas, upcoming)
        if self._monitor is not None and self._searches:
            # Measured times of the step are compared with its modeled times.
            assert self._leader is not None
            request = PlanRequest(step, tuple(metas), self._measured())
            work = StepWork(self._leader.setup, request)
            flops = task_durations(work.graph, self._pipeline.descriptions, metas)
            self._modeled = modeled_totals(work.graph, work.costs, flops)
        return planned

    def learn(
        self,
        step: int,
        planned: StepPlan,
        result: StepResult,
        microbatches: Sequence[Microbatch],
        step_ms: float,
    ) -> None:
        """Use the measured times of a step to plan later steps. See `Planner.learn`."""
        if not self._learns and self._monitor is None:
            return
        graph = planned.plan.graph
        metas = [m.task_meta for m in microbatches]
        targets = [m.target_count for m in microbatches]
        flops = task_durations(graph, self._pipeline.descriptions, metas, targets)
        totals_by_rank = self._of_all_ranks(rank_totals(result.records or (), graph, flops), graph)
        totals = step_totals(totals_by_rank)
        self._rates.learn(totals)
        self._times.learn(totals_by_rank)
        if self._learns:
            records = result.records if self._speaks else None
            stamps = message_stamps(records or (), self._channels)
            dist.all_reduce(torch.from_numpy(stamps), group=self._shared.group)
            self._transfers.learn(between_ranks_ms(stamps, self._channels))
        if self._leader is not None:
            predicted_ms = planned.statistics.get("predicted_step_ms")
            self._leader.remember(step_ms, predicted_ms, result.span_ms)
        if self._monitor is not None and self._searches:  # collective, equal on all ranks
            modeled = {(0, *kind): total for kind, total in self._modeled.items()}
            self._monitor.expect(step_totals(self._of_all_ranks(modeled, graph)))
        if self._monitor is not None and (changes := self._monitor.observe(totals)):
            self._report_drift(step, changes)

    def _of_all_ranks(
        self, local: dict[RankKind, Total], graph: StageGraph
    ) -> dict[RankKind, Total]:
        """Sum over data-parallel replicas and tensor-parallel ranks, by rank of the plan."""
        kinds = sorted(COMPUTE, key=lambda kind: kind.value)
        ranks = range(graph.layout.rank_count)
        modules = [module.name for module in self._pipeline.descriptions]
        keys = [(rank, name, kind) for rank in ranks for name in modules for kind in kinds]
        rows = [local.get(key, Total(0.0, 0.0)) for key in keys]
        totals = torch.tensor(rows, dtype=torch.float64, device=exchange_device())
        dist.all_reduce(totals)
        return {key: Total(*row) for key, row in zip(keys, totals.tolist(), strict=True)}

    def _report_drift(self, step: int, changes: Sequence[Change]) -> None:
        shown = ", ".join(
            f"{module} {kind.value} {times:.2f}x" for (module, kind), times in changes[:SHOWN]
        )
        more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        self._logger.info(
            "step %d: measured times changed since planning (%s%s); the next steps are "
            "planned with the new times", step, shown, more,
        )  # fmt: skip
