"""All ranks of a pipeline share one plan: results are bitwise equal, errors reach all ranks."""

import logging
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from launch import run_distributed
from searched_cases import CPU, Searched, batch_of, build_searched

from torchmm.balance.pipeweaver.background.leader import start_planning
from torchmm.balance.pipeweaver.background.planning_worker import PlanningWorker
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.pipeweaver.planners import BackgroundPlanner
from torchmm.common import step_process
from torchmm.common.batch import Microbatch
from torchmm.common.errors import PlanError
from torchmm.common.step_process import Priority, StepProcess
from torchmm.parallel.mesh import start_process_group
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.planning.planned_step import PlannedStep
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.training.planners.sharing import plan_input_digest
from torchmm.training.planners.static import StaticPlanner

LAYOUT = {"pipeline": 2, "shard": 2}
SCHEDULES = ("separated", "1f1b", "zero_bubble")
STEPS = 8


PLANNED: list[int] = []
"""Steps whose plan came from the planning process, on this rank."""


class SynchronousProcess:
    """Planning process that plans synchronously in this process, to avoid contention."""

    def __init__(self, setup: PlanningSetup, priority: Priority) -> None:
        self.work = PlanningWorker(setup)
        self.planned: PlannedStep | None = None

    def submit(self, step: int, request: PlanRequest) -> None:
        self.planned = self.work(request, None)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        if self.planned is None or self.planned.step != step:
            return None
        PLANNED.append(step)
        return self.planned

    def close(self) -> None:
        self.planned = None


class KilledProcess(StepProcess[PlannedStep]):
    """Planning process that receives a signal before its third step."""

    number: ClassVar = signal.SIGKILL

    def __init__(self, setup: PlanningSetup, priority: Priority) -> None:
        super().__init__(PlanningWorker(setup), "planning", priority)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        if step == 6 and self.pid:
            os.kill(self.pid, self.number)
        planned = super().take(step, wait_s)
        if planned is not None:
            PLANNED.append(step)
        return planned


class StoppedProcess(KilledProcess):
    number = signal.SIGSTOP


def run(searched_model: Searched, start: type | None) -> list:
    """Return the exact losses and gradients of all steps."""
    PLANNED.clear()
    step_process.MIN_BACKGROUND_MS = 1e9 if start is None else 1e-9
    step_process.MIN_SAVED_MS = 0.0
    planner = BackgroundPlanner(
        searched_model.pipeline, None, searched_model.mesh, logging.getLogger("shared"),
        in_background=True, steps=STEPS, start=start or start_planning,
    )  # fmt: skip
    results = []
    for step in range(1, STEPS + 1):
        batches = [batch_of(s) for s in (step, step + 1)]
        share, next_share = (searched_model.share(batch) for batch in batches)
        metas = [m.meta for m in next_share]
        upcoming = [metas] * searched_model.mesh.data_parallel_size
        planned = planner.plan(step, share, lambda upcoming=upcoming: upcoming)
        searched_model.model.zero_grad()
        outcome = searched_model.step.run(planned.plan, share, 100)
        gradients = [p.grad for p in searched_model.model.parameters() if p.grad is not None]
        local = [getattr(g, "to_local", lambda g=g: g)().clone() for g in gradients]
        results.append((outcome.loss.item(), local, planned.statistics.get("planner_ms")))
        planner.observe_step(step, planned, outcome.result, share, 100.0)
    planner.close()
    return results


def bits_differ(first: list, second: list) -> bool:
    return any(
        a[0] != b[0] or not all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))
        for a, b in zip(first, second, strict=True)
    )


def compare(schedule: str) -> list[str]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=120), CPU)
    searched_model = build_searched({**LAYOUT, "schedule": schedule})
    expected = run(searched_model, None)
    problems = []
    if not bits_differ(expected, expected[1:] + expected[:1]):
        problems.append("all steps have equal results")
    for start in (SynchronousProcess, KilledProcess, StoppedProcess):
        name = start.__name__
        results = run(searched_model, start)
        if bits_differ(expected, results):
            problems.append(f"{name}: different losses or gradients")
        # The first two steps are planned synchronously. The third is planned in advance.
        expected_steps = list(range(4, STEPS + 1)) if searched_model.mesh.plan_rank == 0 else []
        if start is SynchronousProcess and expected_steps != PLANNED:
            problems.append(f"the process planned {PLANNED}")
        if start is not SynchronousProcess and STEPS in PLANNED:
            problems.append(f"{name}: a process that exited has a plan")
        if any((ms is None) == (searched_model.mesh.plan_rank == 0) for *_, ms in results):
            problems.append(f"{name}: not only the first rank has the planning time")
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_planning_process_keeps_bitwise_results(schedule):
    assert run_distributed(compare, 4, schedule) == [[]] * 4


def plan_error(
    searched_model: Searched, share: list[Microbatch], change: Callable[[StaticPlanner], None]
) -> str:
    planner = StaticPlanner(searched_model.pipeline, searched_model.mesh)
    change(planner)
    try:
        planner.plan(1, share)
    except PlanError as error:
        return str(error)
    return ""


def plan_errors() -> list[str]:
    """Return the errors of every rank in four cases.

    The cases are equal batches, a different batch on rank 3, a planning error in the second
    pipeline, and equal batches again.
    """
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    searched_model = build_searched({**LAYOUT, "schedule": "separated"})
    share = searched_model.share(batch_of(1))
    rank = searched_model.mesh.rank

    def fail(planner: StaticPlanner) -> None:
        if planner._shared.is_leader and searched_model.mesh.data_parallel_rank == 1:
            config = searched_model.pipeline.config.model_copy(
                update={"schedule": "of another world"}
            )
            planner._pipeline = SimpleNamespace(
                **{**vars(searched_model.pipeline), "config": config}
            )

    different = searched_model.share(batch_of(2)) if rank == 3 else share
    return [
        plan_error(searched_model, share, lambda planner: None),
        plan_error(searched_model, different, lambda planner: None),
        plan_error(searched_model, share, fail),
        plan_error(searched_model, share, lambda planner: None),
    ]


@pytest.mark.slow
def test_all_ranks_raise_error_of_one():
    outcomes = run_distributed(plan_errors, 4)
    for equal, different, failing, repeated in outcomes:
        assert equal == repeated == ""
        assert "step 1: ranks [3] have different microbatches" in different
        assert "than rank 1" in different
        assert "of another world" in failing
    assert all(outcome == outcomes[0] for outcome in outcomes)


def decoded_plan_problems() -> list[str]:
    """Return the problems of the decoded plan on this rank."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    searched_model = build_searched({"pipeline": 4, "schedule": "separated"})
    share = searched_model.share(batch_of(1))
    plan, _ = StaticPlanner(searched_model.pipeline, searched_model.mesh).plan(1, share)
    full: PipelinePlan = searched_model.pipeline.plan_training(share)
    rank = searched_model.mesh.plan_rank
    problems = []
    if set(plan.actions._decoded) != {rank}:
        problems.append(f"programs of {set(plan.actions._decoded)} were decoded")
    if plan.actions != full.actions or plan.graph != full.graph:
        problems.append("the plan differs from a local plan")
    if not plan.specs or any(
        full.specs[message] != tensors for message, tensors in plan.specs.items()
    ):
        problems.append("different tensors")
    if len(plan.specs) >= len(full.specs):
        problems.append("tensors of messages of other ranks")
    return problems


@pytest.mark.slow
def test_ranks_decode_only_local_actions():
    assert run_distributed(decoded_plan_problems, 4) == [[]] * 4


def test_plan_digest_depends_on_inputs():
    metas = [m.meta for m in batch_of(1)]
    digest = plan_input_digest("", metas)
    assert digest == plan_input_digest("", list(metas)) == int(np.float64(digest))
    assert digest != plan_input_digest("other", metas) != plan_input_digest("other", metas[::-1])
