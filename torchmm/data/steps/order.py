"""The global order of samples: a pure function of (seed, epoch, position), the same on all ranks.

Each source is a feed that gives its samples epoch after epoch, each time in a different order:

    shards of the index ─ shuffled ─> blocks of at least 2^20 samples ─ each shuffled ─> epoch

Both shuffles are permutations whose entries are computed one by one (`shuffling.py`): no order is
stored, whatever the number of samples, and any position can be begun at. Sources of up to 2^21
samples are one block, shuffled as a whole. In larger ones neighbours come from one block, so that a
shard's sizes, and its data, are needed in one stretch of an epoch only.

Feeds are mixed by weight through stride scheduling: sample k of a feed of weight w has its place at
k / w, and the next sample of all is the one with the lowest place. Unlike a random choice this
meets the weights in every stretch of the stream, and the number of samples taken from each is the
only state. Weights may change from one step to the next (`Stage`): samples are taken by those of
the step they are for.

Samples are drawn ahead in arrays, some thousands at a time. Those that a step does not use stay for
the next one or, as their positions say all, are simply drawn again.
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
from torchmm.data.steps.shuffling import Int64s, compiled, mixed, permuted
from torchmm.recipe.data_section import LengthFilter

BLOCK_SAMPLES = 1 << 20
"""Fewest samples that are shuffled together, where a source has so many."""
FIRST_DRAWN = 256
MOST_DRAWN = 1 << 16
"""Samples drawn at a time: more and more, as short runs need few."""
COLUMNS = 6
"""Arrays of `Drawn`."""


@dataclass(frozen=True)
class Drawn:
    """N samples that come next."""

    feeds_N: Int64s
    epochs_N: Int64s
    indices_N: Int64s
    tokens_N: Int64s
    tiles_N: Int64s
    """Pictures and tiles of each."""
    patches_N: Int64s
    """Patches that encoders and generators process of each."""
    skipped: Sequence[str] = ()
    """Corrupt samples met on the way, "source[index]: reason"."""
    items: Sequence[Item] = ()
    """The same samples, where their source cannot be asked again (streaming)."""

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def columns(self) -> tuple[Int64s, ...]:
        """All arrays."""
        sizes = self.tokens_N, self.tiles_N, self.patches_N
        return self.feeds_N, self.epochs_N, self.indices_N, *sizes

    def part(self, wanted: slice | np.ndarray) -> Drawn:
        """Some of the samples."""
        return Drawn.made_of([column[wanted] for column in self.columns])

    def names(self) -> list[tuple[int, int, int]]:
        """Feed, epoch and index of each."""
        return list(zip(*(column.tolist() for column in self.columns[:3]), strict=True))

    @classmethod
    def made_of(cls, columns: Sequence[Int64s], skipped: Sequence[str] = ()) -> Drawn:
        """Of the arrays in `columns`."""
        feeds_N, epochs_N, indices_N, tokens_N, tiles_N, patches_N = columns
        return cls(feeds_N, epochs_N, indices_N, tokens_N, tiles_N, patches_N, skipped)

    @classmethod
    def of(cls, items: Sequence[Item]) -> Drawn:
        """Samples of which objects were made."""
        metas = [item.meta for item in items]
        rows = [
            (item.feed, item.epoch, meta.index, meta.tokens, meta.tiles, meta.patches)
            for item, meta in zip(items, metas, strict=True)
        ]
        return cls.made_of(list(np.array(rows, np.int64).reshape(-1, COLUMNS).T))


def joined(parts: Sequence[Drawn]) -> Drawn:
    """Samples of several draws, one after another."""
    empty = np.zeros((COLUMNS, 0), np.int64)
    columns = zip(empty, *(part.columns for part in parts), strict=True)
    return Drawn.made_of([np.concatenate(arrays) for arrays in columns])


@dataclass
class FeedOptions:
    """What feeds of any kind need to know."""

    feed: int
    name: str
    seed: int
    shuffle: bool
    one_epoch: bool
    filter: LengthFilter = field(default_factory=LengthFilter)
    """Which samples take part."""
    counts_tiles: bool = False
    """Whether packing needs to know of pictures and tiles."""
    counts_patches: bool = False
    """Whether packing requires the number of patches."""


class Feed(Protocol):
    """The endless sequence of samples of one source."""

    options: FeedOptions
    size: int | None
    """Samples per epoch, where known."""
    sequential: bool
    """Whether samples can only be had one by one, and each once."""

    def samples(self, first: int, count: int) -> Drawn:
        """Samples `first`, `first` + 1, ...; fewer than `count` at the end of a feed that lasts one
        epoch. Sequential feeds give the next one only, or what was skipped in its place."""
        ...

    def passes(self, taken: int, waiting_epochs_N: Int64s) -> float:
        """Return the number of passes over the source that the run has trained on.

        Args:
            taken: samples taken so far.
            waiting_epochs_N: epochs of the samples among them that no step has used yet.
        """
        ...

    def item(self, epoch: int, index: int) -> Item:
        """A sample that was given, if the feed is not sequential: those give items at once."""
        ...

    def image_sizes(self, indices_N: Int64s, modules: Sequence[str]) -> ImageSizes:
        """Return the sizes of the images of samples of a feed that is not sequential.

        Args:
            modules: As of `ImageSizes.of`.
        """
        ...

    def state(self, taken: int, needed: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """JSON-able position after `taken` samples, from which `restore` can also give those
        `needed` again, by (epoch, index)."""
        ...

    def restore(self, state: dict[str, Any], needed: Sequence[tuple[int, int]]) -> list[Item]:
        """Go to a saved position; returns the items named by (epoch, index), if they exist."""
        ...


class _Epoch(NamedTuple):
    """Shards in the order of an epoch, and the blocks they form."""

    number: int
    shards_S: Int64s
    firsts_B1: Int64s
    """Where each block begins in `shards_S`, and the last one ends."""
    starts_B1: Int64s
    """The same, in samples."""


class _Block(NamedTuple):
    """Samples that are shuffled together, in the order of their shards."""

    name: tuple[int, int]
    """Epoch and number."""
    ends_S: Int64s
    """Of each shard, among the samples of the block."""
    shifts_S: Int64s
    """What is added to a place in the block to give the sample's index."""
    offsets_N: np.ndarray | None
    """Places of the samples in the shards; None where all of them take part."""
    tokens_N: np.ndarray
    tiles_N: np.ndarray | None
    patches_N: np.ndarray | None


class IndexFeed:
    """A source with random access: every usable sample once per epoch.

    Samples found corrupt when the source was measured are left out, and reported once, at the
    beginning.
    """

    sequential = False

    def __init__(self, options: FeedOptions, index: LengthIndex, encoders: Sequence[str]) -> None:
        self.options = options
        self._index = index
        self._encoders = encoders
        self._usable_S = index.usable(options.filter)
        self.size: int | None = int(self._usable_S.sum())
        self._samples = self.size
        self._current: _Epoch | None = None
        self._block: _Block | None = None
        self._reported = False

    def passes(self, taken: int, waiting_epochs_N: Int64s) -> float:
        """Return the number of trained samples, divided by the number of usable samples."""
        return (taken - len(waiting_epochs_N)) / self._samples

    def samples(self, first: int, count: int) -> Drawn:
        """Samples from any position on."""
        if self.options.one_epoch:
            count = min(count, self._samples - first)
        parts = []
        while count > 0:
            parts.append(self._stretch(*divmod(first, self._samples), count))
            first += len(parts[-1])
            count -= len(parts[-1])
        skipped = []
        if parts and not self._reported:
            self._reported = True
            corrupt = self._index.corrupt()
            skipped = [f"{self.options.name}[{i}]: {reason}" for i, reason in corrupt]
        return replace(joined(parts), skipped=skipped)

    def item(self, epoch: int, index: int) -> Item:
        """Any sample."""
        meta = self._index.meta(self.options.name, index, self._encoders)
        return Item(self.options.feed, epoch, meta)

    def image_sizes(self, indices_N: Int64s, modules: Sequence[str]) -> ImageSizes:
        """Return the sizes of the images of any samples."""
        names = [*self._encoders, *([GENERATOR] if GENERATOR in modules else [])]
        generator = len(self._encoders) if GENERATOR in modules else None
        found = self._index.image_sizes(indices_N, generator)
        positions = np.array([modules.index(name) for name in names] or [0])
        found.sizes_I4[:, 0] = positions[found.sizes_I4[:, 0]]
        return found

    def state(self, taken: int, needed: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Draws are the whole state."""
        return {"draws": taken}

    def restore(self, state: dict[str, Any], needed: Sequence[tuple[int, int]]) -> list[Item]:
        """Random access: any item can be named again."""
        self._reported = state["draws"] > 0
        return [self.item(epoch, index) for epoch, index in needed if self._index.has(index)]

    def _stretch(self, epoch: int, position: int, count: int) -> Drawn:
        """Samples of one block from a position in an epoch on, at most `count`."""
        order = self._epoch(epoch)
        number = int(np.searchsorted(order.starts_B1, position, side="right")) - 1
        start, stop = order.starts_B1[number : number + 2].tolist()
        block = self._load(order, number)
        places_N = np.arange(position - start, min(position + count, stop) - start)
        if self.options.shuffle:
            key = mixed(self.options.seed, self.options.feed, epoch, number + 1)
            places_N = permuted(places_N, stop - start, key)
        shards_N = np.searchsorted(block.ends_S, places_N, side="right")
        offsets_N = places_N if block.offsets_N is None else block.offsets_N[places_N]
        none_N = np.zeros(len(places_N), np.int64)
        return Drawn(
            np.full(len(places_N), self.options.feed),
            np.full(len(places_N), epoch),
            block.shifts_S[shards_N] + offsets_N,
            block.tokens_N[places_N].astype(np.int64),
            none_N if block.tiles_N is None else block.tiles_N[places_N].astype(np.int64),
            none_N if block.patches_N is None else block.patches_N[places_N],
        )

    def _epoch(self, number: int) -> _Epoch:
        if self._current is None or self._current.number != number:
            shards_S = permutation(len(self._usable_S), self.options, number, 0)
            ends_S = np.cumsum(self._usable_S[shards_S])
            # A block ends with the shard that fills it; what remains joins the last one.
            firsts, start = [0], 0
            while self._samples - start >= 2 * BLOCK_SAMPLES:
                firsts.append(int(np.searchsorted(ends_S, start + BLOCK_SAMPLES)) + 1)
                start = int(ends_S[firsts[-1] - 1])
            if start < self._samples:
                firsts.append(len(shards_S))
            starts = [0, *(int(ends_S[first - 1]) for first in firsts[1:])]
            self._current = _Epoch(number, shards_S, np.array(firsts), np.array(starts))
        return self._current

    def _load(self, order: _Epoch, number: int) -> _Block:
        """Sizes of a block's samples: 4 to 7 bytes each. Only the latest is kept."""
        if self._block is not None and self._block.name == (order.number, number):
            return self._block
        first, stop = order.firsts_B1[number : number + 2].tolist()
        shards_S = order.shards_S[first:stop]
        usable_S = self._usable_S[shards_S]
        ends_S = np.cumsum(usable_S)
        starts_S = self._index.firsts_S[shards_S]
        whole = bool((usable_S == self._index.samples_S[shards_S]).all())
        tokens, tiles, patches, offsets = [], [], [], []
        for shard in shards_S.tolist():
            sizes = self._index.sizes(shard)
            if not whole:
                offsets.append(sizes.kept_by(self.options.filter).astype(np.uint32))
            chosen: Any = slice(None) if whole else offsets[-1]
            tokens.append(sizes.tokens_N[chosen])
            if self.options.counts_tiles:
                tiles.append(sizes.tiles_N()[chosen])
            if self.options.counts_patches:
                patches.append(sizes.patches_N()[chosen])
        self._block = _Block(
            (order.number, number),
            ends_S,
            starts_S - (ends_S - usable_S if whole else 0),
            None if whole else np.concatenate(offsets),
            np.concatenate(tokens),
            np.concatenate(tiles) if tiles else None,
            np.concatenate(patches) if patches else None,
        )
        return self._block


def permutation(count: int, options: FeedOptions, *key: int) -> Int64s:
    """Order of `count` things: int64, a pure function of seed, the source's number and `key`.

    Its number, not its name: an order should not depend on where data are.
    """
    places_N = np.arange(count)
    if not options.shuffle or not count:
        return places_N
    return permuted(places_N, count, mixed(options.seed, options.feed, *key))


class Stage(NamedTuple):
    """Shares of feeds in a part of training."""

    weights: Sequence[float]
    """Relative to each other, one per feed; a feed of weight 0 is not drawn from."""
    until_step: int | None = None
    """The last step whose samples are drawn by them; None: there is no other stage."""


class Mixture:
    """Mixes feeds by weight.

    Args:
        feeds: one per source.
        stages: their shares, one part of training after another.
    """

    def __init__(self, feeds: Sequence[Feed], stages: Sequence[Stage]) -> None:
        self.feeds = list(feeds)
        self.stages = list(stages)
        self.taken = [0] * len(feeds)
        """Samples taken of each feed; corrupt ones of streams count."""
        self.bases = [0] * len(feeds)
        """Those of them that do not count: taken before weights or sources were changed."""
        self._stage = 0
        self._ended: set[int] = set()
        self._ahead: Drawn | None = None
        self._count = FIRST_DRAWN

    def draw(self) -> Drawn | None:
        """Samples that come next, at least one, or what was skipped; None when every feed has
        ended. They stay the next ones until they are taken."""
        if self._ahead is not None and len(self._ahead):
            return self._ahead
        while alive := self._alive():
            if not any(self.feeds[feed].sequential for feed in alive):
                self._ahead = self._draw_many(alive)
                return self._ahead
            feed = int(self._turns(alive, 1)[0])
            drawn = self.feeds[feed].samples(self.taken[feed], 1)
            if not len(drawn) and not drawn.skipped:
                self._ended.add(feed)
                continue
            if not len(drawn):  # Corrupt samples are taken at once.
                self.taken[feed] += 1
            self._ahead = drawn
            return drawn
        return None

    def take(self, count: int) -> Drawn:
        """Take the next samples, all of which have been drawn."""
        assert self._ahead is not None and count <= len(self._ahead)
        taken, self._ahead = self._ahead.part(slice(count)), self._ahead.part(slice(count, None))
        for feed, number in enumerate(np.bincount(taken.feeds_N).tolist()):
            self.taken[feed] += number
        return taken

    def epoch(self, waiting: Drawn) -> float:
        """Return the number of passes over the current source with the fewest passes.

        Args:
            waiting: taken samples that no step has used yet. They are not counted, because sources
                are packed ahead of training, small ones by several passes.
        """
        weights = self.stages[self._stage].weights
        return min(
            feed.passes(taken, waiting.epochs_N[waiting.feeds_N == number])
            for number, (feed, taken) in enumerate(zip(self.feeds, self.taken, strict=True))
            if weights[number]
        )

    def begin_step(self, step: int) -> None:
        """From here on samples are drawn for this step, counted from 1."""
        ends = (
            n for n, s in enumerate(self.stages) if s.until_step is None or step <= s.until_step
        )
        stage = next(ends)
        if stage != self._stage:
            self._stage = stage
            self.forget_the_past()

    def forget_the_past(self) -> None:
        """From here on the weights hold; nothing is made up for that others caused."""
        self.bases = list(self.taken)
        self._ahead = None

    def _alive(self) -> list[int]:
        weights = self.stages[self._stage].weights
        return [
            number
            for number in range(len(self.feeds))
            if weights[number] and number not in self._ended and self._left(number) > 0
        ]

    def _left(self, number: int) -> float:
        """Samples until a feed ends, as far as that is known."""
        feed = self.feeds[number]
        if not feed.options.one_epoch or feed.size is None:
            return np.inf
        return feed.size - self.taken[number]

    def _draw_many(self, alive: Sequence[int]) -> Drawn:
        self._count = min(2 * self._count, MOST_DRAWN)
        feeds_N = self._turns(alive, self._count)
        arrays = [np.empty(len(feeds_N), np.int64) for _ in range(COLUMNS)]
        skipped: list[str] = []
        for feed in alive:
            own = np.flatnonzero(feeds_N == feed)
            drawn = self.feeds[feed].samples(self.taken[feed], len(own))
            for array, of_feed in zip(arrays, drawn.columns, strict=True):
                array[own] = of_feed
            skipped += drawn.skipped
        return Drawn.made_of(arrays, skipped)

    def _turns(self, alive: Sequence[int], count: int) -> Int64s:
        """Feeds of the next samples, at most `count`."""
        weights = self.stages[self._stage].weights
        left = [self._left(feed) for feed in alive]
        turns_N = _stride(
            np.array([self.taken[feed] - self.bases[feed] for feed in alive], np.int64),
            np.array([weights[feed] for feed in alive], np.float64),
            np.array([min(count, n) for n in left], np.int64),
            int(min(count, sum(left))),
        )
        return np.asarray(alive)[turns_N]


@compiled
def _stride(taken_F: Int64s, weights_F: np.ndarray, left_F: Int64s, count: int) -> Int64s:
    """The next `count` turns: always the feed whose next sample has the lowest place.

    The + 1 makes a feed of weight w come first after 1 / w of the stream, not at its start.
    """
    feeds = len(taken_F)
    given_F = np.zeros(feeds, np.int64)
    places_F = (taken_F + 1) / weights_F
    turns_N = np.empty(count, np.int64)
    for i in range(count):
        best = -1
        for feed in range(feeds):
            if given_F[feed] < left_F[feed] and (best < 0 or places_F[feed] < places_F[best]):
                best = feed
        turns_N[i] = best
        given_F[best] += 1
        places_F[best] = (taken_F[best] + given_F[best] + 1) / weights_F[best]
    return turns_N
