"""The planner of pipelines: the first rank plans each step and sends the plan to the other ranks.

The plan of a static schedule depends only on the sizes of the microbatches, so that it can be made
before they are decoded. The first rank of every pipeline plans, in a background process if planning
is slow (`planners.leader`). It broadcasts the encoded plan after all ranks have compared a digest
of the inputs (`planners.sharing`). Every data-parallel replica plans its own microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torchmm.balance.costs.model import CostModel
from torchmm.balance.pipeweaver.background.leader import PlanLeader
from torchmm.balance.pipeweaver.background.process import PlanningProcess
from torchmm.balance.pipeweaver.background.requests import Measured, PlannedStep, PlanningSetup
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning
from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.parallel.gather import gather_texts
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.plan import Gathering
from torchmm.planning.executions import run_tuning
from torchmm.planning.planner import Planner, PlanStatistics, StepPlan, Upcoming
from torchmm.planning.resolved import Resolved
from torchmm.training.pipeline import Pipeline
from torchmm.training.planners.sharing import SharedPlans, digest_of


def build_static_planner(
    run: Resolved, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> StaticPlanner:
    """Return the planner of a pipeline with a static schedule. Collective over all ranks.

    Raises:
        ConfigError: `simulation.device` is unknown.
    """
    layerwise = pipeline.sharding == "layer"
    tuning = run_tuning(run, pipeline.descriptions, mesh.device, layerwise=layerwise)
    config = run.recipe.parallel
    return StaticPlanner(
        pipeline, tuning, mesh, logger,
        in_background=config.search.background, steps=run.recipe.training.steps,
    )  # fmt: skip


class StaticPlanner(Planner):
    """Plans the steps of a pipeline, see `Planner`. Construction is collective over all ranks.

    Args:
        pipeline: pipeline of this rank.
        tuning: selection of the layers that recompute. If None, plans do not select layers.
        mesh: mesh of the run.
        logger: logger of this rank.
        costs: cost model of the schedule search. None for static schedules.
        in_background: Whether a process may plan while the preceding step trains.
        steps: number of steps of the run.
        start: function that starts the planning process.
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
        start: Callable[[PlanningSetup], PlanningProcess] = PlanningProcess,
    ) -> None:
        self._pipeline = pipeline
        self._logger = logger
        self._leader: PlanLeader | None = None
        """Planner on the first rank of a pipeline. None on the other ranks."""
        self._shared = SharedPlans(mesh)
        layout = pipeline.layout
        cut = f"{layout.stages}{layout.edges}{sorted(layout.sub_microbatched)}"
        # Ranks without sharded parameters run no all-gather, even if the plan has one.
        every = gather_texts(pipeline.sharding)
        members = [rank for alike in mesh.plan_ranks for rank in alike]
        sharding: Gathering = "step" if "step" in {every[rank] for rank in members} else "none"
        self._fixed = f"{cut}{pipeline.config.model_dump_json()}{sharding}"
        """Inputs of planning that do not change during a run."""
        if self._shared.leads:
            setup = PlanningSetup(
                layout,
                pipeline.config,
                tuple(pipeline.descriptions),
                sharding,
                costs,
                pipeline.message_sizes,
                pipeline.dtype,
                tuning,
                pipeline.device.type == "cuda",
                self._shared.leaders,
            )
            self._leader = PlanLeader(
                setup, mesh.data_parallel_rank, logger, steps, beside=in_background, start=start
            )

    def plan(
        self, step: int, microbatches: Sequence[Microbatch], upcoming: Upcoming = lambda: None
    ) -> StepPlan:
        """Return the plan of the step that begins, see `Planner.plan`."""
        metas = [m.task_meta for m in microbatches]
        planned: PlannedStep | None = None
        problems: list[str] = []
        if self._leader is not None:
            try:
                planned = self._leader.plan(step, metas, upcoming, self._measured())
                self._record_request(step, metas)
            except PlanError as error:  # `exchange` raises it on all ranks
                problems = error.problems
            except ValueError as error:
                problems = [str(error)]
        shared = self._shared.exchange(step, digest_of(self._fixed, metas), planned, problems)
        statistics = PlanStatistics(
            shared.predicted_ms,
            shared.planner,
            shared.planner_ms,
            shared.evaluations,
            shared.gain_over_natural,
        )
        return StepPlan(self._pipeline.read_plan(shared.numbers, metas), statistics)

    def _measured(self) -> Measured:
        """Return measured times to plan with. A static schedule uses FLOPs instead."""
        return Measured()

    def _record_request(self, step: int, metas: Sequence[MicrobatchMeta]) -> None:
        """Store data of the planned step that `learn` needs."""

    def close(self) -> None:
        """Stop the planning process."""
        if self._leader is not None:
            self._leader.close()
