"""Planners that select the layers that recompute, or plan in a background process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torchmm.balance.costs.model import CostModel
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.balance.pipeweaver.background.leader import (
    PlanLeader,
    StartPlanning,
    start_planning,
)
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, StepTimings
from torchmm.balance.run_costs import build_run_layer_tuning
from torchmm.balance.section import SearchConfig
from torchmm.balance.step_plans import plan_step_with_costs
from torchmm.common.batch import MicrobatchMeta
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.planner import NextStepMetas
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.training.pipeline import Pipeline
from torchmm.training.planners.single import SinglePlanner
from torchmm.training.planners.static import StaticPlanner


def plan_pipeline_step(
    pipeline: Pipeline, metas: Sequence[MicrobatchMeta], **options: Any
) -> PipelinePlan:
    """Return the plan of a training step of a pipeline with options of `plan_step_with_costs`.

    Raises:
        PlanError: As for `plan_step_with_costs`.
    """
    options.setdefault("reduces_early", pipeline.device.type == "cuda")
    return plan_step_with_costs(
        pipeline.layout,
        pipeline.config,
        pipeline.descriptions,
        metas,
        specs=pipeline.specs(metas),
        sharding=pipeline.sharding,
        **options,
    )


def build_tuned_planner(
    run: ResolvedRecipe, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> TunedPlanner:
    """Return the planner of a run without a pipeline whose plans select layers.

    Raises:
        ConfigError: `simulation.device` is unknown.
    """
    layerwise = pipeline.sharding == "layer"
    tuning = build_run_layer_tuning(run, pipeline.descriptions, mesh.device, layerwise=layerwise)
    return TunedPlanner(pipeline, tuning, mesh.data_parallel_rank)


class TunedPlanner(SinglePlanner):
    """Planner of the steps of one rank that selects the layers that recompute.

    Args:
        pipeline: Pipeline as for `SinglePlanner`.
        tuning: Selection of the layers that recompute. None if plans do not select layers.
        data_parallel_rank: Rank as for `SinglePlanner`.
    """

    def __init__(
        self, pipeline: Pipeline, tuning: LayerTuning | None, data_parallel_rank: int
    ) -> None:
        super().__init__(pipeline, data_parallel_rank)
        self._tuning = tuning

    def _make_plan(self, metas: Sequence[MicrobatchMeta]) -> PipelinePlan:
        return plan_pipeline_step(self._pipeline, metas, tuning=self._tuning)


def build_background_planner(
    run: ResolvedRecipe, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> BackgroundPlanner:
    """Return the planner of a static schedule with a background process or tuned layers.

    Collective over all ranks.

    Raises:
        ConfigError: `simulation.device` is unknown.
    """
    layerwise = pipeline.sharding == "layer"
    return BackgroundPlanner(
        pipeline,
        build_run_layer_tuning(run, pipeline.descriptions, mesh.device, layerwise=layerwise),
        mesh,
        logger,
        in_background=SearchConfig.from_parent(run.recipe.parallel).background,
        steps=run.recipe.training.steps,
    )


class BackgroundPlanner(StaticPlanner):
    """Planner of the steps of a pipeline, with a background process if planning is slow.

    Construction is collective over all ranks.

    Args:
        pipeline: Pipeline as for `StaticPlanner`.
        tuning: Selection of the layers that recompute. None if plans do not select layers.
        mesh: Mesh as for `StaticPlanner`.
        logger: Logger of this rank.
        costs: Cost model of the schedule search. None for static schedules.
        in_background: Whether a process may plan while the preceding step trains.
        steps: Number of steps of the run.
        start: Function that starts the planning process.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        tuning: LayerTuning | None,
        mesh: ParallelMesh,
        logger: logging.Logger,
        costs: CostModel | None = None,
        *,
        in_background: bool,
        steps: int,
        start: StartPlanning = start_planning,
    ) -> None:
        super().__init__(pipeline, mesh)
        self._logger = logger
        self._leader: PlanLeader | None = None
        """Planner on the first rank of a pipeline. None on the other ranks."""
        if self._shared.is_leader:
            setup = PlanningSetup(
                pipeline.layout,
                pipeline.config,
                tuple(pipeline.descriptions),
                self._sharding,
                costs,
                pipeline.message_sizes,
                pipeline.dtype,
                tuning,
                pipeline.device.type == "cuda",
                self._shared.leaders,
            )
            self._leader = PlanLeader(
                setup,
                mesh.data_parallel_rank,
                logger,
                steps,
                in_background=in_background,
                start=start,
            )

    def _make_plan(
        self, step: int, metas: Sequence[MicrobatchMeta], upcoming: NextStepMetas
    ) -> PlannedStep:
        assert self._leader is not None
        return self._leader.plan(step, metas, upcoming, self._measured())

    def _measured(self) -> StepTimings:
        """Return measured times for planning. A static schedule uses FLOPs instead."""
        return StepTimings()

    def close(self) -> None:
        """Stop the planning process."""
        if self._leader is not None:
            self._leader.close()
