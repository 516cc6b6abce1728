"""File system of URLs, which reads blocks through a cache on the local disk.

A file is the version of an object when it was listed. All reads fetch blocks of 256 KiB, which are
stored in the cache (`block_cache.py`). Adjacent blocks share a request, and sequential reads fetch
more blocks ahead. Worker processes receive a copy without connections.

The cache stores blocks instead of shards, because the sample order is global and independent of the
number of hosts. Each host therefore reads a random part of every shard, and a sample requires only
its blocks. With a cache of shards, each host would download every shard, and one shard per sample
before the first step.
"""

from __future__ import annotations

import fnmatch
import io
import logging
import os
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from torchmm.common.errors import DataError
from torchmm.data.files.remote_files import RemoteFile
from torchmm.data.files.urls import glob_directory, is_glob, parse_url
from torchmm.extensions.remote.section import StorageConfig
from torchmm.extensions.remote.storage.block_cache import BlockCache, BlockChecksums, entry_name
from torchmm.extensions.remote.storage.store_client import (
    MissingError,
    ReplacedError,
    StoreClient,
)
from torchmm.recipe.data_section import DataConfig

BLOCK_BYTES = 256 << 10
REQUEST_BYTES = 16 << 20
"""Maximum size of one request in bytes."""
BUFFER_BYTES = 64 << 10
MAX_WRONG_RESPONSES = 3
"""Number of responses with changed bytes after which the run stops."""

logger = logging.getLogger(__name__)


class RemoteFileSystem:
    """File system of all remote files, with their cache.

    Args:
        cache: Directory of the cache.
        limit_bytes: Maximum size of the cache.
        retry_timeout_s: Time in seconds after which a failing request stops the run.

    Raises:
        ConfigError: The cache cannot be written.
    """

    def __init__(self, cache: Path, limit_bytes: int, retry_timeout_s: float) -> None:
        self._settings = cache, limit_bytes, retry_timeout_s
        self._directory = cache
        self._retry_timeout_s = retry_timeout_s
        self._clients: dict[str, StoreClient] = {}
        self._process = os.getpid()
        self.cache = BlockCache(cache, limit_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFileSystem, self._settings  # connections are not shared between processes

    def client(self, url: str) -> StoreClient:
        """Return the client of this process for the storage of a URL. May raise ConfigError."""
        if self._process != os.getpid():
            self._clients = {}
            self._process = os.getpid()
        root = parse_url(url).root
        if root not in self._clients:
            self._clients[root] = StoreClient(root, self._retry_timeout_s)
        return self._clients[root]

    def find(self, url: str) -> RemoteFile | None:
        """Return the current version of the file at a URL, or None if it does not exist.

        Raises:
            DataError: The remote storage rejects the request or does not respond.
        """
        try:
            info = self.client(url).stat(parse_url(url).path)
        except MissingError:
            return None
        return RemoteFile(url, info.size, info.version, self)

    def list(self, url: str) -> list[RemoteFile]:
        """Return the files at, below or matching a URL, see `FileSystem.list`."""
        folder = parse_url(glob_directory(url))
        pattern = parse_url(url).path if is_glob(url) else None
        if pattern is None and folder.path and (one := self.find(url)) is not None:
            return [one]
        files = []
        client = self.client(url)
        for info in client.list(folder.path):
            inside = posixpath.relpath(info.path, folder.path or ".")
            hidden = any(part.startswith(".") for part in inside.split("/"))
            if not hidden and (pattern is None or _matches_glob(info.path, pattern)):
                url = f"{folder.root}/{info.path}"
                files.append(RemoteFile(url, info.size, info.version, self))
        return files

    def read(self, file: RemoteFile, start: int, end: int, keep: bool = True) -> bytes:
        """Return the bytes [start, end) of a file, or fewer at its end.

        Args:
            file: File of this file system.
            start: First byte.
            end: Byte after the last one.
            keep: Whether to store the blocks in the cache.

        Raises:
            DataError: The remote storage rejects a request, does not respond, or sends wrong bytes.
        """
        end = min(end, file.size)
        if start >= end:
            return b""
        if not self.cache.limit_bytes:
            return self._request(file, start, end)
        blocks = range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        block_data: dict[int, bytes | memoryview] = {}
        for number in blocks:
            if number in block_data:
                continue
            cached = self.cache.get(entry_name(file, number))
            if cached is not None:
                block_data[number] = cached
            else:
                block_data |= self._fetch(file, number, blocks.stop, keep)
        whole = b"".join(block_data[number] for number in blocks)
        first = blocks.start * BLOCK_BYTES
        return whole[start - first : end - first]

    def open(self, file: RemoteFile, keep: bool = True) -> BinaryIO:
        """Return a stream that fetches the bytes that are read.

        Args:
            file: The file.
            keep: Whether to store blocks in the cache.
        """
        return cast(BinaryIO, io.BufferedReader(_RemoteStream(self, file, keep), BUFFER_BYTES))

    def derive(
        self, file: RemoteFile, name: str, make: Callable[[BinaryIO], memoryview]
    ) -> tuple[memoryview, Path | None]:
        """Return data derived from a file, see `FileSystem.derive`."""
        entry = entry_name(file, name)
        cached = self.cache.get(entry)
        if cached is None:
            with self.open(file, keep=False) as stream:
                derived = make(stream)
            self.cache.put(entry, derived)
            cached = self.cache.get(entry)
            if cached is None:
                return derived, None
        return cached, self.cache.entry_path(entry)

    def _fetch(self, file: RemoteFile, first: int, last: int, keep: bool) -> dict[int, memoryview]:
        """Fetch blocks from `first` on with one request, up to `last` or the first cached block."""
        stop = first + 1
        while stop < min(last, first + REQUEST_BYTES // BLOCK_BYTES):
            if self.cache.entry_path(entry_name(file, stop)).exists():
                break
            stop += 1
        start = first * BLOCK_BYTES
        for _ in range(MAX_WRONG_RESPONSES):
            data = memoryview(self._request(file, start, min(stop * BLOCK_BYTES, file.size)))
            blocks = {
                number: data[(number - first) * BLOCK_BYTES :][:BLOCK_BYTES]
                for number in range(first, stop)
            }
            wrong = self._changed(file, blocks)
            if wrong is None:
                break
            logger.warning(
                "%s: checksum of bytes from %d does not match, reading them again", file, wrong
            )
        else:
            raise DataError(
                f"{file}: bytes from {wrong} have a different checksum than in the first "
                f"read, {MAX_WRONG_RESPONSES} times; check the object store. If the first read was "
                f"wrong, remove {self._directory} and data.index_cache_dir"
            )
        if keep:
            for number, block in blocks.items():
                self.cache.put(entry_name(file, number), block)
        return blocks

    def _changed(self, file: RemoteFile, blocks: dict[int, memoryview]) -> int | None:
        """Return the offset in bytes of the first block whose checksum has changed, or None.

        Files of one block are not compared, because they are rarely read twice.
        """
        if file.size <= BLOCK_BYTES:
            return None
        sums = BlockChecksums(self._directory / "sums" / file.key[:2] / file.key)
        return next((n * BLOCK_BYTES for n, b in blocks.items() if sums.differs(n, b)), None)

    def _request(self, file: RemoteFile, start: int, end: int) -> bytes:
        try:
            path = parse_url(file.url).path
            return self.client(file.url).read(path, start, end, file.version)
        except MissingError:
            raise ReplacedError(f"{file} was removed while it was being read") from None


def open_remote_file_system(data: DataConfig) -> RemoteFileSystem:
    """Return the file system with the cache of `data.storage`. May raise ConfigError."""
    config = StorageConfig.from_parent(data)
    directory = config.cache_dir or Path(data.index_cache_dir) / "storage"
    return RemoteFileSystem(Path(directory), int(config.cache_gb * 1e9), config.retry_timeout_s)


class _RemoteStream(io.RawIOBase):
    """Stream that reads byte ranges of a file. Longer sequential reads fetch more data ahead."""

    def __init__(self, storage: RemoteFileSystem, file: RemoteFile, keep: bool) -> None:
        self._storage = storage
        self._file = file
        self._keep = keep
        self._position = 0
        self._expected = 0
        self._read_ahead_bytes = 0
        self._buffered: tuple[int, bytes] = (0, b"")
        """Offset and content of the last fetched bytes."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        start = self._position
        end = start + len(buffer)
        if len(buffer) <= BUFFER_BYTES:  # do not fetch another block to fill a buffer
            end = min(end, (start // BLOCK_BYTES + 1) * BLOCK_BYTES)
        end = max(start, min(end, self._file.size))
        data_start, content = self._buffered
        if start < data_start or end > data_start + len(content):
            is_sequential = start == self._expected and start > 0
            self._read_ahead_bytes = min(
                max(2 * self._read_ahead_bytes, BLOCK_BYTES), REQUEST_BYTES
            )
            self._read_ahead_bytes = self._read_ahead_bytes if is_sequential else 0
            self._expected = min(max(end, start + self._read_ahead_bytes), self._file.size)
            content = self._storage.read(self._file, start, self._expected, self._keep)
            data_start, self._buffered = start, (start, content)
        buffer[: end - start] = content[start - data_start : end - data_start]
        self._position = end
        return end - start


def _matches_glob(path: str, pattern: str) -> bool:
    """Return True if a path matches a glob: "*" stays within a folder, "**" does not."""
    parts = path.split("/")
    pattern_parts = pattern.split("/")
    if "**" not in pattern_parts:
        return len(parts) == len(pattern_parts) and all(
            map(fnmatch.fnmatchcase, parts, pattern_parts)
        )
    at = pattern_parts.index("**")
    tail = pattern_parts[at + 1 :]
    rest = parts[at:]
    starts = range(len(rest) + 1) if tail else [len(rest)]
    return _matches_glob("/".join(parts[:at]), "/".join(pattern_parts[:at])) and any(
        _matches_glob("/".join(rest[i:]), "/".join(tail)) for i in starts
    )
