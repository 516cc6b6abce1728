"""The sequence of optimizer steps: which samples, in which packs, on which rank. Sizes only.

Global batch first: all ranks compute the same global batch of packs from the same global order,
then divide it. The samples of step k therefore do not depend on the number of ranks, microbatches
or workers, and metadata of all ranks is known before anything is decoded.

    mixture of feeds ─ items ─> packer ─ packs ─> global batch ─ assign ─> rank, microbatch

The state after each step (samples taken per feed, open packs as references) is JSON-able and small.

Packing is bounded best fit: every sample goes into the fullest open pack that still has room for
it. If none has, a new one is opened; if too many are open, the fullest is closed first. Unlike
sorting by length this keeps the stream's order to within `open_packs` sequences, so that the state
to save is small and mixtures stay mixed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torchmm.common.batch import MicrobatchMeta
from torchmm.common.changes import changes
from torchmm.common.errors import CheckpointError, DataError
from torchmm.data.corrupt import first_of
from torchmm.data.identity import comparable, find_changes, same_stream
from torchmm.data.order import Item, Mixture, Skip
from torchmm.recipe.training_section import TrainingConfig

T = TypeVar("T")


@dataclass
class Pack(Generic[T]):
    """Samples that share one sequence."""

    free_tokens: int
    items: list[T] = field(default_factory=list)
    tiles: int = 0
    """Pictures and tiles in it."""


class Packer(Generic[T]):
    """Packs items one by one.

    Args:
        sequence_length: tokens of a pack.
        max_open: packs kept open.
        max_tiles: most pictures and tiles of a pack; None: any number.
    """

    def __init__(self, sequence_length: int, max_open: int, max_tiles: int | None = None) -> None:
        self.sequence_length = sequence_length
        self.max_open = max_open
        self.max_tiles = max_tiles
        self.open: list[Pack[T]] = []
        """Open packs, oldest first."""
        self.closed: deque[list[T]] = deque()
        """Closed packs not yet taken."""

    def add(self, item: T, tokens: int, tiles: int = 0) -> None:
        """Place one item of `tokens` tokens, at most `sequence_length`.

        An item of more tiles than `max_tiles` shares its pack with none that has any.
        """
        assert 0 < tokens <= self.sequence_length, f"{tokens=} {self.sequence_length=}"
        fitting = [p for p in self.open if self._fits(p, tokens, tiles)]
        if fitting:
            pack = min(fitting, key=lambda p: p.free_tokens)
        else:
            if len(self.open) == self.max_open:
                self._close(min(self.open, key=lambda p: p.free_tokens))
            pack = Pack(self.sequence_length)
            self.open.append(pack)
        pack.items.append(item)
        pack.free_tokens -= tokens
        pack.tiles += tiles
        if pack.free_tokens == 0:
            self._close(pack)

    def flush(self) -> None:
        """Close all packs, oldest first (at the end of a validation epoch)."""
        for pack in list(self.open):
            self._close(pack)

    def _fits(self, pack: Pack[T], tokens: int, tiles: int) -> bool:
        if pack.free_tokens < tokens:
            return False
        alone = not (tiles and pack.tiles)
        return alone or self.max_tiles is None or pack.tiles + tiles <= self.max_tiles

    def _close(self, pack: Pack[T]) -> None:
        self.open = [p for p in self.open if p is not pack]
        self.closed.append(pack.items)


def assign(
    packs: Sequence[T], data_parallel_size: int, microbatch_size: int
) -> list[list[list[T]]]:
    """Packs of one global batch to ranks and microbatches, in natural order.

    Args:
        packs: the global batch, in order.
        data_parallel_size: ranks that share it.
        microbatch_size: packs per microbatch.

    Returns:
        packs by rank and microbatch.
    """
    per_rank = len(packs) // data_parallel_size
    assert per_rank * data_parallel_size == len(packs) and per_rank % microbatch_size == 0
    return [
        [
            list(packs[start : start + microbatch_size])
            for start in range(rank * per_rank, (rank + 1) * per_rank, microbatch_size)
        ]
        for rank in range(data_parallel_size)
    ]


STATE_VERSION = 1

PackItems = list[Item]
Arrange = Callable[[Sequence[MicrobatchMeta]], Sequence[Sequence[Sequence[int]]]]
"""From the packs of a global batch, each as a separate microbatch, to their indices by rank and
microbatch."""


@dataclass(frozen=True)
class StepSamples:
    """One optimizer step of all data-parallel ranks."""

    ranks: list[list[list[PackItems]]]
    """Packs by rank and microbatch."""
    skipped: list[str]
    """Samples found corrupt while planning; the same on all ranks."""
    state: dict[str, Any]
    """The planner's state after this step."""
    epoch: int
    """Completed passes over the source that had the fewest."""

    def metas(self, sequence_length: int) -> list[list[MicrobatchMeta]]:
        """Metadata of every microbatch, by rank."""
        return [[microbatch_meta(m, sequence_length) for m in rank] for rank in self.ranks]


def microbatch_meta(packs: Sequence[PackItems], sequence_length: int) -> MicrobatchMeta:
    """Metadata of the packs of one microbatch."""
    samples = tuple(item.meta for pack in packs for item in pack)
    return MicrobatchMeta(samples, len(packs) * sequence_length)


class StepSequence:
    """Iterator over step plans, endless unless the feeds last one epoch.

    With feeds of one epoch the last step is padded with empty packs.

    Args:
        mixture: the global order of samples.
        training: batch sizes, sequence length, seed.
        open_packs: packs kept open.
        data_parallel_size: ranks that share a global batch.
        max_skipped: corrupt samples accepted within one step.
        state: of an earlier planner, to continue from.
        arrange: which pack goes where; None: in natural order.
        content: what samples and their order depend on (`torchmm.data.identity`).
        resume_changed: continue from `state` even if that is different.

    Raises:
        CheckpointError: the state belongs to other data, or to another order of them.
    """

    def __init__(  # noqa: PLR0913 - what a position in the data depends on
        self,
        mixture: Mixture,
        training: TrainingConfig,
        open_packs: int,
        data_parallel_size: int,
        max_skipped: int,
        state: dict[str, Any] | None,
        arrange: Arrange | None = None,
        content: Mapping[str, Any] | None = None,
        *,
        resume_changed: bool = False,
        max_tiles: int | None = None,
    ) -> None:
        self._mixture = mixture
        self._arrange = arrange
        self._training = training
        self._data_parallel_size = data_parallel_size
        self._max_skipped = max_skipped
        self._packer: Packer[Item] = Packer(training.sequence_length, open_packs, max_tiles)
        self._content = dict(content or {})
        self.notice = ""
        """What to report about `state`."""
        self._steps: int | None = 0
        """Steps planned; None: unknown, as in states that older versions saved."""
        if state is not None:
            self._restore(state, resume_changed)

    def __iter__(self) -> StepSequence:
        return self

    def __next__(self) -> StepSamples:
        closed = self._packer.closed
        skipped: list[str] = []
        wanted = self._training.global_batch_size
        if self._steps is not None:
            self._steps += 1
            self._mixture.begin_step(self._steps)
        while len(closed) < wanted:
            item = self._mixture.next()
            if item is None:
                self._packer.flush()
                if not closed:
                    raise StopIteration
                # The last step of validation: every rank gets its share, if only of padding.
                closed.extend([] for _ in range(-len(closed) % wanted))
            elif isinstance(item, Skip):
                skipped.append(item.message)
                self._check_skipped(skipped)
            else:
                self._packer.add(item, item.meta.tokens, item.meta.tiles)
        packs = [closed.popleft() for _ in range(wanted)]
        ranks = self._assign(packs)
        return StepSamples(ranks, skipped, self._state(), self._mixture.epoch)

    def _assign(self, packs: list[PackItems]) -> list[list[list[PackItems]]]:
        """Packs by rank and microbatch: the same ones, however they are arranged."""
        natural = assign(packs, self._data_parallel_size, self._training.microbatch_size)
        if self._arrange is None:
            return natural
        length = self._training.sequence_length
        places = self._arrange([microbatch_meta([pack], length) for pack in packs])
        found = sorted(index for rank in places for microbatch in rank for index in microbatch)
        shape = [[len(m) for m in rank] for rank in natural]
        if found != list(range(len(packs))) or [[len(m) for m in rank] for rank in places] != shape:
            raise ValueError(
                f"{len(packs)} packs for {len(natural)} ranks were arranged as {places}: each has "
                "to have one place, and all microbatches their size"
            )
        return [[[packs[i] for i in microbatch] for microbatch in rank] for rank in places]

    def _check_skipped(self, skipped: list[str]) -> None:
        if len(skipped) > self._max_skipped:
            raise DataError(
                f"more than data.max_corrupt_samples = {self._max_skipped} samples are corrupt, "
                "beginning with" + first_of(skipped)
            )

    def _state(self) -> dict[str, Any]:
        # Packs are saved as references to their samples, never as content: a resume asks the feeds
        # for these samples again, which is why each feed's state depends on what is still needed.
        packs = [*self._packer.closed, *(p.items for p in self._packer.open)]
        feeds = {}
        for feed in self._mixture.feeds:
            needed = [i for pack in packs for i in pack if i.feed == feed.options.feed]
            feeds[feed.options.name] = feed.state(needed)
        return {
            "version": STATE_VERSION,
            "identity": self._identity(),
            "content": self._content,
            "feeds": feeds,
            "bases": self._mixture.bases,
            "steps": self._steps,
            "closed": [[[*_reference(i)] for i in pack] for pack in self._packer.closed],
            "open": [[[*_reference(i)] for i in p.items] for p in self._packer.open],
        }

    def _identity(self) -> dict[str, Any]:
        """What versions before `torchmm.data.identity` compared."""
        return {
            "seed": self._training.seed,
            "sequence_length": self._training.sequence_length,
            "sources": {f.options.name: f.size for f in self._mixture.feeds},
        }

    def _restore(self, state: dict[str, Any], resume_changed: bool) -> None:
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the checkpoint's data position has version {state.get('version')}, this version "
                f"of torchmm reads {STATE_VERSION}"
            )
        self._steps = state.get("steps")
        if self._steps is not None:
            self._mixture.begin_step(self._steps)
        elif len(self._mixture.stages) > 1:
            raise CheckpointError(
                "the checkpoint's data position was saved by an older version of torchmm and does "
                "not know its step, so [[data.stages]] cannot go on from it; give sources weights "
                'instead, or start afresh with checkpoint.resume = "none"'
            )
        changed = self._changes(state)
        if not changed and not self._restore_exactly(state):
            changed = ["sizes of samples in sequences not yet full"]
        if not changed:
            return
        if not resume_changed:
            raise CheckpointError(
                f"the checkpoint's data position is of other data: {'; '.join(changed)}. Restore "
                "the recipe and the data; or continue with the changed ones with "
                "checkpoint.resume_changed_data = true, or start afresh with "
                'checkpoint.resume = "none"'
            )
        self._restore_what_fits(state, changed)

    def _changes(self, state: dict[str, Any]) -> list[str]:
        if comparable(state.get("content")):
            return find_changes(state["content"], self._content)
        self.notice = (
            "the checkpoint was saved by another version of torchmm: whether samples and their "
            "order are those it was trained on could not be compared, only their numbers"
        )
        old, new = state.get("identity", {}), self._identity()
        return changes(
            {f"training.{k}" if k != "sources" else k: v for k, v in old.items()},
            {f"training.{k}" if k != "sources" else k: v for k, v in new.items()},
        )

    def _restore_exactly(self, state: dict[str, Any]) -> bool:
        """Restores the position; returns False if samples are gone or no longer fit."""
        items: dict[tuple[int, int, int], Item] = {}
        references = _references(state)
        for number, feed in enumerate(self._mixture.feeds):
            needed = [(epoch, index) for f, epoch, index in references if f == number]
            for item in feed.restore(state["feeds"][feed.options.name], needed):
                items[_reference(item)] = item
        if not items.keys() >= set(references):
            return False
        # Sizes come from today's index: a pack that would now overflow cannot be the one saved.
        closed = [[items[tuple(r)] for r in pack] for pack in state["closed"]]
        opened = [[items[tuple(r)] for r in pack] for pack in state["open"]]
        free = [self._free_tokens(pack) for pack in opened]
        if min([*free, *map(self._free_tokens, closed)], default=0) < 0:
            return False
        self._packer.closed.extend(closed)
        tiles = [sum(item.meta.tiles for item in pack) for pack in opened]
        self._packer.open.extend(map(Pack, free, opened, tiles))
        self._mixture.bases = state.get("bases") or self._mixture.bases
        return True

    def _free_tokens(self, pack: PackItems) -> int:
        return self._training.sequence_length - sum(item.meta.tokens for item in pack)

    def _restore_what_fits(self, state: dict[str, Any], changed: Sequence[str]) -> None:
        """Sources continue where they were, as far as that is still meaningful."""
        saved = state["content"] if comparable(state.get("content")) else None
        # Numbers that feeds had when the state was saved; references in it use these.
        numbers = {source["name"]: n for n, source in enumerate(saved["sources"] if saved else [])}
        items: dict[tuple[int, int, int], Item] = {}
        positions = []
        for feed in self._mixture.feeds:
            name = feed.options.name
            past = state["feeds"].get(name)
            if feed.size is None and not (saved and same_stream(saved, self._content, name)):
                past = None
            positions.append(
                f"source {name!r} " + (f"after {past['draws']} samples" if past else "anew")
            )
            number = numbers.get(name)
            needed = [(epoch, index) for f, epoch, index in _references(state) if f == number]
            for item in feed.restore(past or {"draws": 0, "oldest": None}, needed if past else []):
                items[number or 0, item.epoch, item.meta.index] = item
        # Weights or sources may be new: without this, a new source would be drawn from alone until
        # it had caught up with all that was taken from the others.
        self._mixture.forget_the_past()
        kept = [items[r] for r in _references(state) if r in items]
        for item in kept:  # packed anew, as their sizes may have changed
            self._packer.add(item, item.meta.tokens, item.meta.tiles)
        self.notice = (
            f"data changed since the checkpoint: {'; '.join(changed)}; continuing, as "
            f"checkpoint.resume_changed_data says, with {', '.join(positions)} ({len(kept)} of "
            f"{len(_references(state))} samples of unfinished sequences kept)"
        )


def _references(state: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Feed, epoch and index of the samples in packs that no step has taken, in order."""
    packs = [*state["closed"], *state["open"]]
    return [(feed, epoch, index) for pack in packs for feed, epoch, index in pack]


def _reference(item: Item) -> tuple[int, int, int]:
    return item.feed, item.epoch, item.meta.index
