"""Create directories that have their final name only when all files are complete.

Files are written to `.NAME.partial` next to the directory. The writer locks the file
`.NAME.partial.lock`. The operating system releases the lock if the process exits. The next export
in the same folder, or the next start of the run, therefore detects directories without a writer and
removes them. If several processes export to one name, one of them writes, and the others fail.

A process that creates, renames or removes one of these directories has its lock. After it has
locked the file, it checks that the file still has its name, because the previous writer may have
removed it.

Simpler designs fail. All unfinished directories cannot be removed, because a script may export a
checkpoint while the run exports another one. A process id in the name is meaningless on other
nodes. A lock on the directory itself is not visible to other nodes on NFS. A record lock (`lockf`)
does not protect a directory from its own process.
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
"""Time to wait for a process that only removes unfinished files."""
_RETRY_S = 0.05


@contextmanager
def write_directory_atomically(directory: Path, replaces: bool = True) -> Iterator[Path]:
    """Yield a directory for files, and then rename it to `directory`.

    If no file was written, `directory` is unchanged.

    Args:
        directory: Final name.
        replaces: Whether to replace an existing directory.

    Raises:
        ConfigError: Another process writes the directory, or it exists and may not be replaced.
    """
    with _unfinished(directory) as partial:
        if not replaces:
            reject_existing(directory)
        yield partial
        if not any(partial.iterdir()):
            return
        # Give all files the mode of new files. safetensors creates files that only the owner reads.
        probe = partial / ".mode"
        probe.touch()
        mode = probe.stat().st_mode & 0o777
        probe.unlink()
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(mode)
        before = _hidden_path(directory, _BEFORE)
        is_replaced = replaces and directory.exists()
        if is_replaced:
            directory.rename(before)
        partial.rename(directory)
        if is_replaced:
            shutil.rmtree(before, ignore_errors=True)


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Yield a directory for temporary files."""
    with _unfinished(parent / f"{_SCRATCH}{uuid4().hex}") as partial:
        yield partial


def reject_existing(directory: Path) -> None:
    """Raise ConfigError if a directory exists."""
    if directory.exists():
        raise ConfigError(f"{directory} already exists; use another directory, or remove it")


def remove_unfinished(parent: Path) -> None:
    """Remove the files of killed processes, and restore exports that they were replacing.

    Directories with an active writer, or without permission, are skipped.
    """
    names = {
        path.name.removeprefix(".").removesuffix(suffix)
        for suffix in (_PARTIAL, _LOCK, _BEFORE)
        for path in parent.glob(f".*{suffix}")
    }
    for name in names:
        with suppress(OSError):
            lock = _try_lock(parent / name)
            if lock is not None:
                try:
                    _clear(parent / name)
                finally:
                    _release(parent / name, lock)


@contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """Lock a directory, and yield an empty directory for its files, which is removed at the end."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(directory.parent)
    deadline = time.monotonic() + _WAIT_S
    while (lock := _try_lock(directory)) is None:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{directory} is being written by another process; wait for it, or use "
                "another directory"
            )
        time.sleep(_RETRY_S)
    partial = _hidden_path(directory, _PARTIAL)
    try:
        _clear(directory)
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _release(directory, lock)


def _clear(directory: Path) -> None:
    """Remove unfinished files of a directory that this process has locked."""
    shutil.rmtree(_hidden_path(directory, _PARTIAL), ignore_errors=True)
    before = _hidden_path(directory, _BEFORE)
    if directory.exists():
        shutil.rmtree(before, ignore_errors=True)
    elif before.exists():
        before.rename(directory)


def _try_lock(directory: Path) -> int | None:
    """Return a file descriptor with the lock, or None if another process has the lock."""
    path = _hidden_path(directory, _LOCK)
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
        os.close(descriptor)  # the previous writer has removed the file


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _release(directory: Path, descriptor: int) -> None:
    _hidden_path(directory, _LOCK).unlink(missing_ok=True)
    os.close(descriptor)


def _hidden_path(directory: Path, suffix: str) -> Path:
    return directory.with_name(f".{directory.name}{suffix}")
