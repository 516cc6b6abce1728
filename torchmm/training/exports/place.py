"""A directory that appears when it is complete, or not at all.

Its files are written to `.NAME.partial` beside it, which is locked meanwhile. The operating system
gives up the lock of a process that dies, however it dies; so the next export to the same place, or
the next start of the run, sees what nobody writes any more and removes it, whatever its name.

Rejected: to remove everything that looks unfinished, as a script may export a checkpoint while the
run exports another; a name with the process's number, which another machine does not know.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torchmm.common.errors import ConfigError

_PARTIAL = ".partial"
_BEFORE = ".before"
_SCRATCH = ".weights-"


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Where to write files; they then get the name of `directory`, or take that of the one before.

    If nothing was written, nothing changes.

    Raises:
        ConfigError: another process writes it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    clear_unfinished(directory.parent)
    partial = directory.with_name(f".{directory.name}{_PARTIAL}")
    try:
        partial.mkdir()
    except FileExistsError as error:
        raise ConfigError(
            f"{directory} is being written by another process; wait for it, or name another "
            "directory"
        ) from error
    with _locked(partial):
        try:
            yield partial
            if any(partial.iterdir()):
                _take_place(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """For files that nobody needs afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix=_SCRATCH) as name, _locked(Path(name)):
        yield Path(name)


def clear_unfinished(parent: Path) -> None:
    """Removes what processes left that were killed, and gives an export its name back that was to
    be replaced."""
    for path in [*parent.glob(f".*{_PARTIAL}"), *parent.glob(f"{_SCRATCH}*")]:
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(f".*{_BEFORE}"):
        directory = path.with_name(path.name.removeprefix(".").removesuffix(_BEFORE))
        if directory.with_name(f".{directory.name}{_PARTIAL}").exists():
            continue  # is being replaced
        if directory.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(directory)


def _take_place(partial: Path, directory: Path) -> None:
    if not directory.exists():
        partial.rename(directory)
        return
    before = directory.with_name(f".{directory.name}{_BEFORE}")
    shutil.rmtree(before, ignore_errors=True)
    directory.rename(before)
    partial.rename(directory)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_abandoned(directory: Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False  # gone, or no directory
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # somebody writes it
    finally:
        os.close(descriptor)
    return True
