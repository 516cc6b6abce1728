"""The planner of pipelines: the first rank plans each step and sends the plan to the other ranks.

The plan of a static schedule depends only on the sizes of the microbatches. The first rank of every
pipeline broadcasts the encoded plan after all ranks have compared a digest of the inputs
(`planners.sharing`). Every data-parallel replica plans its own microbatches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.parallel.gather import gather_texts
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.plan import UnshardMode
from torchmm.pipelining.plan.serialization import encode_plan
from torchmm.pipelining.run.messages import message_specs
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.planner import NextStepMetas, Planner, StepPlan
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.planning.step import plan_step
from torchmm.training.pipeline import Pipeline
from torchmm.training.planners.sharing import PlanExchange, plan_input_digest


def build_static_planner(
    run: ResolvedRecipe, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> StaticPlanner:
    """Return the planner of a pipeline with a static schedule. Collective over all ranks."""
    return StaticPlanner(pipeline, mesh)


class StaticPlanner(Planner):
    """Planner of the steps of a pipeline, see `Planner`. Construction is collective over all ranks.

    Args:
        pipeline: Pipeline of this rank.
        mesh: Mesh of the run.
    """

    def __init__(self, pipeline: Pipeline, mesh: ParallelMesh) -> None:
        self._pipeline = pipeline
        self._shared = PlanExchange(mesh)
        layout = pipeline.layout
        stages_text = f"{layout.stages}{layout.edges}{sorted(layout.sub_microbatched)}"
        # Ranks without sharded parameters run no all-gather, even if the plan has one.
        shardings = gather_texts(pipeline.sharding)
        members = [rank for ranks in mesh.plan_ranks for rank in ranks]
        self._sharding: UnshardMode = (
            "step" if "step" in {shardings[rank] for rank in members} else "none"
        )
        self._fixed = f"{stages_text}{pipeline.config.model_dump_json()}{self._sharding}"
        """Inputs of planning that do not change during a run."""

    def plan(
        self, step: int, microbatches: Sequence[Microbatch], upcoming: NextStepMetas = lambda: None
    ) -> StepPlan:
        """Return the plan of the step that begins, see `Planner.plan`."""
        metas = [m.task_meta for m in microbatches]
        planned: PlannedStep | None = None  # remains None on ranks that do not plan
        problems: list[str] = []
        if self._shared.is_leader:
            try:
                planned = self._make_plan(step, metas, upcoming)
            except PlanError as error:  # `exchange` raises it on all ranks
                problems = error.problems
            except ValueError as error:
                problems = [str(error)]
        numbers = None if planned is None else planned.encoded_plan
        numbers = self._shared.exchange(
            step, plan_input_digest(self._fixed, metas), numbers, problems
        )
        plan = self._pipeline.load_plan(numbers, metas)
        return StepPlan(plan) if planned is None else StepPlan(plan, planned.statistics)

    def _make_plan(
        self, step: int, metas: Sequence[MicrobatchMeta], upcoming: NextStepMetas
    ) -> PlannedStep:
        """Return the encoded plan of a step. Called on the first rank of each pipeline.

        Raises:
            PlanError, ValueError: The step cannot be planned.
        """
        begin_s = time.perf_counter()
        pipeline = self._pipeline
        # Sizes of complete microbatches. `Pipeline.load_plan` adds those of the slices of a rank.
        specs = partial(
            message_specs, modules=pipeline.message_sizes, microbatches=metas, dtype=pipeline.dtype
        )
        plan = plan_step(
            pipeline.layout, pipeline.config, pipeline.descriptions, metas,
            specs=specs, sharding=self._sharding, reduces_early=pipeline.device.type == "cuda",
        )  # fmt: skip
        numbers = encode_plan(plan)
        return PlannedStep(step, numbers, {"planner_ms": (time.perf_counter() - begin_s) * 1e3})
