"""Planner of schedules that are searched with a cost model, or replanned with measured times.

Searches use the same costs as simulations (`balance.step_plans.compute_search_costs`): times,
transfers and memory of the device. Measured times correct the costs by a constant and a rate per
module, action type and rank (`balance.online_calibration`). After each step, all ranks sum the
times of their actions:

    step i     run, record times --> all-reduce --> rates, transfer times
    step i+1   run                   plan of step i+2 with the new times (background process)

With `parallel.replan_threshold`, static schedules and Optimus are planned again with measured times
if the times have changed (Optimus section 6). Static schedules compare measured times with FLOPs,
and Optimus compares them with the times of the device profile.

A searched schedule depends on its planning time. If the planning process has no plan in time, the
planner compares the default order and static schedules. Runs that must be bitwise reproducible
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
from torchmm.balance.online_calibration import (
    ActionKind,
    ActionRates,
    ActionTimes,
    ActionTotals,
    DriftMonitor,
    RankKind,
    RateChange,
    sum_by_rank,
    sum_over_ranks,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.balance.pipeweaver.background.leader import StartPlanning, start_planning
from torchmm.balance.pipeweaver.background.planning_worker import StepContext
from torchmm.balance.pipeweaver.background.requests import PlanRequest, StepTimings
from torchmm.balance.pipeweaver.planners import BackgroundPlanner
from torchmm.balance.run_costs import build_cost_model, build_run_layer_tuning, load_run_profile
from torchmm.balance.section import SearchConfig
from torchmm.balance.step_plans import modeled_totals
from torchmm.balance.transfer_times import TransferTimes, message_timestamps, rank_pair_times_ms
from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.costs.flops import task_durations
from torchmm.parallel.gather import host_collective_device
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.run.runtime import StepResult, channel_pairs
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.planner import NextStepMetas, StepPlan
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.training.pipeline import Pipeline

MAX_SHOWN_CHANGES = 3
"""Maximum number of action types in a message about drift."""


def build_measuring_planner(
    run: ResolvedRecipe, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> MeasuringPlanner:
    """Return the planner of a run with a cost model or measured times. Collective over all ranks.

    Raises:
        ConfigError: `simulation.device` is unknown.
    """
    recipe = run.recipe
    costs = None
    if plans_schedule(recipe.parallel.schedule):
        costs = build_cost_model(run, pipeline.descriptions, load_run_profile(recipe, mesh.device))
    layerwise = pipeline.sharding == "layer"
    return MeasuringPlanner(
        pipeline,
        build_run_layer_tuning(run, pipeline.descriptions, mesh.device, layerwise=layerwise),
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
        self._rates = ActionRates()
        self._times = ActionTimes()
        self._transfers = TransferTimes()
        self._channels = channel_pairs(pipeline.layout)
        # Tensor-parallel ranks have the same messages, so one of them reports times.
        self._reports_messages = any(
            mesh.rank == ranks[0] for share in mesh.global_ranks for ranks in share
        )
        self._searches = costs is not None
        self._uses_measured_times = False
        """Whether searches in the background use measured times."""
        self._modeled: dict[ActionKind, ActionTotals] = {}
        """Modeled times of the step on the rank that plans, if they are compared with measured
        times."""
        self._monitor: DriftMonitor | None = None
        # The search uses measured times in any case.
        if config.replan_threshold > 0 and config.schedule != "searched":
            self._monitor = DriftMonitor(config.replan_threshold, self._rates)
        elif costs is not None:
            self._uses_measured_times = (
                SearchConfig.from_parent(config).background and not deterministic
            )
        in_background = (
            self._uses_measured_times
            if self._searches
            else SearchConfig.from_parent(config).background
        )
        super().__init__(
            pipeline, tuning, mesh, logger, costs,
            in_background=in_background, steps=steps, start=start,
        )  # fmt: skip

    def _measured(self) -> StepTimings:
        """Return times for a schedule search, or factors for the FLOPs of a static schedule."""
        names = [module.name for module in self._pipeline.descriptions]
        if self._monitor is not None and self._searches:
            return StepTimings(ActionRates(self._monitor.ms_per_flop).fill_missing(names))
        if self._monitor is not None:
            return StepTimings(self._monitor.factors)
        if not self._uses_measured_times:
            return StepTimings()
        return StepTimings(
            self._rates.fill_missing(names), self._times.fit_lines(), dict(self._transfers.ms)
        )

    def _make_plan(
        self, step: int, metas: Sequence[MicrobatchMeta], upcoming: NextStepMetas
    ) -> PlannedStep:
        planned = super()._make_plan(step, metas, upcoming)
        if self._monitor is not None and self._searches:
            # Measured times of the step are compared with its modeled times.
            assert self._leader is not None
            request = PlanRequest(step, tuple(metas), self._measured())
            work = StepContext(self._leader.setup, request)
            flops = task_durations(work.graph, self._pipeline.descriptions, metas)
            self._modeled = modeled_totals(work.graph, work.costs, flops)
        return planned

    def observe_step(
        self,
        step: int,
        planned: StepPlan,
        result: StepResult,
        microbatches: Sequence[Microbatch],
        step_ms: float,
    ) -> None:
        """Use the measured times of a step to plan later steps. See `Planner.observe_step`."""
        if not self._uses_measured_times and self._monitor is None:
            return
        graph = planned.plan.graph
        metas = [m.task_meta for m in microbatches]
        targets = [m.target_count for m in microbatches]
        flops = task_durations(graph, self._pipeline.descriptions, metas, targets)
        totals_by_rank = self._sum_over_all_ranks(
            sum_by_rank(result.records or (), graph, flops), graph
        )
        totals = sum_over_ranks(totals_by_rank)
        self._rates.update(totals)
        self._times.update(totals_by_rank)
        if self._uses_measured_times:
            records = result.records if self._reports_messages else None
            stamps = message_timestamps(records or (), self._channels)
            dist.all_reduce(torch.from_numpy(stamps), group=self._shared.group)
            self._transfers.update(rank_pair_times_ms(stamps, self._channels))
        if self._leader is not None:
            predicted_ms = planned.statistics.get("predicted_step_ms")
            self._leader.record_step(step_ms, predicted_ms, result.span_ms)
        if self._monitor is not None and self._searches:  # collective, equal on all ranks
            modeled = {(0, *kind): total for kind, total in self._modeled.items()}
            self._monitor.set_prior(sum_over_ranks(self._sum_over_all_ranks(modeled, graph)))
        if self._monitor is not None and (changes := self._monitor.observe(totals)):
            self._report_drift(step, changes)

    def _sum_over_all_ranks(
        self, local: dict[RankKind, ActionTotals], graph: StageGraph
    ) -> dict[RankKind, ActionTotals]:
        """Sum over data-parallel replicas and tensor-parallel ranks, by rank of the plan."""
        kinds = sorted(COMPUTE, key=lambda kind: kind.value)
        ranks = range(graph.layout.rank_count)
        modules = [module.name for module in self._pipeline.descriptions]
        keys = [(rank, name, kind) for rank in ranks for name in modules for kind in kinds]
        rows = [local.get(key, ActionTotals(0.0, 0.0)) for key in keys]
        totals = torch.tensor(rows, dtype=torch.float64, device=host_collective_device())
        dist.all_reduce(totals)
        return {key: ActionTotals(*row) for key, row in zip(keys, totals.tolist(), strict=True)}

    def _report_drift(self, step: int, changes: Sequence[RateChange]) -> None:
        shown = ", ".join(
            f"{module} {kind.value} {times:.2f}x"
            for (module, kind), times in changes[:MAX_SHOWN_CHANGES]
        )
        hidden = len(changes) - MAX_SHOWN_CHANGES
        more = f" and {hidden} more" if hidden > 0 else ""
        self._logger.info(
            "step %d: measured times changed since planning (%s%s); the next steps are "
            "planned with the new times", step, shown, more,
        )  # fmt: skip
