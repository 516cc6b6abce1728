"""A directory that appears when it is complete, or not at all.

Its files are written to `.NAME.partial` beside it. Who writes them has a lock on the file
`.NAME.partial.lock` meanwhile. The operating system gives up the lock of a process that dies,
however it dies; so the next export beside it, or the next start of the run, sees what nobody writes
any more and removes it, whatever its name. Of several exporters of one name one writes, and the
others are told.

Whoever makes, gives a name to or removes one of these directories holds its lock, and after it has
the lock looks whether the file still has its name: the one before may just have removed it.

Rejected: to remove everything that looks unfinished, as a script may export a checkpoint while the
run exports another; a name with the process's number, which another machine does not know; a lock
on the directory itself, which comes after it is made, and which other machines do not see on NFS; a
record lock (`lockf`), which does not keep a process from what it writes itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from torchmm.common.errors import ConfigError

_PARTIAL = ".partial"
_LOCK = ".partial.lock"
_BEFORE = ".before"
_SCRATCH = "weights-"
_WAIT_S = 2.0
"""For one who is only removing what somebody left."""
_RETRY_S = 0.05


@contextmanager
def whole_directory(directory: Path, *, replaces: bool = True) -> Iterator[Path]:
    """Where to write files; they then get the name of `directory`, or take that of the one before.

    If nothing was written, nothing changes.

    Args:
        replaces: whether there may be one before.

    Raises:
        ConfigError: another process writes it; it is there, and may not be replaced.
    """
    with _unfinished(directory) as partial:
        if not replaces:
            refuse_existing(directory)
        yield partial
        if any(partial.iterdir()):
            _set_file_modes(partial)
            _take_place(partial, directory, replaces)


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """For files that nobody needs afterwards."""
    with _unfinished(parent / f"{_SCRATCH}{uuid4().hex}") as partial:
        yield partial


def refuse_existing(directory: Path) -> None:
    """Raises:
    ConfigError: it is there.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists; name another directory, or remove it")


def clear_unfinished(parent: Path) -> None:
    """Removes what processes left that were killed, and gives an export its name back that was to
    be replaced."""
    left = {
        path.name.removeprefix(".").removesuffix(suffix)
        for suffix in (_PARTIAL, _LOCK, _BEFORE)
        for path in parent.glob(f".*{suffix}")
    }
    for name in left:
        _try_to_clear(parent / name)


def _try_to_clear(directory: Path) -> None:
    """Leaves it to others if they write it, or if this is not allowed here."""
    with suppress(OSError):
        lock = _try_lock(directory)
        if lock is not None:
            try:
                _clear(directory)
            finally:
                _release(directory, lock)


@contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """An empty directory for its files, which nobody else writes; it has gone at the end."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    clear_unfinished(directory.parent)
    deadline = time.monotonic() + _WAIT_S
    while (lock := _try_lock(directory)) is None:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{directory} is being written by another process; wait for it, or name another "
                "directory"
            )
        time.sleep(_RETRY_S)
    partial = _beside(directory, _PARTIAL)
    try:
        _clear(directory)
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _release(directory, lock)


def _clear(directory: Path) -> None:
    """With the lock: nobody writes any of these."""
    shutil.rmtree(_beside(directory, _PARTIAL), ignore_errors=True)
    before = _beside(directory, _BEFORE)
    if directory.exists():
        shutil.rmtree(before, ignore_errors=True)
    elif before.exists():
        before.rename(directory)


def _set_file_modes(directory: Path) -> None:
    """Give all files the mode of new files. safetensors creates files that only the owner reads."""
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _take_place(partial: Path, directory: Path, replaces: bool) -> None:
    if not replaces or not directory.exists():
        partial.rename(directory)
        return
    before = _beside(directory, _BEFORE)
    directory.rename(before)
    partial.rename(directory)
    shutil.rmtree(before, ignore_errors=True)


def _try_lock(directory: Path) -> int | None:
    """A descriptor that holds the lock; None: somebody else has it."""
    path = _beside(directory, _LOCK)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _has_name(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the one before has removed it


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _release(directory: Path, descriptor: int) -> None:
    _beside(directory, _LOCK).unlink(missing_ok=True)
    os.close(descriptor)


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(f".{directory.name}{suffix}")
