"""What was read from elsewhere, kept on this machine's disk: bounded, checked, shared by processes.

An entry is a file: its content, then the content's 16-byte checksum (xxh3), compared at every
reading; so a damaged disk, or a file cut off by a crash, costs another request and never a wrong
sample. Entries are written beside their place and renamed, so any number of processes may read and
write without locks: racing ones write the same bytes. When the directory is full, the entries that
were not used for longest go first; one process at a time removes them, for all. A process writes
at most a 32nd of the limit before it looks how full the directory is: so much may it be passed by.

Checksums of what a store has sent stay when entries go (`Sums`): a store that sends other bytes for
the same version of an object than before is found out.

Rejected: fsspec's caches, which are bounded by nothing or by memory, and check nothing; one sparse
file per object, which does without renaming but can only be removed as a whole.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from torchmm.common.errors import ConfigError
from torchmm.data.files.places import SUM_BYTES, checksum
from torchmm.data.files.remote import RemoteFile

TOUCH_S = 60.0
"""How exactly it is known when an entry was last used."""
SWEPT_TO = 0.9
"""Share of the limit that is left when entries are removed."""

logger = logging.getLogger(__name__)


def entry_name(file: RemoteFile, block: int | str) -> str:
    """Return the name of a block of a file, or of data made from it, in the cache."""
    return f"{file.key}-{block}"


class BlockCache:
    """Entries under names. Copies in other processes share the directory.

    Args:
        directory: made if there is none.
        limit_bytes: of all entries together; 0: nothing is kept.

    Raises:
        ConfigError: the directory cannot be written.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._entries = directory / "entries"
        self._sweeping = directory / "sweeping"
        self.limit_bytes = limit_bytes
        self._unswept = limit_bytes  # so that the first entry looks what others have left
        self.damaged = 0
        """Entries found damaged."""
        if limit_bytes:
            try:
                self._entries.mkdir(parents=True, exist_ok=True)
                self._sweeping.touch()
            except OSError as error:
                raise ConfigError(
                    f"data.storage.cache_dir = {str(directory)!r}: cannot write "
                    f"{error.filename}: {error.strerror}; name a directory on a local disk"
                ) from error

    def place(self, name: str) -> Path:
        """The file of an entry, whether it exists or not."""
        return self._entries / name[:2] / name

    def get(self, name: str) -> memoryview | None:
        """The content of an entry, mapped from its file; None: there is none, or it is damaged."""
        if not self.limit_bytes:
            return None
        path = self.place(name)
        try:
            with path.open("rb") as stream:
                used = os.fstat(stream.fileno())
                if used.st_size <= SUM_BYTES:
                    raise ValueError("cut off")
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                if time.time() - used.st_mtime > TOUCH_S:
                    os.utime(stream.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self._drop(path, str(error))
            return None
        whole = memoryview(mapped)
        content = whole[:-SUM_BYTES]
        if checksum(content) != whole[-SUM_BYTES:]:
            self._drop(path, "its checksum is wrong")
            return None
        return content

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Keeps a content, if there is room on the disk."""
        if not 0 < len(content) + SUM_BYTES <= self.limit_bytes:
            return
        path = self.place(name)
        partial = path.with_name(f".{name}.{uuid4().hex}")
        self._unswept += len(content)
        try:
            path.parent.mkdir(exist_ok=True)
            with partial.open("xb") as stream:
                stream.write(content)
                stream.write(checksum(content))
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            logger.warning("cannot keep %s (%s): it is read again when needed", path, error)
            self._unswept = self.limit_bytes  # a full disk: others' entries may be old
        if self._unswept >= self.limit_bytes / 32:
            self._unswept = 0
            self._sweep()

    def _drop(self, path: Path, reason: str) -> None:
        self.damaged += 1
        logger.warning("%s is damaged (%s) and is read from its source again", path, reason)
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Removes what was not used for longest, unless another process is doing that."""
        with self._sweeping.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = sorted(self._sizes())
            except OSError:
                return
            total = sum(size for _, size, _ in found)
            if total <= self.limit_bytes:
                return
            for _, size, path in found:
                if total <= SWEPT_TO * self.limit_bytes:
                    break
                with suppress(OSError):
                    Path(path).unlink()
                total -= size

    def _sizes(self) -> Iterator[tuple[float, int, str]]:
        """Last use, size and path of every entry, unfinished ones of killed processes too."""
        for folder in os.scandir(self._entries):
            for entry in os.scandir(folder.path):
                with suppress(FileNotFoundError):
                    stat = entry.stat()
                    yield stat.st_mtime, stat.st_size, entry.path


class Sums:
    """Checksums of an object's blocks as they first came.

    Args:
        path: the file that keeps them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def differs(self, block: int, content: memoryview) -> bool:
        """Whether a block is not what it was; a block that comes for the first time is noted."""
        own = checksum(content)
        try:
            with self._opened() as descriptor:
                known = os.pread(descriptor, SUM_BYTES, block * SUM_BYTES)
                if len(known) == SUM_BYTES and any(known):
                    return known != own
                os.pwrite(descriptor, own, block * SUM_BYTES)
        except OSError as error:
            logger.warning("cannot note a checksum in %s: %s", self._path, error.strerror)
        return False

    @contextmanager
    def _opened(self) -> Iterator[int]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
