"""Decode planned steps in worker processes: a chain of `torchdata.nodes`.

    planned steps -> ParallelMapper (worker processes) -> Prefetcher -> PinMemory

`DecodedSteps` is the chain. Its source yields the part of this rank of each planned step. The state
of the chain is the loader state of the last yielded step, which is independent of the number of
workers and of prefetching. All workers read one queue, so a slow step does not delay the next
steps. Workers are reused between validation passes.

`torchdata` 0.11 has no timeout and does not detect workers that exited. Therefore:

- The caller of `next` plans steps and puts them into the queue, up to the prefetch depth. Planning
  in the thread of ParallelMapper would require locks that a blocked read never releases.
- Workers record the step that they decode in shared memory. `find_failure` checks the workers.
- `TimedCall` calls `next` in a thread, so that the caller can time out.

`StatefulDataLoader` does not fit, because its state includes the state of each worker. Resuming
would require the same number of workers.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, NamedTuple, TypeVar, cast

from torch.utils.data import Dataset
from torchdata.nodes import BaseNode, ParallelMapper, PinMemory, Prefetcher

from torchmm.common.processes import describe_state, make_worker_setup, start_fork_server
from torchmm.data.decode import DecodedStep
from torchmm.data.items import BalancedRankSamples, PackItems
from torchmm.data.steps.plan_steps import StepIterator, StepSamples

POLL_S = 0.5
"""Seconds between two checks of a waiting caller."""

T = TypeVar("T")
State = dict[str, Any]


class DecodeRequest(NamedTuple):
    """Part of a step that this rank decodes.

    Attributes:
        slot: Index in the array of process ids.
        share: Samples of the rank.
    """

    slot: int
    samples: list[list[PackItems]] | BalancedRankSamples


class DecodeRequestSource(BaseNode[DecodeRequest]):
    """Source node. Its state is the data state of the last step that it handed out.

    Args:
        tasks: Steps to hand out, and the data states after them. None ends the chain.
    """

    def __init__(self, tasks: SimpleQueue[tuple[DecodeRequest, State] | None]) -> None:
        super().__init__()
        self._tasks = tasks
        self._state: State = {}

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._state = initial_state or {}

    def next(self) -> DecodeRequest:
        entry = self._tasks.get()
        if entry is None:
            raise StopIteration
        task, self._state = entry
        return task

    def get_state(self) -> State:
        return self._state


class DecodeFunction:
    """Callable that decodes a step.

    Args:
        decoder: Maps the part of the rank to tensors.
        worker_pids: Process id by slot. A worker writes its id when it starts a step.
        setup: Function that prepares a worker process. None without workers.
    """

    def __init__(
        self,
        decoder: Dataset[DecodedStep],
        worker_pids: Any,
        setup: Callable[[int], None] | None,
    ) -> None:
        self._decoder = decoder
        self._worker_pids = worker_pids
        self._setup = setup

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the object, and prepare the worker process that unpickles it."""
        self.__dict__.update(state)
        assert self._setup is not None
        self._setup(0)

    def __call__(self, task: DecodeRequest) -> DecodedStep:
        self._worker_pids[task.slot] = os.getpid()
        step = self._decoder[task.samples]
        return step if self._setup is None else step.share_memory()


class DecodedSteps(BaseNode[tuple[StepSamples, DecodedStep]]):
    """Node that plans steps, decodes them in worker processes and yields both in order.

    While a thread runs `next`, other threads may only call `find_failure` and `describe_decoder`.

    Args:
        make_steps: Returns the steps after a loader state. A state of None is the position of the
            run.
        decoder: Maps the part of this rank of a step to tensors.
        rank: Data-parallel rank.
        workers: Number of worker processes. With 0, `next` decodes.
        prefetch: Number of steps that are decoded ahead, per worker.
        pin_memory: Whether to copy steps to page-locked memory.
    """

    def __init__(
        self,
        make_steps: Callable[[State | None], StepIterator],
        decoder: Dataset[DecodedStep],
        rank: int,
        *,
        workers: int,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        super().__init__()
        self._make_steps = make_steps
        self._decoder = decoder
        self._rank = rank
        self._workers = workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._state: State = {}
        self._steps = make_steps(None)
        self.notice = self._steps.notice
        """Message about the loader state from which the run continues."""
        self._planned: deque[StepSamples] = deque()
        """Steps that `next` has not returned. The first `_num_queued` are in the queue."""
        self._num_queued = 0
        self._is_planning = False
        self._depth = max(1, workers * prefetch)
        self._tasks: SimpleQueue[tuple[DecodeRequest, State] | None] = SimpleQueue()
        weakref.finalize(self, self._tasks.put, None)
        self._chain: BaseNode[DecodedStep] | None = None
        self._num_stale = 0
        """Number of steps of an unfinished pass that the chain will still yield."""
        self._num_received = 0
        """Number of steps that the chain has yielded."""
        self._worker_pids: Any = [0] * (2 * self._depth)
        """Process ids of the decoding workers, by step number modulo the length."""

    def reset(self, initial_state: State | None = None) -> None:
        """Resume after a loader state, and start to decode. None for the position of the run."""
        super().reset(initial_state)
        if self._chain is None:
            self._chain = self._start_chain()
        self.close()
        self._state = initial_state or {}
        self._steps = self._make_steps(initial_state)
        self._planned.clear()
        self._num_stale += self._num_queued
        self._num_queued = 0
        if self._workers:
            self._queue_steps()

    def next(self) -> tuple[StepSamples, DecodedStep]:
        """Return the next step and the tensors of this rank."""
        assert self._chain is not None
        self._queue_steps()
        if not self._num_queued:
            raise StopIteration
        while self._num_stale:
            next(self._chain)
            self._num_received += 1
            self._num_stale -= 1
        decoded = next(self._chain)
        self._num_received += 1
        if self._pin_memory and not self._workers:
            decoded = decoded.pin_memory()
        step = self._planned.popleft()
        self._num_queued -= 1
        self._state = step.state
        if self._workers:  # Workers decode while the caller trains on this step.
            self._queue_steps()
        return step, decoded

    def get_state(self) -> State:
        """Return the loader state of the last step that `next` returned."""
        return self._state

    def peek(self) -> StepSamples | None:
        """Plan and return the step that the next call of `next` returns, or None at the end."""
        return self._planned[0] if self._planned or self._plan() else None

    @property
    def planned(self) -> StepSamples | None:
        """Step that the next call of `next` returns, or None if it is not planned yet."""
        return self._planned[0] if self._planned else None

    def close(self) -> None:
        """Stop processes that plan steps."""
        self._steps.close()

    def find_failure(self) -> str:
        """Return a message if a worker or a thread has exited, else an empty string."""
        for process in self.processes:
            if not process.is_alive():
                return f"data worker process {process.pid} exited with code {process.exitcode}"
        if self._workers:
            for thread in (self._mapper_iterator._read_thread, self._mapper_iterator._sort_thread):
                if not thread.is_alive():
                    return f"thread {thread.name} failed; see its traceback above"
        return ""

    @property
    def processes(self) -> list[BaseProcess]:
        """Running worker processes."""
        return list(self._mapper_iterator._workers) if self._workers and self._chain else []

    def describe_decoder(self) -> str:
        """Return the process that decodes the next step, for an error message."""
        processes = self.processes
        if self._is_planning or not processes:
            return "this process" + ("" if processes else " (data.workers = 0)")
        names = {}
        for number, pid in enumerate(process.pid for process in processes):
            names[pid] = f"data worker {number} (process {pid}{describe_state(pid)})"
        worker = names.get(self._worker_pids[self._num_received % len(self._worker_pids)])
        return worker or f"none of {', '.join(names.values())}"

    def _plan(self) -> bool:
        """Plan one more step. Return False at the end."""
        self._is_planning = True
        step = next(self._steps, None)
        if step is not None:
            self._planned.append(step)
        self._is_planning = False
        return step is not None

    def _queue_steps(self) -> None:
        """Put steps into the queue of the chain, up to the prefetch depth."""
        while self._num_queued < self._depth:
            if self._num_queued == len(self._planned) and not self._plan():
                return
            step = self._planned[self._num_queued]
            slot = (self._num_received + self._num_stale + self._num_queued) % len(
                self._worker_pids
            )
            self._worker_pids[slot] = 0
            self._tasks.put((DecodeRequest(slot, rank_samples(step, self._rank)), step.state))
            self._num_queued += 1

    def _start_chain(self) -> BaseNode[DecodedStep]:
        """Start workers and threads, and return the last node of the chain."""
        source = DecodeRequestSource(self._tasks)
        if not self._workers:
            decode = DecodeFunction(self._decoder, self._worker_pids, None)
            return ParallelMapper(source, decode, num_workers=0)
        self._worker_pids = start_fork_server().RawArray("q", len(self._worker_pids))
        mapper = ParallelMapper(
            source,
            DecodeFunction(self._decoder, self._worker_pids, make_worker_setup()),
            num_workers=self._workers,
            method="process",
            multiprocessing_context="forkserver",
            # None allows two steps per worker.
            max_concurrent=self._workers if self._prefetch == 1 else None,
        )
        chain: BaseNode[DecodedStep] = mapper
        if self._prefetch > 2:
            chain = Prefetcher(chain, (self._prefetch - 2) * self._workers)
        if self._pin_memory:
            chain = PinMemory(chain, "cuda")
        chain.reset()
        # Private attributes: torchdata has no interface to the processes of a mapper.
        self._mapper_iterator: Any = mapper._it._it
        # Without this, this process cannot exit while a step is too large for the pipe to workers.
        self._mapper_iterator._in_q.cancel_join_thread()
        return chain


def rank_samples(step: StepSamples, rank: int) -> list[list[PackItems]] | BalancedRankSamples:
    """Return the samples of a step that a rank decodes."""
    packs = step.ranks[rank]
    return packs if step.rank_images is None else BalancedRankSamples(packs, step.rank_images(rank))


@dataclass(frozen=True)
class TimeoutResult:
    """Result of a wait that timed out."""

    waited_s: float
    """Waiting time in seconds."""
    stopping: bool
    """Whether the run received a stop signal."""
    failure: str = ""
    """Result of `find_failure`."""


class TimedCall(Generic[T]):
    """Thread that calls a function once per `get`, so that the caller can time out.

    A read can block forever, for example if a worker is stopped, a pipe has no writer or a file
    server does not respond. The function only runs during `get`, so it needs no locks.

    Args:
        function: Function that may block forever.
        prepare: Function that the thread calls once at its start.
    """

    def __init__(
        self, function: Callable[[], T], prepare: Callable[[], None] | None = None
    ) -> None:
        self._function = function
        self._prepare = prepare
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        Thread(target=self._serve, name="data", daemon=True).start()

    def get(
        self,
        timeout_s: float,
        stop_requested: Callable[[], bool] = lambda: False,
        grace_s: float = 0.0,
        find_failure: Callable[[], str] = lambda: "",
    ) -> T | TimeoutResult:
        """Return the result of the function, or raise its exception.

        After `TimeoutResult`, do not call `get` again, because the thread may still be blocked.

        Args:
            timeout_s: Maximum waiting time in seconds.
            stop_requested: Returns True after a stop signal.
            grace_s: Maximum waiting time after a stop signal, in seconds.
            find_failure: Returns the reason if the function will not return, else an empty string.
        """
        self._calls.put(True)
        begin = time.monotonic()
        end = begin + timeout_s
        stopping = False
        while True:
            slice_s = max(0.0, min(POLL_S, end - time.monotonic()))
            try:
                value, error = self._results.get(timeout=slice_s)
            except Empty:
                now = time.monotonic()
            else:
                if error is not None:
                    raise error
                return cast(T, value)
            failure = find_failure()
            if failure or now >= end:
                return TimeoutResult(now - begin, stopping, failure)
            if not stopping and stop_requested():
                end, stopping = min(end, now + grace_s), now + grace_s < end

    def close(self) -> None:
        """Stop the thread when the function returns."""
        self._calls.put(False)

    def _serve(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while self._calls.get():
            try:
                self._results.put((self._function(), None))
            except BaseException as error:  # raised by `get`
                self._results.put((None, error))
