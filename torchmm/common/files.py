"""Atomic and synced writes of small files, and safe file names."""

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
"""File that lists the prepared data sets in its directory, with their licenses."""


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, no NaN.

    Raises:
        TypeError, ValueError: The value is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_prepared_manifest(directory: Path) -> dict[str, Any]:
    """Return the entries of `PREPARED_FILE` by data set, or an empty dict without the file."""
    path = directory / PREPARED_FILE
    entries: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for entry in entries.values():
        if "licence" in entry:  # the name of the key in files of earlier versions
            entry["license"] = entry.pop("licence")
    return entries


class UnsafeNameError(ValueError):
    """File name from an untrusted file that can leave the directory of this file."""


def check_relative_name(name: object, where: str) -> str:
    """Return `name` if it is a relative path without "..", on every operating system.

    Call it for each file name of a manifest, an index or an archive, before the name is joined to a
    path. Symbolic links are not resolved.

    Args:
        name: Value from the file. "/" separates directories.
        where: File and key of the name, for the error message.

    Raises:
        UnsafeNameError: The name is not text, is absolute, or has "..", ".", an empty part, a
            backslash, a drive letter or control characters.
    """
    if isinstance(name, str) and not any(part in _UNSAFE_PARTS for part in name.split("/")):
        with suppress(UnicodeEncodeError):  # lone surrogates, which JSON can contain
            name.encode()
            if not _UNSAFE_CHARACTERS.search(name):
                return name
    raise UnsafeNameError(
        f"{where} names the file {str(name)[:200]!a}; use a relative path without '..', "
        "backslashes, drive letters and control characters"
    )


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and sync it to disk. The caller must sync the directory entry."""
    with add_path_to_os_errors(path, len(data)), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _copy_synced(source: Path, target: Path) -> None:
    size_bytes = source.stat().st_size
    with (
        source.open("rb") as read,
        add_path_to_os_errors(target, size_bytes),
        target.open("xb") as file,
    ):
        shutil.copyfileobj(read, file, _COPY_BYTES)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def add_path_to_os_errors(path: Path, size_bytes: int) -> Iterator[None]:
    """Add path, size and free space to write errors. Python omits them when it flushes a buffer."""
    try:
        yield
    except OSError as error:
        free_bytes = shutil.disk_usage(path.parent).free
        reason = f"{error.strerror}: {size_bytes} bytes are required, {free_bytes} bytes are free"
        raise OSError(error.errno, reason, str(path)) from error


def replace_atomically(path: Path, content: bytes | Path) -> None:
    """Replace `path` by a new, synced file with a rename. Its directory must exist.

    Args:
        path: File to replace.
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
    """Create a directory and check its write permission, without writing a file.

    Raises:
        OSError: The directory cannot be created or is not writable.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        reason = "Read-only file system or permission denied"
        raise OSError(errno.EACCES, reason, str(path))


def check_writable(directory: Path) -> None:
    """Write and remove a file to check that `directory` is writable.

    Raises:
        OSError: The file cannot be written.
    """
    probe = directory / f".probe.{uuid4().hex}"
    try:
        write_synced(probe, b"x")
    finally:
        probe.unlink(missing_ok=True)


def overwrite_in_place(path: Path, data: bytes) -> None:
    """Overwrite an existing file in place, which also works on a full disk.

    Readers can see a partially written file. Content that is longer than the allocated space may
    not fit, see `allocated_bytes`.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        # Spaces overwrite the rest, so that the old end never follows the new content.
        os.pwrite(descriptor, data.ljust(os.fstat(descriptor).st_size), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocated_bytes(path: Path) -> int:
    """Return the allocated space of a file on disk, which is a multiple of the block size."""
    status = path.stat()
    return max(status.st_size, status.st_blocks * 512)


def sync_directory(path: Path) -> None:
    """Sync created, renamed and removed entries of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
