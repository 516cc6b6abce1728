"""A child process that computes the next step while this process trains the current step.

    process = StepProcess(work, "planning")
    process.submit(8, request)      the inputs of step 8 are known
    ...                             step 7 trains
    answer = process.take(8)        newest answer so far, or None

`work(request, progress)` returns an answer. It can send preliminary answers (`progress.put`), and
should return None if a newer request arrived (`progress.is_superseded`). `take` raises answers that
are exceptions.

Neither process blocks the other one, even if the other one was stopped by a signal: a thread sends
the newest request, and a thread receives answers. `RestartingProcess` starts a process if a step
takes long, restarts a process that exited, and stops after repeated exits. The caller computes a
step itself if `take` returns None.

Rejected: a thread instead of a process, which shares the interpreter lock with the training step.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Literal, TypeVar

from torchmm.common.processes import (
    describe_state,
    fork_server,
    make_worker_setup,
    restore_priority,
    yield_to_others,
)

MIN_BACKGROUND_MS = 5.0
"""CPU time of a step, twice in a row, from which on a process computes it. Sending a request and
receiving an answer would cost as much as a shorter step."""
EXIT_S = 5.0
"""Maximum time until a process that closed its connection or was killed has exited."""

END: Literal["end"] = "end"
"""Answer to requests after the last step."""

Answer = TypeVar("Answer")
Priority = Literal["normal", "low", "idle"]
"""Priority of a process. "idle" processes run only on cores that are otherwise idle."""
Work = Callable[[Any, "Progress"], Answer | Exception | None]


class StepProcessError(Exception):
    """A step process exited, hangs, or cannot compute a step."""


class Progress:
    """The state of a request in the process that computes the answer."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number

    def put(self, answer: Any) -> None:
        """Send a preliminary answer, which replaces earlier answers to this request."""
        self._connection.send((self._number, answer, False))

    def is_superseded(self) -> bool:
        """Return True if there is a newer request, or the other side is closed."""
        return self._connection.poll()


def serve(connection: Connection, work: Work[Any]) -> None:
    """Answer requests until the other side of the connection is closed."""
    try:
        while True:
            number, request = connection.recv()
            while connection.poll():
                number, request = connection.recv()
            answer = work(request, Progress(connection, number))
            if answer is not None:
                connection.send((number, answer, True))
    except (EOFError, ConnectionError):
        return


def start_process(
    target: Callable[..., None],
    *args: Any,
    name: str,
    priority: Priority = "normal",
    daemon: bool = True,
) -> tuple[BaseProcess, Connection]:
    """Start `target(connection, *args)` in a process, which exits when this process exits.

    Args:
        target: importable function.
        args: picklable arguments.
        name: name of the process.
        priority: priority of the process.
        daemon: Whether the process has no child processes.
    """
    context = fork_server()
    connection, theirs = context.Pipe()
    process = context.Process(
        target=_run, args=(theirs, make_worker_setup(), priority, target, args), name=name,
        daemon=daemon,
    )  # fmt: skip
    process.start()
    theirs.close()
    return process, connection


def _run(
    connection: Connection,
    setup: Callable[[int], None],
    priority: Priority,
    target: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    setup(0)
    if priority != "normal":
        yield_to_others(priority == "idle")
    gc.freeze()  # Imported modules are not garbage. Scanning them took a sixth of planning time.
    target(connection, *args)


class StepProcess(Generic[Answer]):
    """A process that computes answers. Must not be shared between threads.

    Args:
        work: see the module. Picklable.
        name: "planning" for "the planning process".
        priority: priority of the process.
    """

    def __init__(self, work: Work[Answer], name: str, priority: Priority = "normal") -> None:
        self._process, self._connection = start_process(serve, work, name=name, priority=priority)
        self._requests: queue.Queue[tuple[int, Any] | None] = queue.Queue(1)
        self._changed = threading.Condition()
        self._received: tuple[int, Any, bool] = (-1, None, False)
        self._ended = False
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def submit(self, number: int, request: Any) -> None:
        """Request the answer to a step. The process drops the preceding request."""
        self._replace_request((number, request))

    def take(self, number: int, wait_s: float = 0.0) -> Answer | None:
        """Return the newest answer to a request, or None.

        Args:
            number: number of the request.
            wait_s: maximum time to wait for the final answer.

        Raises:
            StepProcessError: the process exited.
            Exception: the answer is an exception.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or (self._received[0] == number and self._received[2]), wait_s
            )
            answered, answer, _ = self._received
        if answered == number:
            if isinstance(answer, Exception):
                raise answer
            found: Answer = answer
            return found
        if self._ended:
            self._process.join(EXIT_S)
            raise self.error(f"exited with code {self._process.exitcode}")
        return None

    def error(self, problem: str) -> StepProcessError:
        """Return an error that names the process with its id and state."""
        state = describe_state(self._process.pid)
        return StepProcessError(f"the {self._process.name} process ({self.pid}{state}) {problem}")

    def close(self) -> None:
        """Kill the process. It ignores other signals, and has no state to save."""
        restore_priority(self.pid)
        self._process.kill()
        self._process.join(EXIT_S)
        self._replace_request(None)
        for thread in self._threads:
            thread.join(EXIT_S)
        self._connection.close()

    def _replace_request(self, request: tuple[int, Any] | None) -> None:
        with suppress(queue.Empty):
            self._requests.get_nowait()
        self._requests.put_nowait(request)

    def _send(self) -> None:
        with suppress(OSError):  # `take` reports the exit of the process
            while (request := self._requests.get()) is not None:
                self._connection.send(request)

    def _receive(self) -> None:
        try:
            while True:
                received = self._connection.recv()
                with self._changed:
                    self._received = received
                    self._changed.notify_all()
        except (EOFError, OSError):
            pass  # `take` reports the exit of the process
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


class RestartingProcess(Generic[Answer]):
    """A step process that starts when a step takes long, and is restarted when it exits.

    Restarts follow after 2, 4, 8, ... steps, so that a process that always exits costs little time.

    Args:
        start: starts a process, which continues with the next step.
        logger: logger for starts and exits.
        task: task of the process, for messages.
        fallback: clause for messages that says how steps without a process are computed.
        final_fallback: the same if no process will be started again.
        max_deaths: exits without an answer in between after which no process is started. 0: no
            process is started.
    """

    def __init__(
        self,
        start: Callable[[], StepProcess[Answer]],
        logger: logging.Logger,
        *,
        task: str,
        fallback: str,
        final_fallback: str,
        max_deaths: int,
    ) -> None:
        self._start, self._logger = start, logger
        self._task, self._fallback, self._final_fallback = task, fallback, final_fallback
        self._max_deaths, self._deaths = max_deaths, 0
        self._process: StepProcess[Answer] | None = None
        self._cpu_ms = 0.0
        """CPU time of the last step that this process computed."""
        self._restart_after: int | None = None
        """Step after which a process that exited is restarted."""

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    @property
    def is_lost(self) -> bool:
        """Whether there will be no process again."""
        return self._deaths >= self._max_deaths

    def restart(self) -> None:
        """Start a process. Kill the running one."""
        self.close()
        self._process = self._start()

    @contextmanager
    def compute_here(self) -> Iterator[None]:
        """Measure a step that this process computes, and start a process if that takes long."""
        begin_s = time.thread_time()
        yield
        cpu_ms = 1e3 * (time.thread_time() - begin_s)
        is_slow = min(cpu_ms, self._cpu_ms) >= MIN_BACKGROUND_MS
        self._cpu_ms = cpu_ms
        if is_slow and not self.is_running and not self.is_lost and self._restart_after is None:
            self._logger.info(
                "%s takes %.0f ms of CPU time; computing further steps in a background "
                "process during training",
                self._task, cpu_ms,
            )  # fmt: skip
            self.restart()

    def take(self, step: int, wait_s: float = 0.0) -> Answer | None:
        """Return the newest answer for a step, or None if the caller has to compute it.

        Args:
            step: number of the step.
            wait_s: maximum time to wait for the answer. The process hangs if there is none then.
        """
        if self._process is None:
            return None
        try:
            answer = self._process.take(step, wait_s)
            if answer is None and wait_s:
                raise self._process.error(f"has not returned a step for {wait_s:g} s")
        except StepProcessError as error:
            self.close()
            self._deaths += 1
            self._restart_after = step + 2**self._deaths
            what = (
                f"a new process starts with step {self._restart_after}; until then {self._fallback}"
            )
            if self.is_lost:
                what = f"from now on {self._final_fallback}"
            self._logger.warning("%s; %s", error, what)
            return None
        if answer is not None:
            self._deaths = 0
        return answer

    def accepts(self, step: int) -> bool:
        """Return True if a process runs. Restart it if it exited and the pause is over.

        Args:
            step: number of the step to request. The preceding step is computed.
        """
        is_due = self._restart_after is not None and step > self._restart_after
        if self._process is None and is_due and not self.is_lost:
            self.restart()
        return self.is_running

    def submit(self, step: int, request: Any) -> None:
        """Request the answer to a step, if a process runs."""
        if self._process is not None:
            self._process.submit(step, request)

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.close()
            self._process = None
