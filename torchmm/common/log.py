"""Logging setup, progress of long operations, and the JSON Lines file of a run.

Rank 0 writes messages to the console. Each rank writes warnings and errors to a separate file in
the run directory, so the file of a failed rank has the reason. In a shared log file, lines of
several writers would interleave on network file systems.

    with working("reading weights", total=len(tensors), unit="tensors") as work:
        for tensor in tensors:
            ...
            work.advance()

Long operations report their progress with the same logger, if no message was logged for `QUIET_S`.
The progress is shown as plain lines in a file, and as a live panel on a terminal. Only rank 0 shows
progress, and short operations are not shown. The threads that log progress do not use the device,
and stop with the operation. tqdm is not used: bars of several libraries and ranks would overwrite
each other, and do not change while one item takes long.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from torchmm.common.files import add_path_to_os_errors

QUIET_S = 3.0
"""Time without messages after which an operation logs its progress, and the minimum interval."""
POLL_S = 0.5
INTERVAL_GROWTH = 0.5
"""Interval before the next progress line, as a fraction of the time since the start."""
GROWTH_AFTER_S = 10.0
"""Time after the start from which on intervals grow. Programs that show only progress use 0."""

T = TypeVar("T")

_logger = logging.getLogger("torchmm")


def make_console(**options: Any) -> Console:
    """Return a console that prints text as it is.

    The default console of rich interprets `[/b]` and `:boom:` in names and captions as markup.

    Args:
        options: Arguments of `rich.console.Console`.
    """
    return Console(markup=False, emoji=False, **options)


def setup_logging(run_dir: Path, rank: int, console: Console) -> logging.Logger:
    """Set up the logger of a run.

    Rank 0 shows messages of level INFO and above on `console`. Each rank writes WARNING and above
    to `logs/rank-N.log` in the run directory, which is created with the first warning. A second
    call replaces the handlers of the first call.
    """
    logger = _reset_logger()
    log_dir = run_dir / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    file = _RankFileHandler(log_dir / f"rank-{rank}.log", delay=True, encoding="utf-8")
    file.setLevel(logging.WARNING)
    file.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    logger.addHandler(file)
    if rank == 0:
        logger.addHandler(_console_handler(console, rank))
    return logger


def log_to_console(
    console: Console, rank: int | None = None, *, only_progress: bool = False
) -> None:
    """Show messages of rank 0 on a console: for programs, and for runs before `setup_logging`.

    Args:
        console: Console.
        rank: Rank of this process in a run, or None for a program.
        only_progress: Whether to show only progress and errors.
    """
    logger = _reset_logger()
    if not rank:
        handler = _console_handler(console, rank, 0.0 if only_progress else GROWTH_AFTER_S)
        if only_progress:
            handler.addFilter(lambda r: hasattr(r, "work") or r.levelno >= logging.ERROR)
        logger.addHandler(handler)


def _reset_logger() -> logging.Logger:
    logger = logging.getLogger("torchmm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger


class ProgressReport:
    """A long operation and its progress.

    Args:
        operation: Name of the operation, such as "reading weights".
        total: Total number of units, or None if unknown.
        unit: Unit that `advance` counts, in the plural.
        count_completed: Function that returns the number of completed units when progress is
            logged. If None, `advance` and `set_completed` set it.
    """

    def __init__(
        self,
        operation: str,
        total: int | None = None,
        unit: str = "",
        count_completed: Callable[[], int] | None = None,
    ) -> None:
        self._operation, self._total, self._unit = operation, total, unit
        self._count_completed = count_completed
        self._completed = 0
        self.began_s = self._operation_started_s = self._quiet_since_s = time.monotonic()
        self._was_reported = False
        self.ended = False

    def advance(self, count: int = 1) -> None:
        """Add completed units."""
        self._completed += count

    def set_completed(self, completed: int) -> None:
        """Set the number of completed units."""
        self._completed = completed

    def set_operation(self, operation: str) -> None:
        """Set the name of the current operation."""
        self._operation = operation
        self._operation_started_s = time.monotonic()

    def mark_reported(self) -> None:
        """Postpone the next progress line, because a different message was logged."""
        self._quiet_since_s = time.monotonic()

    def report(self, reason: str = "") -> None:
        """Log the progress if no message was logged for `QUIET_S`."""
        if time.monotonic() - self._quiet_since_s >= QUIET_S:
            self.report_now(reason)

    def report_now(self, reason: str = "") -> None:
        """Log the progress immediately."""
        self.mark_reported()
        self._was_reported = True
        if self._count_completed is not None:
            self._completed = self._count_completed()
        _logger.info("%s%s", self, reason and f"; {reason}", extra={"work": self})

    def end(self, outcome: str = "") -> None:
        """Stop the operation. Log the result if its progress was logged before."""
        self.ended = True
        if self._was_reported and outcome:
            _logger.info("%s, %s", self, outcome, extra={"work": self})

    def __str__(self) -> str:
        seconds = f"{time.monotonic() - self._operation_started_s:.0f} s"
        total = "" if self._total is None else f" of {self._total:,}"
        count = f"{self._completed:,}{total} {self._unit}, " if self._completed or total else ""
        return f"{self._operation}: {count.replace(' ,', ',')}{seconds}"


@contextmanager
def report_imports() -> Iterator[None]:
    """Log the imports of torch and transformers before they start, without garbage collection.

    The imports create a million objects and free none of them. Garbage collection would use a third
    of the import time, and 0.3 s for each later collection.
    """
    gc.disable()
    try:
        with report_progress("loading torch and transformers", report_start=True):
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def report_progress(
    operation: str,
    total: int | None = None,
    unit: str = "",
    count_completed: Callable[[], int] | None = None,
    *,
    report_start: bool = False,
) -> Iterator[ProgressReport]:
    """Log the progress of an operation every few seconds. See `ProgressReport` for the arguments.

    Args:
        report_start: Whether to log a line before the operation starts.
    """
    progress = ProgressReport(operation, total, unit, count_completed)
    ended = threading.Event()
    if report_start:
        progress.report_now()

    def report_periodically() -> None:
        while not ended.wait(POLL_S):
            progress.report()

    thread = threading.Thread(target=report_periodically, name=operation, daemon=True)
    thread.start()
    outcome = "stopped"
    try:
        yield progress
        outcome = "done"
    finally:
        ended.set()
        thread.join()
        progress.end(outcome)


def iterate_with_progress(
    operation: str, items: Iterable[T], total: int | None = None, unit: str = ""
) -> Iterator[T]:
    """Yield the items of an iterable and log the progress as in `report_progress`."""
    with report_progress(operation, total, unit) as progress:
        for item in items:
            yield item
            progress.advance()


class _GrowingIntervals(logging.Filter):
    """Filter that logs the progress of an operation at growing intervals, so that logs stay short.

    Args:
        after_s: Time after which intervals start to grow, in seconds.
    """

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self._after_s = after_s
        self._next_s: WeakKeyDictionary[ProgressReport, float] = WeakKeyDictionary()

    def filter(self, record: logging.LogRecord) -> bool:
        work: ProgressReport | None = getattr(record, "work", None)
        if work is None or work.ended:
            return True
        now_s = time.monotonic()
        if now_s < self._next_s.get(work, 0.0):
            return False
        self._next_s[work] = now_s + INTERVAL_GROWTH * (now_s - work.began_s - self._after_s)
        return True


class _TerminalHandler(RichHandler):
    """Messages, and a panel below them with all operations in progress."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, show_path=False, markup=False)
        self._operations: list[ProgressReport] = []
        self._panel: Live | None = None

    def emit(self, record: logging.LogRecord) -> None:
        work: ProgressReport | None = getattr(record, "work", None)
        if work is None or work.ended:
            self._operations = [other for other in self._operations if other is not work]
            if not self._operations:
                self._clear()
            super().emit(record)
            return
        if work not in self._operations:
            self._operations.append(work)
            self._operations.sort(
                key=lambda work: work.began_s
            )  # inner operations are below outer ones
        if self._panel is None:
            self._panel = Live(self, console=self.console, transient=True)
            self._panel.start()
        self._panel.refresh()  # it does not refresh itself below the progress bar of steps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for work in [work for work in self._operations if not work.ended]:
            yield Text(str(work), no_wrap=True, overflow="ellipsis")

    def _clear(self) -> None:
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.stop()

    def close(self) -> None:
        """Remove the panel."""
        self._clear()
        super().close()


class _RankFileHandler(logging.FileHandler):
    """Log file that never raises. Messages that cannot be written are printed to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be created, which `logging` does not handle
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


def _console_handler(
    console: Console, rank: int | None, growth_after_s: float = GROWTH_AFTER_S
) -> logging.Handler:
    if console.is_terminal:
        return _TerminalHandler(console)
    handler = logging.StreamHandler(console.file)  # rich would wrap long lines at 80 columns
    message_format = "%(message)s" if rank is None else f"[rank {rank}] %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(message_format))
    handler.addFilter(_GrowingIntervals(growth_after_s))
    return handler


class JsonlWriter:
    """JSON Lines file with increasing "step" keys. Each step has one line.

    Each line is flushed to the operating system, so a killed process loses at most a truncated last
    line. On resume, this line and all steps after the checkpoint are removed.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        """Open `path` for the steps after `last_step`. Records up to this step are kept."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._path = path
        with path.open("r+b") as file:
            self._last = self._length = file.truncate(_bytes_up_to_step(path, last_step))
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. NaN and infinities become null, because JSON does not support them.

        Raises:
            OSError: The file cannot be written. The error message has its path.
        """
        clean = {k: None if _is_non_finite(v) else v for k, v in record.items()}
        line = json.dumps(clean, allow_nan=False) + "\n"
        with add_path_to_os_errors(self._path, len(line)):
            self._file.write(line)
        self._last, self._length = self._length, self._length + len(line)

    def replace_last(self, record: Mapping[str, Any]) -> None:
        """Replace the last record that this object wrote.

        Raises:
            OSError: See `write`.
        """
        with add_path_to_os_errors(self._path, 0):
            self._file.truncate(self._last)
        self._length = self._last
        self.write(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _bytes_up_to_step(path: Path, last_step: int) -> int:
    """Return the bytes of the leading complete lines up to `last_step`."""
    length = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            length += len(line)
    return length


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
