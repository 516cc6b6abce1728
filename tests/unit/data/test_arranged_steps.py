"""Global batches that a function of sizes arranges: the same packs in different positions."""

from collections import deque

import pytest
from data_cases import training

from torchmm.common.batch import Imbalance, SampleMeta, SequenceAssignment
from torchmm.data.items import Item
from torchmm.data.steps.feeds import FeedOptions, Mixture, MixtureStage, SampleArrays
from torchmm.data.steps.plan_steps import StepPlanner


class Endless:
    """A feed of samples of 20 to 60 tokens."""

    options = FeedOptions(0, "numbers", 0, shuffle=False, one_epoch=False)
    size, sequential = None, False

    def samples(self, first, count):
        return SampleArrays.from_items(
            [self.item(0, index) for index in range(first, first + count)]
        )

    def item(self, epoch, index):
        return Item(0, epoch, SampleMeta("numbers", index, 20 + index * 7 % 41))

    def passes(self, taken, unused_epochs_N):
        return 0

    def state(self, taken, needed):
        return {"draws": taken}


def planner(arrange=None, **sizes):
    return StepPlanner(
        Mixture([Endless()], [MixtureStage([1.0])]), training(**sizes), 3, 2, 0, None, arrange
    )


def names(step):
    return sorted(i.meta.index for rank in step.ranks for m in rank for pack in m for i in pack)


def largest_first(packs):
    """Assign the half of the packs with the most tokens to the first rank."""
    order = deque(sorted(range(len(packs)), key=lambda i: -packs[i].used_tokens))
    places = [[[order.popleft() for _ in range(2)] for _ in range(2)] for _ in range(2)]
    return SequenceAssignment(places, Imbalance(1.5, 1.25))


def test_arranged_steps_have_the_same_samples_and_states():
    sizes = {"global_batch_size": 8, "microbatch_size": 2}
    natural, arranged = planner(**sizes), planner(largest_first, **sizes)
    for _ in range(3):
        one, two = next(natural), next(arranged)
        assert names(one) == names(two) and one.state == two.state
        assert list(one.ranks) != list(two.ranks)
        first, second = (
            [meta.used_tokens for meta in rank] for rank in two.metas(training().sequence_length)
        )
        assert min(first) >= max(second)
        assert two.imbalance == {"sequence_imbalance": 1.25, "sequence_imbalance_before": 1.5}


@pytest.mark.parametrize(
    "places",
    [
        [[[0], [1]], [[2], [2]]],
        [[[0], [1], [2]], [[3]]],
        [[[0, 1]], [[2, 3]]],
        [[[0], [1]]],
    ],
)
def test_arrangement_with_missing_or_bundled_packs_is_rejected(places):
    with pytest.raises(ValueError, match="every sequence must have one position"):
        next(planner(lambda packs: SequenceAssignment(places), global_batch_size=4))
