"""Plan optimizer steps: assign samples to packed sequences, ranks and microbatches.

    mixture of feeds ─ samples ─> packer ─ sequences ─> global batch ─ slots ─> rank, microbatch

Invariants:

- All ranks compute the same global batch of sequences from the global sample order, then divide it.
  The samples of step k do not depend on the number of ranks, microbatches or workers.
- Planning uses sizes only, so metadata of all ranks is available before any sample is decoded.
- The loader state after a step is JSON-serializable. It has the number of samples taken from each
  feed, and references to the samples of unused sequences.

All data is in arrays. Sample objects are created on demand, usually for one rank. Each rank that
has the sizes of all samples plans independently: 13 ms per step of 1,024 replicas, ahead of use
(`benchmarks/loader_scale.py`). The remaining ranks request plans (`remote_steps.py`). A central
planner for all ranks would be a single point of failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

import numpy as np

from torchmm.common.batch import ImageAssignment, ImageSizes, MicrobatchMeta, SequenceAssignment
from torchmm.common.errors import CheckpointError, DataError
from torchmm.data.corrupt import list_messages
from torchmm.data.identity import describe_changes, is_comparable, is_same_stream
from torchmm.data.items import Item, PackItems, RankImages, microbatch_meta
from torchmm.data.steps.balanced_packing import BalancedPacker
from torchmm.data.steps.feeds import Mixture, SampleArrays, concat_samples
from torchmm.data.steps.packing import BestFitPacker, group_by_sequence
from torchmm.data.steps.shuffling import Int64s
from torchmm.recipe.changes import changes
from torchmm.recipe.training_section import TrainingConfig

STATE_VERSION = 2
"""Version of the loader state. Version 1 is from before samples were shuffled in blocks."""

T = TypeVar("T")
SampleKey = tuple[int, int, int]
"""Key of a sample in the global order: feed, epoch and index."""
ArrangeSequences = Callable[[Sequence[MicrobatchMeta]], SequenceAssignment]
"""Assigns the sequences of a global batch, one microbatch each, to ranks and microbatches."""


class AssignImages(Protocol):
    """Assignment of images to data-parallel ranks."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all encoders and of the generator, if the model has one."""
        ...

    def owners(self, sizes_I4: Int64s, homes_I: Int64s, ranks: int) -> ImageAssignment:
        """Return the rank that encodes or generates each image of one microbatch of all ranks.

        Args:
            sizes_I4: Array of `ImageSizes`, with modules as indices in `names`.
            homes_I: Rank that trains on each image, ascending.
            ranks: Number of data-parallel ranks.
        """
        ...


class StepPosition(NamedTuple):
    """Start of the steps of a rank, and its part of each step.

    Attributes:
        rank: Data-parallel rank.
        data_parallel_size: Number of data-parallel ranks.
        state: Loader state to continue from. None for the start.
        arrange: Assigns sequences to ranks and microbatches. None for the packing order.
        resume_changed: Whether to continue from the state of different data.
        balance: Assigns images to ranks. If None, each rank encodes the images of its sequences.
    """

    rank: int = 0
    data_parallel_size: int = 1
    state: dict[str, Any] | None = None
    arrange: ArrangeSequences | None = None
    resume_changed: bool = False
    balance: AssignImages | None = None


class StepIterator(Protocol):
    """Iterator over steps, which is infinite unless feeds have one epoch."""

    @property
    def notice(self) -> str:
        """Message about the loader state before the first step."""
        ...

    def __next__(self) -> StepSamples: ...

    def close(self) -> None:
        """Stop processes that plan steps."""


@dataclass(frozen=True)
class StepPacks:
    """Sequences of a step as arrays. A call returns the samples of one sequence."""

    samples: SampleArrays
    """Samples grouped by sequence."""
    starts_P1: Int64s
    """Start of each sequence in `samples`, followed by the end of the last sequence."""
    make_item: Callable[[SampleKey], Item]
    """Function that returns a sample as an object."""
    image_sizes: Callable[[SampleArrays, Sequence[str]], ImageSizes]
    """Function that returns the sizes of the images of samples, for named modules."""

    def __call__(self, number: int) -> PackItems:
        start, stop = self.starts_P1[number : number + 2].tolist()
        return self.items(slice(start, stop))

    def items(self, samples: slice | Int64s) -> PackItems:
        """Return sample objects by their indices in `samples`."""
        return [self.make_item(name) for name in self.samples.select(samples).sample_keys()]


def packs_from_items(packs: Sequence[PackItems]) -> StepPacks:
    """Create arrays from the sample objects of all sequences of a step."""
    items = {item_key(item): item for pack in packs for item in pack}
    starts_P1 = np.cumsum([0, *map(len, packs)])
    samples = SampleArrays.from_items([item for pack in packs for item in pack])
    return StepPacks(samples, starts_P1, items.__getitem__, partial(_image_sizes_of_items, items))


def _image_sizes_of_items(
    items: Mapping[SampleKey, Item], samples: SampleArrays, modules: Sequence[str]
) -> ImageSizes:
    return ImageSizes.from_samples([items[name].meta for name in samples.sample_keys()], modules)


@dataclass(frozen=True)
class StepSamples:
    """Optimizer step of all data-parallel ranks."""

    pack: Callable[[int], PackItems]
    """Function that returns the samples of a sequence by number."""
    sequences_RMB: Int64s
    """Sequence numbers by rank, microbatch and index in the microbatch."""
    skipped: list[str]
    """Messages about samples that were corrupt during planning. Equal on all ranks."""
    state: dict[str, Any]
    """Loader state after this step."""
    epoch: float
    """Completed passes after this step over the source with the fewest passes."""
    rank_images: Callable[[int], list[RankImages]] | None = None
    """Function that returns the images that a rank encodes and generates in each microbatch. If
    None, these are the images of its sequences."""
    imbalance: Mapping[str, float] = field(default_factory=dict)
    """Metrics of `Imbalance`."""

    @property
    def ranks(self) -> LazyByRank[list[PackItems]]:
        """Sequences by rank and microbatch."""
        return LazyByRank(len(self.sequences_RMB), self._sequences_of_rank)

    def metas(self, sequence_length: int) -> LazyByRank[MicrobatchMeta]:
        """Return the metadata of each microbatch, by rank."""

        def metas_of_rank(rank: int) -> list[MicrobatchMeta]:
            metas = [
                microbatch_meta(packs, sequence_length) for packs in self._sequences_of_rank(rank)
            ]
            if self.rank_images is None:
                return metas
            rank_images = self.rank_images(rank)
            return [each.task_meta(meta) for each, meta in zip(rank_images, metas, strict=True)]

        return LazyByRank(len(self.sequences_RMB), metas_of_rank)

    def _sequences_of_rank(self, rank: int) -> list[list[PackItems]]:
        return [[self.pack(n) for n in packs] for packs in self.sequences_RMB[rank].tolist()]


class LazyByRank(Sequence[list[T]]):
    """Sequence with a list per data-parallel rank, created on access.

    Args:
        count: Number of ranks.
        make: Returns the list of a rank.
    """

    def __init__(self, count: int, make: Callable[[int], list[T]]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, rank: int) -> list[T]: ...
    @overload
    def __getitem__(self, rank: slice) -> list[list[T]]: ...
    def __getitem__(self, rank: int | slice) -> list[T] | list[list[T]]:
        if isinstance(rank, slice):
            return [self._make(number) for number in range(self._count)[rank]]
        return self._make(range(self._count)[rank])


def packing_order(training: TrainingConfig, data_parallel_size: int) -> Int64s:
    """Return sequence numbers in packing order: (ranks, microbatches, microbatch size)."""
    shape = (data_parallel_size, -1, training.microbatch_size)
    return np.arange(training.global_batch_size).reshape(shape)


def arrange_step(
    plan: StepSamples, arrange: ArrangeSequences, training: TrainingConfig
) -> StepSamples:
    """Return the step with sequences reassigned to ranks and microbatches.

    Args:
        plan: Step in packing order.
        arrange: Assignment algorithm.
        training: Batch sizes and sequence length.

    Raises:
        ValueError: `arrange` omits sequences, or does not fill all microbatches.
    """
    length = training.sequence_length
    count = training.global_batch_size
    sequences, imbalance = arrange([microbatch_meta([plan.pack(n)], length) for n in range(count)])
    shape = plan.sequences_RMB.shape
    is_complete = all(len(rank) == shape[1] for rank in sequences)
    is_complete &= {len(packs) for rank in sequences for packs in rank} == {shape[2]}
    assigned = sorted(index for rank in sequences for packs in rank for index in packs)
    if len(sequences) != shape[0] or not is_complete or assigned != list(range(count)):
        raise ValueError(
            f"{count} packed sequences for {shape[0]} ranks were arranged as {sequences}; every "
            "sequence must have one position, and all microbatches the same size"
        )
    metrics = {} if imbalance is None else imbalance.metrics("sequence")
    sequences_RMB = np.array(sequences, np.int64)
    return replace(plan, sequences_RMB=sequences_RMB, imbalance={**plan.imbalance, **metrics})


class StepPlanner:
    """Iterator over steps, which is infinite unless the feeds have one epoch.

    With feeds of one epoch, the last step is padded with empty sequences.

    Args:
        mixture: Global sample order.
        training: Batch sizes, sequence length and seed.
        packing_buffer_size: Maximum number of open sequences.
        data_parallel_size: Number of data-parallel ranks.
        max_skipped: Maximum number of corrupt samples in one step.
        state: Loader state to continue from. None for the start.
        arrange: Assigns sequences to ranks and microbatches. None for the packing order.
        content: Identity of samples and their order (`torchmm.data.identity`).
        resume_changed: Whether to continue from the state of different data.
        max_tiles: Maximum number of images and tiles of a sequence.
        packing_max_wait_steps: Number of steps after which an open sequence is closed.
        packing: Packing algorithm (`data.packing`).

    Raises:
        CheckpointError: The state belongs to different data, or to a different sample order.
    """

    def __init__(  # noqa: PLR0913 - the inputs of a data position
        self,
        mixture: Mixture,
        training: TrainingConfig,
        packing_buffer_size: int,
        data_parallel_size: int,
        max_skipped: int,
        state: dict[str, Any] | None,
        arrange: ArrangeSequences | None = None,
        content: Mapping[str, Any] | None = None,
        *,
        resume_changed: bool = False,
        max_tiles: int | None = None,
        packing_max_wait_steps: int = 32,
        packing: Literal["best_fit", "balanced"] = "best_fit",
    ) -> None:
        self._mixture = mixture
        self._arrange = arrange
        self._training = training
        self._data_parallel_size = data_parallel_size
        self._max_skipped = max_skipped
        self._max_wait_steps = packing_max_wait_steps
        length = training.sequence_length
        self._packer = (
            BalancedPacker(length, max_tiles)
            if packing == "balanced"
            else BestFitPacker(length, packing_buffer_size, max_tiles)
        )
        self._content = dict(content or {})
        self.notice = ""
        """Message about `state`."""
        self._steps = 0
        """Number of planned steps."""
        self._unused = [(SampleArrays.from_items([]), np.zeros(0, np.int64))]
        """Samples of sequences that no step has used, and their sequence numbers."""
        self._items: dict[SampleKey, Item] = {}
        """Sample objects of streams, which cannot be read again."""
        if state is not None:
            self._restore(state, resume_changed)

    def close(self) -> None:
        """Do nothing: this process plans."""

    def __iter__(self) -> StepPlanner:
        return self

    def __next__(self) -> StepSamples:
        packer = self._packer
        skipped: list[str] = []
        self._steps += 1
        self._mixture.begin_step(self._steps)
        if isinstance(packer, BestFitPacker):
            self._pack_best_fit(packer, skipped)
        else:
            self._pack_balanced(packer, skipped)
        if not packer.closed:
            raise StopIteration
        count = min(len(packer.closed), self._training.global_batch_size)
        samples, starts_P1 = self._take([packer.closed.popleft() for _ in range(count)])
        names = samples.sample_keys() if self._items else []
        items = {name: self._items.pop(name) for name in names if name in self._items}
        sizes = partial(self._image_sizes, items)
        packs = StepPacks(samples, starts_P1, partial(self._make_item, items), sizes)
        sequences_RMB = packing_order(self._training, self._data_parallel_size)
        unused, _ = self._unused_samples()
        epoch = self._mixture.epoch(unused)
        plan = StepSamples(packs, sequences_RMB, skipped, self._state(), epoch)
        return plan if self._arrange is None else arrange_step(plan, self._arrange, self._training)

    def _pack_best_fit(self, packer: BestFitPacker, skipped: list[str]) -> None:
        """Pack samples until a step is full, or until the end of the feeds."""
        num_sequences = self._training.global_batch_size
        packer.close_older(self._steps - self._max_wait_steps)
        while len(packer.closed) < num_sequences:
            peeked = self._peek(skipped)
            if peeked is None:
                packer.flush()
                return
            packs_N = packer.add(peeked.tokens_N, peeked.tiles_N, num_sequences, self._steps)
            self._unused.append((self._mixture.take(len(packs_N)), packs_N))

    def _pack_balanced(self, packer: BalancedPacker, skipped: list[str]) -> None:
        """Pack samples until a step is full, or until the end of the feeds."""
        while len(packer.closed) < self._training.global_batch_size:
            missing = packer.missing_tokens
            parts = []
            while missing > 0 and (peeked := self._peek(skipped)) is not None:
                stop = int(np.searchsorted(np.cumsum(peeked.tokens_N), missing)) + 1
                parts.append(self._mixture.take(min(stop, len(peeked))))
                missing -= int(parts[-1].tokens_N.sum())
            samples = concat_samples(parts)
            pack = packer.finish if missing > 0 else packer.fill
            packs_N = pack(samples.tokens_N, samples.tiles_N, samples.patches_N)
            self._unused.append((samples, packs_N))
            if missing > 0:
                return

    def _peek(self, skipped: list[str]) -> SampleArrays | None:
        """Return the next samples of the mixture, and add corrupt samples to `skipped`."""
        peeked = self._mixture.peek()
        if peeked is not None:
            skipped += peeked.skipped
            if len(skipped) > self._max_skipped:
                raise DataError(
                    f"more than data.max_corrupt_samples = {self._max_skipped} samples are "
                    "corrupt, starting with" + list_messages(skipped)
                )
            self._items.update((item_key(item), item) for item in peeked.items)
        return peeked

    def _take(self, numbers: Sequence[int]) -> tuple[SampleArrays, Int64s]:
        """Remove closed sequences, and return their samples and the start of each sequence.

        Empty sequences are added to complete a global batch. Therefore all ranks have the same
        number of sequences at the end of validation.
        """
        unused, packs_N = self._unused_samples()
        chosen, starts_P1 = group_by_sequence(packs_N, np.asarray(numbers, np.int64))
        is_unused = np.ones(len(packs_N), bool)
        is_unused[chosen] = False
        self._unused = [(unused.select(is_unused), packs_N[is_unused])]
        empty = self._training.global_batch_size - len(numbers)
        return unused.select(chosen), np.append(starts_P1, np.full(empty, starts_P1[-1]))

    def _unused_samples(self) -> tuple[SampleArrays, Int64s]:
        peeked, packs = zip(*self._unused, strict=True)
        return concat_samples(peeked), np.concatenate(packs)

    def _make_item(self, items: Mapping[SampleKey, Item], name: SampleKey) -> Item:
        feed, epoch, index = name
        return items[name] if name in items else self._mixture.feeds[feed].item(epoch, index)

    def _image_sizes(
        self, items: Mapping[SampleKey, Item], samples: SampleArrays, modules: Sequence[str]
    ) -> ImageSizes:
        def of_feed(number: int, members: Int64s) -> ImageSizes:
            feed = self._mixture.feeds[number]
            if feed.sequential:
                return _image_sizes_of_items(items, samples.select(members), modules)
            return feed.image_sizes(samples.indices_N[members], modules)

        return ImageSizes.from_groups(samples.feeds_N, of_feed)

    def _state(self) -> dict[str, Any]:
        # Sequences are saved as references to samples. A resumed run requests these samples from
        # the feeds, so the state of each feed depends on the samples that are still needed.
        unused, packs_N = self._unused_samples()
        numbers = [*self._packer.closed, *self._packer.open]
        chosen, starts = group_by_sequence(packs_N, np.asarray(numbers, np.int64))
        names = unused.select(chosen).sample_keys()
        packs = [names[start:stop] for start, stop in pairwise(starts.tolist())]
        feeds = {}
        for number, feed in enumerate(self._mixture.feeds):
            needed = [(epoch, index) for f, epoch, index in names if f == number]
            feeds[feed.options.name] = feed.state(self._mixture.taken[number], needed)
        closed = len(self._packer.closed)
        return {
            "version": STATE_VERSION,
            "identity": self._identity(),
            "content": self._content,
            "feeds": feeds,
            "bases": self._mixture.bases,
            "steps": self._steps,
            "closed": [list(map(list, pack)) for pack in packs[:closed]],
            "open": [list(map(list, pack)) for pack in packs[closed:]],
            "opened": self._packer.opened_at,
        }

    def _identity(self) -> dict[str, Any]:
        """Return values to compare if versions of `torchmm.data.identity` differ."""
        return {
            "seed": self._training.seed,
            "sequence_length": self._training.sequence_length,
            "sources": {f.options.name: f.size for f in self._mixture.feeds},
        }

    def _restore(self, state: dict[str, Any], resume_changed: bool) -> None:
        changed = self._changes(state)
        self._steps = int(state.get("steps") or 0)  # early versions did not save it
        self._mixture.begin_step(max(1, self._steps))
        if not changed and not self._restore_exactly(state):
            changed = ["sizes of samples in sequences not yet full"]
        if not changed:
            return
        if not resume_changed:
            raise CheckpointError(
                "the loader state of the checkpoint belongs to different data: "
                f"{'; '.join(changed)}. Restore the recipe and the data, continue with the "
                "changed data with checkpoint.allow_data_change = true, or start a new run "
                'with checkpoint.resume = "none"'
            )
        self._restore_compatible(state, changed)

    def _changes(self, state: dict[str, Any]) -> list[str]:
        version = state.get("version")
        if version not in (1, STATE_VERSION):
            raise CheckpointError(
                f"the loader state of the checkpoint has version {version}, but this version "
                f"of torchmm reads {STATE_VERSION}"
            )
        if version != STATE_VERSION:
            return ["the sample order, which differs in this version of torchmm"]
        if is_comparable(state.get("content")):
            return describe_changes(state["content"], self._content)
        self.notice = (
            "the checkpoint was saved by another version of torchmm, which did not record "
            "the data: only the number of samples could be compared, not the samples and "
            "their order"
        )
        old = state.get("identity", {})
        new = self._identity()
        return changes(
            {f"training.{k}" if k != "sources" else k: v for k, v in old.items()},
            {f"training.{k}" if k != "sources" else k: v for k, v in new.items()},
        )

    def _restore_exactly(self, state: dict[str, Any]) -> bool:
        """Restore the state. Return False if samples are missing or no longer fit."""
        items: dict[SampleKey, Item] = {}
        references = _unused_sample_keys(state)
        for number, feed in enumerate(self._mixture.feeds):
            needed = [(epoch, index) for f, epoch, index in references if f == number]
            saved = state["feeds"][feed.options.name]
            self._mixture.taken[number] = saved["draws"]
            items.update((item_key(item), item) for item in feed.restore(saved, needed))
        if not items.keys() >= set(references):
            return False
        # Sizes are from the current index, and may differ from those in the checkpoint.
        packs = [[items[_sample_key(r)] for r in p] for p in [*state["closed"], *state["open"]]]
        used = [sum(item.meta.tokens for item in pack) for pack in packs]
        if max(used, default=0) > self._training.sequence_length:
            return False
        times = [0] * len(state["closed"]) + state["opened"]
        for number, (pack, tokens, time) in enumerate(zip(packs, used, times, strict=True)):
            if number < len(state["closed"]):
                sequence = self._packer.restore_closed()
            elif isinstance(self._packer, BestFitPacker):
                sequence = self._packer.restore(tokens, sum(item.meta.tiles for item in pack), time)
            else:
                sizes = SampleArrays.from_items(pack)
                sequence = self._packer.restore(sizes.tokens_N, sizes.tiles_N, sizes.patches_N)
            self._add_unused(pack, np.full(len(pack), sequence))
        self._mixture.bases = list(state["bases"])
        return True

    def _add_unused(self, items: Sequence[Item], packs_N: Int64s) -> None:
        """Add samples of sequences that no step has used."""
        self._unused.append((SampleArrays.from_items(items), packs_N))
        self._items.update((item_key(item), item) for item in items if item.record is not None)

    def _restore_compatible(self, state: dict[str, Any], changed: Sequence[str]) -> None:
        """Resume sources whose saved positions are still valid, and start the remaining ones."""
        saved = state["content"] if is_comparable(state.get("content")) else None
        # References in the state use the feed numbers of the checkpoint.
        numbers = {source["name"]: n for n, source in enumerate(saved["sources"] if saved else [])}
        items: dict[SampleKey, Item] = {}
        positions = []
        for index, feed in enumerate(self._mixture.feeds):
            name = feed.options.name
            saved_feed = state["feeds"].get(name)
            if feed.size is None and not (saved and is_same_stream(saved, self._content, name)):
                saved_feed = None
            positions.append(
                f"source {name!r} "
                + (f"after {saved_feed['draws']} samples" if saved_feed else "from the start")
            )
            self._mixture.taken[index] = saved_feed["draws"] if saved_feed else 0
            number = numbers.get(name)
            needed = [
                (epoch, index) for f, epoch, index in _unused_sample_keys(state) if f == number
            ]
            for item in feed.restore(
                saved_feed or {"draws": 0, "oldest": None}, needed if saved_feed else []
            ):
                items[number or 0, item.epoch, item.meta.index] = item
        # Otherwise, all samples would be from a new source until it has caught up.
        self._mixture.restart_strides()
        kept = [items[r] for r in _unused_sample_keys(state) if r in items]
        peeked = SampleArrays.from_items(kept)  # packed again, because sizes may have changed
        if isinstance(self._packer, BestFitPacker):
            packs_N = self._packer.add(peeked.tokens_N, peeked.tiles_N, now=self._steps)
        else:
            packs_N = self._packer.begin(peeked.tokens_N, peeked.tiles_N, peeked.patches_N)
        self._add_unused(kept, packs_N)
        self.notice = (
            f"data changed since the checkpoint: {'; '.join(changed)}; continuing because of "
            f"checkpoint.allow_data_change with {', '.join(positions)} ({len(kept)} of "
            f"{len(_unused_sample_keys(state))} samples of incomplete sequences kept)"
        )


def _unused_sample_keys(state: Mapping[str, Any]) -> list[SampleKey]:
    """Return the samples of sequences that no step has used, in order."""
    return [_sample_key(r) for pack in [*state["closed"], *state["open"]] for r in pack]


def _sample_key(saved: Sequence[int]) -> SampleKey:
    feed, epoch, index = saved
    return feed, epoch, index


def item_key(item: Item) -> SampleKey:
    """Return the key of a sample in the global order."""
    return item.feed, item.epoch, item.meta.index
