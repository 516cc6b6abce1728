"""Logging set-up and the JSON-lines file that records a run.

Messages go to the console from rank 0 only, and warnings and errors of *every* rank to its own
file in the run directory: when one rank of a thousand fails, its file says why. Rejected: one
shared log file (lines of many writers interleave on network file systems).
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from torchmm.common.files import naming_the_file


def setup_logging(run_dir: Path, rank: int, console: Console) -> logging.Logger:
    """Make the run's logger.

    Rank 0 shows INFO and above on `console`; every rank writes WARNING and above to
    `logs/rank-N.log` in the run directory (the file appears with the first warning). Calling it
    again replaces the handlers of the previous call.
    """
    logger = logging.getLogger("torchmm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    log_dir = run_dir / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    file = _RankFile(log_dir / f"rank-{rank}.log", delay=True, encoding="utf-8")
    file.setLevel(logging.WARNING)
    file.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    logger.addHandler(file)
    if rank == 0:
        logger.addHandler(_console_handler(console, rank))
    return logger


class _RankFile(logging.FileHandler):
    """A log file that never ends the run: what cannot be written goes to stderr instead."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be made, which `logging` does not expect
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


def _console_handler(console: Console, rank: int) -> logging.Handler:
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, markup=False)
    plain = logging.StreamHandler(console.file)  # rich would wrap long lines at 80 columns
    plain.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(message)s"))
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
            file.truncate(_length_up_to(path, last_step))
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
