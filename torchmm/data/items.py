"""Samples as workers and planners take them: one by one, with their sizes.

The order and the packs of a step are arrays (`order.py`, `step_packs.py`); these objects are made
only of the samples that somebody asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.data.layouts.sample import Record


class Item(NamedTuple):
    """One sample in the global order."""

    feed: int
    """Position of its source in the mixture."""
    epoch: int
    meta: SampleMeta
    record: Record | None = None
    """The data itself, if the source cannot be asked again (streaming)."""


PackItems = list[Item]
"""Samples that share one sequence."""


def microbatch_meta(packs: Sequence[PackItems], sequence_length: int) -> MicrobatchMeta:
    """Metadata of the packs of one microbatch."""
    samples = tuple(item.meta for pack in packs for item in pack)
    return MicrobatchMeta(samples, len(packs) * sequence_length)


class ReadSample(NamedTuple):
    """A sample with images that this rank encodes or generates."""

    item: Item
    images: list[bool]
    """Whether this rank encodes each of its images."""
    generated: list[bool]
    """Whether this rank generates each of its generated images."""


class EncodedImages(NamedTuple):
    """Images of one microbatch of all data-parallel ranks that one rank encodes or generates."""

    samples: list[ReadSample]
    """In the order of the ranks that train on them."""
    read_for: dict[str, list[int]]
    """Rank that trains on each of the images, by module."""
    read_by: dict[str, list[int]]
    """Rank that encodes or generates each image of the rank's own microbatch, by module."""

    def task_meta(self, meta: MicrobatchMeta) -> MicrobatchMeta:
        """Return the sizes of the tasks of the rank.

        Args:
            meta: The rank's own microbatch.
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
                for image, is_drawn in zip(
                    sample.item.meta.generated, sample.generated, strict=True
                )
                if is_drawn
            ],
        )


class BalancedShare(NamedTuple):
    """The work of one rank in a step whose images are balanced."""

    microbatches: list[list[PackItems]]
    """Its own packs."""
    encoded: list[EncodedImages]
    """Images that it encodes in each microbatch."""
