"""Tests of group balancing: equal counts, exhaustive search on small cases, lower bounds."""

from itertools import combinations

import numpy as np
import pytest

from torchmm.balance.disttrain.reordering.group_balancing import (
    TOLERANCE,
    balance_groups,
    load_bound,
)

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
    """Return the minimum of the largest sum over all partitions into groups of equal count."""
    group_size = len(sizes) // groups

    def best_load(items):
        if not items:
            return 0.0
        first, *remaining = items
        best = np.inf
        for group_items in combinations(remaining, group_size - 1):
            load = sizes[first] + sum(sizes[i] for i in group_items)
            if load < best:
                left_items = [i for i in remaining if i not in group_items]
                best = min(best, max(load, best_load(left_items)))
        return best

    return best_load(list(range(len(sizes))))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("groups", [30, 60, 120])
def test_global_batch_is_balanced_to_bound(kind, groups):
    sizes = SIZES[kind](np.random.default_rng(groups), 1920)
    assignment = balance_groups(sizes, groups)
    assert assignment.shape == (groups, 1920 // groups)
    assert sorted(assignment.ravel()) == list(range(1920))
    assert (np.diff(assignment, axis=1) > 0).all()
    assert largest(sizes, assignment) <= 1.004 * load_bound(sizes, groups)


@pytest.mark.parametrize("kind", SIZES)
def test_small_groups_are_near_optimum(kind):
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        groups = int(rng.integers(2, 5))
        sizes = SIZES[kind](rng, groups * int(rng.integers(1, 10 // groups + 1)))
        best = optimum(sizes, groups)
        assert load_bound(sizes, groups) <= best * (1 + 1e-12)
        ratios.append(largest(sizes, balance_groups(sizes, groups)) / best)
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 4 / 3 - 1 / (3 * 4), "bound of LPT without equal counts"
    assert np.mean(ratios) < 1.01


def test_no_swap_improves_largest_group():
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


def test_paper_example_separates_large_samples():
    # DistTrain, figure 11: samples 1 and 2 are large; the order becomes 1, 3, 2, 4.
    assert (balance_groups([4.0, 4.0, 1.0, 1.0], 2).ravel() + 1).tolist() == [1, 3, 2, 4]


def test_largest_item_is_grouped_with_smallest():
    sizes = np.array([1.0, 2, 3, 4, 5, 6, 7, 100])
    groups = balance_groups(sizes, 2).tolist()
    assert [0, 1, 2, 7] in groups


def test_balancing_is_deterministic_and_scale_invariant():
    sizes = np.random.default_rng(1).lognormal(0, 1, 96)
    first = balance_groups(sizes, 8)
    assert (first == balance_groups(sizes, 8)).all()
    assert (first == balance_groups(sizes * 1024, 8)).all()


def test_equal_and_zero_sizes_are_distributed():
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
def test_invalid_group_sizes_are_rejected(sizes, groups, words):
    for function in (balance_groups, load_bound):
        with pytest.raises(ValueError, match=words):
            function(sizes, groups)
