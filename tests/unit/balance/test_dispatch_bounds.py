"""Lower bounds: never above any order, tight where an optimum is known."""

import math
import random
from itertools import permutations

import numpy as np
import pytest
from dispatch_cases import even_costs, pipeline
from naive_dispatch import random_dispatch

from torchmm.balance.order_search.bounds import lower_bound_ms
from torchmm.balance.order_search.dispatcher import Dispatcher
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType


def test_no_order_of_any_step_is_faster():
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


def test_no_order_is_faster_where_all_ranks_are_equal():
    reached = 0
    for seed in range(300):
        rng = random.Random(seed)
        ranks, llm_ms = rng.choice((2, 3, 4, 8)), rng.choice((1.0, 2.0, 5.0))
        counts = [rng.randint(0, 3) for _ in range(rng.randint(1, 12))]
        graph = pipeline(ranks, counts, rng.randint(1, 3))
        kept = {task: 1 for task in graph.tasks()}
        limit = rng.choice((None, 3 * ranks))
        # Encoder tasks of different lengths, alike on all ranks.
        compute = dict(even_costs(graph, 1.0, llm_ms).compute_ms)
        for action in compute:
            if graph.layout.stages[action.stage].module == "vision":
                compute[action] *= 1 + (action.microbatch * 5 + action.sub_microbatch) % 3 / 4
        costs = PlanCosts(compute, kept_bytes=kept, memory_limit_bytes=limit)
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


def test_best_of_all_orders_of_a_small_step_is_no_faster():
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
def test_an_llm_alone_reaches_it(ranks, microbatches):
    graph = pipeline(ranks, [0] * microbatches)
    dispatcher = Dispatcher(graph, even_costs(graph, llm_ms=1.0))
    bound_ms = lower_bound_ms(dispatcher)
    assert dispatcher.evaluate() == bound_ms == (microbatches + ranks - 1) * 3.0


def test_the_llms_times_count_although_the_encoder_is_on_the_way_sooner():
    graph = pipeline(4, [1] * 8)
    dispatcher = Dispatcher(graph, even_costs(graph, 1.0, 10.0))
    assert lower_bound_ms(dispatcher) == 8 * 33.0 + 3 * 30.0


def test_microbatches_without_backward_may_fill_the_end():
    graph = pipeline(2, [0, 1], trainable=(False, False), pre_trainable=False,
                     post_trainable=False)  # fmt: skip
    frozen = graph.layout.stages[0]
    assert not frozen.trainable
    dispatcher = Dispatcher(graph, even_costs(graph))
    backwards = [a for a in dispatcher.actions if a.type is ActionType.B]
    assert Action(ActionType.B, 0, 1) not in backwards
    assert dispatcher.evaluate() >= lower_bound_ms(dispatcher)
