"""The loader: plans steps in the training process, decodes them in workers, hands out batches.

PyTorch's plain `DataLoader` does the transport: its sampler yields planned steps instead of
integers. torchdata's StatefulDataLoader was rejected: it saves the state of every worker, which
makes the checkpoint depend on the number of workers and the depth of prefetching; here the state
travels with the batch it belongs to, so neither matters.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.common.errors import DataError
from torchmm.common.processes import (
    MORE_SHARED_MEMORY,
    SHARED_MEMORY,
    describe_state,
    end_workers,
    fork_server,
    make_worker_setup,
    workers_of,
)
from torchmm.common.row_slices import BalancedMicrobatch
from torchmm.data.corrupt import SHOWN
from torchmm.data.decode import DecodedStep, StepDecoder
from torchmm.data.items import BalancedShare, EncodedImages, PackItems
from torchmm.data.rows import sample_name
from torchmm.data.sources.sample_set import SampleSet
from torchmm.data.steps.step_packs import Steps, StepSamples
from torchmm.data.waiting import Overdue, Waiting
from torchmm.recipe.data_section import DataConfig

STOP_GRACE_S = 5.0
"""How long to wait for data once the run was asked to stop: most steps' arrive within this time,
and launchers wait about 30 s before they kill."""
_SAMPLE = re.compile(r"\[\d+\]: .*", re.DOTALL)
"""All of a message about a corrupt sample but its source."""

logger = logging.getLogger(__name__)


@dataclass
class StepBatch:
    """Everything one data-parallel rank needs for one optimizer step.

    `state` is the loader's state *after* this batch: saving it with the checkpoint of this step
    makes resume exact whatever the number of workers or the depth of prefetching.
    """

    microbatches: list[Microbatch]
    state: dict[str, Any]
    skipped: list[str] = field(default_factory=list)
    """One "source[index]: reason" per corrupt sample, the first time this rank meets it; what all
    ranks find while planning is listed by rank 0 only."""
    epoch: float = 0.0
    """See `StepSamples`."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Reasons by "source[index]" of samples that this rank could not decode and made blank. Other
    ranks with the same samples may have found different ones (`Loader.settle`)."""
    packs: list[list[PackItems]] = field(default_factory=list)
    """Samples of every microbatch."""
    encoded: list[EncodedImages] | None = None
    """Images that this rank encodes and generates in every microbatch; None: those of `packs`."""
    decoded_images: int = 0
    """See `DecodedStep`."""
    read_bytes: int = 0
    imbalance: Mapping[str, Any] = field(default_factory=dict)
    """See `StepSamples`."""

    def stream_counts(self, kind: Literal["filtered", "dropped"]) -> dict[str, Counter[str]]:
        """Return the counts of `StreamFeed` since the run began, by name of the stream."""
        feeds = self.state.get("feeds", {}).items()
        return {name: Counter(feed[kind]) for name, feed in feeds if kind in feed}

    def stream_total(self, kind: Literal["filtered", "dropped"]) -> int | None:
        """Return the sum of these counts over all streams. None without streams."""
        counts = self.stream_counts(kind)
        return sum(count.total() for count in counts.values()) if counts else None


class StepQueue(Sampler[list[list[PackItems]] | BalancedShare]):
    """Steps planned and not yet trained on; yields this rank's share of each to the DataLoader.

    Args:
        begin: what is planned from the starting position on.
        rank: this data-parallel rank.
    """

    def __init__(self, begin: Callable[[], Steps], rank: int) -> None:
        self._begin = begin
        self._rank = rank
        self._steps = begin()
        # Two readers run ahead of training by different distances: the DataLoader, which
        # prefetches, and `peek`, for planning. Steps stay here until training takes them; `_handed`
        # counts those that the DataLoader already has.
        self._upcoming: deque[StepSamples] = deque()
        self._handed = 0

    def __iter__(self) -> Iterator[list[list[PackItems]] | BalancedShare]:
        self.close()
        self._steps = self._begin()
        self._upcoming.clear()
        self._handed = 0
        while self._handed < len(self._upcoming) or self._plan_one():
            self._handed += 1
            yield rank_share(self._upcoming[self._handed - 1], self._rank)

    @property
    def notice(self) -> str:
        """What to report about the starting position."""
        return self._steps.notice

    def peek(self) -> StepSamples | None:
        """The next step to be trained on; None at the end."""
        return self._upcoming[0] if self._upcoming or self._plan_one() else None

    @property
    def known(self) -> StepSamples | None:
        """The same, if it is planned already."""
        return self._upcoming[0] if self._upcoming else None

    def close(self) -> None:
        """Ends what plans steps elsewhere."""
        self._steps.close()

    def pop(self) -> StepSamples:
        """Take the next step off the queue."""
        self._handed -= 1
        return self._upcoming.popleft()

    def _plan_one(self) -> bool:
        plan = next(self._steps, None)
        if plan is not None:
            self._upcoming.append(plan)
        return plan is not None


def rank_share(step: StepSamples, rank: int) -> list[list[PackItems]] | BalancedShare:
    """Return the part of a step that a rank decodes."""
    packs = step.ranks[rank]
    return packs if step.encoded is None else BalancedShare(packs, step.encoded(rank))


class Loader:
    """Iterable of `StepBatch`; every iteration begins at the position the loader was built with.

    Args:
        queue: planned steps.
        decoder: decodes them.
        samples: what they consist of.
        data: workers and prefetching.
        sequence_length: tokens of a pack.
        rank: this data-parallel rank.
        pin_memory: whether batches are to be in page-locked memory.
        remote: asks producers instead of decoding here.
    """

    def __init__(
        self,
        queue: StepQueue,
        decoder: StepDecoder,
        samples: SampleSet,
        data: DataConfig,
        sequence_length: int,
        rank: int,
        pin_memory: bool,
        remote: Dataset[DecodedStep] | None = None,
    ) -> None:
        if queue.notice and rank == 0:
            logger.warning("%s", queue.notice)
        self._queue = queue
        self._decoder = decoder
        self._samples = samples
        self._feeds = samples.feeds()
        self._sequence_length = sequence_length
        self._rank = rank
        self._known_corrupt: set[str] = set()
        self._corrupt: Counter[str] = Counter()
        """By source."""
        self._logged_counts: dict[tuple[str, str], int] = {}
        """Logged counts of samples of streams, by source and description."""
        self._workers = data.workers
        self._prefetched = data.workers * data.prefetch
        self._memory_checked = False
        self._timeout_s = data.timeout_s
        if remote is not None:  # which itself reports producers that do not answer
            self._timeout_s += data.producers.give_up_s
        self._pin_memory = pin_memory
        self.overdue = ""
        """What `batches` gave up waiting for when it was asked to stop."""
        self._loader = DataLoader(
            remote or decoder,
            batch_size=None,
            sampler=queue,
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            persistent_workers=data.workers > 0,
            multiprocessing_context=fork_server() if data.workers else None,
            collate_fn=_shared if data.workers else _same,
            worker_init_fn=make_worker_setup() if data.workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # iter() draws a seed: not from the training's generator
        )

    @property
    def samples_per_pass(self) -> int:
        """Number of samples of all sources, with corrupt ones; 0 if it is unknown."""
        return self._samples.count

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield batches whose corrupt samples are those that this rank found."""
        for batch in self.batches():
            assert batch is not None  # nobody asks to stop
            yield self.settle(batch, batch.corrupt)

    def batches(
        self, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[StepBatch | None]:
        """Iterates; ends with None if data did not arrive soon after a stop signal.

        Call `settle` with the corrupt samples of each batch.

        Args:
            asked_to_stop: whether the run is to end.

        Raises:
            DataError: a step's samples did not arrive in `data.timeout_s`, their worker died, or
                they could not be prepared.
        """
        # The wait is in a thread, because a read that blocks for ever must not keep this one from
        # noticing the time limit or a stop signal; see `torchmm.data.waiting`.
        steps = iter(self._loader)
        self._check_shared_memory()  # Workers have only started, and have written nothing.
        device = torch.cuda.current_device() if self._pin_memory else None
        waiting = Waiting(partial(next, steps, None), partial(_use_device, device))
        number = 0
        try:
            while (step := self._wait(waiting, asked_to_stop)) is not None:
                if isinstance(step, Overdue):
                    self.overdue = self._describe_overdue(step, steps, number)
                    end_workers(workers_of(steps))  # this process could not exit otherwise
                    if not step.stopping:
                        raise DataError(self.overdue)
                    yield None
                    return
                if step.failure:
                    raise DataError(step.failure)
                plan = self._queue.pop()
                number += 1
                batch = StepBatch(
                    step.microbatches,
                    plan.state,
                    self._report(plan.skipped) if self._rank == 0 else [],
                    plan.epoch,
                    step.corrupt,
                    plan.ranks[self._rank],
                    None if plan.encoded is None else plan.encoded(self._rank),
                    step.decoded_images,
                    step.read_bytes,
                    plan.imbalance,
                )
                if self._rank == 0:
                    self._log_stream_counts(batch)
                yield batch
        finally:
            waiting.close()
            self._queue.close()

    def _check_shared_memory(self) -> None:
        """Warn if all steps that workers of this machine prepare exceed the shared memory."""
        plan = self._queue.known
        if self._memory_checked or not self._prefetched or plan is None:
            return
        self._memory_checked = True  # Validation iterates again and again.
        if not Path(SHARED_MEMORY).is_dir():
            return
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share = rank_share(plan, self._rank)
        needed = self._decoder.step_bytes(share) * self._prefetched * ranks
        if needed > (size := shutil.disk_usage(SHARED_MEMORY).total):
            logger.warning(
                "/dev/shm has %.1f MB, but %d prefetched steps of %d local ranks, as large as the "
                "first one, need %.1f MB; %s, or lower data.prefetch",
                size / 1e6,
                self._prefetched,
                ranks,
                needed / 1e6,
                MORE_SHARED_MEMORY,
            )

    def _wait(
        self, waiting: Waiting[DecodedStep | None], asked_to_stop: Callable[[], bool]
    ) -> DecodedStep | Overdue | None:
        try:
            return waiting.get(self._timeout_s, asked_to_stop, STOP_GRACE_S)
        except (RuntimeError, OSError, EOFError) as error:
            if not _worker_died(error):
                raise
            raise DataError(
                f"a data worker died while the run waited for {self._awaited()} "
                f"({type(error).__name__}: {error}). If memory ran out, lower data.workers or "
                "data.prefetch"
            ) from error

    def settle(self, batch: StepBatch, corrupt: Mapping[str, str]) -> StepBatch:
        """Return the batch with corrupt samples made blank.

        Args:
            corrupt: Reasons by "source[index]", from all ranks with the same samples. If images are
                balanced, from all ranks of the run.
        """
        if not corrupt:
            return batch
        found = [
            self._decoder.blank_out(microbatch, packs, corrupt)
            for microbatch, packs in zip(batch.microbatches, batch.packs, strict=True)
        ]
        for microbatch, encoded in zip(found, batch.encoded or (), strict=False):
            assert isinstance(microbatch, BalancedMicrobatch)
            self._decoder.blank_read(microbatch, encoded, corrupt)
        if self._pin_memory:
            found = [microbatch.pin_memory() for microbatch in found]  # what is new of them
        names = {sample_name(item.meta) for m in batch.packs for pack in m for item in pack}
        # With balanced images, the rank that trains on a sample reports it.
        own = {name: why for name, why in corrupt.items() if batch.encoded is None or name in names}
        skipped = self._report([f"{name}: {why}" for name, why in own.items()])
        return replace(batch, microbatches=found, skipped=[*batch.skipped, *skipped], corrupt={})

    def images(self, source: str, index: int) -> list[Image.Image]:
        """The images of one sample as RGB pictures, to be shown; none for streams."""
        return self._samples.pictures(self._feeds[source], index)

    def references(self, source: str, index: int) -> tuple[str, ...]:
        """All that people have written for one sample, where that is more than its own text."""
        return self._samples.references(self._feeds[source], index)

    def next_metas(self) -> Sequence[list[MicrobatchMeta]] | None:
        """Microbatch metadata of the batch that comes next, by data-parallel rank; None at the end.

        Available as soon as the previous batch was returned, without waiting for any decoding.
        """
        plan = self._queue.peek()
        return plan.metas(self._sequence_length) if plan else None

    def known_metas(self) -> Sequence[list[MicrobatchMeta]] | None:
        """Return `next_metas` if the next step is planned already, else None."""
        plan = self._queue.known
        return plan.metas(self._sequence_length) if plan else None

    def _report(self, found: list[str]) -> list[str]:
        """Corrupt samples not reported before."""
        new = [m for m in dict.fromkeys(found) if m not in self._known_corrupt]
        self._known_corrupt.update(new)
        for message in new:
            source = _SAMPLE.sub("", message)
            self._corrupt[source] += 1
            if self._corrupt[source] <= SHOWN:
                logger.warning("corrupt sample skipped: %s", message)
            elif self._corrupt[source] == SHOWN + 1:
                logger.warning(
                    "source %r has more corrupt samples: they are skipped and counted "
                    "(skipped_samples), but not named. Repair or remove those above and like "
                    "them; `columns` maps names of columns",
                    source,
                )
        return new

    def _log_stream_counts(self, batch: StepBatch) -> None:
        """Log filtered and truncated samples of streams, first and whenever their number is ten
        times higher. Those of indexed sources are logged at the start of the run."""
        kinds: Sequence[Literal["filtered", "dropped"]] = ("filtered", "dropped")
        for kind in kinds:
            text = "filtered" if kind == "filtered" else "dropped from samples in use"
            for source, counts in batch.stream_counts(kind).items():
                for content, count in counts.items():
                    if count >= 10 * self._logged_counts.get((source, content), 0):
                        self._logged_counts[source, content] = count
                        logger.warning(
                            "source %r, %d samples so far: %s: %s", source, count, text, content
                        )

    def _awaited(self) -> str:
        """The samples of the step that comes next."""
        plan = self._queue.known  # planning it now might take as long again
        if plan is None:
            return "the plan of the next step"
        items = [i for m in plan.ranks[self._rank] for p in m for i in p]
        names = f"{items[0].meta.source}[{items[0].meta.index}]" if items else "nothing"
        return f"{len(items)} samples beginning with {names}"

    def _describe_overdue(self, overdue: Overdue, steps: Iterator[DecodedStep], number: int) -> str:
        """Who has not delivered step `number` of this iteration: workers take turns."""
        workers = workers_of(steps)
        who = "this process (data.workers = 0)"
        if workers:
            turn = number % len(workers)
            pid = workers[turn].pid
            who = f"data worker {turn} (process {pid}{describe_state(pid)})"
        limit = "" if overdue.stopping else f" (data.timeout_s = {self._timeout_s:g})"
        return (
            f"{who} has not delivered {self._awaited()} for {overdue.waited_s:.0f} s{limit}. Look "
            "for a file system that does not answer, a process that was stopped, or a file that is "
            "a pipe; where samples take that long, raise data.timeout_s or data.workers"
        )


def _worker_died(error: Exception) -> bool:
    """Whether PyTorch lost a worker, perhaps while receiving tensors from it."""
    text = str(error)
    if isinstance(error, RuntimeError):
        return "exited unexpectedly" in text or "killed by signal" in text
    return "in DataLoader worker process" not in text


def _use_device(device: int | None) -> None:
    """A thread starts on the first device, where page-locking would take memory for a context."""
    if device is not None:
        torch.cuda.set_device(device)


def _same(step: Any) -> Any:
    return step


def _shared(step: Any) -> Any:
    return step.share_memory()
