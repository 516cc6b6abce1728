"""Cache of remote data on the local disk: bounded, verified, and shared by all processes.

    cache = BlockCache(directory, limit_bytes)
    cache.put(entry_name(file, block), content)
    cache.get(entry_name(file, block))

An entry is a file of the content and its 16-byte checksum (xxh3), which is compared at each read. A
damaged disk or a truncated file therefore causes another request and never a wrong sample. Entries
are written under a temporary name and renamed, so any number of processes read and write without
locks. Concurrent processes write the same bytes. When the directory is full, one process removes
the least recently used entries. A process that has mapped an entry can still read it. A process
writes at most 1/32 of the limit before it checks the size of the directory, so each process exceeds
the limit by at most this fraction.

Checksums of received blocks remain when entries are removed (`BlockChecksums`). They detect remote
storage that sends different bytes for the same version of an object.

The caches of fsspec are not used, because they neither limit their disk usage nor verify their
content.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from torchmm.common.errors import ConfigError
from torchmm.data.files.offset_cache import CHECKSUM_BYTES, checksum
from torchmm.data.files.remote_files import RemoteFile

MTIME_RESOLUTION_S = 60.0
"""Resolution of the time of the last use of an entry in seconds."""
SWEEP_TARGET_FRACTION = 0.9
"""Fraction of the limit that remains when entries are removed."""

logger = logging.getLogger(__name__)


def entry_name(file: RemoteFile, block: int | str) -> str:
    """Return the cache name of a block of a file, or of data derived from the file."""
    return f"{file.key}-{block}"


class BlockCache:
    """Entries by name. Instances in other processes share the directory.

    Args:
        directory: Directory of the cache. It is created if it does not exist.
        limit_bytes: Maximum size of all entries together. 0 disables the cache.

    Raises:
        ConfigError: The directory cannot be written.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._entries = directory / "entries"
        self._sweep_lock = directory / "sweeping"
        self.limit_bytes = limit_bytes
        self._bytes_since_sweep = (
            limit_bytes  # the first entry checks the entries of other processes
        )
        self.num_damaged = 0
        """Number of damaged entries that were read."""
        if limit_bytes:
            try:
                self._entries.mkdir(parents=True, exist_ok=True)
                self._sweep_lock.touch()
            except OSError as error:
                raise ConfigError(
                    f"data.storage.cache_dir = {str(directory)!r}: cannot write "
                    f"{error.filename}: {error.strerror}; use a directory on a local disk"
                ) from error

    def entry_path(self, name: str) -> Path:
        """Return the path of an entry, which may not exist."""
        return self._entries / name[:2] / name

    def get(self, name: str) -> memoryview | None:
        """Return the content of an entry, memory-mapped, or None if it is missing or damaged."""
        if not self.limit_bytes:
            return None
        path = self.entry_path(name)
        try:
            with path.open("rb") as stream:
                file_stat = os.fstat(stream.fileno())
                if file_stat.st_size <= CHECKSUM_BYTES:
                    raise ValueError("truncated")
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                if time.time() - file_stat.st_mtime > MTIME_RESOLUTION_S:
                    os.utime(stream.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self._drop(path, str(error))
            return None
        mapped_entry = memoryview(mapped)
        content = mapped_entry[:-CHECKSUM_BYTES]
        if checksum(content) != mapped_entry[-CHECKSUM_BYTES:]:
            self._drop(path, "its checksum does not match")
            return None
        return content

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Store an entry if the disk has space."""
        if len(content) + CHECKSUM_BYTES > self.limit_bytes:
            return
        path = self.entry_path(name)
        partial = path.with_name(f".{name}.{uuid4().hex}")
        self._bytes_since_sweep += len(content)
        try:
            path.parent.mkdir(exist_ok=True)
            with partial.open("xb") as stream:
                stream.write(content)
                stream.write(checksum(content))
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            logger.warning("cannot cache %s (%s); it is read again when required", path, error)
            self._bytes_since_sweep = (
                self.limit_bytes
            )  # the disk is full, and other processes may have old entries
        if self._bytes_since_sweep >= self.limit_bytes / 32:
            self._bytes_since_sweep = 0
            self._sweep()

    def _drop(self, path: Path, reason: str) -> None:
        self.num_damaged += 1
        logger.warning("%s is corrupt (%s); reading it again from its source", path, reason)
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove the least recently used entries, unless another process is removing entries."""
        with self._sweep_lock.open("rb") as lock:
            entries: list[tuple[float, int, str]] = []
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for folder in os.scandir(self._entries):
                    for entry in os.scandir(
                        folder.path
                    ):  # includes partial entries of killed processes
                        with suppress(FileNotFoundError):
                            stat = entry.stat()
                            entries.append((stat.st_mtime, stat.st_size, entry.path))
            except OSError:
                return
            total = sum(size for _, size, _ in entries)
            if total <= self.limit_bytes:
                return
            for _, size, path in sorted(entries):
                if total <= SWEEP_TARGET_FRACTION * self.limit_bytes:
                    break
                with suppress(OSError):
                    Path(path).unlink()
                total -= size


class BlockChecksums:
    """Checksums of the blocks of an object, as they were first received.

    Args:
        path: File of the checksums.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def differs(self, block: int, content: memoryview) -> bool:
        """Return True if a block has changed. Store the checksum of a block that is new."""
        digest = checksum(content)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                stored_digest = os.pread(descriptor, CHECKSUM_BYTES, block * CHECKSUM_BYTES)
                if len(stored_digest) == CHECKSUM_BYTES and any(stored_digest):
                    return stored_digest != digest
                os.pwrite(descriptor, digest, block * CHECKSUM_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("cannot store a checksum in %s: %s", self._path, error.strerror)
        return False
