"""Global sample order: a pure function of seed, epoch and position, equal on all ranks.

Each source is a feed that yields its samples epoch after epoch, in a different order per epoch:

    shards of the index ─ shuffled ─> blocks of at least 2^20 samples ─ each shuffled ─> epoch

Both shuffles are permutations whose entries are computed on demand (`shuffling.py`). The order is
not stored, and a feed can start at any position. A source of up to 2^21 samples is a single block.
In larger sources, consecutive samples are from one block, so that a shard is required in one part
of an epoch only.

Feeds are mixed by stride scheduling. Sample k (from 1) of a feed with weight w has the key k / w,
and the sample with the lowest key is next:

    weights 2 and 1:   A at 0.5 1.0 1.5 2.0, B at 1 2     ->   A A B A A B ...

Unlike random sampling, this matches the weights in each part of the sequence. The only state is the
number of samples taken from each feed. Weights may change between steps (`MixtureStage`).

Samples are requested ahead of their use in arrays of some thousands. Unused samples remain for the
next step, or are requested again, because the order depends on positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchmm.common.batch import ImageSizes
from torchmm.common.module_names import GENERATOR
from torchmm.data.items import Item
from torchmm.data.sources.index.length_index import LengthIndex
from torchmm.data.steps.shuffling import Int64s, compile_kernel, hash_integers, permute_indices
from torchmm.recipe.data_section import LengthFilter

BLOCK_SAMPLES = 1 << 20
"""Minimum number of samples of a block in sources with more samples."""
HALF_FIRST_REQUEST = 256
"""Half of the number of samples of the first request. Each request doubles the number."""
MAX_REQUEST_SAMPLES = 1 << 16
"""Maximum number of samples of a request."""
NUM_COLUMNS = 6
"""Number of arrays of `SampleArrays`."""


@dataclass(frozen=True)
class SampleArrays:
    """Arrays of the next N samples of the order."""

    feeds_N: Int64s
    epochs_N: Int64s
    indices_N: Int64s
    tokens_N: Int64s
    tiles_N: Int64s
    """Number of images and tiles of each sample."""
    patches_N: Int64s
    """Number of patches of each sample, for all encoders and generators."""
    skipped: Sequence[str] = ()
    """Messages "source[index]: reason" for corrupt samples that were skipped."""
    items: Sequence[Item] = ()
    """The same samples as objects, if the source is a stream."""

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def columns(self) -> tuple[Int64s, ...]:
        """Arrays in the order of the fields."""
        sizes = self.tokens_N, self.tiles_N, self.patches_N
        return self.feeds_N, self.epochs_N, self.indices_N, *sizes

    def select(self, indices: slice | np.ndarray) -> SampleArrays:
        """Return the samples of a slice or of an index array."""
        return SampleArrays.from_columns([column[indices] for column in self.columns])

    def sample_keys(self) -> list[tuple[int, int, int]]:
        """Return feed, epoch and index of each sample."""
        return list(zip(*(column.tolist() for column in self.columns[:3]), strict=True))

    @classmethod
    def from_columns(cls, columns: Sequence[Int64s], skipped: Sequence[str] = ()) -> SampleArrays:
        """Create an object from arrays in the order of `columns`."""
        feeds_N, epochs_N, indices_N, tokens_N, tiles_N, patches_N = columns
        return cls(feeds_N, epochs_N, indices_N, tokens_N, tiles_N, patches_N, skipped)

    @classmethod
    def from_items(cls, items: Sequence[Item]) -> SampleArrays:
        """Create an object from sample objects."""
        metas = [item.meta for item in items]
        rows = [
            (item.feed, item.epoch, meta.index, meta.tokens, meta.tiles, meta.patches)
            for item, meta in zip(items, metas, strict=True)
        ]
        return cls.from_columns(list(np.array(rows, np.int64).reshape(-1, NUM_COLUMNS).T))


def concat_samples(parts: Sequence[SampleArrays]) -> SampleArrays:
    """Concatenate samples."""
    empty = np.zeros((NUM_COLUMNS, 0), np.int64)
    columns = zip(empty, *(part.columns for part in parts), strict=True)
    return SampleArrays.from_columns([np.concatenate(arrays) for arrays in columns])


@dataclass
class FeedOptions:
    """Settings of a feed."""

    feed: int
    name: str
    seed: int
    shuffle: bool
    one_epoch: bool
    filter: LengthFilter = field(default_factory=LengthFilter)
    """Limits on the number of tokens of used samples."""
    needs_tiles: bool = False
    """Whether packing requires the number of images and tiles."""
    needs_patches: bool = False
    """Whether packing requires the number of patches."""


class Feed(Protocol):
    """Infinite sequence of samples of one source."""

    options: FeedOptions
    size: int | None
    """Number of samples per epoch. None if unknown."""
    sequential: bool
    """Whether samples are available one at a time and only once, as for streams."""

    def samples(self, first: int, count: int) -> SampleArrays:
        """Return samples `first`, `first` + 1, ...

        A feed of one epoch returns fewer samples at its end. A sequential feed returns the next
        sample only, or the message about a skipped sample.

        Args:
            first: Index of the first sample, counted over all epochs.
            count: Maximum number of samples.
        """
        ...

    def passes(self, taken: int, unused_epochs_N: Int64s) -> float:
        """Return the number of passes over the source that the run has trained on.

        Args:
            taken: Number of samples taken from the feed.
            unused_epochs_N: Epochs of taken samples that no step has used yet.
        """
        ...

    def item(self, epoch: int, index: int) -> Item:
        """Return a sample as an object. Not supported by sequential feeds."""
        ...

    def image_sizes(self, indices_N: Int64s, modules: Sequence[str]) -> ImageSizes:
        """Return the sizes of the images of samples. Not supported by sequential feeds.

        Args:
            indices_N: Indices of the samples in the source.
            modules: Argument of `ImageSizes.from_samples`.
        """
        ...

    def state(self, taken: int, needed: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return a JSON-serializable state after `taken` samples.

        Args:
            taken: Number of samples taken from the feed.
            needed: Samples that `restore` must return, as (epoch, index).
        """
        ...

    def restore(self, state: dict[str, Any], needed: Sequence[tuple[int, int]]) -> list[Item]:
        """Restore a saved state, and return the existing samples among `needed`.

        Args:
            state: Result of `state`.
            needed: Samples to return, as (epoch, index).
        """
        ...


class _Epoch(NamedTuple):
    """Shuffled shards of an epoch, divided into blocks."""

    number: int
    shards_S: Int64s
    firsts_B1: Int64s
    """Start index of each block in `shards_S`, followed by the end of the last block."""
    starts_B1: Int64s
    """The same boundaries, counted in samples."""


class _Block(NamedTuple):
    """Samples of the shards of a block, before they are shuffled."""

    name: tuple[int, int]
    """Epoch and block number."""
    ends_S: Int64s
    """End of each shard among the samples of the block."""
    shifts_S: Int64s
    """Difference between the index in the source and the offset, for each shard."""
    offsets_N: np.ndarray | None
    """Offset of each sample in its shard. None if all samples are used, and the offset is the
    index in the block."""
    tokens_N: np.ndarray
    tiles_N: np.ndarray | None
    patches_N: np.ndarray | None


class IndexFeed:
    """Feed of a source with random access, with each usable sample once per epoch.

    Samples that were corrupt during indexing are omitted. They are reported once, with the first
    samples.
    """

    sequential = False

    def __init__(self, options: FeedOptions, index: LengthIndex, encoders: Sequence[str]) -> None:
        self.options = options
        self._index = index
        self._encoders = encoders
        self._usable_S = index.count_usable(options.filter)
        self.size: int | None = int(self._usable_S.sum())
        self._samples = self.size
        self._current_epoch: _Epoch | None = None
        self._block: _Block | None = None
        self._reported = False

    def passes(self, taken: int, unused_epochs_N: Int64s) -> float:
        """Return the number of trained samples, divided by the number of usable samples."""
        return (taken - len(unused_epochs_N)) / self._samples

    def samples(self, first: int, count: int) -> SampleArrays:
        """Return samples `first`, `first` + 1, ..., with random access."""
        if self.options.one_epoch:
            count = min(count, self._samples - first)
        parts = []
        while count > 0:
            parts.append(self._samples_of_block(*divmod(first, self._samples), count))
            first += len(parts[-1])
            count -= len(parts[-1])
        skipped = []
        if parts and not self._reported:
            self._reported = True
            corrupt = self._index.corrupt()
            skipped = [f"{self.options.name}[{i}]: {reason}" for i, reason in corrupt]
        return replace(concat_samples(parts), skipped=skipped)

    def item(self, epoch: int, index: int) -> Item:
        """Return a sample as an object."""
        meta = self._index.meta(self.options.name, index, self._encoders)
        return Item(self.options.feed, epoch, meta)

    def image_sizes(self, indices_N: Int64s, modules: Sequence[str]) -> ImageSizes:
        """Return the sizes of the images of any samples."""
        names = [*self._encoders, *([GENERATOR] if GENERATOR in modules else [])]
        generator = len(self._encoders) if GENERATOR in modules else None
        sizes = self._index.image_sizes(indices_N, generator)
        positions = np.array([modules.index(name) for name in names] or [0])
        sizes.sizes_I4[:, 0] = positions[sizes.sizes_I4[:, 0]]
        return sizes

    def state(self, taken: int, needed: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the number of taken samples, which is the complete state."""
        return {"draws": taken}

    def restore(self, state: dict[str, Any], needed: Sequence[tuple[int, int]]) -> list[Item]:
        """Return all needed samples that the index still has."""
        self._reported = state["draws"] > 0
        return [self.item(epoch, index) for epoch, index in needed if self._index.is_usable(index)]

    def _samples_of_block(self, epoch: int, position: int, count: int) -> SampleArrays:
        """Return at most `count` samples of one block, starting at a position of an epoch."""
        order = self._epoch(epoch)
        number = int(np.searchsorted(order.starts_B1, position, side="right")) - 1
        start, stop = order.starts_B1[number : number + 2].tolist()
        block = self._load(order, number)
        positions_N = np.arange(position - start, min(position + count, stop) - start)
        if self.options.shuffle:
            key = hash_integers(self.options.seed, self.options.feed, epoch, number + 1)
            positions_N = permute_indices(positions_N, stop - start, key)
        shards_N = np.searchsorted(block.ends_S, positions_N, side="right")
        offsets_N = positions_N if block.offsets_N is None else block.offsets_N[positions_N]
        none_N = np.zeros(len(positions_N), np.int64)
        return SampleArrays(
            np.full(len(positions_N), self.options.feed),
            np.full(len(positions_N), epoch),
            block.shifts_S[shards_N] + offsets_N,
            block.tokens_N[positions_N].astype(np.int64),
            none_N if block.tiles_N is None else block.tiles_N[positions_N].astype(np.int64),
            none_N if block.patches_N is None else block.patches_N[positions_N],
        )

    def _epoch(self, number: int) -> _Epoch:
        if self._current_epoch is None or self._current_epoch.number != number:
            shards_S = make_permutation(len(self._usable_S), self.options, number, 0)
            ends_S = np.cumsum(self._usable_S[shards_S])
            # Blocks consist of complete shards. The last block includes the remainder.
            firsts, start = [0], 0
            while self._samples - start >= 2 * BLOCK_SAMPLES:
                firsts.append(int(np.searchsorted(ends_S, start + BLOCK_SAMPLES)) + 1)
                start = int(ends_S[firsts[-1] - 1])
            if start < self._samples:
                firsts.append(len(shards_S))
            starts = [0, *(int(ends_S[first - 1]) for first in firsts[1:])]
            self._current_epoch = _Epoch(number, shards_S, np.array(firsts), np.array(starts))
        return self._current_epoch

    def _load(self, order: _Epoch, number: int) -> _Block:
        """Return the sizes of the samples of a block. Only the last block is cached."""
        if self._block is not None and self._block.name == (order.number, number):
            return self._block
        first, stop = order.firsts_B1[number : number + 2].tolist()
        shards_S = order.shards_S[first:stop]
        usable_S = self._usable_S[shards_S]
        ends_S = np.cumsum(usable_S)
        starts_S = self._index.firsts_S[shards_S]
        uses_all_samples = bool((usable_S == self._index.samples_S[shards_S]).all())
        tokens, tiles, patches, offsets = [], [], [], []
        for shard in shards_S.tolist():
            sizes = self._index.sizes(shard)
            if not uses_all_samples:
                offsets.append(sizes.select_indices(self.options.filter).astype(np.uint32))
            selection: Any = slice(None) if uses_all_samples else offsets[-1]
            tokens.append(sizes.tokens_N[selection])
            if self.options.needs_tiles:
                tiles.append(sizes.tiles_N()[selection])
            if self.options.needs_patches:
                patches.append(sizes.patches_N()[selection])
        self._block = _Block(
            (order.number, number),
            ends_S,
            starts_S - (ends_S - usable_S if uses_all_samples else 0),
            None if uses_all_samples else np.concatenate(offsets),
            np.concatenate(tokens),
            np.concatenate(tiles) if tiles else None,
            np.concatenate(patches) if patches else None,
        )
        return self._block


def make_permutation(count: int, options: FeedOptions, *key: int) -> Int64s:
    """Return a permutation, a pure function of the seed, the source index and `key`.

    It depends on the index of the source instead of its name, so that data can be moved.

    Args:
        count: Length N of the permutation.
        options: Seed and index of the source, and whether to shuffle.
        key: Further integers, such as the epoch.

    Returns:
        (N,), int64. Ascending without shuffling.
    """
    positions_N = np.arange(count)
    if not options.shuffle or not count:
        return positions_N
    return permute_indices(positions_N, count, hash_integers(options.seed, options.feed, *key))


class MixtureStage(NamedTuple):
    """Sampling weights of all feeds in a range of steps."""

    weights: Sequence[float]
    """Relative weight of each feed. A feed of weight 0 is not used."""
    until_step: int | None = None
    """Last step with these weights. None for the last stage."""


class Mixture:
    """Mixture of feeds by stride scheduling.

    Args:
        feeds: Feed of each source.
        stages: Sampling weights in consecutive ranges of steps.
    """

    def __init__(self, feeds: Sequence[Feed], stages: Sequence[MixtureStage]) -> None:
        self.feeds = list(feeds)
        self.stages = list(stages)
        self.taken = [0] * len(feeds)
        """Number of samples taken from each feed, including corrupt samples of streams."""
        self.bases = [0] * len(feeds)
        """Value of `taken` at the last change of weights or sources."""
        self._stage = 0
        self._ended: set[int] = set()
        self._peeked: SampleArrays | None = None
        self._request_size = HALF_FIRST_REQUEST

    def peek(self) -> SampleArrays | None:
        """Return the next samples without taking them, or None at the end of all feeds.

        The result has at least one sample or one skipped sample.
        """
        if self._peeked is not None and len(self._peeked):
            return self._peeked
        while active := self._active_feeds():
            if not any(self.feeds[feed].sequential for feed in active):
                self._peeked = self._peek_many(active)
                return self._peeked
            feed = int(self._schedule(active, 1)[0])
            samples_of_feed = self.feeds[feed].samples(self.taken[feed], 1)
            if not len(samples_of_feed) and not samples_of_feed.skipped:
                self._ended.add(feed)
                continue
            if not len(samples_of_feed):  # A skipped sample is not returned again.
                self.taken[feed] += 1
            self._peeked = samples_of_feed
            return samples_of_feed
        return None

    def take(self, count: int) -> SampleArrays:
        """Take and return the next samples. `peek` must have returned them before."""
        assert self._peeked is not None and count <= len(self._peeked)
        taken, self._peeked = (
            self._peeked.select(slice(count)),
            self._peeked.select(slice(count, None)),
        )
        for feed, number in enumerate(np.bincount(taken.feeds_N).tolist()):
            self.taken[feed] += number
        return taken

    def epoch(self, unused: SampleArrays) -> float:
        """Return the number of passes over the current source with the fewest passes.

        Args:
            unused: Taken samples that no step has used yet. They are not counted, because small
                sources may be packed several passes ahead.
        """
        weights = self.stages[self._stage].weights
        return min(
            feed.passes(taken, unused.epochs_N[unused.feeds_N == number])
            for number, (feed, taken) in enumerate(zip(self.feeds, self.taken, strict=True))
            if weights[number]
        )

    def begin_step(self, step: int) -> None:
        """Use the weights of this step, counted from 1, for the next samples."""
        ends = (
            n for n, s in enumerate(self.stages) if s.until_step is None or step <= s.until_step
        )
        stage = next(ends)
        if stage != self._stage:
            self._stage = stage
            self.restart_strides()

    def restart_strides(self) -> None:
        """Restart stride scheduling at the current position.

        Otherwise, feeds with a higher weight than before would catch up first.
        """
        self.bases = list(self.taken)
        self._peeked = None

    def _active_feeds(self) -> list[int]:
        weights = self.stages[self._stage].weights
        return [
            number
            for number in range(len(self.feeds))
            if weights[number] and number not in self._ended and self._remaining(number) > 0
        ]

    def _remaining(self, number: int) -> float:
        """Return the number of samples until the end of a feed. Infinite if there is no end."""
        feed = self.feeds[number]
        if not feed.options.one_epoch or feed.size is None:
            return np.inf
        return feed.size - self.taken[number]

    def _peek_many(self, active: Sequence[int]) -> SampleArrays:
        self._request_size = min(2 * self._request_size, MAX_REQUEST_SAMPLES)
        feeds_N = self._schedule(active, self._request_size)
        arrays = [np.empty(len(feeds_N), np.int64) for _ in range(NUM_COLUMNS)]
        skipped: list[str] = []
        for feed in active:
            indices = np.flatnonzero(feeds_N == feed)
            samples_of_feed = self.feeds[feed].samples(self.taken[feed], len(indices))
            for array, of_feed in zip(arrays, samples_of_feed.columns, strict=True):
                array[indices] = of_feed
            skipped += samples_of_feed.skipped
        return SampleArrays.from_columns(arrays, skipped)

    def _schedule(self, active: Sequence[int], count: int) -> Int64s:
        """Return the feed of each of the next samples, at most `count`."""
        weights = self.stages[self._stage].weights
        remaining = [self._remaining(feed) for feed in active]
        order_N = _stride(
            np.array([self.taken[feed] - self.bases[feed] for feed in active], np.int64),
            np.array([weights[feed] for feed in active], np.float64),
            np.array([min(count, n) for n in remaining], np.int64),
            int(min(count, sum(remaining))),
        )
        return np.asarray(active)[order_N]


@compile_kernel
def _stride(taken_F: Int64s, weights_F: np.ndarray, remaining_F: Int64s, count: int) -> Int64s:
    """Return the feeds of the next `count` samples by stride scheduling.

    Keys start at 1 / w instead of 0, so that the first sample of a feed with a low weight is not at
    the start of the sequence.

    Args:
        taken_F: Number of samples already taken from each feed.
        weights_F: Weight of each feed.
        remaining_F: Number of samples until the end of each feed.
        count: Number of samples to return.
    """
    feeds = len(taken_F)
    used_F = np.zeros(feeds, np.int64)
    keys_F = (taken_F + 1) / weights_F
    order_N = np.empty(count, np.int64)
    for i in range(count):
        best = -1
        for feed in range(feeds):
            if used_F[feed] < remaining_F[feed] and (best < 0 or keys_F[feed] < keys_F[best]):
                best = feed
        order_N[i] = best
        used_F[best] += 1
        keys_F[best] = (taken_F[best] + used_F[best] + 1) / weights_F[best]
    return order_N
