"""The planner of runs without a pipeline: every rank plans its own microbatches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.planning.planner import NextStepMetas, Planner, StepPlan
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.training.pipeline import Pipeline


def build_single_planner(
    run: ResolvedRecipe, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> SinglePlanner:
    """Return the planner of a run without a pipeline."""
    return SinglePlanner(pipeline, mesh.data_parallel_rank)


class SinglePlanner(Planner):
    """Planner of the steps of one rank, see `Planner`. Its methods do not communicate.

    Args:
        pipeline: Pipeline with one rank.
        data_parallel_rank: Data-parallel rank of this process.
    """

    def __init__(self, pipeline: Pipeline, data_parallel_rank: int) -> None:
        self._pipeline = pipeline
        self._data_parallel_rank = data_parallel_rank
        self._ahead: tuple[list[MicrobatchMeta], PipelinePlan] | None = None
        """Metadata and plan of the next step, from `plan_ahead`."""

    def plan(
        self, step: int, microbatches: Sequence[Microbatch], upcoming: NextStepMetas = lambda: None
    ) -> StepPlan:
        """Return the plan of `plan_ahead` if its microbatches are equal, else a new plan."""
        metas = [m.task_meta for m in microbatches]
        ahead = self._ahead
        self._ahead = None
        if ahead is not None and ahead[0] == metas:
            return StepPlan(ahead[1])
        return StepPlan(self._make_plan(metas))

    def plan_ahead(self, upcoming: NextStepMetas) -> None:
        """Plan the next step, for `plan` to return."""
        upcoming_metas = upcoming()
        if upcoming_metas is None:
            return
        metas = list(upcoming_metas[self._data_parallel_rank])
        # If the next step cannot be planned, its error is raised after this step is finished.
        with suppress(PlanError):
            self._ahead = metas, self._make_plan(metas)

    def _make_plan(self, metas: Sequence[MicrobatchMeta]) -> PipelinePlan:
        """Return the plan of a step with these microbatches."""
        return self._pipeline.plan(metas)
