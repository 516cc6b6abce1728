"""Equal work at the same index, for ranks that synchronize in every layer."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from test_reorder_step import LAYOUTS, MODEL, MODULES, pack, packs

from torchmm.balance.disttrain.arrangement import ordered_layout
from torchmm.balance.disttrain.reordering.groups import balance_groups
from torchmm.balance.disttrain.reordering.slices import slice_items
from torchmm.balance.disttrain.reordering.step import StepReorder
from torchmm.planning.resolved import resolve
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import load_recipe

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart.toml"


def make_costs(count: int, seed: int) -> np.ndarray:
    """Return the costs of an encoder and an LLM, which are independent of each other."""
    rng = np.random.default_rng(seed)
    images = np.where(rng.random(count) < 0.3, 0, rng.integers(1, 49, count))
    return np.stack([1000.0 * images, rng.integers(8000, 30000, count).astype(float)])


def sum_of_maxima(costs_KN: np.ndarray, places_RM: np.ndarray, ranks: int) -> float:
    """Return the largest sum over the groups."""
    by_group = costs_KN[:, places_RM.reshape(-1, ranks, places_RM.shape[1])]
    return by_group.max(axis=2).sum(axis=(0, 2)).max()


def least_sum(costs_KN: np.ndarray, ranks: int) -> float:
    """Return the minimum over all partitions into slices."""

    @cache
    def best(rest: tuple[int, ...]) -> float:
        if not rest:
            return 0.0
        found = []
        for others in combinations(rest[1:], ranks - 1):
            own = costs_KN[:, [rest[0], *others]].max(axis=1).sum()
            found.append(own + best(tuple(n for n in rest[1:] if n not in others)))
        return min(found)

    return best(tuple(range(costs_KN.shape[1])))


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 3), (4, 3), (2, 5)])
def test_slices_are_near_brute_force(ranks, count):
    ratios, natural = [], []
    for seed in range(25):
        costs = make_costs(ranks * count, seed)
        best = least_sum(costs, ranks)
        ratios.append(sum_of_maxima(costs, slice_items(costs, 1, ranks), ranks) / best)
        as_loaded = np.arange(ranks * count).reshape(ranks, count)
        natural.append(sum_of_maxima(costs, as_loaded, ranks) / best)
    assert min(ratios) >= 1 - 1e-12, "better than the optimum: the objective differs"
    assert np.mean(ratios) < 1.01 and max(ratios) < 1.1
    assert np.mean(natural) > 1.15, "the instances do not need an order"


@pytest.mark.parametrize(("groups", "ranks", "count"), [(1, 8, 4), (2, 4, 6), (4, 2, 3), (3, 1, 5)])
def test_slices_use_every_item_once(groups, ranks, count):
    costs = make_costs(groups * ranks * count, seed=1)
    places = slice_items(costs, groups, ranks)
    assert places.shape == (groups * ranks, count)
    assert sorted(places.ravel().tolist()) == list(range(groups * ranks * count))
    assert (places == slice_items(costs.copy(), groups, ranks)).all()


def test_slices_balance_groups_and_ranks():
    costs = make_costs(4 * 8 * 8, seed=2)
    places = slice_items(costs, 4, 8)
    by_group = costs[:, places.reshape(4, 8, 8)]
    sums = by_group.max(axis=2).sum(axis=(0, 2))
    assert sums.max() < 1.02 * sums.mean()
    loads = by_group.sum(axis=(0, 3))
    assert (loads.max(axis=1) < 1.05 * loads.mean(axis=1)).all()
    decreasing = by_group.max(axis=2).sum(axis=0)
    assert (np.diff(decreasing, axis=1) <= 0).all(), "the most expensive slice is first"


def test_single_module_has_sorted_slices():
    costs = make_costs(24, seed=3)[:1]
    slices = np.sort(costs[0])[::-1].reshape(6, 4)
    assert sum_of_maxima(costs, slice_items(costs, 1, 4), 4) == slices[:, 0].sum()


def step_reorder(synchronized: int, size: int = 1, layout: str = "one rank") -> StepReorder:
    cut, schedule = LAYOUTS[layout]
    runs = ordered_layout(ParallelConfig.model_validate({"schedule": schedule}), cut)
    modules = [m for m in MODULES if m.name in {s.module for s in cut.stages}]
    return StepReorder(
        modules, MODEL, runs, 8, size, balance=True, order=True, synchronized=synchronized
    )


def step_ns(found: StepReorder, batch: list, places: list, synchronized: int) -> float:
    """Return the time of a step without a pipeline: the sum over stages of the slowest rank."""
    places_GMB = np.array(places)
    total_G = 0.0
    for ns_SN in found.stage_times(batch):
        ns_SGM = ns_SN[:, places_GMB].sum(axis=3)
        by_group = ns_SGM.reshape(len(ns_SN), -1, synchronized, ns_SGM.shape[2])
        total_G = total_G + by_group.max(axis=2).sum(axis=(0, 2))
    return float(np.max(total_G))


@pytest.mark.parametrize("synchronized", [2, 8])
@pytest.mark.parametrize("size", [1, 2])
def test_synchronized_step_is_never_longer(synchronized, size):
    found = step_reorder(synchronized, size)
    balanced = step_reorder(1, size)
    ours, natural, sums = [], [], []
    for seed in range(20):
        batch = packs(64, seed=seed)
        if seed % 3 == 0:
            batch[seed] = pack(200)
        if seed == 19:
            batch = [pack(3)] * 64
        as_loaded = np.arange(64).reshape(8, -1, size).tolist()
        arranged = found(batch)
        for values, places in (
            (ours, arranged.places),
            (natural, as_loaded),
            (sums, balanced(batch).places),
        ):
            assert sorted(np.ravel(places).tolist()) == list(range(64))
            values.append(step_ns(found, batch, places, synchronized))
        mean_ns = sum(ns_SN.sum() for ns_SN in found.stage_times(batch)) / 8
        expected = natural[-1] / mean_ns, ours[-1] / mean_ns
        assert arranged.imbalance == pytest.approx(expected)
    assert (np.array(ours) <= np.array(natural)).all()
    assert (np.array(ours) <= np.array(sums)).all()
    assert np.mean(ours[:19]) < 0.97 * np.mean(sums[:19]), "equal sums are as good: no control"


@pytest.mark.parametrize("layout", ["megatron_balanced", "interleaved_1f1b", "separated"])
def test_synchronized_pipelines_have_one_order(layout):
    """Microbatches at the same index are alike, and none is slower than with equal sums."""
    found, alone = step_reorder(4, layout=layout), step_reorder(1, layout=layout)
    spread = []
    for seed in range(4):
        batch = packs(64, seed=seed)
        sizes = sum(found.stage_times(batch)).sum(axis=0)
        spread.append(
            [
                np.ptp(sizes[np.array(places)[:, :, 0].reshape(2, 4, 8)], axis=1).mean()
                for places in (found(batch).places, alone(batch).places)
            ]
        )
    ours, sums = np.mean(spread, axis=0)
    assert ours < 0.5 * sums


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
def test_lockstep_shares_follow_layout(changes, world_size, expected):
    parallel = ParallelConfig.model_validate({"pipeline": 1, "shard": -1, **changes})
    recipe = load_recipe(RECIPE).recipe.model_copy(update={"parallel": parallel})
    assert resolve(recipe, world_size).lockstep_shares == expected


def test_equal_sums_alone_leave_ranks_idle():
    """Two ranks with equal sums in opposite order take 1.5 times as long as equal slices."""
    costs = np.array([[2.0, 1.0, 1.0, 2.0]])
    sums = balance_groups(costs[0], 2)
    assert sum_of_maxima(costs, np.array([[0, 1], [2, 3]]), 2) == 4.0
    assert (costs[0][sums].sum(axis=1) == 3.0).all()
    assert sum_of_maxima(costs, slice_items(costs, 1, 2), 2) == 3.0
