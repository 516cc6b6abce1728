"""Training of one case of `cost_cases`, and the measurements of its ranks.

Every case runs in separate processes. gloo has a thread for each process group that wakes 100 times
per second; idle groups of ten cases in one process used 4 % of both cores.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from support.cases.cost_cases import CostCase
from support.ranks import StepTime, Stopwatch
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import compute_plan_costs, slowest_update_ms
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import set_malloc_retention
from torchmm.costs.execution import Execution
from torchmm.costs.operators import DeviceProfile
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize, module_of
from torchmm.parallel.apply import parallelize
from torchmm.parallel.fsdp import should_reshard_after_forward
from torchmm.parallel.mesh import build_mesh
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.plan import ActionRecord, PipelinePlan
from torchmm.pipelining.run.split import split_model_for_rank
from torchmm.planning.step import plan_layout
from torchmm.recipe.training_section import CompileConfig, OptimizerConfig
from torchmm.training.optim import OptimizerUpdate, build_optimizer
from torchmm.training.pipeline import Pipeline
from torchmm.training.step import TrainStep

CPU = torch.device("cpu")
CLASSES = {
    "forwards": (ActionType.F,),
    "backwards": (ActionType.B, ActionType.I, ActionType.W),
    "reductions": (ActionType.REDUCE_GRAD, ActionType.REDUCE_TIED),
    "posts": (ActionType.SEND_F, ActionType.SEND_B, ActionType.RECV_F, ActionType.RECV_B),
    "waits": (
        ActionType.WAIT_F,
        ActionType.WAIT_B,
        ActionType.WAIT_SEND_F,
        ActionType.WAIT_SEND_B,
    ),
}
"""Classes of actions that occupy a rank."""
REST = "behind the plan"
"""Norm of the gradients, clipping, optimizer; on ranks that are done early, waiting for it."""


class CaseProgram:
    """Trains a case as the trainer does, on this rank; creating it is collective."""

    def __init__(self, case: CostCase) -> None:
        self.name, self.case = case.name, case
        config = case.config
        self.mesh = mesh = build_mesh(config, CPU)
        self.model = case.build()
        self.modules = [module.describe() for module in self.model.modality_modules()]
        steps = [case.step(replica) for replica in range(mesh.data_parallel_size)]
        self.microbatches = steps[mesh.data_parallel_rank]
        self.targets = sum(m.target_count for step in steps for m in step)
        layout = plan_layout(config, self.modules, [m.meta for step in steps for m in step])
        stages = split_model_for_rank(self.model, layout, mesh.plan_rank)
        parallelize(self.model, mesh, config, case.checkpointing, CompileConfig(), torch.float32)
        materialize(self.model, CPU)
        init_weights(self.model, case.seed)
        self.pipeline = Pipeline(
            self.model, stages, layout, self.modules, config, mesh, torch.float32
        )
        settings = OptimizerConfig(lr=1e-5, lr_schedule="constant")
        copies = self.model.tied_replica_parameters()
        optimizer = build_optimizer(self.model, module_of, settings, copies)
        self._updates = OptimizerUpdate(self.model, optimizer, mesh, settings, steps=1)
        self._train_step = TrainStep(self.pipeline, mesh)
        self.cpu_ms: list[float] = []
        """CPU time of this process in every step."""
        self.classes: list[dict[str, float]] = []
        """Milliseconds of this rank in every step, by class of action."""

    def step(self, index: int) -> float:
        """Run a step without its data loading and return the seconds of computation."""
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        plan = self.pipeline.plan_training(self.microbatches)
        outcome = self._train_step.run(plan, self.microbatches, self.targets)
        self._updates.measure(outcome.weighted_and_module_losses)
        self._updates.apply(step=1)
        self._updates.finish()
        self.cpu_ms.append(1e3 * (time.process_time() - begin_cpu_s))
        took_ms = 1e3 * (time.perf_counter() - begin_s)
        records = outcome.result.records or []
        self.classes.append(by_class(records) | {REST: took_ms - outcome.result.span_ms})
        return outcome.compute_ms / 1e3

    def replica(self) -> Replica:
        """Return the inputs of the prediction for the step of this rank."""
        mesh, config = self.mesh, self.case.config
        metas = [m.meta for m in self.microbatches]
        targets = [m.target_count for m in self.microbatches]
        execution = Execution(
            tensor=mesh.module_mesh.sizes.tensor,
            sequence_parallel=config.sequence_parallel,
            shard=mesh.module_mesh.sizes.shard,
            replicate=mesh.module_mesh.sizes.replicate,
            recompute=self.case.recompute,
        )
        layerwise = mesh.plan_size == 1 and should_reshard_after_forward(config)
        plan = self.pipeline.plan(metas)
        return Replica(plan, self.modules, metas, targets, execution, layerwise)


def by_class(records: Iterable[ActionRecord]) -> dict[str, float]:
    """Return milliseconds for each class of action."""
    total_ms = dict.fromkeys(CLASSES, 0.0)
    names = {kind: name for name, kinds in CLASSES.items() for kind in kinds}
    for record in records:
        if (name := names.get(record.action.type)) is not None:
            total_ms[name] += record.end_ms - record.start_ms
    return total_ms


class Replica(NamedTuple):
    """Plan of a rank with the inputs of its prediction."""

    plan: PipelinePlan
    modules: list[ModuleDescription]
    metas: list[MicrobatchMeta]
    targets: list[int]
    execution: Execution
    layerwise: bool


class Prediction(NamedTuple):
    """Predicted step of a case."""

    step_ms: float
    """Time of the slowest rank."""
    classes: Mapping[str, float]
    """Milliseconds by class of action, summed over ranks."""


def predict(replicas: list[Replica], profile: DeviceProfile) -> Prediction:
    """Return the prediction for a step; ranks of a pipeline have the same plan.

    Args:
        replicas: Inputs of all ranks.
    """
    costs = []
    for replica in replicas:
        executions = dict.fromkeys((module.name for module in replica.modules), replica.execution)
        model = CostModel(profile, "float32", executions)
        graph = replica.plan.graph
        costs.append(
            compute_plan_costs(
                graph, replica.modules, replica.metas, model,
                targets=replica.targets, layerwise=replica.layerwise,
            )
        )  # fmt: skip
    first = replicas[0]
    if first.layerwise:
        costs = [slowest_of_replicas(costs)] * len(costs)
    update_ms = slowest_update_ms(first.plan.graph.layout, first.modules, model)
    piped = len(first.plan.actions) > 1
    steps = [simulate(r.plan, c) for r, c in zip(replicas, costs, strict=True)]
    ends_ms: list[float] = []
    classes: dict[str, float] = defaultdict(float)
    for step in steps[: 1 if piped else None]:
        for name, ms in by_class(step.records).items():
            classes[name] += ms
        ends_ms += _ends_ms(step)
    whole_ms = max(ends_ms) + update_ms
    classes[REST] = sum(whole_ms - end_ms for end_ms in ends_ms)
    return Prediction(whole_ms, classes)


def _ends_ms(step: SimulatedStep) -> list[float]:
    """Return the end of the last action of each rank of the plan."""
    ends = dict.fromkeys(range(len(step.plan.actions)), 0.0)
    for record in step.records:
        ends[record.rank] = max(ends[record.rank], record.end_ms)
    return list(ends.values())


@dataclass(frozen=True)
class CaseRuns:
    """Measurements of the ranks of a case.

    Attributes:
        times: Times of undisturbed runs in order.
        disturbed: Number of discarded runs.
        cpu_ms: CPU time of every run on this rank.
        classes: Milliseconds by class of action, summed over ranks; the median over runs.
        replicas: Inputs of the prediction of all ranks.
    """

    times: list[StepTime]
    disturbed: int
    cpu_ms: list[float]
    classes: Mapping[str, float]
    replicas: list[Replica]


def run_case(case: CostCase, runs: int, patience_s: float, quiet: float) -> CaseRuns:
    """Train a case for a few steps on all ranks and return the measurements.

    Args:
        patience_s, quiet: Arguments of `Stopwatch`.
    """
    set_malloc_retention()
    program = CaseProgram(case)
    compared = Stopwatch(patience_s, quiet).compare([program], 1, runs)
    classes_by_step = program.classes[1:]  # the first warms up
    medians = {name: median(step[name] for step in classes_by_step) for name in classes_by_step[0]}
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (medians, program.replica()))
    sums = {name: sum(classes[name] for classes, _ in results) for name in medians}
    times = compared.times[program.name]
    replicas = [replica for _, replica in results]
    return CaseRuns(times, compared.disturbed, program.cpu_ms[1:], sums, replicas)


def slowest_of_replicas(costs: Sequence[PlanCosts]) -> PlanCosts:
    """Return costs of data-parallel replicas that FSDP2 gathers layer by layer.

    The replicas synchronize in every layer, so every action takes as long as on the slowest
    replica.

    Args:
        costs: Costs of each replica, for the same actions.
    """
    slowest = {
        action: max(replica.compute_ms[action] for replica in costs)
        for action in costs[0].compute_ms
    }
    return replace(costs[0], compute_ms=slowest)
