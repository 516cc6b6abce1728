"""Loader: yields the batches of one data-parallel rank.

A chain of `torchdata.nodes` plans and decodes steps (`torchmm.data.nodes`). The loader limits the
time of a wait, describes failures, reports corrupt samples, and saves the data state of a step in
its batch. Resuming is exact for any number of workers and any depth of prefetching.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch.utils.data import Dataset

from torchmm.common.batch import Microbatch, MicrobatchMeta
from torchmm.common.errors import DataError
from torchmm.common.processes import MORE_SHARED_MEMORY, SHARED_MEMORY, end_workers
from torchmm.common.row_slices import BalancedMicrobatch
from torchmm.data.corrupt import SHOWN
from torchmm.data.decode import DecodedStep, StepDecoder
from torchmm.data.items import EncodedImages, PackItems
from torchmm.data.nodes import DecodedSteps, Overdue, State, Waiting, rank_share
from torchmm.data.rows import sample_name
from torchmm.data.sources.sample_set import SampleSet
from torchmm.data.steps.step_packs import Steps
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
    decoded_media: int = 0
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


class Loader:
    """Iterable of `StepBatch`. Every iteration begins at the position that it was built with.

    Args:
        begin: Plans steps after a data state. None for the position of the run.
        decoder: Decodes steps.
        samples: Samples of the steps.
        data: Number of workers, prefetching and timeouts.
        sequence_length: Tokens of a packed sequence.
        rank: Data-parallel rank.
        pin_memory: Whether to copy batches to page-locked memory.
        remote: Requests decoded steps from producers. None to decode on this machine.
    """

    def __init__(
        self,
        begin: Callable[[State | None], Steps],
        decoder: StepDecoder,
        samples: SampleSet,
        data: DataConfig,
        sequence_length: int,
        rank: int,
        pin_memory: bool,
        remote: Dataset[DecodedStep] | None = None,
    ) -> None:
        self._steps = DecodedSteps(
            begin,
            remote or decoder,
            rank,
            workers=data.workers,
            prefetch=data.prefetch,
            pin_memory=pin_memory,
        )
        if self._steps.notice and rank == 0:
            logger.warning("%s", self._steps.notice)
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
        self._prefetched = data.workers * data.prefetch
        self._memory_checked = False
        self._timeout_s = data.timeout_s
        if remote is not None:  # which itself reports producers that do not answer
            self._timeout_s += data.producers.retry_timeout_s
        self._pin_memory = pin_memory
        self.overdue = ""
        """What `batches` gave up waiting for when it was asked to stop."""

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
        self._steps.reset()
        self._check_shared_memory()  # Workers have only started, and have written nothing.
        device = torch.cuda.current_device() if self._pin_memory else None
        waiting = Waiting(partial(next, self._steps, None), partial(_use_device, device))
        try:
            wait = partial(
                waiting.get,
                self._timeout_s,
                asked_to_stop,
                STOP_GRACE_S,
                self._steps.find_failure,
            )
            while (found := wait()) is not None:
                if isinstance(found, Overdue):
                    self.overdue = self._describe_overdue(found)
                    end_workers(self._steps.processes)  # They would keep this process alive.
                    if not found.stopping:
                        raise DataError(self.overdue)
                    yield None
                    return
                plan, step = found
                if step.failure:
                    raise DataError(step.failure)
                batch = StepBatch(
                    step.microbatches,
                    plan.state,
                    self._report(plan.skipped) if self._rank == 0 else [],
                    plan.epoch,
                    step.corrupt,
                    plan.ranks[self._rank],
                    None if plan.encoded is None else plan.encoded(self._rank),
                    step.decoded_media,
                    step.read_bytes,
                    plan.imbalance,
                )
                if self._rank == 0:
                    self._log_stream_counts(batch)
                yield batch
        finally:
            waiting.close()
            self._steps.close()

    def _check_shared_memory(self) -> None:
        """Warn if all steps that workers of this machine prepare exceed the shared memory."""
        plan = self._steps.planned
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
                "/dev/shm has %.1f MB, but %d prefetched steps of %d local ranks require "
                "%.1f MB, estimated from the first step; %s, or lower data.prefetch",
                size / 1e6,
                self._prefetched,
                ranks,
                needed / 1e6,
                MORE_SHARED_MEMORY,
            )

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
        plan = self._steps.peek()
        return plan.metas(self._sequence_length) if plan else None

    def known_metas(self) -> Sequence[list[MicrobatchMeta]] | None:
        """Return `next_metas` if the next step is planned already, else None."""
        plan = self._steps.planned
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
                    "(skipped_samples), but no longer logged. Repair or remove the samples "
                    "above and similar samples; use `columns` to map column names",
                    source,
                )
        return new

    def _log_stream_counts(self, batch: StepBatch) -> None:
        """Log filtered and truncated samples of streams, first and whenever their number is ten
        times higher. Those of indexed sources are logged at the start of the run."""
        kinds: Sequence[Literal["filtered", "dropped"]] = ("filtered", "dropped")
        for kind in kinds:
            text = "filtered" if kind == "filtered" else "truncated samples"
            for source, counts in batch.stream_counts(kind).items():
                for content, count in counts.items():
                    if count >= 10 * self._logged_counts.get((source, content), 0):
                        self._logged_counts[source, content] = count
                        logger.warning(
                            "source %r, %d samples so far: %s: %s", source, count, text, content
                        )

    def _awaited(self) -> str:
        """The samples of the step that comes next."""
        plan = self._steps.planned  # planning it now might take as long again
        if plan is None:
            return "the plan of the next step"
        items = [i for m in plan.ranks[self._rank] for p in m for i in p]
        names = f"{items[0].meta.source}[{items[0].meta.index}]" if items else "nothing"
        return f"{len(items)} samples starting with {names}"

    def _describe_overdue(self, overdue: Overdue) -> str:
        """Return which worker has not delivered which samples, and how to fix it."""
        if overdue.failure:
            return (
                "a data worker exited unexpectedly while the run waited for "
                f"{self._awaited()} ({overdue.failure}). If memory ran out, lower "
                "data.workers or data.prefetch"
            )
        who = self._steps.describe_decoder()
        limit = "" if overdue.stopping else f" (data.timeout_s = {self._timeout_s:g})"
        return (
            f"{who} has not returned {self._awaited()} within {overdue.waited_s:.0f} "
            f"s{limit}. Check for a file system that does not respond, a stopped process, or "
            "a file that is a pipe. If samples require that long, raise data.timeout_s or "
            "data.workers"
        )


def _use_device(device: int | None) -> None:
    """A thread starts on the first device, where page-locking would take memory for a context."""
    if device is not None:
        torch.cuda.set_device(device)
