"""Tests of schedule plans: identical in the background and before a step."""

import logging
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from pipeline_cases import Case, step_of

from torchmm.balance.pipeweaver.background import planning_worker
from torchmm.balance.pipeweaver.background.leader import (
    STARVED_STEPS,
    PlanLeader,
    start_planning,
)
from torchmm.balance.pipeweaver.background.requests import (
    PlanningSetup,
    PlanRequest,
    StepTimings,
)
from torchmm.balance.step_plans import plan_step_with_costs
from torchmm.common import step_process
from torchmm.common.step_process import Priority, StepProcessError
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.serialization import encode_plan
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.step import plan_layout
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.parallel_section import ParallelConfig

CASE = Case("of schedules", tied=False)
WAIT_S = 300.0
"""Timeout of a real process, which may wait for a core."""
UNITS = {"vision": MeshSizes(1, 1, 2, 1), "llm": MeshSizes(2, 1, 1, 1)}
SECTIONS = {
    **{
        name: {"schedule": name}
        for name in ("gpipe", "1f1b", "zero_bubble", "megatron", "megatron_balanced", "separated")
    },
    "interleaved_1f1b": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
    "disaggregated": {"schedule": "1f1b", "placement": "disaggregated"},
    "optimus by FLOPs": {"schedule": "optimus", "placement": "colocated", "replan_threshold": 0.1},
}
FACTORS = {("vision", ActionType.F): 3.0, ("vision", ActionType.B): 2.0}


def metas(seed: int) -> tuple:
    return tuple(m.meta for m in step_of(CASE, seed)[0]) * 2


@cache
def setup_of(name: str) -> PlanningSetup:
    modules = tuple(m.describe() for m in CASE.build().modality_modules())
    section = ParallelConfig.model_validate({"pipeline": 2, **SECTIONS[name]})
    units = UNITS if name == "disaggregated" else None
    layout = plan_layout(section, modules, metas(0), units)
    return PlanningSetup(layout, section, modules, "step", None, reduces_early=True)


@pytest.mark.parametrize("name", SECTIONS)
def test_background_plan_matches_synchronous_plan(name):
    """Run the planning function of the process in this process, which has a core."""
    setup = setup_of(name)
    plan_work, numbers_by_step = planning_worker.PlanningWorker(setup), {}
    for step, (seed, factors) in enumerate(((1, {}), (2, {}), (2, FACTORS)), 1):
        request = PlanRequest(step, metas(seed), StepTimings(factors))
        background = plan_work(request, None)
        assert background.step == step
        synchronous = planning_worker.plan_synchronously(setup, request)
        assert background.finished and set(background.statistics) == {"planner_ms"}
        np.testing.assert_array_equal(background.encoded_plan, synchronous.encoded_plan)
        numbers_by_step[step] = synchronous.encoded_plan.tolist()
    plan = plan_step_with_costs(
        setup.layout, setup.config, setup.modules, metas(2), sharding="step", factors=FACTORS,
        reduces_early=True,
    )  # fmt: skip
    assert numbers_by_step[3] == encode_plan(plan).tolist()
    assert numbers_by_step[1] != numbers_by_step[2], (
        "steps with different images have the same plan"
    )


@pytest.mark.slow
def test_planning_process_matches_synchronous_plan():
    setup = setup_of("separated")
    process = start_planning(setup, "normal")
    request = PlanRequest(1, metas(1))
    try:
        process.submit(1, request)
        background = process.take(1, WAIT_S)
    finally:
        process.close()
    synchronous = planning_worker.plan_synchronously(setup, request)
    np.testing.assert_array_equal(background.encoded_plan, synchronous.encoded_plan)


def test_steps_are_planned_with_their_factors(monkeypatch):
    factors_used = []
    monkeypatch.setattr(
        planning_worker,
        "plan_step_with_costs",
        lambda *_, **options: factors_used.append(options["factors"]),
    )
    monkeypatch.setattr(planning_worker, "encode_plan", lambda plan: np.zeros(1, np.int32))
    for factors in ({}, FACTORS):
        planning_worker.plan_synchronously(
            setup_of("separated"), PlanRequest(1, metas(2), StepTimings(factors))
        )
    assert factors_used == [None, FACTORS]


class FakeProcess:
    """Planning process that returns plans, returns none, or has exited."""

    mood = "plans"

    def __init__(self, setup: PlanningSetup, priority: Priority) -> None:
        self.setup, self.priority = setup, priority
        self.requests: list[PlanRequest] = []
        self.closed = False

    def submit(self, step: int, request: PlanRequest) -> None:
        self.requests.append(request)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        if self.mood == "gone":
            raise StepProcessError("exited with code -9")
        request = self.requests[-1] if self.requests else None
        if self.mood == "late" or request is None or request.step != step:
            return None
        planned = planning_worker.plan_synchronously(self.setup, request)
        return replace(planned, statistics={"planner_ms": -1.0})  # marks plans of the process

    def close(self) -> None:
        self.closed = True


class LeaderUnderTest:
    """Leader with fake processes that always considers planning slow."""

    def __init__(self, monkeypatch, name: str = "separated", **options) -> None:
        monkeypatch.setattr(step_process, "MIN_BACKGROUND_MS", options.pop("from_ms", 1e-9))
        monkeypatch.setattr(step_process, "MIN_SAVED_MS", 0.0)
        self.processes: list[FakeProcess] = []
        self.setup = setup_of(name)
        self.leader = PlanLeader(
            self.setup, 0, logging.getLogger("leader_test"), 99, start=self.start,
            **{"in_background": True, **options},
        )  # fmt: skip
        self.number = 0

    def start(self, setup: PlanningSetup, priority: Priority) -> FakeProcess:
        self.processes.append(FakeProcess(setup, priority))
        return self.processes[-1]

    def step(self, seed: int = 1, announced: int = 1, rates: dict | None = None) -> bool:
        """Plan a step and check the plan. Return True if the process has planned it."""
        self.number += 1
        measured = StepTimings(rates or {})
        planned = self.leader.plan(
            self.number, metas(seed), lambda: [list(metas(announced))], measured
        )
        request = PlanRequest(self.number, metas(seed), measured)
        expected = planning_worker.plan_synchronously(self.setup, request)
        np.testing.assert_array_equal(planned.encoded_plan, expected.encoded_plan)
        return planned.statistics["planner_ms"] == -1.0


def test_fast_plans_need_no_process(monkeypatch):
    leader_test = LeaderUnderTest(monkeypatch, from_ms=1e9)
    assert not any(leader_test.step() for _ in range(6)) and not leader_test.processes


def test_slow_plans_use_background_from_fourth_step(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    leader_test = LeaderUnderTest(monkeypatch)
    # The first two steps are planned synchronously. The third is announced to the process.
    assert [leader_test.step() for _ in range(6)] == [False, False, False, True, True, True]
    assert len(leader_test.processes) == 1 and "planning a step takes" in caplog.text
    leader_test.leader.close()
    assert leader_test.processes[0].closed


def test_background_planning_can_be_disabled(monkeypatch):
    leader_test = LeaderUnderTest(monkeypatch, in_background=False)
    assert not any(leader_test.step() for _ in range(6)) and not leader_test.processes


@pytest.mark.parametrize("mood", ["late", "gone"])
def test_missing_plan_is_planned_synchronously(monkeypatch, caplog, mood):
    caplog.set_level(logging.INFO)
    leader_test = LeaderUnderTest(monkeypatch)
    assert [leader_test.step() for _ in range(4)][-1]
    leader_test.processes[0].mood = mood
    assert not leader_test.step() and not leader_test.step()
    assert "planned synchronously" in caplog.text and "natural" not in caplog.text


def test_changed_samples_are_planned_again(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    leader_test = LeaderUnderTest(monkeypatch)
    assert [leader_test.step(announced=2) for _ in range(5)] == [False] * 5
    assert "step 4: the samples differ from the planned samples; it is planned again" in caplog.text


def test_changed_times_are_used_for_planning(monkeypatch):
    leader_test = LeaderUnderTest(monkeypatch)
    assert [leader_test.step() for _ in range(4)][-1]
    assert [leader_test.step(rates=FACTORS) for _ in range(2)] == [False, True]


def test_process_without_cores_is_replaced(monkeypatch, caplog):
    leader_test = LeaderUnderTest(monkeypatch)
    assert [leader_test.step() for _ in range(4)][-1]
    leader_test.processes[0].mood = "late"
    assert not any(leader_test.step() for _ in range(STARVED_STEPS))
    assert [fake.priority for fake in leader_test.processes] == ["idle", "low"]
    assert leader_test.processes[0].closed and caplog.text.count("has no free core") == 1
    assert leader_test.step() and leader_test.step()


def test_process_that_is_sometimes_late_is_not_replaced(monkeypatch, caplog):
    leader_test = LeaderUnderTest(monkeypatch)
    for mood in ["plans"] * 4 + (["late"] * (STARVED_STEPS - 2) + ["plans"]) * 3:
        for fake in leader_test.processes:
            fake.mood = mood
        leader_test.step()
    assert len(leader_test.processes) == 1 and "has no free core" not in caplog.text
