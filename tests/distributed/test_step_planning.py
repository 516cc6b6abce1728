"""Plans made beside training: which one a step gets, and what happens if there is none."""

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
from torchmm.balance.pipeweaver.measuring import MeasuringPlanner
from torchmm.balance.schedules import SEARCHED_SCHEDULE
from torchmm.common.step_process import Priority, StepProcessError
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.numbers import encode_plan
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.step import step_graph
from torchmm.recipe.parallel_section import ParallelConfig


@dataclass
class FakeProcess:
    """Has a plan when the test wants it to."""

    setup: PlanningSetup
    requests: list[PlanRequest] = field(default_factory=list)
    mood: str = "finished"
    closed: bool = False

    def submit(self, step: int, request: PlanRequest) -> None:
        self.requests.append(request)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        if self.mood == "dead":
            raise StepProcessError("the planning process exited with code -9")
        request = self.requests[-1] if self.requests else None
        if self.mood == "late" or request is None or request.step != step:
            return None
        graph = self.graph(request)
        order = tuple(tuple(row) for row in reversed_microbatches(graph, self.setup.config))
        plan = lower_plan(order, graph, {}, sharding="step")
        statistics = {"planner_ms": 7.0, "planner": "search", "speedup_over_default_order": 0.2}
        statistics |= {
            "planner_evaluations": 33,
            "predicted_step_ms": 50.0 if request.rates else None,
        }
        return PlannedStep(step, encode_plan(plan), statistics, self.mood == "finished")

    def graph(self, request: PlanRequest) -> StageGraph:
        return step_graph(self.setup.layout, self.setup.config, request.microbatches)

    def close(self) -> None:
        self.closed = True


def reversed_microbatches(graph: StageGraph, config: ParallelConfig) -> list:
    """An order that nobody would plan: all forwards of the last microbatch first."""
    found = SEARCHED_SCHEDULE.plan(config, graph, lambda action: 1.0)[1]
    last = graph.microbatches - 1
    return [[a._replace(microbatch=last - a.microbatch) for a in row] for row in found]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def compute_order(plan: PipelinePlan) -> list[list]:
    return [[action for action in row if action.type in COMPUTE] for row in plan.actions]


HARD, TEXT = 0, 9
"""Batches whose first two microbatches make a step: one whose search does not come to its bound, so
that it makes all its evaluations, and one without images."""


class Run:
    """Steps of two microbatches, which may be reversed; all replicas have the same."""

    def __init__(self, of: Searched, **options: bool) -> None:
        self.of, self.log = of, Lines()
        self.made: list[FakeProcess] = []
        logger = logging.Logger("planning")
        logger.addHandler(self.log)
        self.planner = MeasuringPlanner(
            of.pipeline, None, of.mesh, logger, CostModel(load_profile("cpu"), "float32"),
            deterministic=options.get("deterministic", False), steps=20, start=self.start,
        )  # fmt: skip
        self.number = 0

    def start(self, setup: PlanningSetup, priority: Priority) -> FakeProcess:
        self.made.append(FakeProcess(setup))
        return self.made[-1]

    def step(self, announced: int = 0) -> tuple[Mapping[str, Any], list[list]]:
        """A hard step; it is announced as the next one too, or text is."""
        of = self.of
        self.number += 1
        share = batch_of(HARD)[:2]
        metas = [m.meta for m in batch_of(TEXT if announced else HARD)[:2]]
        replicas = of.mesh.data_parallel_size
        planned = self.planner.plan(self.number, share, lambda: [metas] * replicas)
        outcome = of.step.run(planned.plan, share, 50)
        self.planner.learn(self.number, planned, outcome.result, share, 100.0)
        return planned.statistics, compute_order(outcome.plan)


STEPS = (
    # mood of the process, announced images for the next step -> evaluations, predicted ms
    ("first", "finished", 0, 40, None),
    ("planned before anything was measured", "finished", 0, 33, None),
    ("planned", "finished", 1, 33, 50.0),
    ("other images than announced", "finished", 0, 1, None),
    ("late", "late", 0, 1, None),
    ("unfinished", "unfinished", 0, 33, 50.0),
    ("dead", "dead", 0, 1, None),
    ("nobody there", "dead", 0, 1, None),
    ("started again", "finished", 0, 1, None),
    ("planned again", "finished", 0, 33, 50.0),
)
TOLD = (
    "step 4: the samples differ",
    "step 5: the plan is late",
    "step 6: the time limit of planning is reached; the best of 33 schedules",
    "exited with code -9; a new process starts with step 9; until then the original order is used",
)


def scenario(layout: dict[str, int]) -> list[str]:
    """All that is wrong."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    of = build_searched(layout, evaluations=40)
    run, wrong, orders = Run(of), [], {}
    leads = of.mesh.pipeline_rank == 0
    for name, mood, announced, *expected in STEPS:
        for made in run.made:
            made.mood = mood
        statistics, orders[name] = run.step(announced)
        found = [statistics.get(key) for key in ("planner_evaluations", "predicted_step_ms")]
        if found != (expected if leads else [None, None]):
            wrong.append(f"{name}: {statistics}")
        if (
            name == "planned"
            and leads
            and abs(statistics["speedup_over_default_order"] - 0.2) > 1e-12
        ):
            wrong.append(f"gain {statistics['speedup_over_default_order']}")
    planned = [name for name, order in orders.items() if order == orders["planned"]]
    if planned != [STEPS[1][0], "planned", "unfinished", "planned again"]:
        wrong.append(f"the process's order was run in {planned}")
    if leads:
        wrong += problems_of_leader(run)
    dist.barrier()
    repeatable = Run(of, deterministic=True)
    evaluations = repeatable.step()[0].get("planner_evaluations")
    if evaluations != (40 if leads else None) or repeatable.made:
        wrong.append("a run that has to repeat does not search before its steps")
    return wrong


def problems_of_leader(run: Run) -> list[str]:
    wrong, lines = [], run.log.lines
    if len(lines) != 4 or not all(t in line for t, line in zip(TOLD, lines, strict=True)):
        wrong.append(f"told {lines}")
    if run.made[0].setup.planners != 2:
        wrong.append("two pipelines have not shared the machine's cores")
    if [made.closed for made in run.made] != [True, False]:
        wrong.append(f"{len(run.made)} processes, or not closed")
    seconds = [request.seconds for request in run.made[0].requests]
    if seconds[0] is not None or any(abs(s - 0.08) > 1e-9 for s in seconds[1:]):
        wrong.append(f"budgets of {seconds} s")
    return wrong


@pytest.mark.slow
def test_steps_get_the_plan_that_is_there():
    assert run_distributed(scenario, 4, {"pipeline": 2, "shard": 2}) == [[]] * 4
