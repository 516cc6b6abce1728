from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from index_cases import index_of
from order_oracles import turns

from torchmm.data.steps import feeds
from torchmm.data.steps.feeds import (
    FeedOptions,
    IndexFeed,
    Mixture,
    MixtureStage,
    SampleArrays,
    make_permutation,
)
from torchmm.recipe.data_section import LengthFilter


def feed(number=0, count=10, corrupt=None, tokens=None, shard=8192, **options):
    index = index_of(tokens if tokens is not None else [5] * count, corrupt, shard)
    values = {"seed": 1, "shuffle": True, "one_epoch": False, "name": f"s{number}"}
    return IndexFeed(FeedOptions(feed=number, **{**values, **options}), index, ())


def indices(a_feed, count):
    return a_feed.samples(0, count).indices_N.tolist()


def take(mixture, count):
    """Return the next samples as (feed, epoch, index), requested in uneven chunks."""
    names = []
    while len(names) < count and (drawn := mixture.peek()) is not None:
        part = min(len(drawn), count - len(names), 1 + len(names) % 97)
        names += mixture.take(part).sample_keys()
    return names


def test_epochs_have_all_samples_in_different_order():
    sample_indices = indices(feed(count=50), 150)
    epochs = [sample_indices[i : i + 50] for i in (0, 50, 100)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))


def test_order_depends_on_seed_and_feed_number():
    first = indices(feed(count=50), 50)
    assert first == indices(feed(count=50, name="moved"), 50)
    assert first != indices(feed(count=50, seed=2), 50)
    assert first != indices(feed(number=1, count=50), 50)


def test_permutation_is_stable():
    options = FeedOptions(0, "photos", 7, True, False)
    assert make_permutation(8, options, 0).tolist() == [3, 7, 5, 4, 2, 6, 0, 1]
    assert indices(feed(count=10, seed=7), 12) == [5, 3, 2, 1, 4, 7, 8, 9, 0, 6, 6, 5]


@pytest.mark.parametrize("limits", [{}, {"min_tokens": 3, "max_tokens": 8}])
def test_large_source_is_shuffled_in_shard_blocks(monkeypatch, limits):
    monkeypatch.setattr(feeds, "BLOCK_SAMPLES", 100)
    tokens = np.random.default_rng(0).integers(1, 11, 1000)
    corrupt = {3: "damaged", 700: "damaged", 999: "damaged"}
    options = {"tokens": tokens, "corrupt": corrupt, "shard": 32, "filter": LengthFilter(**limits)}
    a_feed = feed(**options)
    low, high = limits.get("min_tokens", 1), limits.get("max_tokens", 10)
    usable = [i for i in range(1000) if i not in corrupt and low <= tokens[i] <= high]
    assert a_feed.size == len(usable)
    samples = a_feed.samples(0, 2 * len(usable))
    for epoch in (0, 1):
        part = samples.indices_N[epoch * len(usable) : (epoch + 1) * len(usable)]
        assert sorted(part) == usable
        # 100 consecutive samples are from the few shards of one or two blocks.
        assert len(set((part[:100] // 32).tolist())) <= 10 < len(set((part // 32).tolist()))
    assert samples.epochs_N.tolist() == [0] * len(usable) + [1] * len(usable)
    assert (samples.tokens_N == tokens[samples.indices_N]).all()
    for start in (0, 1, 99, 250, len(usable) - 1, len(usable) + 5):
        assert (
            feed(**options).samples(start, 30).sample_keys()
            == samples.sample_keys()[start : start + 30]
        )


def test_unshuffled_epoch_is_sequential():
    a_feed = feed(shuffle=False, one_epoch=True)
    assert indices(a_feed, 25) == list(range(10))
    assert not len(a_feed.samples(10, 1))


def test_corrupt_samples_are_reported_once():
    mixture = Mixture([feed(count=4, corrupt={2: "damaged"}, shuffle=False)], [MixtureStage([1.0])])
    assert mixture.peek().skipped == ["s0[2]: damaged"]
    assert [i for _, _, i in take(mixture, 600)] == [0, 1, 3] * 200
    assert not mixture.peek().skipped


@pytest.mark.parametrize("weights", [[3.0, 1.0, 0.5], [1.0, 1.0, 1.0], [0.1, 0.7, 11.0]])
def test_mixture_matches_stride_scheduling(weights):
    mixture = Mixture([feed(0), feed(1), feed(2)], [MixtureStage(weights)])
    drawn = take(mixture, 5000)
    assert [f for f, _, _ in drawn] == turns(weights, [None] * 3, 5000)
    for number in range(3):
        samples = [name for name in drawn if name[0] == number]
        assert samples == feed(number).samples(0, len(samples)).sample_keys()
        assert mixture.taken[number] == len(samples)


def test_mixture_matches_weights_in_every_window():
    mixture = Mixture([feed(0), feed(1), feed(2)], [MixtureStage([3.0, 1.0, 0.5])])
    feeds = [f for f, _, _ in take(mixture, 900)]
    for start in range(0, 900, 90):
        counts = Counter(feeds[start : start + 90])
        assert abs(counts[0] - 60) <= 2 and abs(counts[1] - 20) <= 1 and abs(counts[2] - 10) <= 1


def test_mixture_of_one_epoch_has_each_sample_once():
    feeds = [feed(0, 5, one_epoch=True), feed(1, 20, one_epoch=True)]
    samples = take(Mixture(feeds, [MixtureStage([1.0, 1.0])]), 1000)
    assert [f for f, _, _ in samples] == turns([1.0, 1.0], [5, 20], 1000)
    assert len(set(samples)) == 25


def test_mixture_resumes_at_any_position():
    weights = [3.0, 1.0]
    names = take(Mixture([feed(0), feed(1, 7)], [MixtureStage(weights)]), 400)
    for start in (0, 1, 33, 250):
        mixture = Mixture([feed(0), feed(1, 7)], [MixtureStage(weights)])
        mixture.taken = [sum(f == n for f, _, _ in names[:start]) for n in range(2)]
        assert take(mixture, 100) == names[start : start + 100]


def staged(*stages):
    mixture = Mixture([feed(0), feed(1), feed(2)], [MixtureStage(*stage) for stage in stages])
    for step in range(1, 13):
        mixture.begin_step(step)
        yield [f for f, _, _ in take(mixture, 30)]


def test_stage_weights_apply_from_first_step():
    steps = list(staged(([3.0, 1.0, 0.0], 4), ([0.0, 1.0, 1.0], 8), ([1.0, 1.0, 8.0],)))
    for numbers, counts_expected in (
        (range(4), (22.5, 7.5, 0)),
        (range(4, 8), (0, 15, 15)),
        (range(8, 12), (3, 3, 24)),
    ):
        for number in numbers:
            counts = [steps[number].count(n) for n in range(3)]
            assert all(abs(c - s) <= 1 for c, s in zip(counts, counts_expected, strict=True)), (
                number
            )


def test_source_of_later_stage_does_not_limit_epoch():
    mixture = Mixture([feed(0), feed(1)], [MixtureStage([1.0, 0.0], 1), MixtureStage([1.0, 1.0])])
    take(mixture, 25)
    assert mixture.epoch(SampleArrays.from_items([])) == 2.5
    mixture.begin_step(2)
    assert mixture.epoch(SampleArrays.from_items([])) == 0
