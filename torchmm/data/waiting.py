"""Waiting for data in a way that can be given up.

A read can block for ever: on a stopped worker, a pipe without a writer, a file server that has
gone. A blocked caller could neither watch a clock nor obey a stop signal, so a thread reads, and
the caller waits for the thread. Rejected: DataLoader's own `timeout`, which covers neither
receiving tensors (over a socket to a worker that may have been stopped by then) nor reading in this
process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar, cast

SLICE_S = 0.5
"""How often a waiting caller checks whether to continue."""

T = TypeVar("T")


@dataclass(frozen=True)
class Overdue:
    """What came instead of an answer."""

    waited_s: float
    stopping: bool
    """Given up because the caller was asked to stop."""


class Waiting(Generic[T]):
    """Calls a function in a thread, once per `get`.

    The function only runs while somebody waits for it, so it needs no locks.

    Args:
        function: may block for ever.
        prepare: called once in the thread, first.
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
    ) -> T | Overdue:
        """The function's next result, or its exception; after `Overdue` this object is used up.

        Args:
            timeout_s: seconds to wait.
            asked_to_stop: whether to wait only `grace_s` more.
            grace_s: seconds, from when that was seen.
        """
        self._calls.put(True)
        begin = time.monotonic()
        end, stopping = begin + timeout_s, False
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
            if now >= end:
                return Overdue(now - begin, stopping)
            if not stopping and asked_to_stop():
                end, stopping = min(end, now + grace_s), now + grace_s < end

    def close(self) -> None:
        """Ends the thread as soon as the function returns."""
        self._calls.put(False)

    def _serve(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while self._calls.get():
            try:
                self._answers.put((self._function(), None))
            except BaseException as error:  # raised by `get`
                self._answers.put((None, error))
