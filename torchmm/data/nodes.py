"""Decode planned steps in worker processes: a chain of `torchdata.nodes`.

    planned steps -> ParallelMapper (worker processes) -> Prefetcher -> PinMemory

`DecodedSteps` is the chain. Its source hands out this rank's shares of planned steps; the state of
the source, and so of the chain, is the data state of the last step handed out. It depends neither
on the number of workers nor on prefetching. Workers take steps from one queue, so a slow step does
not delay the steps after it, and they stay alive between the passes of a validation.

`torchdata` 0.11 neither notices dead workers nor limits the time of a wait. Therefore:

- steps are planned by the caller of `next`, which feeds the source as far as workers prefetch.
  Planning in the thread of ParallelMapper would need locks that a read that hangs never releases;
- workers record the step they decode in shared memory, and `find_failure` looks for dead workers;
- `Waiting` calls `next` in a thread, so that the caller can give up.

Rejected: `StatefulDataLoader`. Its state contains the state of every worker, resuming requires the
same number of workers, and it waits for all workers before it hands out the first step.
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
"""How often a waiting caller checks whether to continue."""

T = TypeVar("T")
State = dict[str, Any]


class Task(NamedTuple):
    """This rank's share of a step, to be decoded.

    Attributes:
        slot: Position in the table of process ids.
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
        found = self._tasks.get()
        if found is None:
            raise StopIteration
        task, self._state = found
        return task

    def get_state(self) -> State:
        return self._state


class DecodeTask:
    """Decodes a step.

    Args:
        decoder: Maps the rank's share to tensors.
        decoding: Process id by slot. A worker writes its id when it begins a step.
        setup: Prepares a worker process. None without workers.
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
        """Prepare the worker process, which receives this object first."""
        self.__dict__.update(state)
        assert self._setup is not None
        self._setup(0)

    def __call__(self, task: Task) -> DecodedStep:
        self._decoding[task.slot] = os.getpid()
        step = self._decoder[task.share]
        return step if self._setup is None else step.share_memory()


class DecodedSteps(BaseNode[tuple[StepSamples, DecodedStep]]):
    """Node that plans steps, decodes them in worker processes and yields both in order.

    Do not call its methods while another thread runs `next`, except `find_failure` and
    `describe_decoder`.

    Args:
        begin: Plans steps after a data state. None for the position of the run.
        decoder: Maps this rank's share of a step to tensors.
        rank: Data-parallel rank.
        workers: Number of worker processes. If 0, `next` decodes.
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
        """Message about the data state of the position of the run."""
        self._planned: deque[StepSamples] = deque()
        """Steps that `next` has not returned. The source has got the first `_handed_out`."""
        self._handed_out = 0
        self._is_planning = False
        self._depth = max(1, workers * prefetch)
        self._tasks: SimpleQueue[tuple[Task, State] | None] = SimpleQueue()
        weakref.finalize(self, self._tasks.put, None)
        self._chain: BaseNode[DecodedStep] | None = None
        self._unused = 0
        """Steps of an unfinished pass that the chain still yields."""
        self._received = 0
        """Steps that the chain has yielded."""
        self._decoding: Any = [0] * (2 * self._depth)
        """Process that decodes a step, by the number of the step modulo the length."""

    def reset(self, initial_state: State | None = None) -> None:
        """Begin after a data state, and start to decode. None for the position of the run."""
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
        """Return the next step and this rank's tensors of it."""
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
        if self._workers:  # They decode the step while the caller uses this one.
            self._hand_out()
        return step, decoded

    def get_state(self) -> State:
        """Return the data state of the last step that `next` returned."""
        return self._state

    def peek(self) -> StepSamples | None:
        """Return the step that `next` returns next. None at the end."""
        return self._planned[0] if self._planned or self._plan() else None

    @property
    def planned(self) -> StepSamples | None:
        """The step that `next` returns next, if it is planned already."""
        return self._planned[0] if self._planned else None

    def close(self) -> None:
        """End processes that plan steps."""
        self._steps.close()

    def find_failure(self) -> str:
        """Return why no step will arrive: a worker or a thread has ended. Else, an empty string."""
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
        """Worker processes."""
        return list(self._mapper_iterator._workers) if self._workers and self._chain else []

    def describe_decoder(self) -> str:
        """Return who decodes the step that `next` returns next, for an error message."""
        processes = self.processes
        if self._is_planning or not processes:
            return "this process" + ("" if processes else " (data.workers = 0)")
        names = {}
        for number, pid in enumerate(process.pid for process in processes):
            names[pid] = f"data worker {number} (process {pid}{describe_state(pid)})"
        own = names.get(self._decoding[self._received % len(self._decoding)])
        return own or f"none of {', '.join(names.values())}"

    def _plan(self) -> bool:
        """Plan one more step. Return False at the end."""
        self._is_planning = True
        step = next(self._steps, None)
        if step is not None:
            self._planned.append(step)
        self._is_planning = False
        return step is not None

    def _hand_out(self) -> None:
        """Hand out steps to the chain until it has as many as may be decoded ahead."""
        while self._handed_out < self._depth:
            if self._handed_out == len(self._planned) and not self._plan():
                return
            step = self._planned[self._handed_out]
            slot = (self._received + self._unused + self._handed_out) % len(self._decoding)
            self._decoding[slot] = 0
            self._tasks.put((Task(slot, rank_share(step, self._rank)), step.state))
            self._handed_out += 1

    def _start_chain(self) -> BaseNode[DecodedStep]:
        """Start workers and threads."""
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
            max_concurrent=self._workers if self._prefetch == 1 else None,  # twice the workers
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
    """Return the part of a step that a rank decodes."""
    packs = step.ranks[rank]
    return packs if step.encoded is None else BalancedShare(packs, step.encoded(rank))


@dataclass(frozen=True)
class Overdue:
    """Result of a wait that was given up."""

    waited_s: float
    stopping: bool
    """Whether the run received a stop signal."""
    failure: str = ""
    """Result of `find_failure`."""


class Waiting(Generic[T]):
    """Calls a function in a thread, once per `get`, so that the caller can give up.

    A read can block forever: on a stopped worker, a pipe without a writer or a file server that
    does not respond. The function only runs during `get`, so it needs no locks.

    Args:
        function: May block forever.
        prepare: Called once in the thread before the first call of the function.
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

        After `Overdue` the thread may still be blocked; do not call `get` again.

        Args:
            timeout_s: Seconds to wait.
            asked_to_stop: Whether the run received a stop signal.
            grace_s: Seconds to wait after a stop signal.
            find_failure: Return why the function will not return, or an empty string.
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
        """End the thread as soon as the function returns."""
        self._calls.put(False)

    def _serve(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while self._calls.get():
            try:
                self._answers.put((self._function(), None))
            except BaseException as error:  # raised by `get`
                self._answers.put((None, error))
