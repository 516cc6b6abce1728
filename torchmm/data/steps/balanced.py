"""Steps whose images are encoded by any data-parallel rank (`data.balance = "images"`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from torchmm.common.batch import MicrobatchMeta
from torchmm.data.items import EncodedImages, PackItems, ReadSample, microbatch_meta
from torchmm.data.steps.step_packs import Balance, Steps, StepSamples


class BalancedSteps:
    """Iterator over steps that assigns their images to ranks.

    Args:
        steps: Steps without an assignment.
        balance: Assigns the images of one microbatch of all ranks.
        sequence_length: Tokens of a pack.
    """

    def __init__(self, steps: Steps, balance: Balance, sequence_length: int) -> None:
        self._steps, self._balance, self._sequence_length = steps, balance, sequence_length

    def __iter__(self) -> BalancedSteps:
        return self

    @property
    def notice(self) -> str:
        """Report about the starting position."""
        return self._steps.notice

    def __next__(self) -> StepSamples:
        return balanced_step(next(self._steps), self._balance, self._sequence_length)


def balanced_step(step: StepSamples, balance: Balance, sequence_length: int) -> StepSamples:
    """Return the step with the images that every rank encodes."""
    of_ranks = list(step.ranks)
    microbatches = []
    for packs in zip(*of_ranks, strict=True):
        metas = [microbatch_meta(own, sequence_length) for own in packs]
        microbatches.append((packs, metas, balance(metas)))
    return replace(step, encoded=cache(partial(_encoded_in_step, microbatches)))


_Assigned = tuple[Sequence[list[PackItems]], Sequence[MicrobatchMeta], Mapping[str, Sequence[int]]]
"""Packs and metadata of one microbatch of every rank, and the ranks that encode its images."""


def _encoded_in_step(microbatches: Sequence[_Assigned], rank: int) -> list[EncodedImages]:
    return [encoded_images(*each, rank) for each in microbatches]


def encoded_images(
    packs: Sequence[list[PackItems]],
    metas: Sequence[MicrobatchMeta],
    owners: Mapping[str, Sequence[int]],
    rank: int,
) -> EncodedImages:
    """Return the images of one microbatch of all ranks that one rank encodes.

    Args:
        packs, metas: Microbatch of each rank.
        owners: Rank that encodes each image, by encoder, in the order of the ranks.
    """
    read_for: dict[str, list[int]] = {}
    read_by: dict[str, list[int]] = {}
    chosen: dict[str, dict[int, set[int]]] = {}
    for name, of_images in owners.items():
        stops = np.cumsum([meta.images_of(name) for meta in metas])
        read = np.flatnonzero(np.asarray(of_images, np.int64) == rank)
        homes = np.searchsorted(stops, read, side="right")
        read_for[name] = homes.tolist()
        first = int(stops[rank - 1]) if rank else 0
        read_by[name] = list(of_images[first : int(stops[rank])])
        numbers = chosen[name] = {}
        for home, number in zip(read_for[name], read.tolist(), strict=True):
            start = int(stops[home - 1]) if home else 0
            numbers.setdefault(home, set()).add(number - start)
    samples = []
    for home in sorted({home for numbers in chosen.values() for home in numbers}):
        seen = dict.fromkeys(owners, 0)
        for item in (item for pack in packs[home] for item in pack):
            images = []
            for image in item.meta.images:
                name = image.encoder or item.meta.encoder or ""
                images.append(seen[name] in chosen[name].get(home, ()))
                seen[name] += 1
            if any(images):
                samples.append(ReadSample(item, images))
    return EncodedImages(samples, read_for, read_by)
