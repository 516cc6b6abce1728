"""Steps of fabricated sizes: equal to a reference planner, resumable, independent of ranks."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from data_cases import training
from index_cases import index_of
from order_oracles import PlainPacker

from torchmm.data.steps.feeds import FeedOptions, IndexFeed, Mixture, MixtureStage
from torchmm.data.steps.plan_steps import StepPlanner

RNG = np.random.default_rng(5)
SIZES = [RNG.integers(1, 65, 211), RNG.integers(20, 41, 57)]


def mixture(sizes=SIZES, one_epoch=False):
    feeds = [
        IndexFeed(FeedOptions(n, f"s{n}", 3, True, one_epoch), index_of(tokens), ())
        for n, tokens in enumerate(sizes)
    ]
    return Mixture(feeds, [MixtureStage([2.0, 1.0])])


def sequence(ranks=1, state=None, sizes=SIZES, one_epoch=False, packing_buffer_size=5, **changes):
    values = {"global_batch_size": 8, **changes}
    delay = values.pop("packing_max_wait_steps", 3)
    return StepPlanner(
        mixture(sizes, one_epoch), training(**values), packing_buffer_size, ranks, 0, state,
        packing_max_wait_steps=delay,
    )  # fmt: skip


def packs(step):
    """Return the sample names of the packs of a step, in the original order."""
    return [
        [(item.feed, item.epoch, item.meta.index) for item in pack]
        for rank in step.ranks
        for microbatch in rank
        for pack in microbatch
    ]


def reference_steps(count, delay):
    """Yield the same steps, planned sample by sample."""
    order, packer, step = mixture(), PlainPacker(64, 5), 0
    tokens = {n: sizes for n, sizes in enumerate(SIZES)}
    while step < count:
        step += 1
        packer.close_older(step - delay)
        while len(packer.closed) < 8:
            order.peek()
            name = order.take(1).sample_keys()[0]
            packer.add(name, int(tokens[name[0]][name[2]]), now=step)
        yield packer.closed[:8]
        packer.closed = packer.closed[8:]


@pytest.mark.parametrize("delay", [1, 3, 100])
def test_steps_match_reference_planner(delay):
    steps = list(islice(sequence(packing_max_wait_steps=delay), 30))
    assert [packs(step) for step in steps] == list(reference_steps(30, delay))


@pytest.mark.parametrize("ranks", [2, 8])
def test_steps_are_independent_of_ranks(ranks):
    for one, many in zip(islice(sequence(), 12), sequence(ranks), strict=False):
        assert len(many.ranks) == ranks and packs(one) == packs(many)
        assert json.dumps(one.state) == json.dumps(many.state)


def test_steps_resume_after_any_step():
    steps = list(islice(sequence(), 20))
    for stop in range(20):
        state = json.loads(json.dumps(steps[stop].state))
        for expected, step in zip(steps[stop + 1 :], sequence(2, state), strict=False):
            assert packs(step) == packs(expected) and step.state == expected.state


def test_epoch_has_each_sample_once_then_empty_packs():
    steps = list(sequence(one_epoch=True))
    names = [name for step in steps for pack in packs(step) for name in pack]
    assert len(names) == len(set(names)) == 268
    assert {len(packs(step)) for step in steps} == {8} and [] in packs(steps[-1])


def max_delay(delay, packing_buffer_size, batch):
    """Return the maximum delay of a sample over 60 steps of lengths that pack poorly."""
    sizes = [np.array([33, *[40, 64] * 80]), np.array([64])]
    changes = {"global_batch_size": batch, "packing_max_wait_steps": delay}
    steps = sequence(sizes=sizes, packing_buffer_size=packing_buffer_size, **changes)
    order = mixture(sizes)
    drawn_at, delays = {}, []
    for number, step in enumerate(islice(steps, 60), 1):
        while sum(order.taken) < sum(feed["draws"] for feed in step.state["feeds"].values()):
            order.peek()
            drawn_at[order.take(1).sample_keys()[0]] = number
        delays += [number - drawn_at.pop(name) for pack in packs(step) for name in pack]
    return max([*delays, *(60 - number for number in drawn_at.values())])


@pytest.mark.parametrize(("packing_buffer_size", "batch"), [(5, 8), (16, 4)])
def test_packing_delay_is_bounded(packing_buffer_size, batch):
    assert (
        max_delay(3, packing_buffer_size, batch)
        <= 3 + packing_buffer_size // batch
        < max_delay(1000, packing_buffer_size, batch)
    )
