"""Small files that nobody ever sees half written: not a reader, not the run after a crash."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

_COPY_BYTES = 16 << 20
_UNSAFE_PARTS = ("", ".", "..")
_UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")
PREPARED_FILE = "MANIFEST.json"
"""File that lists the prepared data sets next to it, with their licences."""


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no blanks, NaN refused.

    Raises:
        TypeError, ValueError: the value is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_prepared(directory: Path) -> dict[str, Any]:
    """Return the entries of `PREPARED_FILE` by data set; empty if there is no such file."""
    path = directory / PREPARED_FILE
    entries: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return entries


class UnsafeNameError(ValueError):
    """A file name from an untrusted file that may lead out of the directory of that file."""


def require_relative_name(name: object, where: str) -> str:
    """Return `name` if it names a file inside a directory on every operating system.

    Call it on each file name that a manifest, an index or an archive contains, before the name is
    joined to a path. Symbolic links are not resolved.

    Args:
        name: Value read from the file; "/" separates folders.
        where: File and key that contain the name, for the message.

    Raises:
        UnsafeNameError: The name is not text, is absolute, or has "..", ".", an empty part, a
            backslash, a drive letter or control characters.
    """
    if isinstance(name, str) and not any(part in _UNSAFE_PARTS for part in name.split("/")):
        with suppress(UnicodeEncodeError):  # lone surrogates, which JSON can spell
            name.encode()
            if not _UNSAFE_CHARACTERS.search(name):
                return name
    raise UnsafeNameError(
        f"{where} names the file {str(name)[:200]!a}; use a relative path without '..', "
        "backslashes, drive letters and control characters"
    )


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file and forces it to the disk; the caller syncs the directory entry."""
    with naming_the_file(path, len(data)), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _copy_synced(source: Path, target: Path) -> None:
    size_bytes = source.stat().st_size
    with source.open("rb") as read, naming_the_file(target, size_bytes), target.open("xb") as file:
        shutil.copyfileobj(read, file, _COPY_BYTES)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def naming_the_file(path: Path, size_bytes: int) -> Iterator[None]:
    """Adds to a write error what Python leaves out when a buffer is flushed: file and sizes."""
    try:
        yield
    except OSError as error:
        free_bytes = shutil.disk_usage(path.parent).free
        reason = f"{error.strerror}: {size_bytes} bytes are required, {free_bytes} bytes are free"
        raise OSError(error.errno, reason, str(path)) from error


def replace_atomically(path: Path, content: bytes | Path) -> None:
    """Write `path` by renaming a finished and synced file over it; its directory must exist.

    Args:
        content: Bytes, or the file to copy.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        if isinstance(content, bytes):
            write_synced(temporary, content)
        else:
            _copy_synced(content, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_writable_directory(path: Path) -> None:
    """Makes a directory where there is none, without trying to write into it.

    Raises:
        OSError: it cannot be made, or nobody, or not this user, may write into it.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        reason = "Read-only file system or permission denied"
        raise OSError(errno.EACCES, reason, str(path))


def check_writable(directory: Path) -> None:
    """Nothing, if a file can be written into `directory`.

    Raises:
        OSError: it cannot.
    """
    probe = directory / f".probe.{uuid4().hex}"
    try:
        write_synced(probe, b"x")
    finally:
        probe.unlink(missing_ok=True)


def overwrite(path: Path, data: bytes) -> None:
    """Overwrites the existing `path` in place, which works on a full disk too.

    A reader may see it half written. Content longer than the space that the file already has may
    not fit: see `allocated_bytes`.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        # Blanks over the rest, so that no moment shows the new text with the end of the old one.
        os.pwrite(descriptor, data.ljust(os.fstat(descriptor).st_size), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocated_bytes(path: Path) -> int:
    """Space that a file has on the disk: whole blocks, of which its content fills a part."""
    found = path.stat()
    return max(found.st_size, found.st_blocks * 512)


def sync_directory(path: Path) -> None:
    """Forces created, renamed and removed entries of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
