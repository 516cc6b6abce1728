"""Where records begin in a file, kept between starts: found once, in a file of numbers.

To find them, a file has to be read (JSON lines) or its headers (tar), which for files elsewhere is
slow. What was found is named by the file's version; anything unreadable is found again.
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
from torchmm.data.files.remote import AnyFile, RemoteFile

SUM_BYTES = 16
"""Size of a checksum."""

logger = logging.getLogger(__name__)


def checksum(data: bytes | memoryview | mmap.mmap) -> bytes:
    """Return the 16-byte xxh3 checksum of some bytes."""
    return xxhash.xxh3_128_digest(data)


class Places:
    """Numbers by file.

    Args:
        directory: of the index cache; None: nothing is kept.
    """

    def __init__(self, directory: str | Path | None) -> None:
        self._directory = None if directory is None else Path(directory) / "places"

    def find(self, file: AnyFile, kind: str, search: Callable[[], np.ndarray]) -> np.ndarray:
        """An int64 array about a file: as it was found before, or what `search` returns.

        Args:
            file: this version of a file.
            kind: what is searched, and how: part of the name.
            search: may raise; then nothing is kept.
        """
        if self._directory is None:
            return search()
        digest = hashlib.sha256(f"{kind}\0{_version(file)}".encode()).hexdigest()[:40]
        path = self._directory / f"{digest}.npy"
        try:
            content = path.read_bytes()
            if checksum(content[:-SUM_BYTES]) == content[-SUM_BYTES:]:
                kept: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
                return kept
            logger.warning("%s is corrupt; indexing %s again", path, file)
        except FileNotFoundError:
            pass
        found = np.ascontiguousarray(search(), np.int64)
        stream = io.BytesIO()
        np.save(stream, found)
        content = stream.getvalue()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_atomically(path, content + checksum(content))
        except OSError as error:
            logger.warning("cannot store the record offsets of %s: %s", file, error.strerror)
        return found


def _version(file: AnyFile) -> str:
    if isinstance(file, RemoteFile):
        return file.key
    stat = file.stat()
    return f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}"
