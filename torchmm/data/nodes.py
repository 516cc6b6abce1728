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
- `Waiting` calls `next` in a thread, so that the caller can time out.

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

from torchmm.common.processes import describe_state, fork_server, make_worker_setup
from torchmm.data.decode import DecodedStep
from torchmm.data.items import BalancedShare, PackItems
from torchmm.data.steps.step_packs import Steps, StepSamples

SLICE_S = 0.5
"""Seconds between two checks of a waiting caller."""

T = TypeVar("T")
State = dict[str, Any]


class Task(NamedTuple):
    """Part of a step that this rank decodes.

    Attributes:
        slot: Index in the array of process ids.
        share: Samples of the rank.
    """

    slot: int
    share: list[list[PackItems]] | BalancedShare


class TaskSource(BaseNode[Task]):
    """Source node. Its state is the data state of the last step that it handed out.

    Args:
        tasks: Steps to hand out, and the data states after them. None ends the chain.
    """

    def __init__(self, tasks: SimpleQueue[tuple[Task, State] | None]) -> None:
        super().__init__()
        self._tasks = tasks
        self._state: State = {}

    def reset(self, initial_state: State | None = None) -> None:
        super().reset(initial_state)
        self._state = initial_state or {}

    def next(self) -> Task:
        entry = self._tasks.get()
        if entry is None:
            raise StopIteration
        task, self._state = entry
        return task

    def get_state(self) -> State:
        return self._state


class DecodeTask:
    """Callable that decodes a step.

    Args:
        decoder: Maps the part of the rank to tensors.
        decoding: Process id by slot. A worker writes its id when it starts a step.
        setup: Function that prepares a worker process. None without workers.
    """

    def __init__(
        self,
        decoder: Dataset[DecodedStep],
        decoding: Any,
        setup: Callable[[int], None] | None,
    ) -> None:
        self._decoder = decoder
        self._decoding = decoding
        self._setup = setup

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the object, and prepare the worker process that unpickles it."""
        self.__dict__.update(state)
        assert self._setup is not None
        self._setup(0)

    def __call__(self, task: Task) -> DecodedStep:
        self._decoding[task.slot] = os.getpid()
        step = self._decoder[task.share]
        return step if self._setup is None else step.share_memory()


class DecodedSteps(BaseNode[tuple[StepSamples, DecodedStep]]):
    """Node that plans steps, decodes them in worker processes and yields both in order.

    While a thread runs `next`, other threads may only call `find_failure` and `describe_decoder`.

    Args:
        begin: Returns the steps after a loader state. A state of None is the position of the run.
        decoder: Maps the part of this rank of a step to tensors.
        rank: Data-parallel rank.
        workers: Number of worker processes. With 0, `next` decodes.
        prefetch: Number of steps that are decoded ahead, per worker.
        pin_memory: Whether to copy steps to page-locked memory.
    """

    def __init__(
        self,
        begin: Callable[[State | None], Steps],
        decoder: Dataset[DecodedStep],
        rank: int,
        *,
        workers: int,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        super().__init__()
        self._begin = begin
        self._decoder = decoder
        self._rank = rank
        self._workers = workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._state: State = {}
        self._steps = begin(None)
        self.notice = self._steps.notice
        """Message about the loader state from which the run continues."""
        self._planned: deque[StepSamples] = deque()
        """Steps that `next` has not returned. The first `_handed_out` are in the queue."""
        self._handed_out = 0
        self._is_planning = False
        self._depth = max(1, workers * prefetch)
        self._tasks: SimpleQueue[tuple[Task, State] | None] = SimpleQueue()
        weakref.finalize(self, self._tasks.put, None)
        self._chain: BaseNode[DecodedStep] | None = None
        self._unused = 0
        """Number of steps of an unfinished pass that the chain will still yield."""
        self._received = 0
        """Number of steps that the chain has yielded."""
        self._decoding: Any = [0] * (2 * self._depth)
        """Process ids of the decoding workers, by step number modulo the length."""

    def reset(self, initial_state: State | None = None) -> None:
        """Resume after a loader state, and start to decode. None for the position of the run."""
        super().reset(initial_state)
        if self._chain is None:
            self._chain = self._start_chain()
        self.close()
        self._state = initial_state or {}
        self._steps = self._begin(initial_state)
        self._planned.clear()
        self._unused += self._handed_out
        self._handed_out = 0
        if self._workers:
            self._hand_out()

    def next(self) -> tuple[StepSamples, DecodedStep]:
        """Return the next step and the tensors of this rank."""
        assert self._chain is not None
        self._hand_out()
        if not self._handed_out:
            raise StopIteration
        while self._unused:
            next(self._chain)
            self._received += 1
            self._unused -= 1
        decoded = next(self._chain)
        self._received += 1
        if self._pin_memory and not self._workers:
            decoded = decoded.pin_memory()
        step = self._planned.popleft()
        self._handed_out -= 1
        self._state = step.state
        if self._workers:  # Workers decode while the caller trains on this step.
            self._hand_out()
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
        worker = names.get(self._decoding[self._received % len(self._decoding)])
        return worker or f"none of {', '.join(names.values())}"

    def _plan(self) -> bool:
        """Plan one more step. Return False at the end."""
        self._is_planning = True
        step = next(self._steps, None)
        if step is not None:
            self._planned.append(step)
        self._is_planning = False
        return step is not None

    def _hand_out(self) -> None:
        """Put steps into the queue of the chain, up to the prefetch depth."""
        while self._handed_out < self._depth:
            if self._handed_out == len(self._planned) and not self._plan():
                return
            step = self._planned[self._handed_out]
            slot = (self._received + self._unused + self._handed_out) % len(self._decoding)
            self._decoding[slot] = 0
            self._tasks.put((Task(slot, rank_share(step, self._rank)), step.state))
            self._handed_out += 1

    def _start_chain(self) -> BaseNode[DecodedStep]:
        """Start workers and threads, and return the last node of the chain."""
        source = TaskSource(self._tasks)
        if not self._workers:
            decode = DecodeTask(self._decoder, self._decoding, None)
            return ParallelMapper(source, decode, num_workers=0)
        self._decoding = fork_server().RawArray("q", len(self._decoding))
        mapper = ParallelMapper(
            source,
            DecodeTask(self._decoder, self._decoding, make_worker_setup()),
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


def rank_share(step: StepSamples, rank: int) -> list[list[PackItems]] | BalancedShare:
    """Return the samples of a step that a rank decodes."""
    packs = step.ranks[rank]
    return packs if step.encoded is None else BalancedShare(packs, step.encoded(rank))


@dataclass(frozen=True)
class Overdue:
    """Result of a wait that timed out."""

    waited_s: float
    """Waiting time in seconds."""
    stopping: bool
    """Whether the run received a stop signal."""
    failure: str = ""
    """Result of `find_failure`."""


class Waiting(Generic[T]):
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
        self._answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        Thread(target=self._serve, name="data", daemon=True).start()

    def get(
        self,
        timeout_s: float,
        asked_to_stop: Callable[[], bool] = lambda: False,
        grace_s: float = 0.0,
        find_failure: Callable[[], str] = lambda: "",
    ) -> T | Overdue:
        """Return the result of the function, or raise its exception.

        After `Overdue`, do not call `get` again, because the thread may still be blocked.

        Args:
            timeout_s: Maximum waiting time in seconds.
            asked_to_stop: Returns True after a stop signal.
            grace_s: Maximum waiting time after a stop signal, in seconds.
            find_failure: Returns the reason if the function will not return, else an empty string.
        """
        self._calls.put(True)
        begin = time.monotonic()
        end = begin + timeout_s
        stopping = False
        while True:
            slice_s = max(0.0, min(SLICE_S, end - time.monotonic()))
            try:
                value, error = self._answers.get(timeout=slice_s)
            except Empty:
                now = time.monotonic()
            else:
                if error is not None:
                    raise error
                return cast(T, value)
            failure = find_failure()
            if failure or now >= end:
                return Overdue(now - begin, stopping, failure)
            if not stopping and asked_to_stop():
                end, stopping = min(end, now + grace_s), now + grace_s < end

    def close(self) -> None:
        """Stop the thread when the function returns."""
        self._calls.put(False)

    def _serve(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while self._calls.get():
            try:
                self._answers.put((self._function(), None))
            except BaseException as error:  # raised by `get`
                self._answers.put((None, error))
