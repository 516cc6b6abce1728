"""Loader of the batches of one data-parallel rank.

A chain of `torchdata.nodes` plans and decodes steps (`torchmm.data.nodes`). The loader adds a
timeout, error messages and reports of corrupt samples. Each batch has the loader state after its
step, so resuming is exact for any number of workers and any prefetch depth.
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
from torchmm.common.processes import SHARED_MEMORY, SHARED_MEMORY_ADVICE, kill_workers
from torchmm.common.sequence_slices import BalancedMicrobatch
from torchmm.data.corrupt import MAX_LOGGED_SAMPLES
from torchmm.data.decode import DecodedStep, StepDecoder
from torchmm.data.items import PackItems, RankImages
from torchmm.data.microbatch_builder import sample_name
from torchmm.data.nodes import DecodedSteps, State, TimedCall, TimeoutResult, rank_samples
from torchmm.data.sources.sample_set import SampleSet
from torchmm.data.steps.plan_steps import StepIterator
from torchmm.recipe.data_section import DataConfig

STOP_GRACE_S = 5.0
"""Seconds to wait for data after a stop signal. Launchers kill a process after about 30 s."""
_INDEX_AND_REASON = re.compile(r"\[\d+\]: .*", re.DOTALL)
"""Index and reason in the message "source[index]: reason" about a corrupt sample."""

logger = logging.getLogger(__name__)


@dataclass
class StepBatch:
    """Batch of one data-parallel rank for one optimizer step."""

    microbatches: list[Microbatch]
    state: dict[str, Any]
    """Loader state *after* this batch, to be saved with the checkpoint of this step."""
    skipped: list[str] = field(default_factory=list)
    """Messages "source[index]: reason" for corrupt samples that this rank has not reported before.
    Only rank 0 lists samples that were corrupt when the step was planned."""
    epoch: float = 0.0
    """See `StepSamples`."""
    corrupt: dict[str, str] = field(default_factory=dict)
    """Maps "source[index]" to the reason, for samples that this rank could not decode and masked.
    Ranks with the same samples may have different entries (`Loader.mask_corrupt`)."""
    packs: list[list[PackItems]] = field(default_factory=list)
    """Samples of each microbatch, by sequence."""
    rank_images: list[RankImages] | None = None
    """Images that this rank encodes and generates in each microbatch. None for those of `packs`."""
    decoded_media: int = 0
    """See `DecodedStep`."""
    read_bytes: int = 0
    """See `DecodedStep`."""
    imbalance: Mapping[str, Any] = field(default_factory=dict)
    """See `StepSamples`."""

    def stream_counts(self, kind: Literal["filtered", "dropped"]) -> dict[str, Counter[str]]:
        """Return the sample counts of each stream since the start of the run, by description."""
        feeds = self.state.get("feeds", {}).items()
        return {name: Counter(feed[kind]) for name, feed in feeds if kind in feed}

    def stream_total(self, kind: Literal["filtered", "dropped"]) -> int | None:
        """Return the sum of `stream_counts` over all streams, or None without streams."""
        counts = self.stream_counts(kind)
        return sum(count.total() for count in counts.values()) if counts else None


class Loader:
    """Iterable of `StepBatch`. Each iteration starts at the position of the constructor.

    Args:
        make_steps: Returns the steps after a loader state. A state of None is the position of the
            run.
        decoder: Decodes steps.
        samples: Samples of the steps.
        data: Number of workers, prefetching and timeouts.
        sequence_length: Tokens of a packed sequence.
        rank: Data-parallel rank.
        pin_memory: Whether to copy batches to page-locked memory.
        remote: Dataset that requests decoded steps from producers. None to decode locally.
    """

    def __init__(
        self,
        make_steps: Callable[[State | None], StepIterator],
        decoder: StepDecoder,
        samples: SampleSet,
        data: DataConfig,
        sequence_length: int,
        rank: int,
        pin_memory: bool,
        remote: Dataset[DecodedStep] | None = None,
    ) -> None:
        self._steps = DecodedSteps(
            make_steps,
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
        self._reported: set[str] = set()
        self._corrupt: Counter[str] = Counter()
        """Number of corrupt samples by source."""
        self._logged_counts: dict[tuple[str, str], int] = {}
        """Logged counts of samples of streams, by source and description."""
        self._prefetched = data.workers * data.prefetch
        self._memory_checked = False
        self._timeout_s = data.timeout_s
        if remote is not None:  # `remote` reports unresponsive producers after this time
            self._timeout_s += data.producers.retry_timeout_s
        self._pin_memory = pin_memory
        self.timeout_message = ""
        """Message about the step that `batches` stopped waiting for, or an empty string."""

    @property
    def samples_per_pass(self) -> int:
        """Number of samples of all sources, including corrupt samples. 0 if unknown."""
        return self._samples.count

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield batches in which the corrupt samples of this rank are masked."""
        for batch in self.batches():
            assert batch is not None  # None follows a stop signal only
            yield self.mask_corrupt(batch, batch.corrupt)

    def batches(
        self, stop_requested: Callable[[], bool] = lambda: False
    ) -> Iterator[StepBatch | None]:
        """Yield batches, then None if no data arrives within `STOP_GRACE_S` of a stop signal.

        The caller passes the corrupt samples of each batch to `mask_corrupt`.

        Args:
            stop_requested: Returns True after a stop signal.

        Raises:
            DataError: The samples of a step did not arrive within `data.timeout_s`, their worker
                exited, or they could not be prepared.
        """
        self._steps.reset()
        self._check_shared_memory()  # Workers have not written to shared memory yet.
        device = torch.cuda.current_device() if self._pin_memory else None
        timed_call = TimedCall(partial(next, self._steps, None), partial(_use_device, device))
        try:
            wait = partial(
                timed_call.get,
                self._timeout_s,
                stop_requested,
                STOP_GRACE_S,
                self._steps.find_failure,
            )
            while (result := wait()) is not None:
                if isinstance(result, TimeoutResult):
                    self.timeout_message = self._describe_timeout(result)
                    kill_workers(
                        self._steps.processes
                    )  # Running workers block the exit of this process.
                    if not result.stopping:
                        raise DataError(self.timeout_message)
                    yield None
                    return
                plan, step = result
                if step.failure:
                    raise DataError(step.failure)
                batch = StepBatch(
                    step.microbatches,
                    plan.state,
                    self._report(plan.skipped) if self._rank == 0 else [],
                    plan.epoch,
                    step.corrupt,
                    plan.ranks[self._rank],
                    None if plan.rank_images is None else plan.rank_images(self._rank),
                    step.decoded_media,
                    step.read_bytes,
                    plan.imbalance,
                )
                if self._rank == 0:
                    self._log_stream_counts(batch)
                yield batch
        finally:
            timed_call.close()
            self._steps.close()

    def _check_shared_memory(self) -> None:
        """Warn if the prefetched steps of all local ranks require more than /dev/shm has."""
        plan = self._steps.planned
        if self._memory_checked or not self._prefetched or plan is None:
            return
        self._memory_checked = True  # Validation iterates several times.
        if not Path(SHARED_MEMORY).is_dir():
            return
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share = rank_samples(plan, self._rank)
        needed = self._decoder.step_bytes(share) * self._prefetched * ranks
        if needed > (size := shutil.disk_usage(SHARED_MEMORY).total):
            logger.warning(
                "/dev/shm has %.1f MB, but %d prefetched steps of %d local ranks require "
                "%.1f MB, estimated from the first step; %s, or lower data.prefetch",
                size / 1e6,
                self._prefetched,
                ranks,
                needed / 1e6,
                SHARED_MEMORY_ADVICE,
            )

    def mask_corrupt(self, batch: StepBatch, corrupt: Mapping[str, str]) -> StepBatch:
        """Return the batch with masked corrupt samples.

        Args:
            batch: Batch from `batches`.
            corrupt: Maps "source[index]" to the reason, on all ranks with the same samples. If
                images are balanced, on all ranks of the run.
        """
        if not corrupt:
            return batch
        microbatches = [
            self._decoder.mask_corrupt_samples(microbatch, packs, corrupt)
            for microbatch, packs in zip(batch.microbatches, batch.packs, strict=True)
        ]
        for microbatch, rank_images in zip(microbatches, batch.rank_images or (), strict=False):
            assert isinstance(microbatch, BalancedMicrobatch)
            self._decoder.zero_corrupt_images(microbatch, rank_images, corrupt)
        if self._pin_memory:
            # Pinned tensors stay as they are.
            microbatches = [microbatch.pin_memory() for microbatch in microbatches]
        names = {sample_name(item.meta) for m in batch.packs for pack in m for item in pack}
        # With balanced images, the rank that trains on a sample reports it.
        local = {
            name: why for name, why in corrupt.items() if batch.rank_images is None or name in names
        }
        skipped = self._report([f"{name}: {why}" for name, why in local.items()])
        skipped = [*batch.skipped, *skipped]
        return replace(batch, microbatches=microbatches, skipped=skipped, corrupt={})

    def images(self, source: str, index: int) -> list[Image.Image]:
        """Return the images of a sample in RGB, to be displayed. Empty for streams."""
        return self._samples.sample_images(self._feeds[source], index)

    def references(self, source: str, index: int) -> tuple[str, ...]:
        """Return all reference texts of a sample, if it has more than one."""
        return self._samples.references(self._feeds[source], index)

    def next_metas(self) -> Sequence[list[MicrobatchMeta]] | None:
        """Return microbatch metadata of the next batch by data-parallel rank, or None at the end.

        The metadata does not require decoded samples.
        """
        plan = self._steps.peek()
        return plan.metas(self._sequence_length) if plan else None

    def planned_metas(self) -> Sequence[list[MicrobatchMeta]] | None:
        """Return `next_metas` if the next step is already planned, else None."""
        plan = self._steps.planned
        return plan.metas(self._sequence_length) if plan else None

    def _report(self, messages: list[str]) -> list[str]:
        """Log corrupt samples, and return the messages that were not reported before."""
        new = [m for m in dict.fromkeys(messages) if m not in self._reported]
        self._reported.update(new)
        for message in new:
            source = _INDEX_AND_REASON.sub("", message)
            self._corrupt[source] += 1
            if self._corrupt[source] <= MAX_LOGGED_SAMPLES:
                logger.warning("corrupt sample skipped: %s", message)
            elif self._corrupt[source] == MAX_LOGGED_SAMPLES + 1:
                logger.warning(
                    "source %r has more corrupt samples: they are skipped and counted "
                    "(skipped_samples), but no longer logged. Repair or remove the samples "
                    "above and similar samples; use `columns` to map column names",
                    source,
                )
        return new

    def _log_stream_counts(self, batch: StepBatch) -> None:
        """Log filtered and truncated samples of streams, again when a count is ten times higher.

        Counts of indexed sources are logged at the start of the run.
        """
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

    def _describe_next_step(self) -> str:
        """Return a description of the samples of the next step."""
        plan = self._steps.planned  # planning may block, too
        if plan is None:
            return "the plan of the next step"
        items = [i for m in plan.ranks[self._rank] for p in m for i in p]
        names = f"{items[0].meta.source}[{items[0].meta.index}]" if items else "nothing"
        return f"{len(items)} samples starting with {names}"

    def _describe_timeout(self, timeout: TimeoutResult) -> str:
        """Return a message with the late worker, the missing samples and how to fix it."""
        if timeout.failure:
            return (
                "a data worker exited unexpectedly while the run waited for "
                f"{self._describe_next_step()} ({timeout.failure}). If memory ran out, lower "
                "data.workers or data.prefetch"
            )
        who = self._steps.describe_decoder()
        limit = "" if timeout.stopping else f" (data.timeout_s = {self._timeout_s:g})"
        return (
            f"{who} has not returned {self._describe_next_step()} within {timeout.waited_s:.0f} "
            f"s{limit}. Check for a file system that does not respond, a stopped process, or "
            "a file that is a pipe. If samples require that long, raise data.timeout_s or "
            "data.workers"
        )


def _use_device(device: int | None) -> None:
    """Set the device of a thread.

    The default is device 0, on which pinning memory would create another CUDA context.
    """
    if device is not None:
        torch.cuda.set_device(device)
