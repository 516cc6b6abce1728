"""Packs exchanged between groups by what their plans take: the same packs, ends no later."""

from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from support.step_times import makespans_ms
from test_reorder_step import LAYOUTS, MODEL, MODULES, packs

from torchmm.balance.costs.model import CostModel
from torchmm.balance.reordering import replicas
from torchmm.balance.reordering.groups import balance_groups
from torchmm.balance.reordering.replicas import exchanged
from torchmm.balance.reordering.step import Chain, StepReorder
from torchmm.planning.reordering import SearchedTime, ordered_layout
from torchmm.recipe.parallel_section import ParallelConfig

GROUPS, PER_GROUP = 4, 6
LAYOUT = LAYOUTS["separated"][0]
PARALLEL = ParallelConfig.model_validate(
    {"schedule": "searched", "pipeline": 2, "vision": {"sub_microbatch_images": 8}}
)
TIME = SearchedTime(tuple(MODULES), MODEL, LAYOUT, PARALLEL)


def reorder(time: SearchedTime | None, size: int = 1, balance: bool = True) -> StepReorder:
    runs = ordered_layout(PARALLEL, LAYOUT, time)
    return StepReorder(MODULES, MODEL, runs, GROUPS, size, balance=balance, order=False)


def last_ns(places: list[list[list[int]]], batch: list) -> float:
    return max(TIME([[batch[i] for i in own] for own in group]) for group in places)


@pytest.mark.parametrize("size", [1, 2])
def test_all_packs_are_dealt_and_the_last_plan_ends_no_later(size):
    gains = []
    for seed in range(3):
        batch = packs(GROUPS * PER_GROUP, seed)
        by_work, by_plans = reorder(None, size)(batch), reorder(TIME, size)(batch)
        assert sorted(i for group in by_plans for own in group for i in own) == [*range(len(batch))]
        assert {len(group) for group in by_plans} == {PER_GROUP // size}
        gains.append(last_ns(by_work, batch) / last_ns(by_plans, batch))
        assert by_plans == reorder(TIME, size)(batch), "not the same"
    assert min(gains) >= 1 and max(gains) > 1.001


def test_searched_orders_have_groups_of_equal_work():
    """Whatever a fixed order would take with them: natural groups are shorter in one, of some."""
    found, program = reorder(None), Chain.of(LAYOUT, "searched").program(PER_GROUP)
    assert program is not None
    chain_prefers_natural = 0
    for seed in range(30):
        batch = packs(GROUPS * PER_GROUP, seed)
        chain = found.pack_ms(batch)
        work_N = sum(chain).sum(axis=0)

        def largest(places, work_N=work_N):
            return max(work_N[np.ravel(group)].sum() for group in places)

        def longest_ms(places, chain=chain):
            groups = np.reshape(places, (GROUPS, PER_GROUP))
            times = [np.stack([ms_SN[:, own] for own in groups]) for ms_SN in chain]
            return makespans_ms(program, *times).max()

        natural = np.arange(len(batch)).reshape(GROUPS, PER_GROUP)
        balanced = balance_groups(work_N, GROUPS)
        assert largest(found(batch)) == pytest.approx(min(map(largest, (natural, balanced))))
        chain_prefers_natural += longest_ms(natural) < longest_ms(balanced)
    assert chain_prefers_natural > 2, "no batch tells"


def test_packs_stay_where_groups_are_not_to_be_balanced():
    batch = packs(GROUPS * PER_GROUP)
    places = reorder(TIME, balance=False)(batch)
    assert [i for group in places for own in group for i in own] == [*range(len(batch))]


def test_another_process_can_have_it():
    assert ForkingPickler.dumps(reorder(TIME))


def test_ranks_whose_costs_differ_in_the_last_bits_plan_the_same():
    batch = packs(PER_GROUP)
    plan = [[pack] for pack in batch]

    device = MODEL.profile.device
    peaks = {dtype: flops * (1 + 1e-15) for dtype, flops in device.peak_flops.items()}
    assert peaks != device.peak_flops
    profile = replace(MODEL.profile, device=replace(device, peak_flops=peaks))
    other = CostModel(profile, "bfloat16")
    assert replace(TIME, model=other)(plan) == TIME(plan)


def test_only_searched_steps_of_moderate_size_are_planned():
    class Recipe:
        parallel = PARALLEL

        class training:  # noqa: N801
            global_batch_size, microbatch_size = 64, 1

    assert SearchedTime.of(Recipe, MODULES, MODEL, LAYOUT) == TIME
    Recipe.training.global_batch_size = 100_000
    assert SearchedTime.of(Recipe, MODULES, MODEL, LAYOUT) is None
    Recipe.training.global_batch_size = 64
    Recipe.parallel = PARALLEL.model_copy(update={"schedule": "separated"})
    assert SearchedTime.of(Recipe, MODULES, MODEL, LAYOUT) is None
    Recipe.parallel = PARALLEL
    assert SearchedTime.of(Recipe, MODULES, MODEL, LAYOUTS["one rank"][0]) is None


def test_what_is_even_stays_and_what_plans_lengthen_is_moved():
    """Two packs that are as much work as others take longer in the same plan."""
    places = np.arange(12).reshape(3, 4, 1)
    sizes = np.ones(12)
    assert exchanged(places, sizes, lambda own: 4.0).tolist() == places.tolist()

    def lasts(own: np.ndarray) -> float:
        return 4.0 + (len({0, 1} & set(own.ravel().tolist())) == 2)

    dealt = exchanged(places, sizes, lasts)
    assert max(map(lasts, places)) == 5 and max(map(lasts, dealt)) == 4
    assert sorted(dealt.ravel().tolist()) == [*range(12)]
    assert places.ravel().tolist() == [*range(12)], "its argument is changed"


def test_trials_are_bounded():
    planned = []

    def lasts(own: np.ndarray) -> float:
        planned.append(own)
        return float(1000 - len(planned))  # every exchange seems to help

    exchanged(np.arange(40).reshape(4, 10, 1), np.ones(40), lasts)
    assert len(planned) <= 4 + 2 * replicas.TRIALS
