"""A process that plans the next step while this one trains: PipeWeaver §7.1.

    process = PlanningProcess(setup)
    process.submit(PlanRequest(step=8, ...))     as soon as the metadata of step 8 are there
    ...                                          step 7 trains
    planned = process.take(8)                    the best plan so far; None if there is none
    process.close()

The process leaves what it has where training finds it (`handover`) as soon as it is better than
what it left before (`work`); taking it is all that is left for the training process. A search
begins with what was good for steps like this one (`remembered`) and ends with its share of the
step's time; a new request ends it sooner, and so does an order that none can be faster than.
Neither side waits for the other, however large requests and plans are, even if the other one was
stopped: plans are a file that is replaced, requests are sent by a thread, which knows the newest
one only.

The process runs only when nothing else wants its core: training goes first, and where cores are
scarce plans are less good. `KeptPlanning` starts another one in the place of a process that died,
and one with a share of the cores in the place of one that never found any.

Rejected: a thread, which would share Python's lock with the training step it must not slow down.
"""

from __future__ import annotations

import atexit
import logging
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchmm.balance.pipeweaver.background.requests import PlanningSetup, PlanRequest
from torchmm.balance.pipeweaver.background.work import plan_until_closed, plans_in
from torchmm.common.processes import fork_server
from torchmm.planning.planned_step import PlannedStep

CLOSING_S = 5.0
MOST_DEATHS = 6
"""In a row, without a plan: the next would die too."""
STARVED_STEPS = 10
"""Steps in a row without a plan in time after which a process gets a share of the cores."""


class PlanningProcessError(Exception):
    """The process is gone; the message says how."""


class PlanningProcess:
    """This side of it. Not to be shared between threads.

    Args:
        setup: of the run.
    """

    def __init__(self, setup: PlanningSetup) -> None:
        context = fork_server()
        self._directory = Path(tempfile.mkdtemp(prefix="torchmm-planning-"))
        self._plans = plans_in(self._directory)
        # There: requests. Back: numbers of finished steps, or what went wrong.
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=plan_until_closed,
            args=(theirs, setup, self._directory),
            name="planning",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._newest: queue.Queue[PlanRequest | None] = queue.Queue(1)
        threading.Thread(target=self._send, name="requests", daemon=True).start()
        # A process that exits without `close` must not wait for a process that ignores signals.
        atexit.register(self._connection.close)

    @property
    def pid(self) -> int | None:
        """Its number."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def submit(self, request: PlanRequest) -> None:
        """Asks for the plan of a step, and for no other from now on."""
        self._hand_over(request)

    def _hand_over(self, request: PlanRequest | None) -> None:
        """To the thread, which ends with None."""
        with suppress(queue.Empty):
            self._newest.get_nowait()
        self._newest.put_nowait(request)

    def _send(self) -> None:
        """What the thread does; a process that was stopped lets it wait for ever."""
        with suppress(OSError):  # the process is gone, which `take` tells
            while (request := self._newest.get()) is not None:
                self._connection.send(request)

    def take(self, step: int, wait_s: float = 0.0) -> PlannedStep | None:
        """The best plan of a step so far; None if there is none.

        Args:
            wait_s: how long to wait for the finished plan.

        Raises:
            PlanningProcessError: it is gone.
        """
        deadline = time.monotonic() + wait_s
        while self._call(self._connection.poll, max(0.0, deadline - time.monotonic())):
            message = self._call(self._connection.recv)
            if isinstance(message, str):
                raise PlanningProcessError(message)
            if message == step:
                break
        found = self._call(self._plans.get)
        newest = None if found is None else PlannedStep.of(found)
        return newest if newest is not None and newest.step == step else None

    def close(self, *, at_once: bool = False) -> None:
        """Ends the process.

        Args:
            at_once: without giving it time to end by itself, which one that was stopped never does.
        """
        atexit.unregister(self._connection.close)
        self._hand_over(None)
        self._connection.close()
        if not at_once:
            self._process.join(CLOSING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(CLOSING_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (EOFError, OSError) as error:
            self._process.join(CLOSING_S)
            code = self._process.exitcode
            raise PlanningProcessError(
                f"the planning process ended with code {code} ({type(error).__name__})"
            ) from error


class KeptPlanning:
    """A planning process that is started again: with pauses of more and more steps if it dies, and
    with a share of the cores if it never has a plan in time.

    Args:
        setup: of the run.
        start: makes a process.
        logger: is told what happens.
    """

    def __init__(
        self,
        setup: PlanningSetup,
        start: Callable[[PlanningSetup], PlanningProcess],
        logger: logging.Logger,
    ) -> None:
        self._setup, self._start, self._logger = setup, start, logger
        self._process: PlanningProcess | None = start(setup)
        self._deaths = 0
        self._again_at = 0
        """The step at which another process is started."""
        self._waits_for = 0
        """The step that was submitted last, once times were measured."""
        self._missed = 0
        """Steps in a row without a plan."""
        # A search may have had too little to go by until times are measured; a schedule has not.
        self._needs_rates = setup.model is not None
        self._meanwhile = (
            "the natural order is used" if self._needs_rates else "it is planned before it begins"
        )

    @property
    def lost(self) -> bool:
        """Whether there is no process and will be none."""
        return self._deaths >= MOST_DEATHS

    def take(self, step: int) -> PlannedStep | None:
        """The best plan of a step so far; None if there is none."""
        if self._process is None:
            if not self.lost and step >= self._again_at:
                self._process = self._start(self._setup)
            return None
        try:
            planned = self._process.take(step)
        except PlanningProcessError as error:
            self._died(step, error)
            return None
        if planned is not None:
            self._deaths = self._missed = 0
        elif step == self._waits_for:
            self._miss(step)
        return planned

    def submit(self, request: PlanRequest) -> None:
        """Asks for the plan of a step, and for no other from now on."""
        if self._process is not None:
            self._process.submit(request)
            self._waits_for = request.step if request.rates or not self._needs_rates else 0

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _died(self, step: int, error: PlanningProcessError) -> None:
        self._end()
        self._deaths += 1
        self._again_at = step + 2**self._deaths
        until = "orders are natural" if self._needs_rates else "steps are planned before they begin"
        what = f"step {self._again_at} begins with another one, until then {until}"
        if self.lost:
            what = "from here on each step is planned before it begins, which takes its time"
        self._logger.warning("%s; %s", error, what)

    def _miss(self, step: int) -> None:
        self._missed += 1
        self._logger.info("step %d: no plan in time; %s", step, self._meanwhile)
        if self._missed % STARVED_STEPS:
            return
        remedy = "give ranks fewer threads or data workers, or set parallel.search.background"
        self._logger.warning(
            "no plan was in time for %d steps: the planning process finds no free core, or hangs. "
            "Another one is started, which gets a share of the cores; if this goes on, %s = false",
            self._missed, remedy,
        )  # fmt: skip
        self._end()
        self._setup = replace(self._setup, idle=False)
        self._process = self._start(self._setup)

    def _end(self) -> None:
        assert self._process is not None
        self._process.close(at_once=True)
        self._process = None
