"""One plan on all ranks of a pipeline: the same bits wherever it is made, errors on all ranks."""

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
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.pipeweaver.background.work import PlanWork
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
"""Steps of which a process had the plan, in this rank."""


class Here:
    """Does what a process does, at once and in this one: processes wait for a core."""

    def __init__(self, setup: PlanningSetup, priority: Priority) -> None:
        self.work = PlanWork(setup)
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


class Lost(StepProcess[PlannedStep]):
    """A process that gets a signal before its third step."""

    number: ClassVar = signal.SIGKILL

    def __init__(self, setup: PlanningSetup, priority: Priority) -> None:
        super().__init__(PlanWork(setup), "planning", priority)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        if step == 6 and self.pid:
            os.kill(self.pid, self.number)
        planned = super().take(step, wait_s)
        if planned is not None:
            PLANNED.append(step)
        return planned


class Stopped(Lost):
    number = signal.SIGSTOP


def run(of: Searched, start: type | None) -> list:
    """Losses and gradients of all steps, to the bit."""
    PLANNED.clear()
    step_process.MIN_BACKGROUND_MS = 1e9 if start is None else 1e-9
    planner = BackgroundPlanner(
        of.pipeline, None, of.mesh, logging.getLogger("shared"), in_background=True,
        steps=STEPS, start=start or start_planning,
    )  # fmt: skip
    found = []
    for step in range(1, STEPS + 1):
        batches = [batch_of(s) for s in (step, step + 1)]
        share, coming = (of.share(batch) for batch in batches)
        metas = [m.meta for m in coming]
        upcoming = [metas] * of.mesh.data_parallel_size
        planned = planner.plan(step, share, lambda upcoming=upcoming: upcoming)
        of.model.zero_grad()
        outcome = of.step.run(planned.plan, share, 100)
        gradients = [p.grad for p in of.model.parameters() if p.grad is not None]
        local = [getattr(g, "to_local", lambda g=g: g)().clone() for g in gradients]
        found.append((outcome.loss.item(), local, planned.statistics.get("planner_ms")))
        planner.learn(step, planned, outcome.result, share, 100.0)
    planner.close()
    return found


def bits_differ(one: list, other: list) -> bool:
    return any(
        a[0] != b[0] or not all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))
        for a, b in zip(one, other, strict=True)
    )


def compare(schedule: str) -> list[str]:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=120), CPU)
    of = build_searched({**LAYOUT, "schedule": schedule})
    before = run(of, None)
    wrong = []
    if not bits_differ(before, before[1:] + before[:1]):
        wrong.append("all steps are the same")
    for start in (Here, Lost, Stopped):
        name = start.__name__
        found = run(of, start)
        if bits_differ(before, found):
            wrong.append(f"{name}: other losses or gradients")
        # Two steps are planned in place, the third is the first to be announced.
        had = list(range(4, STEPS + 1)) if of.mesh.pipeline_rank == 0 else []
        if start is Here and had != PLANNED:
            wrong.append(f"plans of {PLANNED} came from the process")
        if start is not Here and STEPS in PLANNED:
            wrong.append(f"{name}: a process that is gone had a plan")
        if any((ms is None) == (of.mesh.pipeline_rank == 0) for *_, ms in found):
            wrong.append(f"{name}: the first rank, and no other, has the time of planning")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_where_a_plan_is_made_changes_no_bit(schedule):
    assert run_distributed(compare, 4, schedule) == [[]] * 4


def plan_error(
    of: Searched, share: list[Microbatch], change: Callable[[StaticPlanner], None]
) -> str:
    planner = StaticPlanner(of.pipeline, of.mesh)
    change(planner)
    try:
        planner.plan(1, share)
    except PlanError as error:
        return str(error)
    return ""


def disagree() -> list[str]:
    """What every rank says: where all are alike, where rank 3 has another batch, where the second
    pipeline's step cannot be planned."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    of = build_searched({**LAYOUT, "schedule": "separated"})
    share = of.share(batch_of(1))
    rank = of.mesh.rank

    def fail(planner: StaticPlanner) -> None:
        if planner._shared.leads and of.mesh.data_parallel_rank == 1:
            config = of.pipeline.config.model_copy(update={"schedule": "of another world"})
            planner._pipeline = SimpleNamespace(**{**vars(of.pipeline), "config": config})

    other = of.share(batch_of(2)) if rank == 3 else share
    return [
        plan_error(of, share, lambda planner: None),
        plan_error(of, other, lambda planner: None),
        plan_error(of, share, fail),
        plan_error(of, share, lambda planner: None),
    ]


@pytest.mark.slow
def test_all_ranks_are_told_what_one_of_them_has():
    outcomes = run_distributed(disagree, 4)
    for alike, differing, failing, again in outcomes:
        assert alike == again == ""
        assert "step 1: ranks [3] have different microbatches" in differing
        assert "than rank 1" in differing
        assert "of another world" in failing
    assert all(outcome == outcomes[0] for outcome in outcomes)


def own_programs() -> list[str]:
    """What is wrong with what ranks have of a plan."""
    start_process_group(ParallelConfig(backend="gloo", timeout_s=60), CPU)
    of = build_searched({"pipeline": 4, "schedule": "separated"})
    share = of.share(batch_of(1))
    plan, _ = StaticPlanner(of.pipeline, of.mesh).plan(1, share)
    whole: PipelinePlan = of.pipeline.plan_training(share)
    rank = of.mesh.pipeline_rank
    wrong = []
    if set(plan.actions._decoded) != {rank}:
        wrong.append(f"programs of {set(plan.actions._decoded)} were decoded")
    if plan.actions != whole.actions or plan.graph != whole.graph:
        wrong.append("another plan than every rank would make for itself")
    if not plan.specs or any(whole.specs[message] != own for message, own in plan.specs.items()):
        wrong.append("other tensors")
    if len(plan.specs) >= len(whole.specs):
        wrong.append("tensors of messages that others exchange")
    return wrong


@pytest.mark.slow
def test_ranks_read_their_own_programs():
    assert run_distributed(own_programs, 4) == [[]] * 4


def test_plans_are_told_apart_by_what_they_are_made_from():
    metas = [m.meta for m in batch_of(1)]
    digest = plan_input_digest("", metas)
    assert digest == plan_input_digest("", list(metas)) == int(np.float64(digest))
    assert digest != plan_input_digest("other", metas) != plan_input_digest("other", metas[::-1])
