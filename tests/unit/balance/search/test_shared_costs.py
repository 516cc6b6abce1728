"""Tests of searched steps: runs, background planning and simulation use the same costs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from torchmm.balance.online_calibration import ActionTimeFit
from torchmm.balance.pipeweaver.background.leader import start_planning
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.run_costs import build_cost_model, load_simulated_profile
from torchmm.balance.schedules import search_schedule
from torchmm.balance.step_plans import compute_search_costs
from torchmm.costs.flops import task_durations
from torchmm.pipelining.plan.actions import COMPUTE, ActionType
from torchmm.pipelining.plan.serialization import decode_plan
from torchmm.recipe.read import load_recipe

ROOT = Path(__file__).parents[4]
EVALUATIONS = 200


@pytest.fixture(scope="module")
def forecaster() -> StepSimulator:
    overrides = [
        "--parallel.schedule=searched",
        f"--parallel.search.evaluations={EVALUATIONS}",
        "--parallel.search.workers=1",
    ]
    recipe = load_recipe(ROOT / "recipes/papers/pipeweaver_vlm_s.toml", overrides, None).recipe
    return StepSimulator(recipe, 16, load_simulated_profile(recipe))


def kinds_of(graph, values):
    """Return sums over actions, by module and action type."""
    sums = defaultdict(float)
    for action, value in values.items():
        sums[graph.layout.stages[action.stage].module, action.type] += value
    return sums


def compute_orders(plan):
    return [[action for action in row if action.type in COMPUTE] for row in plan.actions]


def test_run_executes_simulated_plan(forecaster):
    step = forecaster.simulate_schedule().step
    graph = step.plan.graph
    parallel = forecaster.run.recipe.parallel
    parallel = parallel.model_copy(update={"pipeline": forecaster.run.llm.pipeline})
    costs = build_cost_model(forecaster.run, forecaster.modules, forecaster.profile)
    modules = tuple(forecaster.modules)
    setup = PlanningSetup(graph.layout, parallel, modules, "step", costs)
    process = start_planning(setup, "normal")
    try:
        metas = tuple(forecaster.workload.microbatches)
        process.submit(1, PlanRequest(1, metas))
        planned = process.take(1, 120)
    finally:
        process.close()
    assert planned.finished and planned.statistics["planner_evaluations"] == EVALUATIONS
    executed = decode_plan(planned.encoded_plan, graph, lambda graph: {})
    assert compute_orders(executed) == compute_orders(step.plan)
    # Check that different costs lead to a different order.
    flops = compute_search_costs(graph, modules, metas, costs)
    skewed = {a: ms * (1 + a.microbatch % 3) for a, ms in flops.compute_ms.items()}
    other_order = search_schedule(parallel, graph, flops.__class__(skewed)).order
    assert [list(row) for row in other_order] != compute_orders(step.plan)


def test_measured_rates_scale_each_action_type(forecaster):
    step = forecaster.simulate_schedule().step
    graph, metas = step.plan.graph, forecaster.workload.microbatches
    model = build_cost_model(forecaster.run, forecaster.modules, forecaster.profile)
    plain = compute_search_costs(graph, forecaster.modules, metas, model)
    flops = task_durations(graph, forecaster.modules, metas)
    work = kinds_of(graph, {action: flops(action) for action in plain.compute_ms})
    rates = {kind: (1 + number) * 1e-9 for number, kind in enumerate(sorted(work, key=str))}
    measured = compute_search_costs(graph, forecaster.modules, metas, model, rates=rates)
    for kind, ms in kinds_of(graph, measured.compute_ms).items():
        if work[kind] > 0 and kind[1] in (ActionType.F, ActionType.B):
            assert ms == pytest.approx(rates[kind] * work[kind])
    # Within a type, actions have the ratios of the cost model, not of FLOPs. Bytes and transfers do
    # not change.
    assert measured.saved_bytes == plain.saved_bytes
    assert measured.transfer_ms == plain.transfer_ms
    forwards = [a for a in plain.compute_ms if (a.stage, a.type) == (0, ActionType.F)]
    ratios = {round(measured.compute_ms[a] / plain.compute_ms[a], 6) for a in forwards}
    assert len(ratios) == 1


def test_constants_and_rates_apply_per_rank(forecaster):
    step = forecaster.simulate_schedule().step
    graph, metas = step.plan.graph, forecaster.workload.microbatches
    model = build_cost_model(forecaster.run, forecaster.modules, forecaster.profile)
    plain = compute_search_costs(graph, forecaster.modules, metas, model)
    flops = task_durations(graph, forecaster.modules, metas)
    rates = {
        (module.name, kind): 1e-9 for module in forecaster.modules for kind in ActionType
    }  # fmt: skip
    fits = {(1, "llm", ActionType.F): ActionTimeFit(7.0, 3e-9)}
    step_arguments = graph, forecaster.modules, metas, model
    measured = compute_search_costs(*step_arguments, rates=rates, fits=fits)
    pooled = compute_search_costs(*step_arguments, rates=rates)
    llm_forwards = [
        action
        for action in plain.compute_ms
        if action.type is ActionType.F
        and graph.layout.stages[action.stage].module == "llm"
        and graph.rank(action.task) == 1
    ]
    total_ms = sum(7.0 + 3e-9 * flops(action) for action in llm_forwards)
    assert sum(measured.compute_ms[a] for a in llm_forwards) == pytest.approx(total_ms)
    grown = {round((measured.compute_ms[a] - 7.0) / plain.compute_ms[a], 6) for a in llm_forwards}
    assert len(grown) == 1, "variable times do not follow the cost model"
    backwards = [a for a in plain.compute_ms if a.type is ActionType.B]
    assert [measured.compute_ms[a] for a in backwards] == [pooled.compute_ms[a] for a in backwards]


def test_measured_transfers_shift_predicted_transfers(forecaster):
    step = forecaster.simulate_schedule().step
    graph, metas = step.plan.graph, forecaster.workload.microbatches
    model = build_cost_model(forecaster.run, forecaster.modules, forecaster.profile)
    step_arguments = graph, forecaster.modules, metas, model
    rates = {("llm", ActionType.F): 1e-9}
    plain = compute_search_costs(*step_arguments, rates=rates)

    def ends(key):
        return tuple(
            sorted((graph.rank(graph.producer(key[0])), graph.rank(graph.consumer(key[0]))))
        )

    mean_ms = defaultdict(list)
    for key, ms in plain.transfer_ms.items():
        mean_ms[ends(key)].append(ms)
    measured = compute_search_costs(*step_arguments, rates=rates, rank_pair_ms={(0, 1): 50.0})
    predicted_ms = mean_ms[0, 1]
    for key, ms in plain.transfer_ms.items():
        more_ms = 50.0 - sum(predicted_ms) / len(predicted_ms) if ends(key) == (0, 1) else 0.0
        assert measured.transfer_ms[key] == pytest.approx(ms + more_ms)
