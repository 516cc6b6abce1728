"""Tests of microbatch orders: exhaustive search on small steps, and a naive Algorithm 3."""

from itertools import permutations

import numpy as np
import pytest
from schedule_cases import LAYOUTS, chain

from torchmm.balance.disttrain.reordering.compiled_schedule import compile_schedule
from torchmm.balance.disttrain.reordering.microbatch_order import (
    SwapBudget,
    fill_interval_orders,
    makespans_ms,
    reorder_microbatches,
)
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.classic import interleaved_1f1b, one_f_one_b
from torchmm.pipelining.view.timeline import simulate_order

F, B = ActionType.F, ActionType.B


def program_of(ranks, microbatches, per_rank=1):
    graph = StageGraph(chain(ranks, per_rank), microbatches)
    return compile_schedule((one_f_one_b if per_rank == 1 else interleaved_1f1b)(graph), graph)


def durations(program, groups, seed, generator=False, others=1.0):
    """Return durations of an uneven encoder, an LLM and an optional uneven generator."""
    rng = np.random.default_rng(seed)
    forward = np.full((groups, program.stages, program.microbatches), others / 3)
    forward[:, 0] = rng.lognormal(0, 0.8, (groups, program.microbatches)) / 4
    if generator:
        forward[:, -1] = rng.lognormal(0, 0.8, (groups, program.microbatches)) / 4
    return forward, 2 * forward


def min_makespan(program, forward, backward):
    orders = np.array(list(permutations(range(program.microbatches))))
    repeated = [np.repeat(x[None], len(orders), axis=0) for x in (forward, backward)]
    reordered = [np.take_along_axis(x, orders[:, None], axis=2) for x in repeated]
    return makespans_ms(program, *reordered).min()


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("generator", [False, True])
def test_small_orders_are_near_optimum(per_rank, generator):
    program = program_of(4, 7, per_rank)
    forward, backward = durations(program, 12, 0, generator)
    orders = reorder_microbatches(program, forward, backward)
    pairs = zip(forward, backward, strict=True)
    best = np.array([min_makespan(program, f, b) for f, b in pairs])
    ratio = makespans_ms(program, forward, backward, orders) / best
    assert (ratio > 1 - 1e-12).all()
    assert ratio.mean() < 1.01
    natural = makespans_ms(program, forward, backward)
    assert (natural / best).mean() > 1.02, "the default order is optimal in these cases"


@pytest.mark.parametrize("name", LAYOUTS)
def test_orders_are_permutations_without_slowdown(name):
    layout, schedule = LAYOUTS[name]
    graph = StageGraph(layout, 9)
    program = compile_schedule(schedule(graph), graph)
    rng = np.random.default_rng(3)
    forward, backward = rng.lognormal(0, 0.7, (2, 6, program.stages, 9))
    reordered = reorder_microbatches(program, forward, backward)
    assert (np.sort(reordered, axis=1) == np.arange(9)).all()
    rule = fill_interval_orders(program, program.stack_durations(forward, backward))
    best, natural, interval = (
        makespans_ms(program, forward, backward, orders) for orders in (reordered, None, rule)
    )
    assert (best <= np.minimum(natural, interval)).all()


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 24), (8, 16)])
@pytest.mark.parametrize("generator", [False, True])
def test_reordering_exceeds_published_gain(ranks, microbatches, generator):
    program = program_of(ranks, microbatches)
    costs = durations(program, 8, 1, generator)
    reordered_ms = makespans_ms(program, *costs, reorder_microbatches(program, *costs))
    assert (makespans_ms(program, *costs) / reordered_ms).mean() > 1.03
    longer = reorder_microbatches(program, *costs, swap_budget=SwapBudget(50_000, 5_000))
    assert (reordered_ms / makespans_ms(program, *costs, longer)).mean() < 1.015


def naive_interval_order(graph, ranks, forward, backward):
    """Return the order of Algorithm 3, with a simulation of the step for each interval."""
    count = forward.shape[1]
    size = (forward + backward).sum(axis=0)
    remaining = sorted(range(count), key=lambda m: size[m])
    order, rear, remaining = [remaining[0]], remaining[1:ranks][::-1], remaining[ranks:]
    schedule = one_f_one_b(graph)

    def ends():
        assigned = [*order, *[None] * (count - len(order))]

        def duration(action):
            assigned_microbatch = assigned[action.microbatch]
            costs = forward if action.type is F else backward
            return 0.0 if assigned_microbatch is None else costs[action.stage, assigned_microbatch]

        records = simulate_order(schedule, graph, duration)
        return {(r.action.type, r.action.stage, r.action.microbatch): r.end_ms for r in records}

    fill = min(ranks - 1, len(remaining))
    room = (forward + backward)[1:, order[0]].sum()
    while remaining:
        if len(order) <= fill:
            interval = room / (fill + 1 - len(order))
        else:
            i = len(order) - ranks + 1  # backward that follows the chosen forward
            end = ends()
            interval = end[B, 1, i] - end[B, 0, i - 1]
        remaining.sort(key=lambda m: (abs(forward[0, m] - interval), m))
        room -= forward[0, remaining[0]]
        order.append(remaining.pop(0))
    return order + rear


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (2, 9), (4, 5), (4, 7), (4, 15)])
def test_algorithm_3_matches_naive_implementation(ranks, microbatches):
    graph = StageGraph(chain(ranks), microbatches)
    program = compile_schedule(one_f_one_b(graph), graph)
    forward, backward = durations(program, 4, microbatches, generator=True)
    orders = fill_interval_orders(program, program.stack_durations(forward, backward)).tolist()
    for order, *costs in zip(orders, forward, backward, strict=True):
        assert order == naive_interval_order(graph, ranks, *costs)


def test_algorithm_3_sorts_few_microbatches():
    program = program_of(4, 4)
    forward = np.ones((1, 4, 4))
    forward[0, 0] = [3.0, 1.0, 4.0, 2.0]
    assert fill_interval_orders(program, program.stack_durations(forward, forward)).tolist() == [
        [1, 3, 0, 2]
    ]


def test_equal_microbatches_keep_order():
    program = program_of(3, 5)
    ones = np.ones((2, 3, 5))
    orders = reorder_microbatches(program, ones, ones)
    assert (orders == np.arange(5)).all()
    assert (makespans_ms(program, ones, ones, orders) == 14).all()


def test_orders_depend_on_durations_and_seed():
    program = program_of(4, 16)
    costs = durations(program, 3, 5, generator=True)
    first = reorder_microbatches(program, *costs, seed=1)
    assert (first == reorder_microbatches(program, *costs, seed=1)).all()
    assert (first != reorder_microbatches(program, *costs, seed=2)).any()


def test_mismatched_duration_shapes_are_rejected():
    program = program_of(2, 3)
    with pytest.raises(ValueError, match=r"\(2, 4\).*2 stages x 3"):
        reorder_microbatches(program, np.ones((1, 2, 4)), np.ones((1, 2, 4)))
