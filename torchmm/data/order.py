"""The global order of samples: a pure function of (seed, epoch, position), the same on all ranks.

Each source is a feed that yields its samples epoch after epoch, each time in a different order.
Feeds are mixed by weight through stride scheduling: the next sample comes from the feed whose
samples lag furthest behind its weight. Unlike a random choice this meets the weights in every
stretch of the stream, and the number of samples taken from each is the only state. Weights may
change from one step to the next (`Stage`): samples are taken by those of the step they are for.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchmm.common.batch import SampleMeta
from torchmm.data.layouts.sample import Record
from torchmm.data.sources.length_index import LengthIndex
from torchmm.recipe.data_section import LengthFilter


class Item(NamedTuple):
    """One sample in the global order."""

    feed: int
    """Position of its source in the mixture."""
    epoch: int
    meta: SampleMeta
    record: Record | None = None
    """The data itself, if the source cannot be asked again (streaming)."""


class Skip(NamedTuple):
    """A corrupt sample in the global order: "source[index]: reason"."""

    message: str


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


class Feed(Protocol):
    """The endless sequence of samples of one source."""

    options: FeedOptions
    taken: int
    """Samples given so far, corrupt ones included."""
    size: int | None
    """Samples per epoch, where known."""

    @property
    def epoch(self) -> int:
        """Complete passes over the source."""
        ...

    def next(self) -> Item | Skip | None:
        """The next sample; None at the end of a feed that lasts one epoch."""
        ...

    def state(self, needed: Sequence[Item]) -> dict[str, Any]:
        """JSON-able position from which `restore` can also give the `needed` items again."""
        ...

    def restore(self, state: dict[str, Any], needed: Sequence[tuple[int, int]]) -> list[Item]:
        """Go to a saved position; returns the items named by (epoch, index), if they exist."""
        ...


class IndexFeed:
    """A source with random access: every usable sample once per epoch.

    Samples found corrupt when the source was measured are left out, and reported once, at the
    beginning.
    """

    def __init__(self, options: FeedOptions, index: LengthIndex, encoders: Sequence[str]) -> None:
        self.options = options
        self.taken = 0
        self._index = index
        self._encoders = encoders
        self._usable = index.kept_by(options.filter)
        self.size: int | None = len(self._usable)
        self._epoch = -1
        self._order = self._usable
        corrupt = sorted(index.corrupt.items())
        self._reports = [Skip(f"{options.name}[{i}]: {reason}") for i, reason in corrupt]

    @property
    def epoch(self) -> int:
        """Complete passes over the usable samples."""
        return self.taken // len(self._usable)

    def next(self) -> Item | Skip | None:
        """The next sample in this epoch's order."""
        if self._reports:
            return self._reports.pop(0)
        # Draws are the position: no state but a count, so any position can be restored at once.
        epoch, position = divmod(self.taken, len(self._usable))
        if epoch > 0 and self.options.one_epoch:
            return None
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._usable[permutation(len(self._usable), self.options, epoch)]
        self.taken += 1
        return self._item(epoch, int(self._order[position]))

    def state(self, needed: Sequence[Item]) -> dict[str, Any]:
        """Draws are the whole state."""
        return {"draws": self.taken}

    def restore(self, state: dict[str, Any], needed: Sequence[tuple[int, int]]) -> list[Item]:
        """Random access: any item can be named again."""
        self.taken = state["draws"]
        if self.taken:
            self._reports = []
        return [self._item(epoch, index) for epoch, index in needed if self._has(index)]

    def _has(self, index: int) -> bool:
        return index < len(self._index.tokens_N) and bool(self._index.tokens_N[index])

    def _item(self, epoch: int, index: int) -> Item:
        meta = self._index.meta(self.options.name, index, self._encoders)
        return Item(self.options.feed, epoch, meta)


def permutation(count: int, options: FeedOptions, *key: int) -> np.ndarray:
    """Order of `count` samples: int64, a pure function of seed, source name and `key`.

    Sorting by a hash instead of numpy's generator, whose streams may change between releases.
    """
    if not options.shuffle:
        return np.arange(count)
    state = np.uint64(zlib.crc32(options.name.encode()))
    for part in (options.seed, *key):
        state = _splitmix64(np.asarray([state ^ np.uint64(part)]))[0]
    return np.argsort(_splitmix64(np.arange(count, dtype=np.uint64) + state), kind="stable")


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Steele et al. 2014: a bijection of 64-bit integers that passes statistical tests."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


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
        self._stage = 0
        self._alive = list(range(len(feeds)))
        self.bases = [0] * len(feeds)
        """Draws of each feed that do not count: those before weights or sources were changed."""

    def next(self) -> Item | Skip | None:
        """The next sample of all; None when every feed has ended."""
        while drawn := self._mixed():
            feed = min(drawn, key=self._lead)
            item = self.feeds[feed].next()
            if item is not None:
                return item
            self._alive.remove(feed)
        return None

    @property
    def epoch(self) -> int:
        """Complete passes over the source that had the fewest, of those now drawn from."""
        weights = self.stages[self._stage].weights
        return min(f.epoch for f, weight in zip(self.feeds, weights, strict=True) if weight)

    def begin_step(self, step: int) -> None:
        """From here on samples are drawn for this step, counted from 1."""
        ends = (
            n for n, s in enumerate(self.stages) if s.until_step is None or step <= s.until_step
        )
        stage = next(ends)
        if stage != self._stage:
            self._stage = stage
            self.forget_the_past()

    def _mixed(self) -> list[int]:
        return [feed for feed in self._alive if self.stages[self._stage].weights[feed]]

    def forget_the_past(self) -> None:
        """From here on the weights hold; nothing is made up for that others caused."""
        self.bases = [feed.taken for feed in self.feeds]

    def _lead(self, feed: int) -> float:
        # Stride scheduling: where the feed's samples, divided by its weight, are with one more.
        # The + 1 makes a feed of weight w come first after 1 / w of the stream, not at its start.
        weight = self.stages[self._stage].weights[feed]
        return (self.feeds[feed].taken - self.bases[feed] + 1) / weight
