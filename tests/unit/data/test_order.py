from __future__ import annotations

from collections import Counter

import numpy as np

from torchmm.data.order import FeedOptions, IndexFeed, Mixture, Skip, Stage, permutation
from torchmm.data.sources.length_index import LengthIndex


def feed(number=0, count=10, corrupt=None, **options):
    corrupt = corrupt or {}
    tokens = np.asarray([0 if i in corrupt else 5 for i in range(count)], np.int32)
    none = np.zeros(count + 1, np.int64), np.zeros((0, 4), np.int32)
    index = LengthIndex(tokens, *none, *none, corrupt)
    values = {"seed": 1, "shuffle": True, "one_epoch": False, "name": f"s{number}"}
    return IndexFeed(FeedOptions(feed=number, **{**values, **options}), index, ())


def indices(a_feed, count):
    return [a_feed.next().meta.index for _ in range(count)]


def test_every_epoch_has_every_sample_once_in_an_order_of_its_own():
    drawn = indices(feed(count=50), 150)
    epochs = [drawn[i : i + 50] for i in (0, 50, 100)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))


def test_order_depends_on_the_seed_and_the_name_only():
    assert indices(feed(count=50), 50) == indices(feed(number=0, count=50), 50)
    assert indices(feed(count=50), 50) != indices(feed(count=50, seed=2), 50)
    assert indices(feed(count=50), 50) != indices(feed(count=50, name="other"), 50)


def test_order_is_the_same_for_ever():
    options = FeedOptions(0, "photos", 7, True, False)
    assert permutation(8, options, 0).tolist() == [6, 2, 3, 5, 1, 4, 7, 0]


def test_permutation_is_uniform_in_its_first_place():
    options = [FeedOptions(0, "x", seed, True, False) for seed in range(4000)]
    counts = Counter(int(permutation(4, o, 0)[0]) for o in options)
    assert all(900 < counts[i] < 1100 for i in range(4))


def test_without_shuffling_samples_come_in_order_and_one_epoch_ends():
    a_feed = feed(shuffle=False, one_epoch=True)
    assert indices(a_feed, 10) == list(range(10))
    assert a_feed.next() is None


def test_corrupt_samples_are_reported_once_and_then_left_out():
    a_feed = feed(count=4, corrupt={2: "torn"}, shuffle=False)
    assert a_feed.next() == Skip("s0[2]: torn")
    assert indices(a_feed, 6) == [0, 1, 3, 0, 1, 3]


def test_mixture_hits_its_weights_in_every_stretch():
    mixture = Mixture([feed(0), feed(1), feed(2)], [Stage([3.0, 1.0, 0.5])])
    drawn = [mixture.next().feed for _ in range(900)]
    for start in range(0, 900, 90):
        counts = Counter(drawn[start : start + 90])
        assert abs(counts[0] - 60) <= 2 and abs(counts[1] - 20) <= 1 and abs(counts[2] - 10) <= 1


def test_mixture_of_one_epoch_gives_everything_once():
    mixture = Mixture(
        [feed(0, 5, one_epoch=True), feed(1, 20, one_epoch=True)], [Stage([1.0, 1.0])]
    )
    drawn = iter(mixture.next, None)
    assert Counter(item.feed for item in drawn) == {0: 5, 1: 20}


def staged(*stages):
    mixture = Mixture([feed(0), feed(1), feed(2)], [Stage(*stage) for stage in stages])
    for step in range(1, 13):
        mixture.begin_step(step)
        yield [mixture.next().feed for _ in range(30)]


def test_every_stage_hits_its_weights_from_its_first_step_on():
    steps = list(staged(([3.0, 1.0, 0.0], 4), ([0.0, 1.0, 1.0], 8), ([1.0, 1.0, 8.0],)))
    for numbers, shares in (
        (range(4), (22.5, 7.5, 0)),
        (range(4, 8), (0, 15, 15)),
        (range(8, 12), (3, 3, 24)),
    ):
        for number in numbers:
            counts = [steps[number].count(n) for n in range(3)]
            assert all(abs(c - s) <= 1 for c, s in zip(counts, shares, strict=True)), number


def test_a_source_of_a_later_stage_does_not_hold_up_the_count_of_epochs():
    mixture = Mixture([feed(0), feed(1)], [Stage([1.0, 0.0], 1), Stage([1.0, 1.0])])
    for _ in range(25):
        mixture.next()
    assert mixture.epoch == 2
    mixture.begin_step(2)
    assert mixture.epoch == 0
