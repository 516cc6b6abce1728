"""Balancing groups: equal counts, brute force on small cases, bounds on large ones."""

from itertools import combinations

import numpy as np
import pytest

from torchmm.balance.disttrain.reordering.groups import TOLERANCE, balance_groups, load_bound

SIZES = {
    "uniform": lambda rng, n: rng.random(n),
    "images": lambda rng, n: 0.1 + np.where(rng.random(n) < 0.3, 0, rng.integers(0, 49, n)),
    "lognormal": lambda rng, n: rng.lognormal(0, 0.5, n),
    "heavy": lambda rng, n: rng.lognormal(0, 1.5, n),
    "heavier": lambda rng, n: rng.pareto(1.1, n),
}


def largest(sizes, assignment):
    return sizes[assignment].sum(axis=1).max()


def optimum(sizes, groups):
    """Least largest sum over all partitions into groups of equal count."""
    room = len(sizes) // groups

    def least(items):
        if not items:
            return 0.0
        first, *others = items
        best = np.inf
        for company in combinations(others, room - 1):
            load = sizes[first] + sum(sizes[i] for i in company)
            if load < best:
                rest = [i for i in others if i not in company]
                best = min(best, max(load, least(rest)))
        return best

    return least(list(range(len(sizes))))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("groups", [30, 60, 120])
def test_a_global_batch_is_balanced_to_the_bound(kind, groups):
    sizes = SIZES[kind](np.random.default_rng(groups), 1920)
    assignment = balance_groups(sizes, groups)
    assert assignment.shape == (groups, 1920 // groups)
    assert sorted(assignment.ravel()) == list(range(1920))
    assert (np.diff(assignment, axis=1) > 0).all()
    assert largest(sizes, assignment) <= 1.004 * load_bound(sizes, groups)


@pytest.mark.parametrize("kind", SIZES)
def test_small_cases_are_near_the_optimum(kind):
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        groups = int(rng.integers(2, 5))
        sizes = SIZES[kind](rng, groups * int(rng.integers(1, 10 // groups + 1)))
        best = optimum(sizes, groups)
        assert load_bound(sizes, groups) <= best * (1 + 1e-12)
        ratios.append(largest(sizes, balance_groups(sizes, groups)) / best)
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 4 / 3 - 1 / (3 * 4), "what LPT promises without a limit on counts"
    assert np.mean(ratios) < 1.01


def test_no_swap_with_the_heaviest_group_would_help():
    for seed in range(30):
        sizes = np.random.default_rng(seed).lognormal(0, 1, 24)
        assignment = balance_groups(sizes, 4)
        loads = sizes[assignment].sum(axis=1)
        heavy = loads.argmax()
        if loads[heavy] <= load_bound(sizes, 4) * (1 + TOLERANCE):
            continue
        for light in set(range(4)) - {heavy}:
            moved = sizes[assignment[heavy]][:, None] - sizes[assignment[light]][None]
            worse = np.maximum(loads[heavy] - moved, loads[light] + moved)
            assert worse.min() >= loads[heavy] - 0.001 * (loads[heavy] - loads[light])


def test_the_two_large_samples_of_the_paper_part():
    # DistTrain, figure 11: samples 1 and 2 are large; the order becomes 1, 3, 2, 4.
    assert (balance_groups([4.0, 4.0, 1.0, 1.0], 2).ravel() + 1).tolist() == [1, 3, 2, 4]


def test_a_giant_gets_the_smallest_company():
    sizes = np.array([1.0, 2, 3, 4, 5, 6, 7, 100])
    groups = balance_groups(sizes, 2).tolist()
    assert [0, 1, 2, 7] in groups


def test_the_result_is_the_same_each_time_and_scales_with_the_unit():
    sizes = np.random.default_rng(1).lognormal(0, 1, 96)
    first = balance_groups(sizes, 8)
    assert (first == balance_groups(sizes, 8)).all()
    assert (first == balance_groups(sizes * 1024, 8)).all()


def test_equal_and_zero_sizes_are_dealt_out():
    for sizes in (np.ones(12), np.zeros(12)):
        assert sorted(balance_groups(sizes, 3).ravel()) == list(range(12))
    assert balance_groups([5.0, 3.0], 1).tolist() == [[0, 1]]
    assert balance_groups([5.0, 3.0], 2).tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("sizes", "groups", "words"),
    [
        ([1.0, 2.0, 3.0], 2, r"\(3,\) for 2 groups.*a multiple"),
        ([], 2, "one size per item"),
        ([1.0], 0, "0 groups"),
        ([1.0, -2.0], 2, "item 1 is -2"),
        ([float("nan"), 1.0], 2, "item 0 is nan"),
    ],
)
def test_what_cannot_be_balanced_is_refused(sizes, groups, words):
    for function in (balance_groups, load_bound):
        with pytest.raises(ValueError, match=words):
            function(sizes, groups)
