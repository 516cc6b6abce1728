"""Windows: several steps share their packs, in an order that a resumed run goes on in."""

import json
from collections import Counter
from functools import partial
from itertools import islice

import numpy as np
import pytest
from data_cases import data_config, training
from index_cases import index_of

from torchmm.common.errors import CheckpointError
from torchmm.data.steps.order import FeedOptions, IndexFeed
from torchmm.data.steps.sample_order import OrderedSource, SampleOrder
from torchmm.data.steps.step_packs import Position
from torchmm.data.steps.windows import WINDOW_VERSION
from torchmm.recipe.data_section import SourceConfig, StageConfig

SIZES = np.random.default_rng(5).integers(1, 65, 211)
STEPS = 11
"""Of a run: two windows of four, and one that the run's end cuts short."""


def order_of(*, stages=(), corrupt=None):
    sources = []
    for number, name in enumerate(("a", "b")):
        options = FeedOptions(number, name, 3, shuffle=True, one_epoch=False)
        index = index_of(SIZES, corrupt if number == 0 else None)
        make_feed = partial(IndexFeed, options, index, ())
        sources.append(OrderedSource(name, SourceConfig(path=name), make_feed))
    return SampleOrder(sources, {}, stages)


def by_length(packs, steps):
    """The longest to the last step, which no batch is by itself."""
    found = np.argsort([pack.used_tokens for pack in packs], kind="stable")
    return found.reshape(steps, -1).tolist()


def steps_of(tmp_path, window=4, state=None, ranks=1, deal=by_length, **options):
    data = data_config(tmp_path, reorder_window=window, reorder="both", open_packs=5)
    position = Position(0, ranks, state, options.pop("arrange", None), False, deal)
    run = training(global_batch_size=8, steps=STEPS)
    return order_of(**options).sequence(data, run, position)


def names(step):
    """Samples by pack, in natural order of the step's packs."""
    return [
        [(item.meta.source, item.epoch, item.meta.index) for item in pack]
        for rank in step.ranks
        for microbatch in rank
        for pack in microbatch
    ]


def seen(steps):
    return Counter(name for step in steps for pack in names(step) for name in pack)


def saved(step):
    return json.loads(json.dumps(step.state))


def test_a_window_has_the_samples_of_its_steps_and_other_steps(tmp_path):
    natural = list(islice(steps_of(tmp_path, 1, deal=None), 3 * STEPS))
    dealt = list(islice(steps_of(tmp_path), 3 * STEPS))
    ends = [4, 8, STEPS, STEPS + 4]
    for start, stop in zip([0, *ends], ends, strict=False):
        assert seen(natural[start:stop]) == seen(dealt[start:stop])
        assert dealt[stop - 1].state == natural[stop - 1].state
        lengths = [sum(i.meta.tokens for pack in step.ranks[0] for p in pack for i in p)
                   for step in dealt[start:stop]]  # fmt: skip
        assert lengths == sorted(lengths)
    assert any(seen([one]) != seen([two]) for one, two in zip(natural, dealt, strict=True))
    assert [step.epoch for step in natural] == [step.epoch for step in dealt]


def never(packs, steps):
    raise AssertionError("a window was dealt anew")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_goes_on_in_the_recorded_order_on_any_ranks(tmp_path, ranks):
    """To the end of the window without asking how to deal; after it as the other run went on."""
    steps = list(islice(steps_of(tmp_path), 15))
    for stop in range(len(steps)):
        left = next(end for end in (3, 7, STEPS - 1, STEPS + 3) if end >= stop) - stop
        resumed = steps_of(tmp_path, state=saved(steps[stop]), ranks=ranks, deal=never)
        for expected in steps[stop + 1 : stop + 1 + left]:
            step = next(resumed)
            assert names(step) == names(expected) and step.state == expected.state
            assert len(step.ranks) == ranks
        with pytest.raises(AssertionError, match="dealt anew"):
            next(resumed)
        again = steps_of(tmp_path, state=saved(steps[stop]), ranks=ranks)
        assert [names(s) for s in islice(again, 14 - stop)] == [names(s) for s in steps[stop + 1 :]]


def test_a_window_that_is_switched_off_is_finished_first(tmp_path):
    steps = list(islice(steps_of(tmp_path), 6))
    natural = list(islice(steps_of(tmp_path, 1, deal=None), 12))
    resumed = steps_of(tmp_path, 1, state=saved(steps[5]), deal=None)
    found = [*steps, *islice(resumed, 6)]
    assert seen(found[4:8]) == seen(natural[4:8])
    assert [names(step) for step in found[8:]] == [names(step) for step in natural[8:]]
    assert found[8].state == natural[8].state


def test_steps_are_arranged_after_they_were_dealt(tmp_path):
    def reversed_packs(packs):
        return [[[n] for n in range(len(packs) - 1, -1, -1)]]

    plain, arranged = steps_of(tmp_path), steps_of(tmp_path, arrange=reversed_packs)
    for one, two in islice(zip(plain, arranged, strict=True), 8):
        assert names(one) == names(two)[::-1] and one.state == two.state


def test_a_window_ends_where_weights_change(tmp_path):
    """Samples of one part of training are trained on in that part."""
    stages = [StageConfig(until_step=6, weights={"a": 1.0}), StageConfig(weights={"b": 1.0})]
    lengths = []

    def deal(packs, steps):
        lengths.append(steps)
        return by_length(packs, steps)

    steps = list(islice(steps_of(tmp_path, stages=stages, deal=deal), STEPS))
    sources = [{name[0] for name in seen([step])} for step in steps]
    assert lengths == [4, 2, 4]  # and one step is left, which has its own packs
    drawn_later = sum("a" in found for found in sources[6:])
    assert all(found == {"a"} for found in sources[:6]) and drawn_later <= 3


def test_corrupt_samples_are_told_once(tmp_path):
    steps = list(islice(steps_of(tmp_path, corrupt={3: "torn"}), 8))
    assert [step.skipped for step in steps] == [["a[3]: torn"], *[[]] * 7]


@pytest.mark.parametrize("wrong", [[[0] * 8] * 4, [[*range(32)]], [[*range(16)], [*range(16, 32)]]])
def test_deals_that_lose_packs_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="32 packs of 4 steps were dealt as"):
        next(steps_of(tmp_path, deal=lambda packs, steps: wrong))


def test_states_of_other_versions_are_refused(tmp_path):
    state = saved(next(steps_of(tmp_path)))
    assert state["version"] == WINDOW_VERSION
    with pytest.raises(CheckpointError, match="inside a window of version 99"):
        steps_of(tmp_path, state={**state, "version": 99})
