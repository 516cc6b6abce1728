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

from torchmm.common.files import naming_the_file

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
    logger = _own_logger()
    log_dir = run_dir / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    file = _RankFile(log_dir / f"rank-{rank}.log", delay=True, encoding="utf-8")
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
    logger = _own_logger()
    if not rank:
        handler = _console_handler(console, rank, 0.0 if only_progress else GROWTH_AFTER_S)
        if only_progress:
            handler.addFilter(lambda r: hasattr(r, "work") or r.levelno >= logging.ERROR)
        logger.addHandler(handler)


def _own_logger() -> logging.Logger:
    logger = logging.getLogger("torchmm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger


class Work:
    """A long operation and its progress.

    Args:
        what: Name of the operation, such as "reading weights".
        total: Total number of units, or None if unknown.
        unit: Unit that `advance` counts, in the plural.
        measured: Returns the number of completed units when progress is logged. If None, `advance`
            and `at` set it.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "",
        measured: Callable[[], int] | None = None,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._measured = measured
        self._done = 0
        self.began_s = self._now_since_s = self._quiet_since_s = time.monotonic()
        self._told = False
        self.ended = False

    def advance(self, count: int = 1) -> None:
        """Add completed units."""
        self._done += count

    def at(self, done: int) -> None:
        """Set the number of completed units."""
        self._done = done

    def now(self, what: str) -> None:
        """Set the name of the current operation."""
        self._what = what
        self._now_since_s = time.monotonic()

    def said(self) -> None:
        """Postpone the next progress line, because a different message was logged."""
        self._quiet_since_s = time.monotonic()

    def tell(self, why: str = "") -> None:
        """Log the progress if no message was logged for `QUIET_S`."""
        if time.monotonic() - self._quiet_since_s >= QUIET_S:
            self.tell_now(why)

    def tell_now(self, why: str = "") -> None:
        """Log the progress immediately."""
        self.said()
        self._told = True
        if self._measured is not None:
            self._done = self._measured()
        _logger.info("%s%s", self, why and f"; {why}", extra={"work": self})

    def end(self, how: str = "") -> None:
        """Stop the operation. Log the result if its progress was logged before."""
        self.ended = True
        if self._told and how:
            _logger.info("%s, %s", self, how, extra={"work": self})

    def __str__(self) -> str:
        seconds = f"{time.monotonic() - self._now_since_s:.0f} s"
        of = "" if self._total is None else f" of {self._total:,}"
        count = f"{self._done:,}{of} {self._unit}, " if self._done or of else ""
        return f"{self._what}: {count.replace(' ,', ',')}{seconds}"


@contextmanager
def loading() -> Iterator[None]:
    """Log the imports of torch and transformers before they start, without garbage collection.

    The imports create a million objects and free none of them. Garbage collection would use a third
    of the import time, and 0.3 s for each later collection.
    """
    gc.disable()
    try:
        with working("loading torch and transformers", at_once=True):
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def working(
    what: str,
    total: int | None = None,
    unit: str = "",
    measured: Callable[[], int] | None = None,
    *,
    at_once: bool = False,
) -> Iterator[Work]:
    """Log the progress of an operation every few seconds. See `Work` for the arguments.

    Args:
        at_once: Whether to log a line before the operation starts.
    """
    work = Work(what, total, unit, measured)
    ended = threading.Event()
    if at_once:
        work.tell_now()

    def tell() -> None:
        while not ended.wait(POLL_S):
            work.tell()

    thread = threading.Thread(target=tell, name=what, daemon=True)
    thread.start()
    how = "stopped"
    try:
        yield work
        how = "done"
    finally:
        ended.set()
        thread.join()
        work.end(how)


def worked(what: str, of: Iterable[T], total: int | None = None, unit: str = "") -> Iterator[T]:
    """Yield the items of an iterable and log the progress as in `working`."""
    with working(what, total, unit) as work:
        for each in of:
            yield each
            work.advance()


class _GrowingIntervals(logging.Filter):
    """Filter that logs the progress of an operation at growing intervals, so that logs stay short.

    Args:
        after_s: Time after which intervals start to grow, in seconds.
    """

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self._after_s = after_s
        self._next_s: WeakKeyDictionary[Work, float] = WeakKeyDictionary()

    def filter(self, record: logging.LogRecord) -> bool:
        work: Work | None = getattr(record, "work", None)
        if work is None or work.ended:
            return True
        now_s = time.monotonic()
        if now_s < self._next_s.get(work, 0.0):
            return False
        self._next_s[work] = now_s + INTERVAL_GROWTH * (now_s - work.began_s - self._after_s)
        return True


class _Terminal(RichHandler):
    """Messages, and a panel below them with all operations in progress."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, show_path=False, markup=False)
        self._works: list[Work] = []
        self._panel: Live | None = None

    def emit(self, record: logging.LogRecord) -> None:
        work: Work | None = getattr(record, "work", None)
        if work is None or work.ended:
            self._works = [other for other in self._works if other is not work]
            if not self._works:
                self._clear()
            super().emit(record)
            return
        if work not in self._works:
            self._works.append(work)
            self._works.sort(key=lambda work: work.began_s)  # inner operations are below outer ones
        if self._panel is None:
            self._panel = Live(self, console=self.console, transient=True)
            self._panel.start()
        self._panel.refresh()  # it does not refresh itself below the progress bar of steps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for work in [work for work in self._works if not work.ended]:
            yield Text(str(work), no_wrap=True, overflow="ellipsis")

    def _clear(self) -> None:
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.stop()

    def close(self) -> None:
        """Remove the panel."""
        self._clear()
        super().close()


class _RankFile(logging.FileHandler):
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
        return _Terminal(console)
    plain = logging.StreamHandler(console.file)  # rich would wrap long lines at 80 columns
    form = "%(message)s" if rank is None else f"[rank {rank}] %(levelname)s %(message)s"
    plain.setFormatter(logging.Formatter(form))
    plain.addFilter(_GrowingIntervals(growth_after_s))
    return plain


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
            self._last = self._length = file.truncate(_length_up_to(path, last_step))
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. NaN and infinities become null, because JSON does not support them.

        Raises:
            OSError: The file cannot be written. The error message has its path.
        """
        clean = {k: None if _is_non_finite(v) else v for k, v in record.items()}
        line = json.dumps(clean, allow_nan=False) + "\n"
        with naming_the_file(self._path, len(line)):
            self._file.write(line)
        self._last, self._length = self._length, self._length + len(line)

    def replace_last(self, record: Mapping[str, Any]) -> None:
        """Replace the last record that this object wrote.

        Raises:
            OSError: See `write`.
        """
        with naming_the_file(self._path, 0):
            self._file.truncate(self._last)
        self._length = self._last
        self.write(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _length_up_to(path: Path, last_step: int) -> int:
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
