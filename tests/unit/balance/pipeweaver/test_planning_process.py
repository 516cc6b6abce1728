"""The planning process: it plans, goes to newer requests, and its end is told."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from pipeline_cases import Case, step_of
from support.memory_needs import memory_needs

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.background.process import (
    MOST_DEATHS,
    STARVED_STEPS,
    KeptPlanning,
    PlanningProcess,
    PlanningProcessError,
)
from torchmm.balance.pipeweaver.background.requests import Measured, PlanningSetup, PlanRequest
from torchmm.balance.pipeweaver.recomputation.costs import costs_of_plan
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning
from torchmm.balance.schedules import OPTIMUS_SCHEDULE, optimus_orders
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.step_plans import searched_costs
from torchmm.costs.flops import module_layers, task_durations
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.numbers import decode_plan
from torchmm.pipelining.run.messages import message_sizes, message_specs
from torchmm.pipelining.schedules.layouts import separated_layout
from torchmm.pipelining.schedules.separated import separated
from torchmm.planning.step import step_graph
from torchmm.recipe.parallel_section import ParallelConfig

CASE = Case("planned beside training")
COSTS = CostModel(load_profile("cpu"), "float32")
WAIT_S = 180.0
HARD = 3
"""Seed of a step whose search does not come to its bound, so that it makes all its evaluations."""


def config(evaluations: int) -> ParallelConfig:
    return ParallelConfig.model_validate(
        {"pipeline": 2, "schedule": "searched", "search": {"evaluations": evaluations}}
    )


def setup(evaluations: int) -> PlanningSetup:
    modules = tuple(m.describe() for m in CASE.build().modality_modules())
    layout = separated_layout(module_layers(modules, metas(0)), 2)
    return PlanningSetup(
        layout, config(evaluations), modules, "none", COSTS, has_low_priority=False
    )


def metas(seed: int) -> tuple:
    return tuple(m.meta for m in step_of(CASE, seed)[0]) * 2


@pytest.fixture(scope="module")
def process() -> Iterator[PlanningProcess]:
    made = PlanningProcess(setup(60))
    yield made
    made.close()


def request(step: int, seed: int, rate: float = 0.0) -> PlanRequest:
    kinds = [(name, kind) for name in ("llm", "vision") for kind in ActionType]
    rates = dict.fromkeys(kinds, rate) if rate else {}
    return PlanRequest(step, metas(seed), Measured(rates))


def test_it_plans_the_step_it_was_asked_for(process):
    process.submit(request(1, HARD))
    planned = process.take(1, WAIT_S)
    found = planned.statistics
    assert planned.step == 1 and planned.finished and "predicted_ms" not in found
    assert (found["planner"], found["planner_evaluations"]) == ("search", 60)
    assert found["gain_over_natural"] >= 0
    graph = step_graph(setup(60).layout, config(60), metas(HARD))
    plan = decode_plan(planned.numbers, graph, lambda graph: {})
    assert validate_plan(plan).problems == ()


def test_a_search_ends_with_an_order_that_none_can_be_faster_than(process):
    process.submit(request(2, 1))
    planned = process.take(2, WAIT_S)
    assert planned.finished and planned.statistics["planner"] == "natural"
    # The natural order, and orders that were good for earlier steps.
    assert planned.statistics["planner_evaluations"] < 10


def test_optimus_is_planned_with_the_replicas_of_its_encoder():
    """In a step so slow that messages to another rank are worth it."""
    modules = tuple(m.describe() for m in CASE.build().modality_modules())
    section = ParallelConfig.model_validate(
        {"pipeline": 2, "schedule": "optimus", "placement": "colocated"}
    )
    layers = module_layers(modules, metas(0))
    made = PlanningSetup(OPTIMUS_SCHEDULE.layout(section, layers), section, modules, "none", COSTS)
    made = replace(made, has_low_priority=False)
    process = PlanningProcess(made)
    try:
        process.submit(request(1, 1, 1e-6))
        planned = process.take(1, WAIT_S)
    finally:
        process.close()
    assert planned.finished and planned.statistics["planner"].startswith("optimus ")
    graph = step_graph(made.layout, section, metas(1))
    plan = decode_plan(planned.numbers, graph, lambda graph: {})
    assert validate_plan(plan).problems == ()
    costs = searched_costs(graph, modules, metas(1), COSTS, rates=request(1, 1, 1e-6).rates)
    *coarse, best = optimus_orders(section, graph, costs, "none")
    assert plan.graph == best.step.graph and set(plan.graph.replica.values()) == {0, 1}
    predicted_ms = planned.statistics["predicted_ms"]
    assert simulate(plan, costs).makespan_ms == pytest.approx(predicted_ms)
    assert predicted_ms <= coarse[0].predicted_ms
    assert planned.statistics["gain_over_natural"] >= 0


def test_it_tunes_the_layers():
    """Half-way between the least and the most memory that the plan may need."""
    made = setup(60)
    sizes = {m.name: message_sizes(m) for m in CASE.build().modality_modules()}
    model = CostModel(load_profile("cpu"), "float32")
    tuning = LayerTuning(model, frozenset(m.name for m in made.modules), 0)
    graph = step_graph(made.layout, made.config, metas(1))
    specs = message_specs(graph, sizes, metas(1), torch.float32)
    plain = lower_plan(separated(graph), graph, specs)
    needs = memory_needs(plain, made.modules, metas(1), tuning)
    least, most = (max(each) for each in zip(*needs, strict=True))
    limited = replace(tuning, memory_limit_bytes=(least + most) // 2)
    process = PlanningProcess(replace(made, sizes=sizes, tuning=limited))
    process.submit(request(1, 1))
    plan = decode_plan(process.take(1, WAIT_S).numbers, graph, lambda graph: specs)
    process.close()
    assert validate_plan(plan).problems == ()
    assert {mode for modes in plan.recompute.values() for mode in modes} > {"none"}
    costs = costs_of_plan(plan, made.modules, metas(1), model)
    assert max(simulate(plan, costs).peak_bytes) <= limited.memory_limit_bytes


def test_rates_give_milliseconds(process):
    """A rank has at least its own work to do, and at most all work."""
    process.submit(request(3, 1, rate=1e-6))
    predicted_ms = process.take(3, WAIT_S).statistics["predicted_ms"]
    graph = step_graph(setup(60).layout, config(60), metas(1))
    flops = task_durations(graph, setup(60).modules, metas(1))
    whole = [Action(kind, *task) for task in graph.tasks() for kind in (ActionType.F, ActionType.B)]
    ranks = [
        sum(flops(a) for a in whole if graph.layout.stages[a.stage].ranks[0] == rank)
        for rank in range(2)
    ]
    assert 1e-6 * max(ranks) <= predicted_ms <= 1e-6 * sum(ranks) * 1.001


def test_only_the_newest_request_counts(process):
    for step in range(4, 8):
        process.submit(request(step, step))
    assert process.take(7, WAIT_S).finished
    assert process.take(5) is None
    assert process.take(8) is None


def test_what_there_is_can_be_taken_at_any_time():
    endless = PlanningProcess(setup(10**9))
    endless.submit(request(1, HARD))
    planned = None
    while planned is None:
        planned = endless.take(1, 0.05)
    assert not planned.finished
    endless.submit(request(2, 2))  # does not wait for the end of the first
    while endless.take(2, 0.05) is None:
        pass
    endless.close()
    assert endless.exit_code is not None


def test_a_dead_process_is_told():
    process = PlanningProcess(setup(60))
    process.submit(request(1, 1))
    process.take(1, WAIT_S)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(PlanningProcessError, match=r"ended with code -?\d+"):
        process.take(2, WAIT_S)
    process.close()


@pytest.mark.slow
def test_nobody_waits_for_it_at_exit():
    code = """if __name__ == "__main__":
        import sys
        sys.path[:0] = [{paths}]
        from test_planning_process import HARD, PlanningProcess, request, setup
        process = PlanningProcess(setup(10**9))
        process.submit(request(1, HARD))
        print("made")"""
    paths = ", ".join(map(repr, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code.format(paths=paths)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr


def test_a_step_that_cannot_be_planned_is_told():
    process = PlanningProcess(setup(60))
    process.submit(request(1, 1, rate=float("nan")))
    with pytest.raises(PlanningProcessError, match="cannot plan a step: "):
        process.take(1, WAIT_S)
    process.close()


def test_nobody_waits_for_a_process_that_was_stopped():
    """Requests of more than a pipe holds."""
    process = PlanningProcess(setup(60))
    process.submit(request(1, 1))
    process.take(1, WAIT_S)
    os.kill(process.pid, signal.SIGSTOP)
    first, *others = metas(1)
    many = tuple(replace(sample, index=i) for i in range(10_000) for sample in first.samples)
    large = replace(request(2, 1), microbatches=(replace(first, samples=many), *others))
    assert len(ForkingPickler.dumps(large)) > 10**6  # a pipe holds a fifth of that
    submitted = threading.Thread(target=lambda: [process.submit(large) for _ in range(3)])
    submitted.daemon = True
    submitted.start()
    submitted.join(WAIT_S / 2)
    assert not submitted.is_alive()
    process.submit(request(6, 6))
    os.kill(process.pid, signal.SIGCONT)
    assert process.take(6, WAIT_S).finished
    process.close()


class Fake:
    """A process that dies, or has no time, as it is told."""

    def __init__(self, of, setup):
        self.of, self.setup, self.asked = of, setup, None
        of.append(self)
        self.closed = False

    def submit(self, request):
        self.asked = request.step

    def take(self, step):
        if self.of.mood == "dies":
            raise PlanningProcessError("ended with code -9")
        return "plan" if self.of.mood == "plans" and self.asked == step else None

    def close(self, *, at_once=False):
        self.closed = True


class Fakes(list):
    mood = "plans"


def kept_steps(moods, caplog):
    """Which steps got a plan; and the processes there were."""
    made = Fakes()
    kept = KeptPlanning(setup(60), lambda given: Fake(made, given), logging.getLogger("kept"))
    planned = []
    for step, mood in enumerate(moods, 1):
        made.mood = mood
        if kept.take(step):
            planned.append(step)
        kept.submit(request(step + 1, 1, rate=1.0))
    assert all(each.closed for each in made[:-1])
    return planned, made, kept


def test_a_process_that_died_is_started_again_after_a_pause(caplog):
    moods = ["plans"] * 3 + ["dies"] + ["plans"] * 6
    planned, made, kept = kept_steps(moods, caplog)
    assert (planned, len(made), kept.lost) == ([2, 3, 7, 8, 9, 10], 2, False)
    assert "step 6 begins with another one" in caplog.text


def test_one_that_always_dies_is_given_up(caplog):
    planned, made, kept = kept_steps(["dies"] * 300, caplog)
    assert planned == [] and kept.lost and len(made) == MOST_DEATHS
    assert "from here on each step is planned before it begins" in caplog.text


def test_one_that_is_starved_gets_a_share_of_the_cores(caplog):
    moods = ["late"] * (STARVED_STEPS + 1) + ["plans"] * 4
    planned, made, _ = kept_steps(moods, caplog)
    assert [each.setup.idle for each in made] == [True, False]
    assert planned == [len(moods) - 3, len(moods) - 2, len(moods) - 1, len(moods)]
    assert caplog.text.count("finds no free core") == 1


def test_what_is_late_now_and_then_is_left_alone(caplog):
    moods = (["late"] * (STARVED_STEPS - 2) + ["plans"]) * 3
    _, made, _ = kept_steps(moods, caplog)
    assert len(made) == 1 and "finds no free core" not in caplog.text
