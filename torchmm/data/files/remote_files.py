"""Remote files (`s3://`, `hf://`, `https://`), with the required methods of `pathlib.Path`.

    storage = open_file_system("s3://bucket/shards/*.tar", recipe.data)
    for file in storage.list("s3://bucket/shards/*.tar"):
        with file.open() as stream: ...

File systems come from extensions, as entries of the table "file_systems". The name of an entry is
"addresses"; its target is a function with the argument `DataConfig` that returns a `FileSystem`.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, Protocol

from torchmm.common.extensions import load_entry
from torchmm.data.files.urls import join_url, parse_url, redact_urls
from torchmm.recipe.data_section import DataConfig, is_address


class FileSystem(Protocol):
    """Remote file system. Workers receive a pickled copy and open separate connections.

    All methods raise DataError if a store rejects a request or does not respond.
    """

    def find(self, url: str) -> RemoteFile | None:
        """Return the current version of the file at a URL, or None if it does not exist."""
        ...

    def list(self, url: str) -> list[RemoteFile]:
        """Return the visible files at or below a URL or matching a pattern, sorted by name."""
        ...

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of a file, or fewer at its end."""
        ...

    def open(self, file: RemoteFile) -> BinaryIO:
        """Return a stream of a file, which fetches bytes when they are read."""
        ...

    def derive(
        self, file: RemoteFile, name: str, make: Callable[[BinaryIO], memoryview]
    ) -> tuple[memoryview, Path | None]:
        """Return data derived from a file, and the mapped cache entry or None.

        Args:
            file: File of this file system.
            name: Name of the derived data.
            make: Function that derives the data from a stream of the file. It is called if the data
                is not in the cache. The bytes that it reads are not cached.
        """
        ...


@dataclass(frozen=True, order=True)
class RemoteFile:
    """Version of a remote file."""

    url: str
    size: int
    """Size in bytes."""
    version: str
    """String that changes with the content, such as an ETag."""
    storage: FileSystem = field(compare=False, repr=False)

    def __str__(self) -> str:
        return redact_urls(self.url)

    @property
    def key(self) -> str:
        """Name of this version in caches."""
        named = f"{self.url}\0{self.size}\0{self.version}"
        return hashlib.sha256(named.encode()).hexdigest()[:40]

    @property
    def name(self) -> str:
        """Last part of the path."""
        return posixpath.basename(parse_url(self.url).path)

    @property
    def stem(self) -> str:
        """Name without its last suffix."""
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        """Last suffix of the name, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """Directory of the file."""
        return RemotePath(self.url.rpartition("/")[0], self.storage)

    def stat(self) -> SimpleNamespace:
        """Return the size as `st_size`."""
        return SimpleNamespace(st_size=self.size)

    def read_bytes(self) -> bytes:
        """Return the content. Raise DataError if the store does not respond."""
        return self.storage.read(self, 0, self.size)

    def open(self) -> BinaryIO:
        """Return a stream, which fetches bytes when they are read."""
        return self.storage.open(self)


@dataclass(frozen=True)
class RemotePath:
    """Remote directory, or remote file that may not exist."""

    url: str
    storage: FileSystem = field(compare=False, repr=False)

    def __str__(self) -> str:
        return redact_urls(self.url)

    def join(self, name: str) -> RemotePath | None:
        """Return the path of a file in this directory, or None if the name is outside of it."""
        url = join_url(self.url, name)
        return None if url is None else RemotePath(url, self.storage)

    def find(self) -> RemoteFile | None:
        """Return the current version of the file, or None if it does not exist."""
        return self.storage.find(self.url)


AnyFile = Path | RemoteFile
"""Local or remote file of a source."""


def open_file_system(path: str, data: DataConfig) -> FileSystem | None:
    """Return the file system of a URL, or None if the path is local.

    Raises:
        ConfigError: The file system cannot be used with these settings.
    """
    if not is_address(path):
        return None
    storage: FileSystem = load_entry("file_systems", "addresses")(data)
    return storage
