"""Samples as workers and planners take them: one by one, with their sizes.

The order and the packs of a step are arrays (`order.py`, `step_packs.py`); these objects are made
only of the samples that somebody asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
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
