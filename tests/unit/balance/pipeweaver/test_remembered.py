"""Orders of earlier steps: the whole order for the same work, places for other work."""

import random
from dataclasses import replace

import numpy as np
from dispatch_cases import even_costs, pipeline

from torchmm.balance.pipeweaver.order_search.dispatcher import Dispatcher
from torchmm.balance.pipeweaver.order_search.remembered import MOST, RememberedOrders
from torchmm.balance.pipeweaver.order_search.search import Budget, search


def step(counts):
    graph = pipeline(3, counts, 2)
    costs = even_costs(graph, encoder_ms=1.7, kept_bytes=dict.fromkeys(graph.tasks(), 1))
    return Dispatcher(graph, replace(costs, flops=costs.compute_ms, memory_limit_bytes=12))


def test_the_same_work_in_another_order_of_microbatches_is_as_fast_at_once():
    helped = 0
    for seed in range(8):
        rng = random.Random(seed)
        counts = [rng.choice((0, 1, 2, 4)) for _ in range(10)]
        first = step(counts)
        found = search(first, Budget(evaluations=400), seed=seed)
        remembered = RememberedOrders()
        assert remembered.starts(first) == []
        remembered.add(first, found.order)
        other = step(rng.sample(counts, len(counts)))
        (start,) = remembered.starts(other)
        assert sorted(start.tolist()) == list(range(len(other.segments)))
        # Microbatches with as much work are alike: which of them is which changes nothing.
        assert other.evaluate(start) == found.makespan_ms
        helped += found.makespan_ms < other.evaluate()
    assert helped > 4


def test_another_step_begins_better_than_in_natural_order():
    gained = []
    for seed in range(12):
        rng = random.Random(seed)
        first, other = (step([rng.choice((0, 1, 2, 4)) for _ in range(14)]) for _ in range(2))
        remembered = RememberedOrders()
        found = search(first, Budget(evaluations=600), seed=seed)
        remembered.add(first, found.order)
        (start,) = remembered.starts(other)
        assert sorted(start.tolist()) == list(range(len(other.segments)))
        begun = search(other, Budget(evaluations=40), starts=[start])
        assert begun.makespan_ms <= min(other.evaluate(start), other.evaluate())
        gained.append(other.evaluate() / other.evaluate(start) - 1)
    assert np.mean(gained) > 0


def test_steps_of_other_sizes_are_no_mistake():
    remembered = RememberedOrders()
    big = step([3, 0, 2, 4, 1, 0, 2])
    remembered.add(big, big.natural_order)
    for counts in ([1], [0, 0, 0], [5] * 9, [0, 7]):
        other = step(counts)
        for start in remembered.starts(other):
            assert sorted(start.tolist()) == list(range(len(other.segments)))


def test_only_the_latest_are_kept():
    remembered = RememberedOrders()
    for count in range(MOST + 5):
        own = step([count, 1])
        remembered.add(own, own.natural_order)
    assert len(remembered.starts(step([0, 1]))) == 1  # forgotten: only the last step's
    assert len(remembered.starts(step([MOST, 1]))) == 2
