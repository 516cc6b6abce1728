"""Effect of planning the next step on the current step, with two ranks and a planning process.

Two programs run the same plan of a step of the image-text model. The first has the planner of the
trainer, whose process searches, lowers and validates the next plan in the background. The step uses
the finished plan, sends it to the pipeline, converts it to actions and sums measured times. The
second replays the plan from memory. The programs alternate, and a run begins when the planning
process is idle. The number of orders is the default of recipes; additional cases have a number that
exhausts the time budget, so planning takes 80 % of every step.

A core is spare if ranks have all cores except the last, which the planning process has. On a
machine with two cores, both ranks then share one: steps are longer, but the comparison is the same.
Without a spare core, the planning process shares the cores of the ranks with the lowest priority.
Context switches and shared caches may slow steps; the rows show this, but no goal limits it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from support.cases.pipeline_model_case import QUIET, RANKS, OurProgram, ProgramChoice
from support.harness import Row
from support.models.pipeline_model import Size, load_steps
from support.ranks import Comparison, Program, StepTime, Stopwatch, run_ranks
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.background.leader import start_planning
from torchmm.balance.pipeweaver.background.requests import PlanningSetup
from torchmm.balance.pipeweaver.measuring_planner import MeasuringPlanner
from torchmm.balance.section import SearchConfig
from torchmm.common.batch import Microbatch
from torchmm.common.processes import set_malloc_retention
from torchmm.common.step_process import Priority, StepProcess
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.mesh import ParallelMesh, build_mesh
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.planner import StepPlan
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.step import StepOutcome, TrainStep

ON, REPLAY = "planning", "replay"
GOAL = 1.02
ALL = 1 << 20
"""Images per sub-microbatch if a microbatch is not split."""
ENDLESS = 1 << 30
"""Number of steps of a run without end."""
PATIENCE_S = 60.0
"""Time limit of a plan in seconds."""
WARM = 3
"""Number of warmup steps.

The first step is planned before it starts, and the second without measured times.
"""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """Extent of the measurement.

    Attributes:
        evaluations: Maximum number of evaluated schedules per step, for each case.
        patience_s: Time limit in seconds for waiting until other programs finish.
    """

    size: Size
    microbatches: int
    runs: int
    evaluations: tuple[int | None, ...]
    patience_s: float
    choice: ProgramChoice


DEFAULT = SearchConfig().evaluations
SETTINGS = {
    "full": Setting(Size(6, 16, 96, 96), 4, 20, (DEFAULT, 200_000), 30, ProgramChoice(1, 2, 4)),
    "quick": Setting(Size(2, 2, 96, 96), 4, 1, (DEFAULT,), 0, ProgramChoice(1, 1, 4)),
    "tiny": Setting(Size(2, 2, 32, 32), 4, 1, (100,), 0, ProgramChoice(1, 1, 4)),
}


@dataclass(frozen=True)
class Cores:
    """CPU cores of the ranks and of the planning process."""

    ranks: frozenset[int]
    planning: frozenset[int]

    @property
    def spare(self) -> bool:
        """True if the planning process has separate cores."""
        return not self.ranks & self.planning

    def __str__(self) -> str:
        if not self.spare:
            return f"{RANKS} ranks, no spare core"
        shared = ", one core for both" if len(self.ranks) < RANKS else ""
        return f"{RANKS} ranks{shared}, one spare core"


def divisions() -> list[Cores]:
    """Return the core assignments with and without a spare core. Empty except on Linux."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    full = frozenset(cores[:RANKS])
    result = [Cores(full, full)]
    if len(cores) > 1:
        result.insert(0, Cores(frozenset(cores[:-1][:RANKS]), frozenset(cores[-1:])))
    return result


@dataclass(frozen=True)
class SearchedChoice(ProgramChoice):
    """Stages with a searched schedule.

    Attributes:
        evaluations: Maximum number of evaluated schedules per step.
        stages: Value of `stages` in [parallel.search].
    """

    evaluations: int | None = 2000
    stages: str = "separated"

    def config(self) -> ParallelConfig:
        values = super().config().model_dump(exclude_none=True)
        search = {"evaluations": self.evaluations, "stages": self.stages}
        return ParallelConfig.model_validate({**values, "schedule": "searched", "search": search})

    def __str__(self) -> str:
        if self.stages == "separated":
            return super().__str__()
        most = "all" if self.images == ALL else f"at most {self.images}"
        return f"stages as in {self.stages!r}, {self.llm_segments} per rank, {most} images at once"


class Replayed(OurProgram):
    """Trainer step up to the gradients, with an existing plan.

    Args:
        shared: List with the plan of all programs.
    """

    def __init__(
        self,
        name: str,
        model: MultimodalModel,
        batch: Sequence[Microbatch],
        choice: SearchedChoice,
        mesh: ParallelMesh,
        shared: list[PipelinePlan],
    ) -> None:
        super().__init__(name, model, [batch], choice, mesh)
        self.shared, self.train = shared, TrainStep(self.pipeline, mesh)
        self.targets = sum(m.target_count for m in batch)

    def train_step(self, plan: PipelinePlan, index: int) -> StepOutcome:
        """Compute the gradients of a step."""
        self.model.zero_grad()
        return self.train.run(plan, self.steps[index], self.targets)

    def step(self, index: int) -> float:
        return self.train_step(self.shared[0], index).compute_ms / 1e3


class Planned(Replayed):
    """Trainer step with concurrent planning.

    Later steps of all programs run the plan of the last warmup step. Statistics are on the
    planning rank only, so the choice depends on the step number, which all ranks share.

    Args:
        cores: Cores of the planning process.
    """

    def __init__(
        self,
        model: MultimodalModel,
        batch: Sequence[Microbatch],
        choice: SearchedChoice,
        mesh: ParallelMesh,
        shared: list[PipelinePlan],
        cores: Cores | None,
    ) -> None:
        super().__init__(ON, model, batch, choice, mesh, shared)
        self.cores = cores
        self.process: StepProcess[PlannedStep] | None = None
        self.number, self.planning = 0, False
        self.statistics: Mapping[str, Any] = {}
        logger = logging.getLogger(__name__)
        self.planner = MeasuringPlanner(
            self.pipeline, None, mesh, logger, CostModel(load_profile("cpu"), "float32"),
            deterministic=False, steps=ENDLESS, start=self._start,
        )  # fmt: skip

    def _start(self, setup: PlanningSetup, priority: Priority) -> StepProcess[PlannedStep]:
        """Start the planning process on the first rank of the pipeline."""
        self.process = start_planning(setup, priority)
        if self.cores is not None:
            os.sched_setaffinity(self.process.pid, self.cores.planning)
        return self.process

    def step(self, index: int) -> float:
        """Receive, send and read plans as in training, but always run the same plan."""
        begin_s = time.perf_counter()
        self.number += 1
        self.planning = True
        batch = self.steps[index]
        plan, self.statistics = self.planner.plan(
            self.number, batch, lambda: [[m.meta for m in batch]]
        )
        if self.number == WARM:
            self.shared.append(plan)
        used = StepPlan(self.shared[0] if self.shared else plan, self.statistics)
        outcome = self.train_step(used.plan, index)
        step_ms = (time.perf_counter() - begin_s) * 1e3
        self.planner.observe_step(self.number, used, outcome.result, batch, step_ms)
        return outcome.compute_ms / 1e3

    def settle(self) -> None:
        """Wait until the planning process has nothing to do."""
        if self.process is not None and self.planning:
            self.process.take(self.number + 1, PATIENCE_S)
        self.planning = False


class SettledStopwatch(Stopwatch):
    """Waits with each step until its plan is finished."""

    def __init__(self, planned: Planned, patience_s: float) -> None:
        # The planning process may occupy a core.
        super().__init__(patience_s, QUIET + 1 / (os.cpu_count() or 1))
        self.planned = planned

    def time(self, program: Program, index: int) -> StepTime:
        self.planned.settle()
        return super().time(program, index)


def run_rank(setting: Setting, cores: Cores | None, evaluations: int | None) -> dict[str, Any]:
    """Measure all programs on this rank, and return the results."""
    if cores is not None:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores.ranks)
    set_malloc_retention()  # as training does
    source, (batch,) = load_steps(1, setting.microbatches)
    model, mesh = setting.size.build(), build_mesh(ParallelConfig(pipeline=RANKS), CPU)
    choice = SearchedChoice(*astuple(setting.choice), evaluations)
    shared: list[PipelinePlan] = []
    planned = Planned(model, batch, choice, mesh, shared, cores)
    programs: list[Program] = [planned, Replayed(REPLAY, model, batch, choice, mesh, shared)]
    watch = SettledStopwatch(planned, setting.patience_s)
    for _ in range(WARM):
        watch.time(planned, 0)
    comparison = watch.compare(programs, 1, setting.runs)
    planned.settle()
    planned.planner.close()
    return {"source": source, "comparison": comparison, "statistics": planned.statistics}


def measure(setting: Setting) -> Iterator[list[Row]]:
    """Yield tables with a spare core, if the machine has one, and without."""
    everywhere: list[Cores | None] = [None]
    for cores, evaluations in product(divisions() or everywhere, setting.evaluations):
        results = run_ranks(run_rank, RANKS, setting, cores, evaluations)
        comparison = results["comparison"]
        case = _case(cores, evaluations)
        print(f"planning: {case}: {comparison}; last: {results['statistics']}")
        yield rows(cores, evaluations, results)


def _case(cores: Cores | None, evaluations: int | None) -> str:
    where = cores or f"{RANKS} ranks, cores not pinned"
    limit = "unlimited" if evaluations is None else f"at most {evaluations:,}"
    return f"{where}, {limit} schedules"


def rows(cores: Cores | None, evaluations: int | None, results: dict[str, Any]) -> list[Row]:
    """Return the rows of the results."""
    comparison, statistics = results["comparison"], results["statistics"]
    assert isinstance(comparison, Comparison)
    case = _case(cores, evaluations)
    goal = GOAL if cores and cores.spare else None
    ratio = comparison.speed_ratio(REPLAY, ON)
    planned_s, replayed_s = comparison.wall_s(ON), comparison.wall_s(REPLAY)
    share = statistics.get("planner_ms", 0.0) / 1e3 / planned_s
    return [
        Row(case, "step time, background planning / replay", "x", ratio, 1.0, None, goal, "lower"),
        Row(case, "step time, background planning, replay", "s", planned_s, replayed_s,
            better="lower"),
        Row(case, "planning time / step time", "fraction", share, better="lower"),
    ]  # fmt: skip
