"""Assign the images of a step to data-parallel ranks (`data.balance = "images"`).

Any rank may encode or generate the images of a sample. All ranks compute the same assignment from
the sizes of all images. A step of 1,024 ranks has about 10^5 samples, so sizes are arrays. Objects
are created only for the samples of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np

from torchmm.common.batch import ImageAssignment, ImageSizes, Imbalance, concatenate_ranges
from torchmm.data.items import AssignedSample, PackItems, RankImages
from torchmm.data.steps.plan_steps import AssignImages, StepIterator, StepPacks, StepSamples
from torchmm.data.steps.shuffling import Int64s


class ImageBalancedSteps:
    """Iterator over steps that assigns their images to ranks.

    Args:
        steps: Steps without an assignment.
        balance: Assigns the images of one microbatch of all ranks.
    """

    def __init__(self, steps: StepIterator, balance: AssignImages) -> None:
        self._steps, self._balance = steps, balance

    def __iter__(self) -> ImageBalancedSteps:
        return self

    @property
    def notice(self) -> str:
        """Message about the starting position."""
        return self._steps.notice

    def __next__(self) -> StepSamples:
        return balance_images(next(self._steps), self._balance)

    def close(self) -> None:
        """Stop processes that plan steps."""
        self._steps.close()


def balance_images(step: StepSamples, balance: AssignImages) -> StepSamples:
    """Return the step with the images that each rank encodes and generates."""
    packs = step.pack
    assert isinstance(packs, StepPacks)
    sizes = packs.image_sizes(packs.samples, balance.names)
    samples_P = np.diff(packs.starts_P1)
    microbatches = []
    for sequences_RB in step.sequences_RMB.swapaxes(0, 1):
        samples_R = samples_P[sequences_RB].sum(1)
        sequences = sequences_RB.reshape(-1)
        samples = concatenate_ranges(packs.starts_P1[sequences], samples_P[sequences])
        homes_S = np.repeat(np.arange(len(samples_R)), samples_R)
        images = assign_images(sizes.select(samples), homes_S, balance, len(samples_R))
        microbatches.append((samples, images))

    def items_of(samples: Int64s) -> Callable[[Int64s], PackItems]:
        return lambda selected: packs.items(samples[selected])

    def rank_images(rank: int) -> list[RankImages]:
        return [images.of_rank(rank, items_of(samples)) for samples, images in microbatches]

    before, after, mean = np.sum([images.owners[1:] for _, images in microbatches], axis=0)
    metrics = Imbalance(before / mean, after / mean).metrics("image") if mean else {}
    return replace(step, rank_images=cache(rank_images), imbalance={**step.imbalance, **metrics})


@dataclass(frozen=True)
class AssignedImages:
    """Images of one microbatch of all ranks, sorted by the rank that trains on them.

    Attributes:
        names: Names of all encoders and of the generator, if the model has one.
        counts_S: Number of images of each sample.
        modules_I: Index in `names` of the module that reads each image.
        homes_I: Rank that trains on each image.
        owners: Rank that encodes or generates each image.
    """

    names: Sequence[str]
    counts_S: Int64s
    modules_I: Int64s
    homes_I: Int64s
    owners: ImageAssignment

    def of_rank(self, rank: int, items: Callable[[Int64s], PackItems]) -> RankImages:
        """Return the images that one rank encodes and generates.

        Args:
            rank: Data-parallel rank.
            items: Returns samples by their indices among all samples.
        """
        owners_I = self.owners.owners_I
        is_read_I = owners_I == rank
        samples_I = np.repeat(np.arange(len(self.counts_S)), self.counts_S)
        selected = np.unique(samples_I[is_read_I])
        stops = np.cumsum(self.counts_S[selected]).tolist()
        flags_I = is_read_I[np.isin(samples_I, selected)].tolist()
        flags = [flags_I[start:stop] for start, stop in pairwise([0, *stops])]
        is_local_I = self.homes_I == rank
        read_for, read_by = {}, {}
        for number, name in enumerate(self.names):
            of_module_I = self.modules_I == number
            read_for[name] = self.homes_I[is_read_I & of_module_I].tolist()
            read_by[name] = owners_I[is_local_I & of_module_I].tolist()
        samples = []
        for item, is_read in zip(items(selected), flags, strict=True):
            images = len(item.meta.images)
            samples.append(AssignedSample(item, is_read[:images], is_read[images:]))
        return RankImages(samples, read_for, read_by)


def assign_images(
    sizes: ImageSizes, homes_S: Int64s, balance: AssignImages, ranks: int
) -> AssignedImages:
    """Assign the images of one microbatch of all ranks to ranks.

    Args:
        sizes: Sizes of the images, with modules as indices in `balance.names`.
        homes_S: Rank that trains on each sample, ascending.
        balance: Assignment algorithm.
        ranks: Number of data-parallel ranks.
    """
    homes_I = np.repeat(homes_S, sizes.counts_N)
    owners = balance.owners(sizes.sizes_I4, homes_I, ranks)
    return AssignedImages(balance.names, sizes.counts_N, sizes.sizes_I4[:, 0], homes_I, owners)
