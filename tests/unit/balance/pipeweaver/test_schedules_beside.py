"""Plans of schedules: number for number the same beside training and before a step."""

import logging
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from pipeline_cases import Case, step_of

from torchmm.balance.pipeweaver.background import work
from torchmm.balance.pipeweaver.background.leader import (
    STARVED_STEPS,
    PlanLeader,
    start_planning,
)
from torchmm.balance.pipeweaver.background.requests import (
    Measured,
    PlanningSetup,
    PlanRequest,
)
from torchmm.balance.step_plans import plan_costed_step
from torchmm.common import step_process
from torchmm.common.step_process import Priority, StepProcessError
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.numbers import encode_plan
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.step import plan_layout
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.parallel_section import ParallelConfig

CASE = Case("of schedules", tied=False)
WAIT_S = 300.0
"""Of a real process, which may find no core for a while."""
UNITS = {"vision": MeshSizes(1, 1, 2, 1), "llm": MeshSizes(2, 1, 1, 1)}
SECTIONS = {
    **{
        name: {"schedule": name}
        for name in ("gpipe", "1f1b", "zero_bubble", "megatron", "megatron_balanced", "separated")
    },
    "interleaved_1f1b": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
    "apart": {"schedule": "1f1b", "placement": "disaggregated"},
    "optimus by FLOPs": {"schedule": "optimus", "placement": "colocated", "replan_threshold": 0.1},
}
FACTORS = {("vision", ActionType.F): 3.0, ("vision", ActionType.B): 2.0}


def metas(seed: int) -> tuple:
    return tuple(m.meta for m in step_of(CASE, seed)[0]) * 2


@cache
def setup_of(name: str) -> PlanningSetup:
    modules = tuple(m.describe() for m in CASE.build().modality_modules())
    section = ParallelConfig.model_validate({"pipeline": 2, **SECTIONS[name]})
    units = UNITS if name == "apart" else None
    layout = plan_layout(section, modules, metas(0), units)
    return PlanningSetup(layout, section, modules, "step", None, reduces_early=True)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_process_gives_the_plan_that_is_made_before_the_step(name):
    """The work of the process in this process. Processes wait for a core."""
    setup = setup_of(name)
    plan_work, found = work.PlanWork(setup), {}
    for step, (seed, factors) in enumerate(((1, {}), (2, {}), (2, FACTORS)), 1):
        request = PlanRequest(step, metas(seed), Measured(factors))
        beside = plan_work(request, None)
        assert beside.step == step
        before = work.plan_before_step(setup, request)
        assert beside.finished and set(beside.statistics) == {"planner_ms"}
        np.testing.assert_array_equal(beside.numbers, before.numbers)
        found[step] = before.numbers.tolist()
    plan = plan_costed_step(
        setup.layout, setup.config, setup.modules, metas(2), sharding="step", factors=FACTORS,
        reduces_early=True,
    )  # fmt: skip
    assert found[3] == encode_plan(plan).tolist()
    assert found[1] != found[2], "steps with other images have the same plan"


@pytest.mark.slow
def test_the_process_does_so():
    setup = setup_of("separated")
    process = start_planning(setup, "normal")
    request = PlanRequest(1, metas(1))
    try:
        process.submit(1, request)
        beside = process.take(1, WAIT_S)
    finally:
        process.close()
    before = work.plan_before_step(setup, request)
    np.testing.assert_array_equal(beside.numbers, before.numbers)


def test_steps_are_planned_with_their_factors(monkeypatch):
    given = []
    monkeypatch.setattr(
        work, "plan_costed_step", lambda *_, **options: given.append(options["factors"])
    )
    monkeypatch.setattr(work, "encode_plan", lambda plan: np.zeros(1, np.int32))
    for factors in ({}, FACTORS):
        work.plan_before_step(setup_of("separated"), PlanRequest(1, metas(2), Measured(factors)))
    assert given == [None, FACTORS]


class Fake:
    """Has plans, none, or is gone."""

    mood = "plans"

    def __init__(self, setup: PlanningSetup, priority: Priority) -> None:
        self.setup, self.priority = setup, priority
        self.asked: list[PlanRequest] = []
        self.closed = False

    def submit(self, step: int, request: PlanRequest) -> None:
        self.asked.append(request)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        if self.mood == "gone":
            raise StepProcessError("exited with code -9")
        request = self.asked[-1] if self.asked else None
        if self.mood == "late" or request is None or request.step != step:
            return None
        made = work.plan_before_step(self.setup, request)
        return replace(made, statistics={"planner_ms": -1.0})  # by which tests know it

    def close(self) -> None:
        self.closed = True


class Led:
    """A leader that always finds planning long, and its processes."""

    def __init__(self, monkeypatch, name: str = "separated", **options) -> None:
        monkeypatch.setattr(step_process, "MIN_BACKGROUND_MS", options.pop("from_ms", 1e-9))
        self.made: list[Fake] = []
        self.setup = setup_of(name)
        self.leader = PlanLeader(
            self.setup, 0, logging.getLogger("led"), 99, start=self.start,
            **{"in_background": True, **options},
        )  # fmt: skip
        self.number = 0

    def start(self, setup: PlanningSetup, priority: Priority) -> Fake:
        self.made.append(Fake(setup, priority))
        return self.made[-1]

    def step(self, seed: int = 1, announced: int = 1, rates: dict | None = None) -> bool:
        """Whether the process has planned it; it is planned right in any case."""
        self.number += 1
        measured = Measured(rates or {})
        planned = self.leader.plan(
            self.number, metas(seed), lambda: [list(metas(announced))], measured
        )
        request = PlanRequest(self.number, metas(seed), measured)
        wanted = work.plan_before_step(self.setup, request)
        np.testing.assert_array_equal(planned.numbers, wanted.numbers)
        return planned.statistics["planner_ms"] == -1.0


def test_steps_that_are_planned_at_once_need_no_process(monkeypatch):
    led = Led(monkeypatch, from_ms=1e9)
    assert not any(led.step() for _ in range(6)) and not led.made


def test_long_plans_are_made_beside_training_from_the_fourth_step_on(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    led = Led(monkeypatch)
    # Two are made in place, the third is the first to be announced to the process.
    assert [led.step() for _ in range(6)] == [False, False, False, True, True, True]
    assert len(led.made) == 1 and "planning a step takes" in caplog.text
    led.leader.close()
    assert led.made[0].closed


def test_a_run_may_plan_all_steps_before_they_begin(monkeypatch):
    led = Led(monkeypatch, in_background=False)
    assert not any(led.step() for _ in range(6)) and not led.made


@pytest.mark.parametrize("mood", ["late", "gone"])
def test_without_a_plan_in_time_it_is_made_before_the_step(monkeypatch, caplog, mood):
    caplog.set_level(logging.INFO)
    led = Led(monkeypatch)
    assert [led.step() for _ in range(4)][-1]
    led.made[0].mood = mood
    assert not led.step() and not led.step()
    assert "planned synchronously" in caplog.text and "natural" not in caplog.text


def test_a_step_that_became_another_one_is_planned_again(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    led = Led(monkeypatch)
    assert [led.step(announced=2) for _ in range(5)] == [False] * 5
    assert "step 4: the samples differ from the planned samples; it is planned again" in caplog.text


def test_times_that_drifted_meanwhile_are_planned_with(monkeypatch):
    led = Led(monkeypatch)
    assert [led.step() for _ in range(4)][-1]
    assert [led.step(rates=FACTORS) for _ in range(2)] == [False, True]


def test_process_without_cores_is_replaced(monkeypatch, caplog):
    led = Led(monkeypatch)
    assert [led.step() for _ in range(4)][-1]
    led.made[0].mood = "late"
    assert not any(led.step() for _ in range(STARVED_STEPS))
    assert [fake.priority for fake in led.made] == ["idle", "low"]
    assert led.made[0].closed and caplog.text.count("has no free core") == 1
    assert led.step() and led.step()


def test_process_that_is_late_sometimes_is_not_replaced(monkeypatch, caplog):
    led = Led(monkeypatch)
    for mood in ["plans"] * 4 + (["late"] * (STARVED_STEPS - 2) + ["plans"]) * 3:
        for fake in led.made:
            fake.mood = mood
        led.step()
    assert len(led.made) == 1 and "has no free core" not in caplog.text
