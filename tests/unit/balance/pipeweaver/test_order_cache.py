"""Tests of orders of earlier steps: reused for equal work, adapted for different work."""

import random
from dataclasses import replace

import numpy as np
from dispatch_cases import even_costs, pipeline

from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, search_orders
from torchmm.balance.pipeweaver.schedule_search.warm_start import MAX_STEPS, WarmStart


def step(counts):
    graph = pipeline(3, counts, 2)
    costs = even_costs(graph, encoder_ms=1.7, saved_bytes=dict.fromkeys(graph.tasks(), 1))
    return Dispatcher(graph, replace(costs, flops=costs.compute_ms, memory_limit_bytes=12))


def test_remembered_order_fits_permuted_microbatches():
    helped = 0
    for seed in range(8):
        rng = random.Random(seed)
        counts = [rng.choice((0, 1, 2, 4)) for _ in range(10)]
        first = step(counts)
        result = search_orders(first, SearchBudget(evaluations=400), seed=seed)
        warm_start = WarmStart()
        assert warm_start.starts(first) == []
        warm_start.add(first, result.order)
        permuted = step(rng.sample(counts, len(counts)))
        (start,) = warm_start.starts(permuted)
        assert sorted(start.tolist()) == list(range(len(permuted.segments)))
        # Microbatches with equal work are interchangeable.
        assert permuted.evaluate(start) == result.makespan_ms
        helped += result.makespan_ms < permuted.evaluate()
    assert helped > 4


def test_remembered_order_improves_different_step():
    gained = []
    for seed in range(12):
        rng = random.Random(seed)
        first, other = (step([rng.choice((0, 1, 2, 4)) for _ in range(14)]) for _ in range(2))
        warm_start = WarmStart()
        result = search_orders(first, SearchBudget(evaluations=600), seed=seed)
        warm_start.add(first, result.order)
        (start,) = warm_start.starts(other)
        assert sorted(start.tolist()) == list(range(len(other.segments)))
        warm_started = search_orders(other, SearchBudget(evaluations=40), starts=[start])
        assert warm_started.makespan_ms <= min(other.evaluate(start), other.evaluate())
        gained.append(other.evaluate() / other.evaluate(start) - 1)
    assert np.mean(gained) > 0


def test_remembered_orders_fit_steps_of_other_sizes():
    warm_start = WarmStart()
    big = step([3, 0, 2, 4, 1, 0, 2])
    warm_start.add(big, big.default_order)
    for counts in ([1], [0, 0, 0], [5] * 9, [0, 7]):
        other = step(counts)
        for start in warm_start.starts(other):
            assert sorted(start.tolist()) == list(range(len(other.segments)))


def test_only_latest_orders_are_remembered():
    warm_start = WarmStart()
    for count in range(MAX_STEPS + 5):
        dispatcher = step([count, 1])
        warm_start.add(dispatcher, dispatcher.default_order)
    assert len(warm_start.starts(step([0, 1]))) == 1  # only the order of the previous step
    assert len(warm_start.starts(step([MAX_STEPS, 1]))) == 2
