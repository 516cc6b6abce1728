"""Objects for single samples of a step, with their sizes.

The sample order and the sequences of a step are arrays (`feeds.py`, `plan_steps.py`). Objects are
created only for samples that a rank decodes or describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.data.record_formats.sample import Record


class Item(NamedTuple):
    """Sample in the global sample order."""

    feed: int
    """Index of the source in the mixture."""
    epoch: int
    """Epoch of the source, counted from 0."""
    meta: SampleMeta
    record: Record | None = None
    """Record of a streamed sample, which cannot be read again. Otherwise None."""


PackItems = list[Item]
"""Samples of one packed sequence."""


def microbatch_meta(packs: Sequence[PackItems], sequence_length: int) -> MicrobatchMeta:
    """Return the metadata of a microbatch with these sequences."""
    samples = tuple(item.meta for pack in packs for item in pack)
    return MicrobatchMeta(samples, len(packs) * sequence_length)


class AssignedSample(NamedTuple):
    """Sample with images that this rank encodes or generates."""

    item: Item
    images: list[bool]
    """Whether this rank encodes each of its images."""
    generated: list[bool]
    """Whether this rank generates each of its generated images."""


class RankImages(NamedTuple):
    """Images of one microbatch of all data-parallel ranks that one rank encodes or generates."""

    samples: list[AssignedSample]
    """Samples with these images, sorted by the rank that trains on them."""
    read_for: dict[str, list[int]]
    """Rank that trains on each of these images, by module."""
    read_by: dict[str, list[int]]
    """Rank that encodes or generates each image of the local microbatch, by module."""

    def task_meta(self, meta: MicrobatchMeta) -> MicrobatchMeta:
        """Return metadata with the images that this rank encodes and generates.

        Args:
            meta: Metadata of the local microbatch.
        """
        return meta.with_images(
            [
                replace(image, encoder=image.encoder or sample.item.meta.encoder)
                for sample in self.samples
                for image, is_read in zip(sample.item.meta.images, sample.images, strict=True)
                if is_read
            ],
            [
                image
                for sample in self.samples
                for image, is_generated in zip(
                    sample.item.meta.generated, sample.generated, strict=True
                )
                if is_generated
            ],
        )


class BalancedRankSamples(NamedTuple):
    """Work of one rank in a step whose images are balanced."""

    microbatches: list[list[PackItems]]
    """Sequences of the local microbatches."""
    rank_images: list[RankImages]
    """Images that the rank encodes and generates in each microbatch."""
