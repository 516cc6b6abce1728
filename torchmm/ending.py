"""How a run ends: with the error that came first, told in STATUS.json, whatever fails after it.

The files of a run directory can stop being writable at any moment (a full disk, a file system that
became read-only), and the way out of a run writes some of them. None of that may hide why the run
ended, or make another exit code of it.
"""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torchmm.checkpoint_directory import CheckpointDirectory, InUseError
from torchmm.errors import CheckpointError, ConfigError, Preempted, TorchmmError
from torchmm.preempt import STATUS_NAME, Status, write_status

logger = logging.getLogger("torchmm")
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""In errors of safetensors and tokenizers, which write the export and have classes of their own."""


@contextmanager
def starting(run_dir: Path) -> Iterator[None]:
    """A run directory that cannot be written is a mistake in the recipe: nothing was started."""
    try:
        yield
    except OSError as error:
        if not _is_below(error, run_dir):
            raise
        raise ConfigError(
            f"output_dir = {str(run_dir.parent)!r}: cannot write {error.filename}: "
            f"{error.strerror}; name a directory that can be written and has room"
        ) from error


@contextmanager
def training(run_dir: Path) -> Iterator[None]:
    """A run directory that can no longer be written ends the run like a save that fails."""
    try:
        yield
    except Exception as error:
        problem = _write_problem(error, run_dir)
        if problem is None:
            raise
        raise CheckpointError(
            f"cannot write {problem}. Checkpoints saved before are intact: make room, or make it "
            "writable, and start again"
        ) from error


@contextmanager
def closed_after(close: Callable[[], None]) -> Iterator[None]:
    """Calls `close` at the end; what fails in it is logged where another error came first."""
    try:
        yield
    except BaseException:
        try:
            close()
        except Exception as error:  # the one that came first is raised below
            logger.error("on the way out of a failed run: %r", error)
        raise
    close()


def write_failure(
    run_dir: Path, error: BaseException, step: int, rank: int, directory: CheckpointDirectory
) -> None:
    """STATUS.json of a run that ended early; an error that is known already is marked so.

    Nothing is written where the directory belongs to another run: its status is its own.
    """
    if isinstance(error, InUseError):
        error.reported = rank != 0  # all ranks have it from rank 0
        return
    if not directory.is_of_this_run():
        return
    if isinstance(error, TorchmmError):
        state: Literal["preempted", "failed"] = "failed"
        if isinstance(error, Preempted):
            state = "preempted"
        status = Status(state, step, rank, error.exit_code, str(error))
        error.reported = not _tell(run_dir, status)
    else:
        _tell(run_dir, Status("failed", step, rank, 1, "".join(traceback.format_exception(error))))


def write_end(run_dir: Path, step: int) -> None:
    """STATUS.json of a run that did all it should, by rank 0."""
    _tell(run_dir, Status("done", step, 0, 0))


def _write_problem(error: Exception, run_dir: Path) -> str | None:
    """File and reason, if the error is that a file of the run directory cannot be written."""
    if isinstance(error, OSError):
        if error.errno in _UNWRITABLE or _is_below(error, run_dir):
            return f"{error.filename or f'a file of {run_dir}'}: {error.strerror}"
        return None
    found = _OF_RUST.search(str(error))
    return f"a file of {run_dir}: {error}" if found and int(found[1]) in _UNWRITABLE else None


def _is_below(error: OSError, run_dir: Path) -> bool:
    name = error.filename
    return isinstance(name, str) and Path(name).absolute().is_relative_to(run_dir.absolute())


def _tell(run_dir: Path, status: Status) -> bool:
    """Whether it was written; false if the same is known already."""
    try:
        return write_status(run_dir, status)
    except OSError as error:
        logger.error("cannot write %s: %s", run_dir / STATUS_NAME, error)
        return True  # as far as telling it on the console goes: nobody else has
