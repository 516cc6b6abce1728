"""Tests of the closed form of 1F1B with an uneven first rank, against the simulation."""

import numpy as np
import pytest
from schedule_cases import chain

from torchmm.balance.disttrain.reordering.compiled_schedule import compile_schedule
from torchmm.balance.disttrain.reordering.microbatch_order import makespans_ms
from torchmm.balance.disttrain.reordering.uneven_first_rank import (
    anneal_first_rank,
    first_rank_makespans,
)
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.schedules.classic import one_f_one_b


def uneven_first_rank(groups, ranks, microbatches, rng):
    """Return (groups, stages, microbatches) durations, constant after the first rank."""
    forward = np.full((groups, ranks, microbatches), 0.3)
    backward = np.full((groups, ranks, microbatches), 0.7)
    forward[:, 0] = rng.lognormal(-1, 1, (groups, microbatches))
    backward[:, 0] = rng.lognormal(-0.5, 1, (groups, microbatches))
    return forward, backward


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 21])
def test_first_rank_formula_matches_simulation(ranks, microbatches):
    rng = np.random.default_rng(ranks)
    forward, backward = uneven_first_rank(5, ranks, microbatches, rng)
    orders = np.stack([rng.permutation(microbatches) for _ in range(5)])
    graph = StageGraph(chain(ranks), microbatches)
    program = compile_schedule(one_f_one_b(graph), graph)
    others = np.full(5, 0.0 if ranks == 1 else 1.0)
    makespans = first_rank_makespans(forward[:, 0], backward[:, 0], others, ranks, orders)
    assert makespans == pytest.approx(makespans_ms(program, forward, backward, orders), rel=1e-12)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 5), (3, 2), (4, 7), (4, 24), (12, 16)])
def test_annealing_matches_first_rank_formula(ranks, microbatches):
    # Annealing updates a running sum, which must match the formula to find the best order.
    rng = np.random.default_rng(microbatches)
    forward, backward = uneven_first_rank(8, ranks, microbatches, rng)
    arguments = (forward[:, 0].copy(), backward[:, 0].copy(), np.ones(8), ranks)
    natural = np.tile(np.arange(microbatches), (8, 1))
    before = first_rank_makespans(*arguments, natural)
    for steps in (0, 1, 2000):
        orders = anneal_first_rank(*arguments, natural, steps, 1)
        assert (np.sort(orders, axis=1) == natural).all()
        after = first_rank_makespans(*arguments, orders)
        assert (after <= before * (1 + 1e-12)).all()
    if ranks > 1 and microbatches > 2:
        assert after.mean() < 0.97 * before.mean()
    assert (natural == np.arange(microbatches)).all(), "annealing modified its start"


def test_annealing_depends_on_group_and_seed():
    forward = np.tile(np.random.default_rng(0).random(40), (2, 1))
    natural = np.tile(np.arange(40), (2, 1))
    arguments = (forward, 2 * forward, np.ones(2), 4, natural, 50)
    first, again = (anneal_first_rank(*arguments, 3) for _ in range(2))
    assert (first == again).all()
    assert (first[0] != first[1]).any()
    assert (first != anneal_first_rank(*arguments, 4)).any()
