"""Orders of microbatches: brute force on small steps, Algorithm 3 against a naive version."""

from itertools import permutations

import numpy as np
import pytest
from schedule_cases import LAYOUTS, chain

from torchmm.balance.disttrain.reordering.microbatches import (
    SearchEffort,
    interval_orders,
    makespans_ms,
    reorder_microbatches,
)
from torchmm.balance.disttrain.reordering.program import compile_order
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.classic import interleaved_1f1b, one_f_one_b
from torchmm.pipelining.view.timeline import uniform_timeline

F, B = ActionType.F, ActionType.B


def program_of(ranks, microbatches, per_rank=1):
    graph = StageGraph(chain(ranks, per_rank), microbatches)
    return compile_order((one_f_one_b if per_rank == 1 else interleaved_1f1b)(graph), graph)


def durations(program, groups, seed, generator=False, others=1.0):
    """An uneven encoder, as fast on average as the LLM's stages, and perhaps a generator."""
    rng = np.random.default_rng(seed)
    forward = np.full((groups, program.stages, program.microbatches), others / 3)
    forward[:, 0] = rng.lognormal(0, 0.8, (groups, program.microbatches)) / 4
    if generator:
        forward[:, -1] = rng.lognormal(0, 0.8, (groups, program.microbatches)) / 4
    return forward, 2 * forward


def least_makespan(program, forward, backward):
    orders = np.array(list(permutations(range(program.microbatches))))
    repeated = [np.repeat(x[None], len(orders), axis=0) for x in (forward, backward)]
    taken = [np.take_along_axis(x, orders[:, None], axis=2) for x in repeated]
    return makespans_ms(program, *taken).min()


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("generator", [False, True])
def test_seven_microbatches_on_four_ranks_are_near_the_optimum(per_rank, generator):
    program = program_of(4, 7, per_rank)
    forward, backward = durations(program, 12, 0, generator)
    found = reorder_microbatches(program, forward, backward)
    pairs = zip(forward, backward, strict=True)
    best = np.array([least_makespan(program, f, b) for f, b in pairs])
    ratio = makespans_ms(program, forward, backward, found) / best
    assert (ratio > 1 - 1e-12).all()
    assert ratio.mean() < 1.01
    natural = makespans_ms(program, forward, backward)
    assert (natural / best).mean() > 1.02, "cases in which nothing is to be gained"


@pytest.mark.parametrize("name", LAYOUTS)
def test_orders_are_permutations_and_never_worse_than_others(name):
    layout, schedule = LAYOUTS[name]
    graph = StageGraph(layout, 9)
    program = compile_order(schedule(graph), graph)
    rng = np.random.default_rng(3)
    forward, backward = rng.lognormal(0, 0.7, (2, 6, program.stages, 9))
    found = reorder_microbatches(program, forward, backward)
    assert (np.sort(found, axis=1) == np.arange(9)).all()
    rule = interval_orders(program, program.checked(forward, backward))
    best, natural, interval = (
        makespans_ms(program, forward, backward, orders) for orders in (found, None, rule)
    )
    assert (best <= np.minimum(natural, interval)).all()


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 24), (8, 16)])
@pytest.mark.parametrize("generator", [False, True])
def test_larger_steps_gain_more_than_the_paper_promises(ranks, microbatches, generator):
    program = program_of(ranks, microbatches)
    costs = durations(program, 8, 1, generator)
    ours_ms = makespans_ms(program, *costs, reorder_microbatches(program, *costs))
    assert (makespans_ms(program, *costs) / ours_ms).mean() > 1.03
    longer = reorder_microbatches(program, *costs, effort=SearchEffort(50_000, 5_000))
    assert (ours_ms / makespans_ms(program, *costs, longer)).mean() < 1.015


def naive_interval_order(graph, ranks, forward, backward):
    """Algorithm 3, with the whole step simulated for each interval."""
    count = forward.shape[1]
    size = (forward + backward).sum(axis=0)
    left = sorted(range(count), key=lambda m: size[m])
    order, rear, left = [left[0]], left[1:ranks][::-1], left[ranks:]
    schedule = one_f_one_b(graph)

    def ends():
        known = [*order, *[None] * (count - len(order))]

        def duration(action):
            which = known[action.microbatch]
            costs = forward if action.type is F else backward
            return 0.0 if which is None else costs[action.stage, which]

        records = uniform_timeline(schedule, graph, duration)
        return {(r.action.type, r.action.stage, r.action.microbatch): r.end_ms for r in records}

    fill = min(ranks - 1, len(left))
    room = (forward + backward)[1:, order[0]].sum()
    while left:
        if len(order) <= fill:
            interval = room / (fill + 1 - len(order))
        else:
            i = len(order) - ranks + 1  # of the backward behind the forward to be chosen
            end = ends()
            interval = end[B, 1, i] - end[B, 0, i - 1]
        left.sort(key=lambda m: (abs(forward[0, m] - interval), m))
        room -= forward[0, left[0]]
        order.append(left.pop(0))
    return order + rear


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (2, 9), (4, 5), (4, 7), (4, 15)])
def test_algorithm_3_equals_a_naive_version(ranks, microbatches):
    graph = StageGraph(chain(ranks), microbatches)
    program = compile_order(one_f_one_b(graph), graph)
    forward, backward = durations(program, 4, microbatches, generator=True)
    found = interval_orders(program, program.checked(forward, backward)).tolist()
    for own, *costs in zip(found, forward, backward, strict=True):
        assert own == naive_interval_order(graph, ranks, *costs)


def test_algorithm_3_sorts_where_there_are_no_more_microbatches_than_ranks():
    program = program_of(4, 4)
    forward = np.ones((1, 4, 4))
    forward[0, 0] = [3.0, 1.0, 4.0, 2.0]
    assert interval_orders(program, program.checked(forward, forward)).tolist() == [[1, 3, 0, 2]]


def test_equal_microbatches_stay_in_turn():
    program = program_of(3, 5)
    ones = np.ones((2, 3, 5))
    found = reorder_microbatches(program, ones, ones)
    assert (found == np.arange(5)).all()
    assert (makespans_ms(program, ones, ones, found) == 14).all()


def test_orders_depend_on_nothing_but_durations_and_seed():
    program = program_of(4, 16)
    costs = durations(program, 3, 5, generator=True)
    first = reorder_microbatches(program, *costs, seed=1)
    assert (first == reorder_microbatches(program, *costs, seed=1)).all()
    assert (first != reorder_microbatches(program, *costs, seed=2)).any()


def test_durations_of_other_shapes_are_refused():
    program = program_of(2, 3)
    with pytest.raises(ValueError, match=r"\(2, 4\).*2 stages x 3"):
        reorder_microbatches(program, np.ones((1, 2, 4)), np.ones((1, 2, 4)))
