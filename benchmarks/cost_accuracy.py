"""How well the cost model and the simulator predict real steps of training on this CPU.

    python benchmarks/cost_accuracy.py [--quick] [--json FILE]

Operators are measured for each number of ranks (`torchmm.measure`, as `scripts/calibrate.py` does),
half before and half behind the steps, because the machine's own speed changes within minutes.
Models that calibration has never seen (`cost_cases`) are trained as the trainer does it. A step's
prediction is `simulate` of the very plan that the runtime executes, with `plan_costs` of that
profile, and `update_ms` for the optimizer; nothing is learned from the steps.

Accuracy is 1 - |predicted - measured| / measured, of the median over runs. All cases take turns,
so a slow minute hits all of them. The baseline is the noise floor: the first half of the runs
against the second. The paper's figure is the mean of PipeWeaver's simulator. One rank's time on
a core is compared too: on an idle machine it is the time that passes, on others it still holds.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import torch
import torch.distributed as dist
import transformers
from cost_cases import ONE_RANK, TINY, TWO_RANKS, CostCase
from documents import load_documents
from harness import Row, describe_machine, make_parser, report
from ranks import StepTime, Stopwatch, run_ranks

from torchmm.balance.calibration import fit_profile, mean_measurements
from torchmm.balance.cost_model import CostModel
from torchmm.balance.execution import Execution
from torchmm.balance.operators import Profile
from torchmm.balance.plan_costs import (
    PlanCosts,
    of_meeting_replicas,
    plan_costs,
    slowest_update_ms,
)
from torchmm.balance.profiles import load_profile
from torchmm.balance.simulator import simulate
from torchmm.config import CompileConfig, OptimizerConfig
from torchmm.host_memory import keep_freed_memory
from torchmm.measure import machine, measure
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import materialize, module_of
from torchmm.optim import build_optimizer, clip_factor, global_grad_norm, scale_gradients
from torchmm.parallel.apply import parallelize, reshards_after_forward
from torchmm.parallel.mesh import build_mesh
from torchmm.pipeline import Pipeline
from torchmm.pipelining.cut import cut_for_rank
from torchmm.step import TrainStep
from torchmm.step_plan import plan_layout

PAPER, WORST = 0.976, 0.90
QUIET = 0.05
"""Share of the CPU that other programs may take: ranks need all of it."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """How much to measure.

    Attributes:
        cases: by number of ranks.
        seconds: for calibration, about, by number of ranks.
        runs: of every case.
        patience_s: how long to wait for other programs to end, by number of ranks.
        small: whether calibration measures few sizes only.
    """

    cases: tuple[Sequence[CostCase], ...]
    seconds: float
    runs: int
    patience_s: float
    small: bool = False


SETTINGS = {
    "full": Setting((ONE_RANK, TWO_RANKS), 30.0, 7, 900.0),
    "quick": Setting(
        tuple(
            [replace(case, microbatches=ranks) for case in cases[:2]]
            for ranks, cases in ((1, ONE_RANK), (2, TWO_RANKS))
        ),
        seconds=4.0,
        runs=2,
        patience_s=0.0,
    ),
    "tiny": Setting((TINY[:1], TINY[1:]), 0.2, 2, 0.0, small=True),
}


class CaseProgram:
    """Trains a case as the trainer does, on this rank; creating it is collective."""

    def __init__(self, case: CostCase) -> None:
        self.name, self.case = case.name, case
        config = case.config
        self.mesh = mesh = build_mesh(config, CPU)
        self.model = case.build()
        self.modules = [module.describe() for module in self.model.modality_modules()]
        every = [case.step(replica) for replica in range(mesh.data_parallel_size)]
        self.microbatches = every[mesh.data_parallel_rank]
        self.targets = sum(m.target_count for step in every for m in step)
        layout = plan_layout(config, self.modules, [m.meta for step in every for m in step])
        stages = cut_for_rank(self.model, layout, mesh.pipeline_rank)
        parallelize(self.model, mesh, config, case.checkpointing, CompileConfig(), torch.float32)
        materialize(self.model, CPU)
        init_weights(self.model, case.seed)
        self.pipeline = Pipeline(
            self.model, stages, layout, self.modules, config, mesh, torch.float32
        )
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._copies = self.model.tied_copy_parameters()
        optimizer = OptimizerConfig(lr=1e-5)
        self._optimizer = build_optimizer(self.model, module_of, optimizer, self._copies)
        self._train_step = TrainStep(self.pipeline, mesh)
        self.cpu_ms: list[float] = []
        """Of every step: time of this process on a core."""

    def step(self, index: int) -> float:
        """All that a step does behind its data; the seconds of computing."""
        begin_s = time.process_time()
        outcome = self._train_step.run(self.microbatches, self.targets)
        group = self.mesh.pipeline.get_group() if self.mesh.pipeline_size > 1 else None
        norm = global_grad_norm(self._parameters, self._copies, group).item()
        scale_gradients(self._parameters, clip_factor(norm, 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.cpu_ms.append(1e3 * (time.process_time() - begin_s))
        return outcome.compute_ms / 1e3

    def predict_ms(self, profile: Profile) -> float:
        """Of the slowest rank; collective."""
        metas = [m.meta for m in self.microbatches]
        targets = [m.target_count for m in self.microbatches]
        mesh, config = self.mesh, self.case.config
        execution = Execution(
            tensor=mesh.tensor_size,
            sequence_parallel=config.sequence_parallel,
            shard=mesh.shard_size,
            replicate=mesh.replicate_size,
            recompute=self.case.recompute,
        )
        executions = dict.fromkeys((module.name for module in self.modules), execution)
        model = CostModel(profile, "float32", executions)
        plan = self.pipeline.plan(metas, targets)
        layerwise = mesh.pipeline_size == 1 and reshards_after_forward(config)
        costs = plan_costs(
            plan.graph, self.modules, metas, model, targets=targets, layerwise=layerwise
        )
        if layerwise and mesh.data_parallel_size > 1:
            replicas: list[PlanCosts] = [costs] * mesh.data_parallel_size
            dist.all_gather_object(replicas, costs)
            costs = of_meeting_replicas(replicas)
        update_ms = slowest_update_ms(plan.graph.layout, self.modules, model)
        slowest = torch.tensor(simulate(plan, costs).makespan_ms + update_ms)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()


@dataclass(frozen=True)
class Found:
    """Of one case.

    Attributes:
        case: its name.
        predicted_ms, measured_ms: of a step; measured: run after run.
        cpu_ms: the same on a core; where there are several ranks, they also wait: none.
    """

    case: str
    predicted_ms: float
    measured_ms: list[float]
    cpu_ms: list[float]

    @property
    def median_ms(self) -> float:
        """Measured."""
        return median(self.measured_ms)

    @property
    def accuracy(self) -> float:
        """Of the prediction."""
        return _accuracy(self.predicted_ms, self.median_ms)

    @property
    def cpu_accuracy(self) -> float:
        """Of the prediction, against the time on a core."""
        return _accuracy(self.predicted_ms, median(self.cpu_ms))

    @property
    def floor(self) -> float:
        """Of the first half of the runs, taken as a prediction of the second."""
        half = len(self.measured_ms) // 2
        first, second = self.measured_ms[:half], self.measured_ms[half:]
        return _accuracy(median(first), median(second))


def _accuracy(predicted: float, measured: float) -> float:
    return 1 - abs(predicted - measured) / measured


def run_rank(cases: Sequence[CostCase], setting: Setting) -> tuple[list[Found], str]:
    """Everything one rank does; what rank 0 reports."""
    _quiet_libraries()
    keep_freed_memory()
    name, base = machine(CPU), load_profile("cpu")
    begin_s = time.perf_counter()
    before = measure(CPU, torch.float32, setting.seconds / 2, quick=setting.small)
    taken_s = time.perf_counter() - begin_s
    programs = [CaseProgram(case) for case in cases]
    watch = Stopwatch(setting.patience_s, QUIET)
    compared = watch.compare(programs, 1, setting.runs)
    begin_s = time.perf_counter()
    behind = measure(CPU, torch.float32, setting.seconds / 2, quick=setting.small)
    taken_s += time.perf_counter() - begin_s
    both = mean_measurements(before, behind)
    mine = [
        fit_profile(found, base, "float32", name, own_peaks=True)
        for found in (both, before, behind)
    ]
    dist.broadcast_object_list(mine)
    predicted, *halves = [[p.predict_ms(profile) for p in programs] for profile in mine]
    drift = median(b / a for a, b in zip(*halves, strict=True))
    times: dict[str, list[StepTime]] = compared.times
    alone = dist.get_world_size() == 1
    results = [
        Found(
            p.name,
            predicted_ms,
            [1e3 * t.wall_s for t in times[p.name]],
            p.cpu_ms[1:] if alone else [],  # the first warms up
        )
        for p, predicted_ms in zip(programs, predicted, strict=True)
    ]
    how = f"calibrated in {taken_s:.0f} s, half of it before and half behind the steps, by which "
    how += f"predictions differ by {drift - 1:+.1%}: {name}; {compared}"
    return results, how


def _quiet_libraries() -> None:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", message=".*_tensor. is deprecated")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()


def rows(found: dict[int, list[Found]]) -> list[Row]:
    """The table's lines, from what was found by number of ranks."""
    made, every = [], [own for results in found.values() for own in results]
    for ranks, results in found.items():
        for own in results:
            case = f"{own.case}; {ranks} rank{'s' * (ranks > 1)}"
            made += [
                Row(case, "predicted step", "ms", own.predicted_ms, own.median_ms, better="lower"),
                Row(case, "accuracy", "share", own.accuracy, own.floor),
            ]
            if own.cpu_ms:
                made.append(Row(case, "accuracy, CPU time", "share", own.cpu_accuracy))
    case = f"all {len(every)} cases"
    for metric, combine, goal, paper in (
        ("mean accuracy", mean, PAPER, PAPER),
        ("worst accuracy", min, WORST, None),
    ):
        ours, floor = combine(own.accuracy for own in every), combine(own.floor for own in every)
        made.append(Row(case, metric, "share", ours, floor, paper, goal))
    on_core = [own.cpu_accuracy for own in every if own.cpu_ms]
    for metric, combine in (("mean", mean), ("worst", min)):
        name = f"{metric} accuracy, CPU time, 1 rank"
        made.append(Row(case, name, "share", combine(on_core)))
    return made


def main() -> None:
    """Prints the table."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="for tests: seconds, says nothing")
    arguments = parser.parse_args()
    name = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    setting = SETTINGS[name]
    torch.set_num_threads(1)
    print(f"machine: {describe_machine(CPU)}")
    print(f"documents: {load_documents().source}; seeds 0")
    print("baseline: of predicted steps, the measured ones; of accuracy, runs against themselves")
    found = {}
    for ranks, cases in enumerate(setting.cases, start=1):
        found[ranks], how = run_ranks(run_rank, ranks, cases, setting)
        print(f"{ranks} rank(s): {how}")
    report("Predicted against measured steps", rows(found), arguments.json)


if __name__ == "__main__":
    main()
