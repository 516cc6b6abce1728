"""Plans in a run: which step is planned from what, and with what measured times.

    planner = build_planner(run, pipeline, mesh, logger)
    planned = planner.plan(step, microbatches, loader.next_metas)              before each step
    planner.learn(step, planned, outcome.result, microbatches, step_ms)        after it

The first rank of every pipeline has the plan of each step made, beside the training of the one
before where that is worth it (`plans.leader`), and sends it to the others as numbers, once all have
shown that they would plan the same (`plans.sharing`). Every data-parallel replica does so for its
own data. A plan of one rank, without a pipeline, is made by that rank.

A schedule's plan follows from the sizes of microbatches alone, so that it may be made before they
are decoded. With `parallel.replan_drift` it, and Optimus' too, is made with measured times once
these have drifted from those planned with (Optimus §6): FLOPs, or of Optimus the times of the
device's profile.

Searched schedules take longer, and so does Optimus where it plays its candidates through
(`balance.bubbles.choice`). What the planning process has not finished in time is used as far as it
is; where there is nothing yet, the natural order and static ones are compared (of Optimus the first
coarse order is taken). Runs that have to repeat to the bit (`training.deterministic`, or
`background = false`) search with the times of the device's profile, in all evaluations, before the
step begins.

Orders are searched with the costs that forecasts use (`planning.step.searched_costs`): times,
transfers and bytes of the device. Measured times correct them: a constant and a rate for each
module, kind of action and rank (`balance.rates`). After every step all ranks add up what their
actions took; they then know the same. Losses change only by rounding: another order adds up the
same gradients.

Rejected: letting ranks search the same order on their own during training, which needs as many
cores as there are ranks, and budgets in evaluations, which nobody can know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from torchmm.balance.costs.flops import task_durations
from torchmm.balance.costs.model import CostModel
from torchmm.balance.planners import PLANNERS
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
from torchmm.balance.recomputation.tuning import LayerTuning
from torchmm.balance.transfer_times import TransferTimes, between_ranks_ms, message_stamps
from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.parallel.gather import exchange_device, gather_texts
from torchmm.parallel.mesh import ParallelMesh
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import Gathering, PipelinePlan
from torchmm.pipelining.run.runtime import StepResult, channel_pairs
from torchmm.planning.beside.process import PlanningProcess
from torchmm.planning.beside.requests import Measured, PlannedStep, PlanningSetup, PlanRequest
from torchmm.planning.beside.work import StepWork
from torchmm.planning.executions import run_costs, run_profile, run_tuning
from torchmm.planning.planner import PlanStatistics, StepPlan, Upcoming
from torchmm.planning.resolved import Resolved
from torchmm.planning.step import modelled_totals
from torchmm.training.pipeline import Pipeline
from torchmm.training.plans.leader import PlanLeader
from torchmm.training.plans.sharing import SharedPlans, digest_of

SHOWN = 3
"""Kinds of actions that a message about drift names."""


def build_planner(
    run: Resolved, pipeline: Pipeline, mesh: ParallelMesh, logger: logging.Logger
) -> StepPlanner:
    """Return the planner of a run. Collective over all ranks.

    Raises:
        ConfigError: `simulation.device` is unknown.
    """
    recipe = run.recipe
    layerwise = pipeline.sharding == "layer"
    costs = None
    if recipe.parallel.schedule in PLANNERS and mesh.pipeline_size > 1:
        costs = run_costs(run, pipeline.descriptions, run_profile(recipe, mesh.device))
    return StepPlanner(
        pipeline,
        run_tuning(run, pipeline.descriptions, mesh.device, layerwise=layerwise),
        mesh,
        logger,
        costs,
        deterministic=recipe.training.deterministic,
        steps=recipe.training.steps,
    )


class StepPlanner:
    """Plans the steps of a run, see `Planner`. Construction is collective over all ranks.

    Args:
        tuning: how plans choose what layers recompute; None: they do not.
        costs: of the run's device, that orders are searched with; None: they are not.
        deterministic: search with all evaluations and without measured times.
        steps: of the run.
        start: makes the planning process.
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
        config = self._config = pipeline.config
        self._rates = Rates()
        self._times = ActionTimes()
        self._transfers = TransferTimes()
        self._channels = channel_pairs(pipeline.layout)
        # Of tensor-parallel ranks, which are alike, one: all times of a channel are of two clocks.
        self._speaks = any(mesh.rank == alike[0] for share in mesh.shares for alike in share)
        self._searches = costs is not None
        self._learns = False
        """Whether searches beside training follow measured times."""
        self._modelled: dict[ActionKind, Total] = {}
        """What the step was planned with, on the rank that leads, where it is watched for drift."""
        self._monitor: DriftMonitor | None = None
        self._leader: PlanLeader | None = None
        self._shared: SharedPlans | None = None
        self._ahead: tuple[list[MicrobatchMeta], PipelinePlan | None] = ([], None)
        """Metadata and plan of the next step, from `plan_ahead`."""
        if mesh.pipeline_size == 1:
            return
        self._shared = SharedPlans(mesh)
        layout = pipeline.layout
        cut = f"{layout.stages}{layout.edges}{sorted(layout.sub_microbatched)}"
        # Ranks that are not sharded have nothing to gather, though the plan may say so.
        every = gather_texts(pipeline.sharding)
        members = [rank for alike in mesh.plan_ranks for rank in alike]
        sharding: Gathering = "step" if "step" in {every[rank] for rank in members} else "none"
        self._fixed = f"{cut}{config.model_dump_json()}{sharding}"
        # Searched orders follow measured times in any case.
        if config.replan_drift > 0 and config.schedule != "searched":
            self._monitor = DriftMonitor(config.replan_drift, self._rates)
        elif costs is not None:
            self._learns = config.search.background and not deterministic
        if self._shared.leads:
            setup = PlanningSetup(
                layout,
                config,
                tuple(pipeline.descriptions),
                sharding,
                costs,
                pipeline.message_sizes,
                pipeline.dtype,
                tuning,
                pipeline.device.type == "cuda",
                self._shared.leaders,
            )
            beside = self._learns if self._searches else config.search.background
            share = mesh.data_parallel_rank
            self._leader = PlanLeader(setup, share, logger, steps, beside=beside, start=start)

    def plan(
        self, step: int, microbatches: Sequence[Microbatch], upcoming: Upcoming = lambda: None
    ) -> StepPlan:
        """Return the plan of the step that begins, see `Planner.plan`."""
        metas = [m.task_meta for m in microbatches]
        if self._shared is None:
            (planned_metas, plan), self._ahead = self._ahead, ([], None)
            if plan is not None and planned_metas == metas:
                return StepPlan(plan, PlanStatistics())
            plan = self._pipeline.plan(metas, tuning=self._tuning)
            return StepPlan(plan, PlanStatistics())
        planned: PlannedStep | None = None
        problems: list[str] = []
        if self._leader is not None:
            try:
                planned = self._leader.plan(step, metas, upcoming, self._measured())
                self._watch(step, metas)
            except PlanError as error:  # all ranks raise it
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

    def plan_ahead(self, upcoming: Upcoming) -> None:
        """Plan the next step of a rank without a pipeline, for `plan` to return.

        Pipelines plan ahead in `PlanLeader`.
        """
        if self._shared is not None or (every := upcoming()) is None:
            return
        metas = list(every[self._mesh.data_parallel_rank])
        # A step that cannot be planned fails when it begins, after this step is finished.
        with suppress(PlanError):
            self._ahead = metas, self._pipeline.plan(metas, tuning=self._tuning)

    def _measured(self) -> Measured:
        """What to plan with: times of a search, factors of a schedule."""
        names = [module.name for module in self._pipeline.descriptions]
        if self._monitor is not None and self._searches:
            return Measured(Rates(self._monitor.ms_per_flop).complete(names))
        if self._monitor is not None:
            return Measured(self._monitor.factors)
        if not self._learns:
            return Measured()
        return Measured(self._rates.complete(names), self._times.fits(), dict(self._transfers.ms))

    def _watch(self, step: int, metas: Sequence[MicrobatchMeta]) -> None:
        """Notes what a search that is watched for drift has planned with."""
        if self._leader is None or self._monitor is None or not self._searches:
            return
        request = PlanRequest(step, tuple(metas), self._measured())
        work = StepWork(self._leader.setup, request)
        flops = task_durations(work.graph, self._pipeline.descriptions, metas)
        self._modelled = modelled_totals(work.graph, work.costs, flops)

    def learn(
        self,
        step: int,
        planned: StepPlan,
        result: StepResult,
        microbatches: Sequence[Microbatch],
        step_ms: float,
    ) -> None:
        """Use the measured times of a step to plan later steps, see `Planner.learn`."""
        if not self._learns and self._monitor is None:
            return
        graph = planned.plan.graph
        metas = [m.task_meta for m in microbatches]
        targets = [m.target_count for m in microbatches]
        flops = task_durations(graph, self._pipeline.descriptions, metas, targets)
        every = self._of_all_ranks(rank_totals(result.records or (), graph, flops), graph)
        totals = step_totals(every)
        self._rates.learn(totals)
        self._times.learn(every)
        if self._learns and self._shared is not None:
            records = result.records if self._speaks else None
            stamps = message_stamps(records or (), self._channels)
            dist.all_reduce(torch.from_numpy(stamps), group=self._shared.group)
            self._transfers.learn(between_ranks_ms(stamps, self._channels))
        if self._leader is not None:
            self._leader.remember(step_ms, planned.statistics.predicted_ms, result.span_ms)
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

    def close(self) -> None:
        """Stop the planning process."""
        if self._leader is not None:
            self._leader.close()
