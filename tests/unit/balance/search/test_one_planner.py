"""Runs, the process beside them and forecasts plan a searched step with the same costs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from torchmm.balance.forecasts.forecast import Forecaster
from torchmm.balance.pipeweaver.background.leader import start_planning
from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.rates import ActionFit
from torchmm.balance.run_costs import run_costs, simulated_profile
from torchmm.balance.schedules import search_by_costs
from torchmm.balance.step_plans import searched_costs
from torchmm.costs.flops import task_durations
from torchmm.pipelining.plan.actions import COMPUTE, ActionType
from torchmm.pipelining.plan.numbers import decode_plan
from torchmm.recipe.read import load_recipe

ROOT = Path(__file__).parents[4]
EVALUATIONS = 200


@pytest.fixture(scope="module")
def forecaster() -> Forecaster:
    given = [
        "--parallel.schedule=searched",
        f"--parallel.search.evaluations={EVALUATIONS}",
        "--parallel.search.workers=1",
    ]
    recipe = load_recipe(ROOT / "recipes/papers/pipeweaver_vlm_s.toml", given, None).recipe
    return Forecaster(recipe, 16, simulated_profile(recipe))


def kinds_of(graph, values):
    """Sums over actions, by module and kind."""
    found = defaultdict(float)
    for action, value in values.items():
        found[graph.layout.stages[action.stage].module, action.type] += value
    return found


def compute_orders(plan):
    return [[action for action in row if action.type in COMPUTE] for row in plan.actions]


def test_a_run_executes_the_plan_that_its_forecast_shows(forecaster):
    step = forecaster.forecast().step
    graph = step.plan.graph
    parallel = forecaster.run.recipe.parallel
    parallel = parallel.model_copy(update={"pipeline": forecaster.run.llm.pipeline})
    costs = run_costs(forecaster.run, forecaster.modules, forecaster.profile)
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
    ran = decode_plan(planned.numbers, graph, lambda graph: {})
    assert compute_orders(ran) == compute_orders(step.plan)
    # Not by chance: an order that was searched with other costs is another one.
    flops = searched_costs(graph, modules, metas, costs)
    skewed = {a: ms * (1 + a.microbatch % 3) for a, ms in flops.compute_ms.items()}
    other = search_by_costs(parallel, graph, flops.__class__(skewed)).order
    assert [list(row) for row in other] != compute_orders(step.plan)


def test_measured_rates_hold_for_every_kind_of_action(forecaster):
    step = forecaster.forecast().step
    graph, metas = step.plan.graph, forecaster.workload.microbatches
    model = run_costs(forecaster.run, forecaster.modules, forecaster.profile)
    plain = searched_costs(graph, forecaster.modules, metas, model)
    flops = task_durations(graph, forecaster.modules, metas)
    work = kinds_of(graph, {action: flops(action) for action in plain.compute_ms})
    rates = {kind: (1 + number) * 1e-9 for number, kind in enumerate(sorted(work, key=str))}
    measured = searched_costs(graph, forecaster.modules, metas, model, rates=rates)
    for kind, ms in kinds_of(graph, measured.compute_ms).items():
        if work[kind] > 0 and kind[1] in (ActionType.F, ActionType.B):
            assert ms == pytest.approx(rates[kind] * work[kind])
    # Actions of a kind differ as the model says, not as FLOPs do; bytes and transfers stay.
    assert measured.kept_bytes == plain.kept_bytes
    assert measured.transfer_ms == plain.transfer_ms
    own = [a for a in plain.compute_ms if (a.stage, a.type) == (0, ActionType.F)]
    ratios = {round(measured.compute_ms[a] / plain.compute_ms[a], 6) for a in own}
    assert len(ratios) == 1


def test_constants_and_rates_hold_for_every_rank(forecaster):
    step = forecaster.forecast().step
    graph, metas = step.plan.graph, forecaster.workload.microbatches
    model = run_costs(forecaster.run, forecaster.modules, forecaster.profile)
    plain = searched_costs(graph, forecaster.modules, metas, model)
    flops = task_durations(graph, forecaster.modules, metas)
    rates = {
        (module.name, kind): 1e-9 for module in forecaster.modules for kind in ActionType
    }  # fmt: skip
    fits = {(1, "llm", ActionType.F): ActionFit(7.0, 3e-9)}
    given = graph, forecaster.modules, metas, model
    measured = searched_costs(*given, rates=rates, fits=fits)
    pooled = searched_costs(*given, rates=rates)
    own = [
        action
        for action in plain.compute_ms
        if action.type is ActionType.F
        and graph.layout.stages[action.stage].module == "llm"
        and graph.rank(action.task) == 1
    ]
    total_ms = sum(7.0 + 3e-9 * flops(action) for action in own)
    assert sum(measured.compute_ms[a] for a in own) == pytest.approx(total_ms)
    grown = {round((measured.compute_ms[a] - 7.0) / plain.compute_ms[a], 6) for a in own}
    assert len(grown) == 1, "beyond the constant they differ as the model says"
    others = [a for a in plain.compute_ms if a.type is ActionType.B]
    assert [measured.compute_ms[a] for a in others] == [pooled.compute_ms[a] for a in others]


def test_measured_transfers_shift_those_of_the_model(forecaster):
    step = forecaster.forecast().step
    graph, metas = step.plan.graph, forecaster.workload.microbatches
    model = run_costs(forecaster.run, forecaster.modules, forecaster.profile)
    given = graph, forecaster.modules, metas, model
    rates = {("llm", ActionType.F): 1e-9}
    plain = searched_costs(*given, rates=rates)

    def ends(key):
        return tuple(
            sorted((graph.rank(graph.producer(key[0])), graph.rank(graph.consumer(key[0]))))
        )

    mean_ms = defaultdict(list)
    for key, ms in plain.transfer_ms.items():
        mean_ms[ends(key)].append(ms)
    found = searched_costs(*given, rates=rates, between_ms={(0, 1): 50.0})
    own = mean_ms[0, 1]
    for key, ms in plain.transfer_ms.items():
        more_ms = 50.0 - sum(own) / len(own) if ends(key) == (0, 1) else 0.0
        assert found.transfer_ms[key] == pytest.approx(ms + more_ms)
