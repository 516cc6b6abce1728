"""Child process that computes the next step while this process trains the current step.

    process = StepProcess(work, "planning")
    process.submit(8, request)      the inputs of step 8 are known
    ...                             step 7 trains
    answer = process.take(8)        newest answer so far, or None

`work(request, progress)` returns an answer. It can send preliminary answers (`progress.put`), and
should return None if a newer request has arrived (`progress.is_superseded`). `take` raises answers
that are exceptions.

Neither process blocks the other one, even if a signal has stopped the other one. A thread sends the
newest request, and a thread receives answers. `RestartingProcess` starts a process if a step takes
long, restarts a process that has exited, and stops after repeated exits. The caller computes a step
itself if `take` returns None. A thread would share the interpreter lock with the training step.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Literal, TypeVar

from torchmm.common.processes import (
    describe_state,
    lower_priority,
    make_worker_setup,
    restore_priority,
    start_fork_server,
)

MIN_BACKGROUND_MS = 5.0
"""CPU time of a step in ms. If two consecutive steps take longer, a process computes later steps.
For shorter steps, requests and answers would take as much time."""
MIN_SAVED_MS = 10_000.0
"""Minimum CPU time in ms that a process must save in the remaining steps.

Starting a process delays a step by 3 to 6 s, because it imports torch again.
"""
EXIT_S = 5.0
"""Maximum time until a process that closed its connection or was killed has exited."""

END_OF_STEPS: Literal["end"] = "end"
"""Answer to requests after the last step."""

Answer = TypeVar("Answer")
Priority = Literal["normal", "low", "idle"]
"""Priority of a process. "idle" processes run only on idle cores."""
AnswerFunction = Callable[[Any, "RequestStatus"], Answer | Exception | None]


class StepProcessError(Exception):
    """A step process has exited, hangs, or cannot compute a step."""


class RequestStatus:
    """State of a request in the process that computes the answer."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number

    def send_preliminary(self, answer: Any) -> None:
        """Send a preliminary answer, which replaces earlier answers to this request."""
        self._connection.send((self._number, answer, False))

    def is_superseded(self) -> bool:
        """Return True if a newer request exists, or the connection is closed."""
        return self._connection.poll()


def serve(connection: Connection, work: AnswerFunction[Any]) -> None:
    """Answer requests until the other side of the connection is closed."""
    try:
        while True:
            number, request = connection.recv()
            while connection.poll():
                number, request = connection.recv()
            answer = work(request, RequestStatus(connection, number))
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
        target: Importable function.
        args: Picklable arguments.
        name: Name of the process.
        priority: Priority of the process.
        daemon: Whether the process has no child processes.
    """
    context = start_fork_server()
    connection, remote = context.Pipe()
    process = context.Process(
        target=_run, args=(remote, make_worker_setup(), priority, target, args), name=name,
        daemon=daemon,
    )  # fmt: skip
    process.start()
    remote.close()
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
        lower_priority(priority == "idle")
    gc.freeze()  # Imported modules are not garbage. Scanning them took 17% of planning time.
    target(connection, *args)


class StepProcess(Generic[Answer]):
    """Process that computes answers. Must not be shared between threads.

    Args:
        work: Function, see the module. Picklable.
        name: Name in messages: "planning" for "the planning process".
        priority: Priority of the process.
    """

    def __init__(
        self, work: AnswerFunction[Answer], name: str, priority: Priority = "normal"
    ) -> None:
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
        """Process ID."""
        return self._process.pid or 0

    def submit(self, number: int, request: Any) -> None:
        """Request the answer for a step. The process drops earlier requests."""
        self._replace_request((number, request))

    def take(self, number: int, wait_s: float = 0.0) -> Answer | None:
        """Return the newest answer to a request, or None.

        Args:
            number: Number of the request.
            wait_s: Maximum time to wait for the final answer, in seconds.

        Raises:
            StepProcessError: The process has exited.
            Exception: The answer is an exception.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or (self._received[0] == number and self._received[2]), wait_s
            )
            answered, answer, _ = self._received
        if answered == number:
            if isinstance(answer, Exception):
                raise answer
            result: Answer = answer
            return result
        if self._ended:
            self._process.join(EXIT_S)
            raise self.error(f"exited with code {self._process.exitcode}")
        return None

    def error(self, problem: str) -> StepProcessError:
        """Return an error with the name, process ID and state of the process."""
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
    """Step process that is started when a step takes long, and restarted when it exits.

    Restarts follow after 2, 4, 8, ... steps, so that a process that always exits uses little time.

    Args:
        start: Starts a process, which continues with the next step.
        logger: Logger for starts and exits.
        task: Task of the process, for messages.
        fallback: Clause for messages on how steps without a process are computed.
        final_fallback: The same clause if no process will be started again.
        max_deaths: Maximum number of exits without an answer in between. 0 disables processes.
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
        self._last_cpu_ms = 0.0
        """CPU time of the last step that this process computed."""
        self._restart_after: int | None = None
        """Step after which a process that exited is restarted."""

    @property
    def is_running(self) -> bool:
        """True if a process is running."""
        return self._process is not None

    @property
    def is_lost(self) -> bool:
        """True if no process will be started again."""
        return self._deaths >= self._max_deaths

    def restart(self) -> None:
        """Start a process, after killing the running one."""
        self.close()
        self._process = self._start()

    @contextmanager
    def compute_locally(self, remaining_steps: float = inf) -> Iterator[None]:
        """Measure the CPU time of a step in this process, and start a process if it takes long.

        Args:
            remaining_steps: Number of further steps.
        """
        begin_s = time.thread_time()
        yield
        cpu_ms = 1e3 * (time.thread_time() - begin_s)
        lower_ms = min(cpu_ms, self._last_cpu_ms)
        is_slow = lower_ms >= MIN_BACKGROUND_MS and lower_ms * remaining_steps >= MIN_SAVED_MS
        self._last_cpu_ms = cpu_ms
        if is_slow and not self.is_running and not self.is_lost and self._restart_after is None:
            self._logger.info(
                "%s takes %.0f ms of CPU time; computing further steps in a background "
                "process during training",
                self._task, cpu_ms,
            )  # fmt: skip
            self.restart()

    def take(self, step: int, wait_s: float = 0.0) -> Answer | None:
        """Return the newest answer for a step, or None if the caller must compute it.

        Args:
            step: Number of the step.
            wait_s: Maximum time to wait for the answer, in seconds. Without an answer, the process
                is considered to hang.
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
            consequence = (
                f"a new process starts with step {self._restart_after}; until then {self._fallback}"
            )
            if self.is_lost:
                consequence = f"from now on {self._final_fallback}"
            self._logger.warning("%s; %s", error, consequence)
            return None
        if answer is not None:
            self._deaths = 0
        return answer

    def accepts(self, step: int) -> bool:
        """Return True if a process is running. Restart an exited process after the pause.

        Args:
            step: Number of the step to request. The preceding step has been computed.
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
