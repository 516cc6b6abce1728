"""Tests of slices: equal work at the same index for ranks that synchronize in every layer."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from test_reorder_step import LAYOUTS, MODEL, MODULES, pack, packs

from torchmm.balance.disttrain.arrangement import layout_with_schedule
from torchmm.balance.disttrain.reordering.group_balancing import balance_groups
from torchmm.balance.disttrain.reordering.lockstep_slices import slice_microbatches
from torchmm.balance.disttrain.reordering.step_reorder import StepReorder
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart.toml"


def make_costs(count: int, seed: int) -> np.ndarray:
    """Return independent costs of an encoder and an LLM."""
    rng = np.random.default_rng(seed)
    images = np.where(rng.random(count) < 0.3, 0, rng.integers(1, 49, count))
    return np.stack([1000.0 * images, rng.integers(8000, 30000, count).astype(float)])


def sum_of_maxima(costs_KN: np.ndarray, items_RM: np.ndarray, ranks: int) -> float:
    """Return the maximum over the groups of the sum of slice maxima."""
    by_group = costs_KN[:, items_RM.reshape(-1, ranks, items_RM.shape[1])]
    return by_group.max(axis=2).sum(axis=(0, 2)).max()


def min_sum(costs_KN: np.ndarray, ranks: int) -> float:
    """Return the minimum over all partitions into slices."""

    @cache
    def best(rest: tuple[int, ...]) -> float:
        if not rest:
            return 0.0
        sums = []
        for partners in combinations(rest[1:], ranks - 1):
            slice_cost = costs_KN[:, [rest[0], *partners]].max(axis=1).sum()
            sums.append(slice_cost + best(tuple(n for n in rest[1:] if n not in partners)))
        return min(sums)

    return best(tuple(range(costs_KN.shape[1])))


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 3), (4, 3), (2, 5)])
def test_slices_are_near_optimum(ranks, count):
    ratios, natural = [], []
    for seed in range(25):
        costs = make_costs(ranks * count, seed)
        best = min_sum(costs, ranks)
        ratios.append(sum_of_maxima(costs, slice_microbatches(costs, 1, ranks), ranks) / best)
        as_loaded = np.arange(ranks * count).reshape(ranks, count)
        natural.append(sum_of_maxima(costs, as_loaded, ranks) / best)
    assert min(ratios) >= 1 - 1e-12, "better than the optimum: the objective differs"
    assert np.mean(ratios) < 1.01 and max(ratios) < 1.1
    assert np.mean(natural) > 1.15, "the instances do not need an order"


@pytest.mark.parametrize(("groups", "ranks", "count"), [(1, 8, 4), (2, 4, 6), (4, 2, 3), (3, 1, 5)])
def test_slices_use_every_item_once(groups, ranks, count):
    costs = make_costs(groups * ranks * count, seed=1)
    slices = slice_microbatches(costs, groups, ranks)
    assert slices.shape == (groups * ranks, count)
    assert sorted(slices.ravel().tolist()) == list(range(groups * ranks * count))
    assert (slices == slice_microbatches(costs.copy(), groups, ranks)).all()


def test_slices_balance_groups_and_ranks():
    costs = make_costs(4 * 8 * 8, seed=2)
    slices = slice_microbatches(costs, 4, 8)
    by_group = costs[:, slices.reshape(4, 8, 8)]
    sums = by_group.max(axis=2).sum(axis=(0, 2))
    assert sums.max() < 1.02 * sums.mean()
    loads = by_group.sum(axis=(0, 3))
    assert (loads.max(axis=1) < 1.05 * loads.mean(axis=1)).all()
    decreasing = by_group.max(axis=2).sum(axis=0)
    assert (np.diff(decreasing, axis=1) <= 0).all(), "the most expensive slice is first"


def test_single_module_has_sorted_slices():
    costs = make_costs(24, seed=3)[:1]
    slices = np.sort(costs[0])[::-1].reshape(6, 4)
    assert sum_of_maxima(costs, slice_microbatches(costs, 1, 4), 4) == slices[:, 0].sum()


def step_reorder(synchronized: int, size: int = 1, layout: str = "one rank") -> StepReorder:
    stage_layout, schedule = LAYOUTS[layout]
    runs = layout_with_schedule(ParallelConfig.model_validate({"schedule": schedule}), stage_layout)
    modules = [m for m in MODULES if m.name in {s.module for s in stage_layout.stages}]
    return StepReorder(
        modules, MODEL, runs, 8, size, balance=True, order=True, synchronized=synchronized
    )


def step_ns(reorder: StepReorder, batch: list, places: list, synchronized: int) -> float:
    """Return the step time without a pipeline: the sum over stages of the slowest rank."""
    places_GMB = np.array(places)
    total_G = 0.0
    for ns_SN in reorder.stage_times(batch):
        ns_SGM = ns_SN[:, places_GMB].sum(axis=3)
        by_group = ns_SGM.reshape(len(ns_SN), -1, synchronized, ns_SGM.shape[2])
        total_G = total_G + by_group.max(axis=2).sum(axis=(0, 2))
    return float(np.max(total_G))


@pytest.mark.parametrize("synchronized", [2, 8])
@pytest.mark.parametrize("size", [1, 2])
def test_synchronized_step_is_never_longer(synchronized, size):
    reorder = step_reorder(synchronized, size)
    balanced = step_reorder(1, size)
    arranged_ns, natural, balanced_ns = [], [], []
    for seed in range(20):
        batch = packs(64, seed=seed)
        if seed % 3 == 0:
            batch[seed] = pack(200)
        if seed == 19:
            batch = [pack(3)] * 64
        as_loaded = np.arange(64).reshape(8, -1, size).tolist()
        arranged = reorder(batch)
        for values, places in (
            (arranged_ns, arranged.places),
            (natural, as_loaded),
            (balanced_ns, balanced(batch).places),
        ):
            assert sorted(np.ravel(places).tolist()) == list(range(64))
            values.append(step_ns(reorder, batch, places, synchronized))
        mean_ns = sum(ns_SN.sum() for ns_SN in reorder.stage_times(batch)) / 8
        expected = natural[-1] / mean_ns, arranged_ns[-1] / mean_ns
        assert arranged.imbalance == pytest.approx(expected)
    assert (np.array(arranged_ns) <= np.array(natural)).all()
    assert (np.array(arranged_ns) <= np.array(balanced_ns)).all()
    assert np.mean(arranged_ns[:19]) < 0.97 * np.mean(balanced_ns[:19]), (
        "equal sums are as fast in these cases"
    )


@pytest.mark.parametrize("layout", ["megatron_balanced", "interleaved_1f1b", "separated"])
def test_synchronized_pipelines_have_one_order(layout):
    """Check that microbatches at the same index have similar cost."""
    synchronized, alone = step_reorder(4, layout=layout), step_reorder(1, layout=layout)
    spread = []
    for seed in range(4):
        batch = packs(64, seed=seed)
        sizes = sum(synchronized.stage_times(batch)).sum(axis=0)
        spread.append(
            [
                np.ptp(sizes[np.array(places)[:, :, 0].reshape(2, 4, 8)], axis=1).mean()
                for places in (synchronized(batch).places, alone(batch).places)
            ]
        )
    sliced, sums = np.mean(spread, axis=0)
    assert sliced < 0.5 * sums


@pytest.mark.parametrize(
    ("changes", "world_size", "expected"),
    [
        ({}, 8, 8),
        ({"llm": {"context": 2}}, 8, 4),
        ({"replicate": 4}, 32, 8),
        ({"reshard_after_forward": "never"}, 8, 1),
        ({"reshard_after_forward": "never", "expert": 4}, 8, 4),
        ({"pipeline": 2, "schedule": "1f1b"}, 16, 1),
        ({"pipeline": 2, "schedule": "1f1b", "expert": 4}, 16, 4),
    ],
)
def test_lockstep_shares_follow_parallel_config(changes, world_size, expected):
    parallel = ParallelConfig.model_validate({"pipeline": 1, "shard": -1, **changes})
    recipe = load_recipe(RECIPE).recipe.model_copy(update={"parallel": parallel})
    assert resolve_recipe(recipe, world_size).lockstep_size == expected


def test_equal_sums_leave_ranks_idle():
    """Compare two ranks with equal sums in opposite order, which take 1.5 times as long."""
    costs = np.array([[2.0, 1.0, 1.0, 2.0]])
    sums = balance_groups(costs[0], 2)
    assert sum_of_maxima(costs, np.array([[0, 1], [2, 3]]), 2) == 4.0
    assert (costs[0][sums].sum(axis=1) == 3.0).all()
    assert sum_of_maxima(costs, slice_microbatches(costs, 1, 2), 2) == 3.0
