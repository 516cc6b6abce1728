"""Plans that are made in the background: the plan of each step, and the fallback without one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from launch import run_distributed
from searched_cases import CPU, Searched, batch_of, build_searched

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.pipeweaver.measuring_planner import MeasuringPlanner
from torchmm.balance.schedules import SEARCHED_SCHEDULE
from torchmm.common.step_process import Priority, StepProcessError
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.plan.serialization import encode_plan
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.step import step_graph
from torchmm.recipe.parallel_section import ParallelConfig


@dataclass
class FakeProcess:
    """Planning process whose state the test controls."""

    setup: PlanningSetup
    requests: list[PlanRequest] = field(default_factory=list)
    state: str = "finished"
    closed: bool = False

    def submit(self, step: int, request: PlanRequest) -> None:
        self.requests.append(request)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        if self.state == "dead":
            raise StepProcessError("the planning process exited with code -9")
        request = self.requests[-1] if self.requests else None
        if self.state == "late" or request is None or request.step != step:
            return None
        graph = self.graph(request)
        order = tuple(tuple(row) for row in reversed_microbatches(graph, self.setup.config))
        plan = lower_plan(order, graph, {}, sharding="step")
        statistics = {"planner_ms": 7.0, "planner": "search", "speedup_over_default_order": 0.2}
        statistics |= {
            "planner_evaluations": 33,
            "predicted_step_ms": 50.0 if request.rates else None,
        }
        return PlannedStep(step, encode_plan(plan), statistics, self.state == "finished")

    def graph(self, request: PlanRequest) -> StageGraph:
        return step_graph(self.setup.layout, self.setup.config, request.microbatches)

    def close(self) -> None:
        self.closed = True


def reversed_microbatches(graph: StageGraph, config: ParallelConfig) -> list:
    """Return an unusual order: all forwards of the last microbatch first."""
    order = SEARCHED_SCHEDULE.plan(config, graph, lambda action: 1.0)[1]
    last = graph.microbatches - 1
    return [[a._replace(microbatch=last - a.microbatch) for a in row] for row in order]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def compute_order(plan: PipelinePlan) -> list[list]:
    return [[action for action in row if action.type in COMPUTE] for row in plan.actions]


HARD, TEXT = 0, 9
"""Seeds of batches whose first two microbatches are a step.

The search of the HARD step does not reach its bound, so that it uses all evaluations. The TEXT step
has no images.
"""


class Run:
    """Steps of two microbatches, which are equal on all replicas, with fake planning processes."""

    def __init__(self, searched_model: Searched, **options: bool) -> None:
        self.searched_model, self.log = searched_model, Lines()
        self.processes: list[FakeProcess] = []
        logger = logging.Logger("planning")
        logger.addHandler(self.log)
        self.planner = MeasuringPlanner(
            searched_model.pipeline, None, searched_model.mesh, logger,
            CostModel(load_profile("cpu"), "float32"),
            deterministic=options.get("deterministic", False), steps=20, start=self.start,
        )  # fmt: skip
        self.number = 0

    def start(self, setup: PlanningSetup, priority: Priority) -> FakeProcess:
        self.processes.append(FakeProcess(setup))
        return self.processes[-1]

    def step(self, announced: int = 0) -> tuple[Mapping[str, Any], list[list]]:
        """Run the hard step. Announce the same step as the next one, or a step without images."""
        searched_model = self.searched_model
        self.number += 1
        share = batch_of(HARD)[:2]
        metas = [m.meta for m in batch_of(TEXT if announced else HARD)[:2]]
        replicas = searched_model.mesh.data_parallel_size
        planned = self.planner.plan(self.number, share, lambda: [metas] * replicas)
        outcome = searched_model.step.run(planned.plan, share, 50)
        self.planner.observe_step(self.number, planned, outcome.result, share, 100.0)
        return planned.statistics, compute_order(outcome.plan)


STEPS = (
    # name, process state, announced next step -> evaluations, predicted ms
    ("first", "finished", 0, 40, None),
    ("planned before anything was measured", "finished", 0, 33, None),
    ("planned", "finished", 1, 33, 50.0),
    ("other images than announced", "finished", 0, 1, None),
    ("late", "late", 0, 1, None),
    ("unfinished", "unfinished", 0, 33, 50.0),
    ("dead", "dead", 0, 1, None),
    ("no process", "dead", 0, 1, None),
    ("started again", "finished", 0, 1, None),
    ("planned again", "finished", 0, 33, 50.0),
)
LOGGED = (
    "step 4: the samples differ",
    "step 5: the plan is late",
    "step 6: the time limit of planning is reached; the best of 33 schedules",
    "exited with code -9; a new process starts with step 9; until then the original order is used",
)


def scenario(layout: dict[str, int]) -> list[str]:
    """Run all steps and return the problems."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    searched_model = build_searched(layout, evaluations=40)
    run, problems, orders = Run(searched_model), [], {}
    leads = searched_model.mesh.plan_rank == 0
    for name, state, announced, *expected in STEPS:
        for process in run.processes:
            process.state = state
        statistics, orders[name] = run.step(announced)
        values = [statistics.get(key) for key in ("planner_evaluations", "predicted_step_ms")]
        if values != (expected if leads else [None, None]):
            problems.append(f"{name}: {statistics}")
        if (
            name == "planned"
            and leads
            and abs(statistics["speedup_over_default_order"] - 0.2) > 1e-12
        ):
            problems.append(f"gain {statistics['speedup_over_default_order']}")
    planned = [name for name, order in orders.items() if order == orders["planned"]]
    if planned != [STEPS[1][0], "planned", "unfinished", "planned again"]:
        problems.append(f"the order of the process was used in {planned}")
    if leads:
        problems += problems_of_leader(run)
    dist.barrier()
    repeatable = Run(searched_model, deterministic=True)
    evaluations = repeatable.step()[0].get("planner_evaluations")
    if evaluations != (40 if leads else None) or repeatable.processes:
        problems.append("a deterministic run does not plan synchronously")
    return problems


def problems_of_leader(run: Run) -> list[str]:
    problems, lines = [], run.log.lines
    if len(lines) != 4 or not all(t in line for t, line in zip(LOGGED, lines, strict=True)):
        problems.append(f"logged {lines}")
    if run.processes[0].setup.planners != 2:
        problems.append("two pipelines do not share the CPU cores")
    if [process.closed for process in run.processes] != [True, False]:
        problems.append(f"{len(run.processes)} processes, or not closed")
    seconds = [request.seconds for request in run.processes[0].requests]
    if seconds[0] is not None or any(abs(s - 0.08) > 1e-9 for s in seconds[1:]):
        problems.append(f"budgets of {seconds} s")
    return problems


@pytest.mark.slow
def test_steps_use_available_background_plans():
    assert run_distributed(scenario, 4, {"pipeline": 2, "shard": 2}) == [[]] * 4
