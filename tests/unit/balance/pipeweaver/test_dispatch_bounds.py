"""Tests of lower bounds: never above any order, and tight if the optimum is known."""

import math
import random
from itertools import permutations

import numpy as np
import pytest
from dispatch_cases import even_costs, pipeline
from naive_dispatch import random_dispatch

from torchmm.balance.pipeweaver.schedule_search.bounds import _preemptive_end_ps, lower_bound_ms
from torchmm.balance.pipeweaver.schedule_search.dispatcher import Dispatcher
from torchmm.balance.plan_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType


def test_no_random_order_beats_the_bound():
    checked = 0
    for seed in range(200):
        graph, costs = random_dispatch(seed)
        dispatcher = Dispatcher(graph, costs)
        bound_ms, rng = lower_bound_ms(dispatcher), np.random.default_rng(seed)
        for _ in range(5):
            makespan_ms = dispatcher.evaluate(rng.permutation(len(dispatcher.segments)))
            assert makespan_ms >= bound_ms > 0
            checked += makespan_ms < math.inf
    assert checked > 500


def test_bound_holds_for_uniform_ranks():
    reached = 0
    for seed in range(300):
        rng = random.Random(seed)
        ranks, llm_ms = rng.choice((2, 3, 4, 8)), rng.choice((1.0, 2.0, 5.0))
        counts = [rng.randint(0, 3) for _ in range(rng.randint(1, 12))]
        graph = pipeline(ranks, counts, rng.randint(1, 3))
        kept = {task: 1 for task in graph.tasks()}
        limit = rng.choice((None, 3 * ranks))
        # Encoder tasks have different lengths, which are equal on all ranks.
        compute = dict(even_costs(graph, 1.0, llm_ms).compute_ms)
        for action in compute:
            if graph.layout.stages[action.stage].module == "vision":
                compute[action] *= 1 + (action.microbatch * 5 + action.sub_microbatch) % 3 / 4
        costs = PlanCosts(compute, saved_bytes=kept, memory_limit_bytes=limit)
        dispatcher = Dispatcher(graph, costs)
        bound_ms = lower_bound_ms(dispatcher)
        busy_ms = sum(compute[a] for a in compute if graph.layout.stages[a.stage].ranks == (0,))
        assert bound_ms >= busy_ms + (ranks - 1) * 3 * llm_ms - 1e-9
        for _ in range(5):
            order = np.random.default_rng(seed).permutation(len(dispatcher.segments))
            makespan_ms = dispatcher.evaluate(order)
            assert makespan_ms >= bound_ms - 1e-9, seed
            reached += makespan_ms == pytest.approx(bound_ms)
    assert reached > 100


def test_bound_holds_for_best_order():
    graph = pipeline(3, [1, 0, 2])
    dispatcher = Dispatcher(graph, even_costs(graph, 1.0, 3.0))
    best_ms = min(
        dispatcher.evaluate(np.array(order))
        for order in permutations(range(len(dispatcher.segments)))
    )
    bound_ms = lower_bound_ms(dispatcher)
    busy_ms = 3 * (3 * 1.0) + 3 * (3 * 3.0)
    assert bound_ms == busy_ms + 2 * 9.0 <= best_ms


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (4, 8), (8, 8)])
def test_bound_of_llm_pipeline_is_tight(ranks, microbatches):
    graph = pipeline(ranks, [0] * microbatches)
    dispatcher = Dispatcher(graph, even_costs(graph, llm_ms=1.0))
    bound_ms = lower_bound_ms(dispatcher)
    assert dispatcher.evaluate() == bound_ms == (microbatches + ranks - 1) * 3.0


def test_bound_includes_llm_ramp_times():
    graph = pipeline(4, [1] * 8)
    dispatcher = Dispatcher(graph, even_costs(graph, 1.0, 10.0))
    assert lower_bound_ms(dispatcher) == 8 * 33.0 + 3 * 30.0


def test_bound_holds_for_frozen_encoder():
    graph = pipeline(2, [0, 1], trainable=(False, False), embedding_trainable=False,
                     head_trainable=False)  # fmt: skip
    frozen = graph.layout.stages[0]
    assert not frozen.trainable
    dispatcher = Dispatcher(graph, even_costs(graph))
    backwards = [a for a in dispatcher.actions if a.type is ActionType.B]
    assert Action(ActionType.B, 0, 1) not in backwards
    assert dispatcher.evaluate() >= lower_bound_ms(dispatcher)


def slower_last_rank(counts):
    """Return a dispatcher of three ranks. The last rank has the LM head and is slower."""
    graph = pipeline(3, counts)
    compute = dict(even_costs(graph, 2.0, 3.0).compute_ms)
    stages = graph.layout.stages
    for action in compute:
        if stages[action.stage].module == "llm" and stages[action.stage].ranks == (2,):
            compute[action] *= 1.5
    return Dispatcher(graph, PlanCosts(compute))


def test_bound_of_unequal_ranks_includes_all_paths():
    """Check bounds against shortest paths to and from the slowest rank plus its work.

    Only few actions have these shortest paths.
    """
    tighter = 0
    for counts in ([1, 0, 2], [2, 1], [0, 1, 1], [3, 0]):
        dispatcher = slower_last_rank(counts)
        orders = permutations(range(len(dispatcher.segments)))
        best_ms = min(dispatcher.evaluate(np.array(order)) for order in orders)
        bound_ms = lower_bound_ms(dispatcher)
        assert bound_ms <= best_ms
        compute = dispatcher.costs.compute_ms
        stages = dispatcher.graph.layout.stages
        work_ms = sum(compute[a] for a in dispatcher.actions if stages[a.stage].ranks == (2,))
        shortest_ms = 2 * 2.0 + 2 * 4.0  # over two ranks, with encoder stages
        tighter += bound_ms > work_ms + shortest_ms + 1e-9
    assert tighter > 1


def test_rank_bound_allows_interrupted_work():
    # Work with a long tail is available late, so the rank must not start with all other work.
    assert _preemptive_end_ps([(0, 5, 0), (3, 2, 10)]) == 15
    assert _preemptive_end_ps([(0, 5, 0), (3, 2, 0)]) == 7
    assert _preemptive_end_ps([(4, 1, 2), (0, 1, 0)]) == 7
    for seed in range(200):
        rng = random.Random(seed)
        jobs = [
            (rng.randint(0, 9), rng.randint(1, 5), rng.randint(0, 9))
            for _ in range(rng.randint(1, 5))
        ]
        ends = []
        for order in permutations(jobs):
            now = end = 0
            for head, time, tail in order:
                now = max(now, head) + time
                end = max(end, now + tail)
            ends.append(end)
        simple = min(o[0] for o in jobs) + sum(o[1] for o in jobs) + min(o[2] for o in jobs)
        assert simple <= _preemptive_end_ps(jobs) <= min(ends)
