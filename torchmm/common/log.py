"""Logging set-up, progress of what takes long, and the JSON-lines file that records a run.

Messages go to the console from rank 0 only, and warnings and errors of *every* rank to its own
file in the run directory: when one rank of a thousand fails, its file says why. Rejected: one
shared log file (lines of many writers interleave on network file systems).

    with working("reading weights", total=len(tensors), unit="tensors") as work:
        for tensor in tensors:
            ...
            work.advance()

What takes long says so through the same logger, once nothing was said for `QUIET_S`: plain lines in
a file, a panel that renews itself on a terminal. So only rank 0 shows it, short work is never
mentioned, and nobody hands a progress bar around. The threads that tell it touch no device and end
with the work. Rejected: tqdm, whose bars of several libraries and ranks overwrite each other, and
which writes nothing while a single thing takes long.
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
"""After which what is under way says so, and again."""
POLL_S = 0.5
INTERVAL_GROWTH = 0.5
"""Pause before the next line about the same work, over the time since it began."""
GROWTH_AFTER_S = 10.0
"""Time since work began after which its lines come at growing intervals. Programs that only show
progress do not wait for it."""

T = TypeVar("T")

_logger = logging.getLogger("torchmm")


def make_console(**options: Any) -> Console:
    """Return a console that prints text as it is.

    rich's own default reads `[/b]` and `:boom:` in names, paths and captions as markup.

    Args:
        options: Arguments of `rich.console.Console`.
    """
    return Console(markup=False, emoji=False, **options)


def setup_logging(run_dir: Path, rank: int, console: Console) -> logging.Logger:
    """Make the run's logger.

    Rank 0 shows INFO and above on `console`; every rank writes WARNING and above to
    `logs/rank-N.log` in the run directory (the file appears with the first warning). Calling it
    again replaces the handlers of the previous call.
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
    """Shows messages of rank 0 on a console: of programs, and of runs until `setup_logging`.

    Args:
        rank: this one of a run; None: it is none.
        only_progress: progress and errors alone.
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
    """Something under way, and how far it is.

    Args:
        what: "reading weights".
        total: of what `advance` counts; None: nobody knows.
        unit: of it, in the plural.
        measured: how much is done, asked whenever it is told; None: `advance` and `at` say so.
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
        """So much more is done."""
        self._done += count

    def at(self, done: int) -> None:
        """So much is done in all."""
        self._done = done

    def now(self, what: str) -> None:
        """Something else is under way."""
        self._what = what
        self._now_since_s = time.monotonic()

    def said(self) -> None:
        """Something was shown elsewhere."""
        self._quiet_since_s = time.monotonic()

    def tell(self, why: str = "") -> None:
        """Says how far it is, where nothing was said for long."""
        if time.monotonic() - self._quiet_since_s >= QUIET_S:
            self.tell_now(why)

    def tell_now(self, why: str = "") -> None:
        """Says how far it is."""
        self.said()
        self._told = True
        if self._measured is not None:
            self._done = self._measured()
        _logger.info("%s%s", self, why and f"; {why}", extra={"work": self})

    def end(self, how: str = "") -> None:
        """Says how it ended, if anything was said before."""
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
    """Imports that take seconds, for programs to put around theirs: said before they begin.

    They make a million objects and free none of them. Looking for garbage among these takes a third
    of the time here, and later a third of a second every time: nobody does.
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
    """Work that says every few seconds how far it is; arguments as of `Work`.

    Args:
        at_once: also before it begins.
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
    """What an iterable gives, counted as `working`."""
    with working(what, total, unit) as work:
        for each in of:
            yield each
            work.advance()


class _GrowingIntervals(logging.Filter):
    """Filter that shows work in progress at growing intervals, so that logs stay short.

    Args:
        after_s: Time after which intervals begin to grow.
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
    """Messages, and below them one panel of all that is under way."""

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
            self._works.sort(key=lambda work: work.began_s)  # what is inside stands below
        if self._panel is None:
            self._panel = Live(self, console=self.console, transient=True)
            self._panel.start()
        self._panel.refresh()  # below the bar of steps it does not renew itself

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for work in [work for work in self._works if not work.ended]:
            yield Text(str(work), no_wrap=True, overflow="ellipsis")

    def _clear(self) -> None:
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.stop()

    def close(self) -> None:
        """Takes the panel away."""
        self._clear()
        super().close()


class _RankFile(logging.FileHandler):
    """A log file that never ends the run: what cannot be written goes to stderr instead."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be made, which `logging` does not expect
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
    """Appends one JSON object per line; each has a "step", and no step appears twice.

    Every line reaches the operating system when it is written, so a killed process loses at most
    a torn last line. On resume, that line and all steps after the checkpoint are cut off.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        """Open `path` for the steps after `last_step`; records up to it are kept."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._path = path
        with path.open("r+b") as file:
            self._last = self._length = file.truncate(_length_up_to(path, last_step))
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`; NaN and infinities, which JSON does not have, become null.

        Raises:
            OSError: it cannot be written; names the file.
        """
        clean = {k: None if _is_non_finite(v) else v for k, v in record.items()}
        line = json.dumps(clean, allow_nan=False) + "\n"
        with naming_the_file(self._path, len(line)):
            self._file.write(line)
        self._last, self._length = self._length, self._length + len(line)

    def replace_last(self, record: Mapping[str, Any]) -> None:
        """`write` in place of the record that this wrote last.

        Raises:
            OSError: as `write`.
        """
        with naming_the_file(self._path, 0):
            self._file.truncate(self._last)
        self._length = self._last
        self.write(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _length_up_to(path: Path, last_step: int) -> int:
    """Bytes of the leading lines that are whole and not after `last_step`."""
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
