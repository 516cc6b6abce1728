"""The table of trackers, and the threads in which trackers run.

A tracker cannot stop or slow training. Each tracker has a separate thread behind a bounded queue.
The thread connects, sends and closes. The first failure disables the tracker with one warning.
metrics.jsonl has every record in any case.

A new tracker of the core is a function and an entry in `TRACKERS`. An extension adds trackers with
entries of the table "trackers" (`torchmm.common.extensions`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchmm.common.extensions import Entry, find_entries
from torchmm.recipe.training_section import MetricsConfig
from torchmm.training.metrics import Record
from torchmm.training.tracking.run_files import RunFiles, code_version

CLOSE_TIMEOUT_S = 60.0
QUEUE_LENGTH = 1000

TRACKERS: Sequence[Entry] = (
    Entry(
        "wandb",
        "torchmm.training.tracking.wandb_tracker:start_wandb",
        lambda metrics: metrics.wandb != "disabled",
    ),
)
"""Trackers of the core.

The argument of `is_used` is the recipe section `[metrics]`. The target is a function that starts
the tracker: its argument is a `TrackedRun`, and its result is a `BackgroundSink`. It may raise
ConfigError, for example if a package is not installed. Modules of unused trackers are not imported.
"""


class Sink(Protocol):
    """Receiver of the record of each step, see `torchmm.training.metrics`."""

    def emit(self, record: Record) -> None:
        """Show or store one step."""

    def close(self) -> None:
        """Finish. No record is emitted after this call."""


class TrackedRun(NamedTuple):
    """Run that a tracker shows."""

    config: MetricsConfig
    run_dir: Path
    name: str
    recipe: Mapping[str, Any]
    """The resolved recipe."""
    log: logging.Logger
    start_step: int
    """Step of the checkpoint that the run resumes, or 0 for a new run.

    Trackers continue the run of this checkpoint.
    """

    @property
    def is_resumed(self) -> bool:
        """True if the run resumes a checkpoint."""
        return self.start_step > 0

    def files(self) -> RunFiles:
        """Return the reader of files that are written after `start_step`."""
        return RunFiles(self.run_dir, self.start_step)

    def facts(self) -> Mapping[str, Any]:
        """Return the recipe and the versions of the code."""
        return {**self.recipe, "code": code_version()}


def start_trackers(run: TrackedRun) -> list[Sink]:
    """Start the trackers that the recipe sets.

    Raises:
        ConfigError: A tracker cannot be used, for example because its package is not installed.
    """
    entries = [*TRACKERS, *find_entries("trackers")]
    return [entry.load()(run) for entry in entries if entry.is_used(run.config)]


class BackgroundSink:
    """Sink in a daemon thread, which runs until its first failure."""

    def __init__(
        self,
        label: str,
        start: Callable[[], Sink],
        log: logging.Logger,
        close_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        """Start the sink in the background. Records are queued until `start` returns.

        Args:
            label: Name of the tracker in messages.
            start: Function that connects the sink.
            log: Logger of the run.
            close_s: Time limit of `close` in seconds.
        """
        self._label = label
        self._start = start
        self._log = log
        self._close_s = close_s
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_LENGTH)
        self._disabled = threading.Event()
        self._disable_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)
        self._thread.start()

    def emit(self, record: Record) -> None:
        """Add one record to the queue without blocking."""
        if self._disabled.is_set():
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._disable(f"is too slow ({QUEUE_LENGTH} records are queued)")

    def close(self) -> None:
        """Wait until the sink has finished, for at most `close_s`."""
        timeout_s = self._close_s
        if self._disabled.is_set():
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self._disable("does not respond")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._disable(f"did not finish within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            sink = self._start()
            while (record := self._queue.get()) is not None and not self._disabled.is_set():
                sink.emit(record)
            sink.close()
        except Exception as error:  # counted: the first error disables the tracker
            self._disable(f"failed: {type(error).__name__}: {error}")

    def _disable(self, reason: str) -> None:
        with self._disable_lock:
            if not self._disabled.is_set():
                self._log.warning(
                    "%s %s; it is disabled for the rest of the run, metrics.jsonl continues",
                    self._label,
                    reason,
                )
                self._disabled.set()  # last, because `close` does not wait for a disabled tracker
