"""Tests of orders of earlier steps: reused for equal work, adapted for different work."""

import random
from dataclasses import replace

import numpy as np
from dispatch_cases import even_costs, pipeline

from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.order_search.remembered import MOST, RememberedOrders
from torchmm.balance.pipeweaver.order_search.search import Budget, search


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
        result = search(first, Budget(evaluations=400), seed=seed)
        remembered = RememberedOrders()
        assert remembered.starts(first) == []
        remembered.add(first, result.order)
        permuted = step(rng.sample(counts, len(counts)))
        (start,) = remembered.starts(permuted)
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
        remembered = RememberedOrders()
        result = search(first, Budget(evaluations=600), seed=seed)
        remembered.add(first, result.order)
        (start,) = remembered.starts(other)
        assert sorted(start.tolist()) == list(range(len(other.segments)))
        warm_started = search(other, Budget(evaluations=40), starts=[start])
        assert warm_started.makespan_ms <= min(other.evaluate(start), other.evaluate())
        gained.append(other.evaluate() / other.evaluate(start) - 1)
    assert np.mean(gained) > 0


def test_remembered_orders_fit_steps_of_other_sizes():
    remembered = RememberedOrders()
    big = step([3, 0, 2, 4, 1, 0, 2])
    remembered.add(big, big.natural_order)
    for counts in ([1], [0, 0, 0], [5] * 9, [0, 7]):
        other = step(counts)
        for start in remembered.starts(other):
            assert sorted(start.tolist()) == list(range(len(other.segments)))


def test_only_latest_orders_are_remembered():
    remembered = RememberedOrders()
    for count in range(MOST + 5):
        dispatcher = step([count, 1])
        remembered.add(dispatcher, dispatcher.natural_order)
    assert len(remembered.starts(step([0, 1]))) == 1  # only the order of the previous step
    assert len(remembered.starts(step([MOST, 1]))) == 2
