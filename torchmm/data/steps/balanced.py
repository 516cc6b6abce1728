"""Steps whose images are encoded by any data-parallel rank (`data.balance = "images"`).

All ranks compute the same assignment from the sizes of all images. These are arrays, because a step
of 1,024 ranks has 10^5 samples: objects are made only of the samples of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np

from torchmm.common.batch import ImageSizes, consecutive
from torchmm.data.items import EncodedImages, PackItems, ReadSample
from torchmm.data.steps.shuffling import Int64s
from torchmm.data.steps.step_packs import Balance, Packs, Steps, StepSamples


class BalancedSteps:
    """Iterator over steps that assigns their images to ranks.

    Args:
        steps: Steps without an assignment.
        balance: Assigns the images of one microbatch of all ranks.
    """

    def __init__(self, steps: Steps, balance: Balance) -> None:
        self._steps, self._balance = steps, balance

    def __iter__(self) -> BalancedSteps:
        return self

    @property
    def notice(self) -> str:
        """Report about the starting position."""
        return self._steps.notice

    def __next__(self) -> StepSamples:
        return balanced_step(next(self._steps), self._balance)


def balanced_step(step: StepSamples, balance: Balance) -> StepSamples:
    """Return the step with the images that every rank encodes."""
    packs = step.pack
    assert isinstance(packs, Packs)
    sizes = packs.image_sizes(packs.samples, balance.names)
    samples_P = np.diff(packs.starts_P1)
    microbatches = []
    for places_RB in step.places_RMB.swapaxes(0, 1):
        samples_R = samples_P[places_RB].sum(1)
        places = places_RB.reshape(-1)
        own = consecutive(packs.starts_P1[places], samples_P[places])
        homes_S = np.repeat(np.arange(len(samples_R)), samples_R)
        microbatches.append((own, assign_images(sizes.part(own), homes_S, balance, len(samples_R))))

    def items_of(own: Int64s) -> Callable[[Int64s], PackItems]:
        return lambda chosen: packs.items(own[chosen])

    def encoded(rank: int) -> list[EncodedImages]:
        return [images.of_rank(rank, items_of(own)) for own, images in microbatches]

    return replace(step, encoded=cache(encoded))


@dataclass(frozen=True)
class AssignedImages:
    """Images of one microbatch of all ranks, in the order of the ranks that train on them.

    Attributes:
        names: Names of all encoders.
        counts_S: Number of images of each sample.
        encoders_I: Position in `names` of the encoder of each image.
        homes_I: Rank that trains on each image.
        owners_I: Rank that encodes each image.
    """

    names: Sequence[str]
    counts_S: Int64s
    encoders_I: Int64s
    homes_I: Int64s
    owners_I: Int64s

    def of_rank(self, rank: int, items: Callable[[Int64s], PackItems]) -> EncodedImages:
        """Return the images that one rank encodes.

        Args:
            items: Returns samples by their positions among all samples.
        """
        is_read_I = self.owners_I == rank
        samples_I = np.repeat(np.arange(len(self.counts_S)), self.counts_S)
        chosen = np.unique(samples_I[is_read_I])
        stops = np.cumsum(self.counts_S[chosen]).tolist()
        flags_I = is_read_I[np.isin(samples_I, chosen)].tolist()
        flags = [flags_I[start:stop] for start, stop in pairwise([0, *stops])]
        own_I = self.homes_I == rank
        read_for, read_by = {}, {}
        for number, name in enumerate(self.names):
            of_encoder_I = self.encoders_I == number
            read_for[name] = self.homes_I[is_read_I & of_encoder_I].tolist()
            read_by[name] = self.owners_I[own_I & of_encoder_I].tolist()
        samples = [ReadSample(*each) for each in zip(items(chosen), flags, strict=True)]
        return EncodedImages(samples, read_for, read_by)


def assign_images(
    sizes: ImageSizes, homes_S: Int64s, balance: Balance, ranks: int
) -> AssignedImages:
    """Return the images of one microbatch of all ranks with the ranks that encode them.

    Args:
        sizes: Sizes of the images, with encoders as positions in `balance.names`.
        homes_S: Rank that trains on each sample, ascending.
    """
    homes_I = np.repeat(homes_S, sizes.counts_N)
    owners_I = balance.owners(sizes.sizes_I4, homes_I, ranks)
    return AssignedImages(balance.names, sizes.counts_N, sizes.sizes_I4[:, 0], homes_I, owners_I)
