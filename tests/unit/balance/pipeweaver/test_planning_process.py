"""Tests of the planning process: plans of searched schedules, and errors."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from pipeline_cases import Case, step_of
from support.memory_needs import memory_needs

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.balance.pipeweaver.background.leader import start_planning
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest, StepTimings
from torchmm.balance.schedules import OPTIMUS_SCHEDULE, search_optimus_orders
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.step_plans import compute_search_costs
from torchmm.common.step_process import StepProcess, StepProcessError
from torchmm.costs.flops import module_layers, task_durations
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.serialization import decode_plan
from torchmm.pipelining.run.messages import message_sizes, message_specs
from torchmm.pipelining.schedules.layouts import separated_layout
from torchmm.pipelining.schedules.separated import separated
from torchmm.planning.planned_step import PlannedStep
from torchmm.planning.step import step_graph
from torchmm.recipe.parallel_section import ParallelConfig

CASE = Case("planned in background")
COSTS = CostModel(load_profile("cpu"), "float32")
WAIT_S = 180.0
HARD = 3
"""Seed of a step whose search never reaches its bound, so that it uses its full budget."""


def config(evaluations: int) -> ParallelConfig:
    return ParallelConfig.model_validate(
        {"pipeline": 2, "schedule": "searched", "search": {"evaluations": evaluations}}
    )


def setup(evaluations: int) -> PlanningSetup:
    modules = tuple(m.describe() for m in CASE.build().modality_modules())
    layout = separated_layout(module_layers(modules, metas(0)), 2)
    return PlanningSetup(layout, config(evaluations), modules, "none", COSTS)


def start(setup_: PlanningSetup) -> StepProcess[PlannedStep]:
    """Start a process that does not wait for an idle core."""
    return start_planning(setup_, "normal")


def metas(seed: int) -> tuple:
    return tuple(m.meta for m in step_of(CASE, seed)[0]) * 2


@pytest.fixture(scope="module")
def process() -> Iterator[StepProcess[PlannedStep]]:
    process_ = start(setup(60))
    yield process_
    process_.close()


def request(step: int, seed: int, rate: float = 0.0) -> PlanRequest:
    kinds = [(name, kind) for name in ("llm", "vision") for kind in ActionType]
    rates = dict.fromkeys(kinds, rate) if rate else {}
    return PlanRequest(step, metas(seed), StepTimings(rates))


def test_process_plans_the_requested_step(process):
    process.submit(1, request(1, HARD))
    planned = process.take(1, WAIT_S)
    statistics = planned.statistics
    assert planned.step == 1 and planned.finished and "predicted_step_ms" not in statistics
    assert (statistics["planner"], statistics["planner_evaluations"]) == ("search", 60)
    assert statistics["speedup_over_default_order"] >= 0
    graph = step_graph(setup(60).layout, config(60), metas(HARD))
    plan = decode_plan(planned.encoded_plan, graph, lambda graph: {})
    assert validate_plan(plan).problems == ()


def test_search_stops_at_the_lower_bound(process):
    process.submit(2, request(2, 1))
    planned = process.take(2, WAIT_S)
    assert planned.finished and planned.statistics["planner"] == "natural"
    # The default order, and orders of earlier steps.
    assert planned.statistics["planner_evaluations"] < 10


def test_optimus_plan_includes_encoder_replicas():
    """Use a slow step, in which messages to another rank pay off."""
    modules = tuple(m.describe() for m in CASE.build().modality_modules())
    section = ParallelConfig.model_validate(
        {"pipeline": 2, "schedule": "optimus", "placement": "colocated"}
    )
    layers = module_layers(modules, metas(0))
    setup_ = PlanningSetup(
        OPTIMUS_SCHEDULE.layout(section, layers), section, modules, "none", COSTS
    )
    process = start(setup_)
    try:
        process.submit(1, request(1, 1, 1e-6))
        planned = process.take(1, WAIT_S)
    finally:
        process.close()
    assert planned.finished and planned.statistics["planner"].startswith("optimus ")
    graph = step_graph(setup_.layout, section, metas(1))
    plan = decode_plan(planned.encoded_plan, graph, lambda graph: {})
    assert validate_plan(plan).problems == ()
    costs = compute_search_costs(graph, modules, metas(1), COSTS, rates=request(1, 1, 1e-6).rates)
    *coarse, best = search_optimus_orders(section, graph, costs, "none")
    assert plan.graph == best.step.graph and set(plan.graph.replica.values()) == {0, 1}
    predicted_ms = planned.statistics["predicted_step_ms"]
    assert simulate(plan, costs).makespan_ms == pytest.approx(predicted_ms)
    assert predicted_ms <= coarse[0].predicted_ms
    assert planned.statistics["speedup_over_default_order"] >= 0


def test_process_tunes_layers_to_memory_limit():
    """Use a limit between the minimum and the maximum memory of the plan."""
    setup_ = setup(60)
    sizes = {m.name: message_sizes(m) for m in CASE.build().modality_modules()}
    model = CostModel(load_profile("cpu"), "float32")
    tuning = LayerTuning(model, frozenset(m.name for m in setup_.modules), 0)
    graph = step_graph(setup_.layout, setup_.config, metas(1))
    specs = message_specs(graph, sizes, metas(1), torch.float32)
    plain = lower_plan(separated(graph), graph, specs)
    needs = memory_needs(plain, setup_.modules, metas(1), tuning)
    minimum, maximum = (max(each) for each in zip(*needs, strict=True))
    limited = replace(tuning, memory_limit_bytes=(minimum + maximum) // 2)
    process = start(replace(setup_, sizes=sizes, tuning=limited))
    process.submit(1, request(1, 1))
    plan = decode_plan(process.take(1, WAIT_S).encoded_plan, graph, lambda graph: specs)
    process.close()
    assert validate_plan(plan).problems == ()
    assert {mode for modes in plan.recompute.values() for mode in modes} > {"none"}
    costs = compute_plan_costs_with_recompute(plan, setup_.modules, metas(1), model)
    assert max(simulate(plan, costs).peak_bytes) <= limited.memory_limit_bytes


def test_rates_determine_predicted_milliseconds(process):
    """Check that the predicted time is between the work of one rank and the total work."""
    process.submit(3, request(3, 1, rate=1e-6))
    predicted_ms = process.take(3, WAIT_S).statistics["predicted_step_ms"]
    graph = step_graph(setup(60).layout, config(60), metas(1))
    flops = task_durations(graph, setup(60).modules, metas(1))
    actions = [
        Action(kind, *task) for task in graph.tasks() for kind in (ActionType.F, ActionType.B)
    ]
    ranks = [
        sum(flops(a) for a in actions if graph.layout.stages[a.stage].ranks[0] == rank)
        for rank in range(2)
    ]
    assert 1e-6 * max(ranks) <= predicted_ms <= 1e-6 * sum(ranks) * 1.001


def test_unfinished_search_returns_a_plan():
    endless = start(setup(10**9))
    endless.submit(1, request(1, HARD))
    planned = None
    while planned is None:
        planned = endless.take(1, 0.05)
    assert not planned.finished
    endless.submit(2, request(2, 2))  # does not wait for the end of the first search
    while endless.take(2, 0.05) is None:
        pass
    endless.close()


def test_planning_errors_are_raised():
    process = start(setup(60))
    process.submit(1, request(1, 1, rate=float("nan")))
    with pytest.raises(StepProcessError, match="cannot plan a step: "):
        process.take(1, WAIT_S)
    process.close()
