"""Tests of schedule search: deterministic, never worse than static orders, optimal if known."""

import os
import random
from dataclasses import replace
from itertools import permutations
from math import inf, isfinite

import numpy as np
import pytest
from dispatch_cases import even_costs, pipeline
from naive_dispatch import random_dispatch
from support.strategies import STRATEGIES, DepthFirst, RandomSearch

from torchmm.balance.pipeweaver.schedule_search.annealing import construct_orders
from torchmm.balance.pipeweaver.schedule_search.bounds import lower_bound_ms
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.order_timing import time_order
from torchmm.balance.pipeweaver.schedule_search.search import (
    SearchBudget,
    SearchSettings,
    search_orders,
)
from torchmm.balance.pipeweaver.schedule_search.step_search import (
    StepSearch,
    with_separated_memory_limit,
)
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import simulate
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.orders import order_problems
from torchmm.pipelining.schedules.classic import gpipe, interleaved_1f1b
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout
from torchmm.pipelining.schedules.separated import separated


def skewed(seed: int, microbatches: int = 8, limit: int | None = None) -> Dispatcher:
    """Return a step of three ranks, two LLM segments, and encoder tasks of different lengths."""
    rng = random.Random(seed)
    counts = [rng.choice((0, 0, 1, 2, 4)) for _ in range(microbatches)]
    graph = pipeline(3, counts, 2)
    costs = even_costs(graph, encoder_ms=1.7, saved_bytes=dict.fromkeys(graph.tasks(), 1))
    return Dispatcher(graph, replace(costs, memory_limit_bytes=limit))


def loaded(seed: int) -> tuple[StageGraph, PlanCosts]:
    dispatcher = skewed(seed)
    return dispatcher.graph, with_separated_memory_limit(dispatcher.graph, dispatcher.costs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_search_depends_on_seed_and_evaluations(strategy, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # at most two workers are used
    dispatcher = skewed(1, microbatches=24, limit=12)
    budget = SearchBudget(evaluations=400)
    for workers in (1, 2):
        first, second = (
            search_orders(
                dispatcher, budget, strategy=STRATEGIES[strategy], seed=3, workers=workers
            )
            for _ in range(2)
        )
        assert np.array_equal(first.order, second.order)
        assert first.evaluations == second.evaluations <= 400
    if strategy != "natural":
        assert first.evaluations == 400
    if strategy in ("random", "mcts", "annealing"):
        other = search_orders(dispatcher, budget, strategy=STRATEGIES[strategy], seed=4)
        assert not np.array_equal(first.order, other.order)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_search_never_loses_to_default_order(strategy):
    for seed in range(10):
        dispatcher = skewed(seed, limit=random.Random(seed).choice((None, 9, 12)))
        result = search_orders(
            dispatcher, SearchBudget(evaluations=60), strategy=STRATEGIES[strategy], seed=seed
        )
        assert result.makespan_ms <= result.default_order_ms == dispatcher.evaluate()
        assert dispatcher.evaluate(result.order) == result.makespan_ms
        assert result.fits == isfinite(result.makespan_ms)


def test_search_finds_optimum_of_tiny_steps():
    """Compare with all orders of groups. Orders of single segments can be better."""
    gained = 0
    for seed in range(6):
        dispatcher = skewed(seed, microbatches=3, limit=9)
        count = len(dispatcher.groups)
        assert count <= 6
        best = min(
            dispatcher.evaluate(dispatcher.order_of_groups(groups))
            for groups in permutations(range(count))
        )
        result = search_orders(dispatcher, SearchBudget(evaluations=600), seed=seed)
        exhaustive = search_orders(dispatcher, SearchBudget(evaluations=10**6), strategy=DepthFirst)
        assert exhaustive.makespan_ms == best
        assert exhaustive.evaluations == len(list(permutations(range(count))))
        assert result.makespan_ms <= best
        gained += best < result.default_order_ms
    assert gained > 2


def test_annealing_stops_at_the_lower_bound():
    graph = pipeline(4, [0, 2, 0, 1, 3, 0, 1, 2], 2)
    dispatcher = Dispatcher(graph, even_costs(graph, encoder_ms=1.5))
    bound_ms = lower_bound_ms(dispatcher)
    result = search_orders(dispatcher, SearchBudget(evaluations=5000), bound_ms=bound_ms)
    assert result.makespan_ms == pytest.approx(bound_ms)
    assert result.default_order_ms > 1.02 * bound_ms
    assert result.evaluations < 5000


def test_search_recovers_from_orders_exceeding_memory():
    rescued = 0
    for seed in range(40):
        dispatcher = skewed(seed, limit=7)
        result = search_orders(dispatcher, SearchBudget(evaluations=300), seed=seed)
        rescued += result.default_order_ms == inf and result.fits
    assert rescued > 5


def test_callback_stops_the_search():
    rounds = []

    def on_round(result):
        rounds.append(result)
        return len(rounds) < 3

    dispatcher = skewed(2)
    result = search_orders(
        dispatcher, SearchBudget(evaluations=10**6), on_round=on_round, strategy=RandomSearch
    )
    assert len(rounds) == 3
    times = [each.makespan_ms for each in (*rounds, result)]
    assert times == sorted(times, reverse=True) and times[2] == times[3]
    assert np.array_equal(result.order, rounds[-1].order)
    for earlier in rounds:
        assert dispatcher.evaluate(earlier.order) == earlier.makespan_ms


def test_time_budget_stops_the_search():
    result = search_orders(skewed(2), SearchBudget(seconds=0.05), strategy=RandomSearch)
    assert result.evaluations > 0


@pytest.mark.parametrize("arguments", [{}, {"evaluations": 0}, {"seconds": -1.0}])
def test_budgets_must_be_positive(arguments):
    with pytest.raises(ValueError, match="set at least one of them"):
        SearchBudget(**arguments)


@pytest.mark.parametrize(("cores", "expected"), [(8, 3), (4, 2), (1, 1), (None, 1)])
def test_search_uses_at_most_half_of_the_cores(cores, expected, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    built = []

    def build(evaluator, generator):
        built.append(evaluator)
        return RandomSearch(evaluator, generator)

    search_orders(skewed(1), SearchBudget(evaluations=10), workers=3, strategy=build)
    assert len(built) == expected


def test_number_of_workers_must_be_positive():
    with pytest.raises(ValueError, match="workers = 0"):
        search_orders(skewed(1), SearchBudget(evaluations=1), workers=0)


def test_constructed_orders_are_group_permutations():
    for seed in range(5):
        dispatcher = skewed(seed)
        orders = construct_orders(dispatcher)
        assert len({order.tobytes() for order in orders}) == len(orders) > 5
        for order in orders:
            assert sorted(order.tolist()) == list(range(len(dispatcher.groups)))


def test_timed_orders_match_the_simulator():
    checked = limited = 0
    for seed in range(200):
        graph, costs = random_dispatch(seed)
        if min(costs.compute_ms.values()) == 0:
            continue  # actions without duration take a picosecond in the dispatcher
        dispatcher = Dispatcher(graph, costs)
        order = separated(graph, costs.compute_ms.__getitem__)
        timed = time_order(dispatcher, order)
        step = simulate(lower_plan(order, graph, {}, receives_ahead=10**6), costs)
        assert timed.makespan_ms == step.makespan_ms
        assert timed.peak_bytes == step.peak_bytes
        assert timed.fits == step.fits
        checked += 1
        limited += not timed.fits
    assert checked > 80
    assert limited > 10


def test_orders_of_different_steps_are_rejected():
    dispatcher = skewed(1)
    order = separated(dispatcher.graph)
    with pytest.raises(ValueError, match="for a step of"):
        time_order(dispatcher, [row[1:] for row in order])
    with pytest.raises(ValueError, match="wait for each other in this order"):
        time_order(dispatcher, [row[::-1] for row in order])


def test_searched_plans_are_valid_and_fast():
    searched = 0
    for seed in range(25):
        graph, costs = loaded(seed)
        planned = StepSearch(graph, costs).search(
            SearchBudget(evaluations=200), SearchSettings(seed)
        )
        assert order_problems(graph, planned.order) == []
        plan = lower_plan(planned.order, graph, {}, receives_ahead=10**6)
        assert validate_plan(plan).problems == ()
        step = simulate(plan, costs)
        assert step.makespan_ms == planned.predicted_ms
        assert step.peak_bytes == planned.peak_bytes
        assert step.fits
        dispatcher = Dispatcher(graph, costs)
        for order in (gpipe(graph), separated(graph, costs.compute_ms.__getitem__)):
            timed = time_order(dispatcher, order)
            assert not timed.fits or planned.predicted_ms <= timed.makespan_ms
        assert planned.predicted_ms <= min(planned.default_order_ms, planned.static_ms)
        searched += planned.planner == "search"
    assert searched > 12


def test_default_limit_is_memory_of_separated_schedule():
    graph, costs = loaded(3)
    timed = time_order(Dispatcher(graph, costs), separated(graph, costs.compute_ms.__getitem__))
    assert set(timed.peak_bytes) == {costs.memory_limit_bytes}


def test_little_memory_reduces_microbatches_in_flight():
    graph, costs = loaded(3)
    tight = replace(costs, static_bytes=(), memory_limit_bytes=6)
    planned = StepSearch(graph, tight).search(SearchBudget(evaluations=1), SearchSettings())
    assert Dispatcher(graph, tight).evaluate() == inf
    assert planned.default_order_ms == planned.predicted_ms
    assert planned.speedup_over_default_order == 0
    assert planned.planner.startswith("separated, at most")
    assert max(planned.peak_bytes) <= 6


@pytest.mark.campaign
def test_plan_exists_if_one_microbatch_fits():
    """Use limits between one microbatch in flight and the default order."""
    unlucky = 0
    for seed in range(8):
        graph, costs = loaded(seed)
        free = replace(costs, static_bytes=(), memory_limit_bytes=None)
        durations = costs.compute_ms.__getitem__
        minimum = max(
            time_order(Dispatcher(graph, free), separated(graph, durations, 1)).peak_bytes
        )
        maximum = max(Dispatcher(graph, free).dispatch().peak_bytes)
        for limit in {minimum, minimum + 1, (minimum + maximum) // 2, max(minimum, maximum)}:
            tight = replace(free, memory_limit_bytes=limit)
            for evaluations in (1, 20):  # the default order, a search
                planned = StepSearch(graph, tight).search(
                    SearchBudget(evaluations), SearchSettings()
                )
                plan = lower_plan(planned.order, graph, {}, receives_ahead=10**6)
                assert validate_plan(plan).problems == ()
                assert simulate(plan, tight).fits, (seed, limit, evaluations)
            result = search_orders(Dispatcher(graph, tight), SearchBudget(evaluations=1))
            unlucky += not result.fits
    assert unlucky > 4


def test_searched_single_pipeline_beats_1f1b():
    for seed in range(10):
        rng = random.Random(seed)
        encoder = ModuleLayers("vision", "encoder", (1.0,) * 4, True, (True,) * 4)
        llm = ModuleLayers("llm", "llm", (1.0,) * 8, False, (True,) * 8)
        layout = megatron_layout([encoder, llm], 2)
        graph = StageGraph(layout, 6, {"vision": tuple(rng.randint(0, 1) for _ in range(6))})
        kept = dict.fromkeys(graph.tasks(), 1)
        free = even_costs(graph, encoder_ms=rng.uniform(0.2, 3.0), saved_bytes=kept)
        costs = with_separated_memory_limit(graph, free)
        planned = StepSearch(graph, costs).search(
            SearchBudget(evaluations=50), SearchSettings(seed)
        )
        timed = time_order(Dispatcher(graph, costs), interleaved_1f1b(graph))
        assert timed.fits and planned.predicted_ms <= timed.makespan_ms


def test_unsatisfiable_step_reports_missing_memory():
    graph, costs = loaded(3)
    tight = replace(costs, static_bytes=(), memory_limit_bytes=1)
    with pytest.raises(
        ValueError, match=r"even with one microbatch in flight: rank 0: .* requires 1"
    ):
        StepSearch(graph, tight).search(SearchBudget(evaluations=5), SearchSettings())
