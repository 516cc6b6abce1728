"""Indices of fabricated sample sizes, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from torchmm.data.sources.index.length_index import PATCHES_COLUMN, LengthIndex, Shard, ShardSizes


def index_of(
    tokens: Sequence[int],
    corrupt: Mapping[int, str] | None = None,
    shard: int = 8192,
    patches: Sequence[int] | None = None,
) -> LengthIndex:
    """Return an index of samples with the specified token counts.

    Args:
        tokens: Tokens of each sample.
        corrupt: Maps corrupt samples to the reasons.
        shard: Number of samples in a shard.
        patches: Patches of the single image of each sample. If None, samples have no images.
    """
    reasons = dict(corrupt or {})
    tokens_N = np.array([0 if i in reasons else t for i, t in enumerate(tokens)], np.uint32)
    parts = [tokens_N[start : start + shard] for start in range(0, len(tokens_N), shard)]

    def sizes(number: int) -> ShardSizes:
        count = len(parts[number])
        none_N = np.zeros(count + 1, np.uint32)
        no_images = none_N, np.zeros(0, np.uint16)
        no_rows = np.zeros((0, 8), np.int32), np.zeros((0, 4), np.int32)
        images = (*no_images, no_rows[0])
        if patches is not None:
            rows = np.zeros((count, 8), np.int32)
            rows[:, PATCHES_COLUMN] = patches[number * shard :][:count]
            images = np.arange(count + 1), np.arange(count), rows
        return ShardSizes(parts[number], *images, *no_images, no_rows[1])

    shards = [
        Shard(
            number * shard, len(part), int((part == 0).sum()), int(part[part > 0].min(initial=99)),
            int(part.max()), f"content {number}", "", 0, {},
        )
        for number, part in enumerate(parts)
    ]  # fmt: skip
    return LengthIndex(
        shards,
        sizes,
        lambda number: {i - number * shard: r for i, r in reasons.items() if i // shard == number},
    )
