"""Cache of the offsets of records in files.

Finding records requires reading a file (JSON Lines) or its headers (tar), which is slow for remote
files. An entry of the cache is named by the version of the file. Corrupt entries are replaced.
"""

from __future__ import annotations

import hashlib
import io
import logging
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from torchmm.common.files import replace_atomically
from torchmm.data.files.remote_files import AnyFile, RemoteFile

CHECKSUM_BYTES = 16
"""Size of a checksum in bytes."""

logger = logging.getLogger(__name__)


def checksum(data: bytes | memoryview | mmap.mmap) -> bytes:
    """Return the 16-byte xxh3 checksum of bytes."""
    return xxhash.xxh3_128_digest(data)


class OffsetCache:
    """Cache of integer arrays by file.

    Args:
        directory: Directory of the index cache. None to disable the cache.
    """

    def __init__(self, directory: str | Path | None) -> None:
        self._directory = None if directory is None else Path(directory) / "places"

    def get_or_compute(
        self, file: AnyFile, kind: str, search: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Return a cached int64 array of a file, or call `search` and cache the result.

        Args:
            file: Version of a file.
            kind: Name and version of the search.
            search: Function that computes the array. If it raises, nothing is cached.
        """
        if self._directory is None:
            return search()
        digest = hashlib.sha256(f"{kind}\0{_file_version(file)}".encode()).hexdigest()[:40]
        path = self._directory / f"{digest}.npy"
        try:
            content = path.read_bytes()
            if checksum(content[:-CHECKSUM_BYTES]) == content[-CHECKSUM_BYTES:]:
                cached: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
                return cached
            logger.warning("%s is corrupt; indexing %s again", path, file)
        except FileNotFoundError:
            pass
        result = np.ascontiguousarray(search(), np.int64)
        stream = io.BytesIO()
        np.save(stream, result)
        content = stream.getvalue()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_atomically(path, content + checksum(content))
        except OSError as error:
            logger.warning("cannot store the record offsets of %s: %s", file, error.strerror)
        return result


def _file_version(file: AnyFile) -> str:
    if isinstance(file, RemoteFile):
        return file.key
    stat = file.stat()
    return f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}"
