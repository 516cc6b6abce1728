"""Tests of the choice among Optimus plans, each of which is simulated."""

from dataclasses import replace

import pytest
from test_optimus import random_step

from torchmm.balance.optimus.action_order import best_optimus_step
from torchmm.balance.optimus.schedule_selection import select_schedules
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget
from torchmm.balance.schedules import plan_with_costs, relative_costs, search_optimus_orders
from torchmm.balance.simulation.simulator import simulate
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.recipe.parallel_section import ParallelConfig

CASES = 40


def makespan_ms(step, costs, sharding) -> float:
    plan = lower_plan(
        step.order, step.graph, {}, sharding, reduces_early=costs.overlaps_communication
    )
    validate_plan(plan).raise_for_problems()
    return simulate(plan, costs).makespan_ms


def test_chosen_plan_is_the_shortest():
    kinds = set()
    for seed in range(CASES):
        graph, costs, schedule = random_step(seed, wires=True)
        costs = replace(costs, overlaps_communication=seed % 3 > 0)
        sharding = "step" if seed % 2 else "none"
        options = {"llm_schedule": schedule, "sharding": sharding, "evaluations": 6}
        choices = list(select_schedules(graph, costs, granularity="fine", **options))
        best = choices[-1]
        kinds.add(best.mode)
        ends = [choice.simulated.makespan_ms for choice in choices]
        assert ends == sorted(ends, reverse=True)
        assert best.simulated_count == len(choices) and best.simulated.makespan_ms <= best.coarse_ms
        chosen_costs = best.simulated.costs
        chosen_ms = makespan_ms(best.step, chosen_costs, sharding)
        assert chosen_ms == best.simulated.makespan_ms
        simulated_ms = {
            kind: makespan_ms(
                best_optimus_step(graph, costs, granularity=kind, **options), chosen_costs, sharding
            )
            for kind in ("coarse", "fine")
        }
        assert chosen_ms <= min(simulated_ms.values()) + 1e-9, seed
    assert "fine" in kinds


def test_coarse_recipes_get_coarse_plans():
    graph, costs, schedule = random_step(3)
    choices = select_schedules(
        graph, costs, llm_schedule=schedule, granularity="coarse", sharding="none", evaluations=5
    )
    assert {choice.mode for choice in choices} == {"coarse"}


def test_budget_of_one_returns_first_plan():
    graph, costs, schedule = random_step(4, wires=True)
    config = ParallelConfig(placement="colocated", schedule="optimus", llm_schedule=schedule)
    first = plan_with_costs(config, graph, costs, "step", SearchBudget(1))
    statistics = first.statistics
    assert (statistics["planner"], statistics["planner_evaluations"]) == ("optimus coarse", 1)
    orders = list(search_optimus_orders(config, graph, costs, "step", 5))
    assert first.predicted_ms >= orders[-1].predicted_ms
    assert plan_with_costs(config, graph, costs, "step", SearchBudget(5)) == orders[-1]
    gain = orders[-1].statistics["speedup_over_default_order"]
    coarse = [order for order in orders if order.statistics["planner"] == "optimus coarse"]
    coarse_ms = min(order.predicted_ms for order in coarse)
    assert gain == pytest.approx(coarse_ms / orders[-1].predicted_ms - 1)


def test_plans_consider_communication_costs():
    """Compare sums over cases, because each case has few candidates.

    Plans that ignore communication take longer.
    """
    planned_ms = without_ms = 0.0
    for seed in range(12):
        graph, costs, schedule = random_step(seed, wires=True)
        costs = replace(
            costs,
            transfer_ms={key: 20 * ms for key, ms in costs.transfer_ms.items()},
            reduce_ms={stage: 10 * ms for stage, ms in costs.reduce_ms.items()},
            overlaps_communication=True,
        )
        config = ParallelConfig(placement="colocated", schedule="optimus", llm_schedule=schedule)
        planned_ms += plan_with_costs(config, graph, costs, "step", SearchBudget(10)).predicted_ms
        bare = relative_costs(graph, costs.compute_ms.__getitem__).costs
        without = plan_with_costs(config, graph, bare, "none", SearchBudget(10))
        without_ms += makespan_ms(without.step, costs, "step")
    assert planned_ms < without_ms
