"""Decoding queue of a producer: each microbatch is decoded once for all ranks that request it.

Pipeline ranks of a replica that read no pixels request identical microbatches. A trainer also
repeats a request that timed out. Microbatches that are being decoded or were sent recently are
found by their samples. Decoding of a microbatch does not start if no request waits for it.

Workers are processes and return tensors in shared memory.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from torchmm.common.processes import make_worker_setup, start_fork_server
from torchmm.data.decode import StepDecoder
from torchmm.data.items import PackItems
from torchmm.extensions.remote.producers.wire_format import TensorMessage, step_messages

MAX_CACHED_JOBS = 64
MAX_CACHED_BYTES = 256 * 10**6
"""Maximum size of the cache of sent microbatches in bytes."""

logger = logging.getLogger(__name__)

_decoders: dict[str, StepDecoder] = {}
"""Decoders of the worker process, set by its initializer."""

JobKey = tuple[object, ...]


@dataclass
class DecodeJob:
    """A requested microbatch."""

    key: JobKey
    future: Future[list[TensorMessage]]
    num_requests: int = 0
    """Number of requests that wait for it, or send it."""

    @property
    def finished(self) -> bool:
        """True if the microbatch can be sent."""
        return self.future.done() and not self.future.cancelled() and not self.future.exception()

    @property
    def bytes(self) -> int:
        """Size of a finished microbatch in bytes."""
        return sum(t.nbytes for message in self.future.result() for t in message.tensors.values())


class DecodeQueue:
    """Queue and cache of microbatches that are being decoded.

    Args:
        decoders: Decoders by the fingerprint of their samples.
        workers: Number of processes. With 0, a thread of this process decodes.
    """

    def __init__(self, decoders: Mapping[str, StepDecoder], workers: int) -> None:
        self._decoders = decoders
        self._workers = workers
        self._lock = threading.Lock()
        self._jobs: OrderedDict[JobKey, DecodeJob] = OrderedDict()
        """Jobs by key, least recently requested first."""
        self._pool = self._make_pool()
        self.decoded = 0
        """Number of microbatches that were queued for decoding."""

    @property
    def unfinished(self) -> int:
        """Number of microbatches that are queued or being decoded."""
        with self._lock:
            return sum(not job.future.done() for job in self._jobs.values())

    def request(
        self, samples: str, packs: list[PackItems], images: Mapping[str, range]
    ) -> DecodeJob:
        """Return the job of a microbatch, and start to decode it if necessary.

        The caller must release the job with `release`.

        Args:
            samples: Fingerprint of the samples.
            packs: Samples of the microbatch.
            images: Images to decode, by module (`StepDecoder.images_to_decode`).
        """
        names = tuple(
            tuple((item.feed, item.epoch, item.meta.index) for item in pack) for pack in packs
        )
        key = (
            samples,
            names,
            tuple(
                (module, size_of_job.start, size_of_job.stop)
                for module, size_of_job in sorted(images.items())
            ),
        )
        with self._lock:
            job = self._jobs.get(key)
            if job is None or (job.future.done() and not job.finished):
                job = self._jobs[key] = DecodeJob(key, self._submit(samples, packs, images))
                self.decoded += 1
            self._jobs.move_to_end(key)
            job.num_requests += 1
        return job

    def release(self, job: DecodeJob) -> None:
        """Release a job that a request no longer requires."""
        with self._lock:
            job.num_requests -= 1
            if job.num_requests == 0 and self._jobs.get(job.key) is job:
                if not job.finished:
                    job.future.cancel()  # no effect on running jobs, which can be reused
                if job.future.done() and not job.finished:
                    del self._jobs[job.key]
            self._evict()

    def close(self) -> None:
        """Cancel queued jobs. Running jobs continue."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _evict(self) -> None:
        """Remove the least recently sent microbatches above the limits of the cache."""
        evictable = [job for job in self._jobs.values() if job.finished and not job.num_requests]
        sizes = [job.bytes for job in evictable]
        number = len(evictable)
        size = sum(sizes)
        for job, size_of_job in zip(evictable, sizes, strict=True):
            if number <= MAX_CACHED_JOBS and size <= MAX_CACHED_BYTES:
                return
            del self._jobs[job.key]
            number -= 1
            size -= size_of_job

    def _submit(self, *arguments: Any) -> Future[list[TensorMessage]]:
        try:
            return self._submit_to_pool(*arguments)
        except BrokenProcessPool:
            logger.warning("a worker exited unexpectedly; starting new workers")
            self._pool = self._make_pool()
            return self._submit_to_pool(*arguments)

    def _submit_to_pool(
        self, samples: str, packs: list[PackItems], images: Mapping[str, range]
    ) -> Future[list[TensorMessage]]:
        if self._workers == 0:
            return self._pool.submit(_decode, self._decoders[samples], packs, images)
        return self._pool.submit(_decode_in_worker, samples, packs, images)

    def _make_pool(self) -> Executor:
        if self._workers == 0:
            return ThreadPoolExecutor(1)
        return ProcessPoolExecutor(
            self._workers,
            mp_context=start_fork_server(),
            initializer=_start_worker,
            initargs=(self._decoders, make_worker_setup()),
        )


def _start_worker(decoders: Mapping[str, StepDecoder], setup: object) -> None:
    assert callable(setup)
    setup(0)
    _decoders.update(decoders)


def _decode_in_worker(
    samples: str, packs: list[PackItems], images: Mapping[str, range]
) -> list[TensorMessage]:
    return _decode(_decoders[samples], packs, images)


def _decode(
    decoder: StepDecoder, packs: list[PackItems], images: Mapping[str, range]
) -> list[TensorMessage]:
    return step_messages(decoder.decode_one(packs, images))
