"""Packed text (`.jsonl.gz`, `.csv.zst` and the like): unpacked once, into the index cache.

Records of packed files cannot be reached without unpacking all before them. So each is unpacked
when it is first read, and found again as long as its size and time stay the same. So are, from
elsewhere, tables and arrays, which can only be searched as a whole. Copies are never removed; they
take as much room as the unpacked files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.sample_files import open_regular
from torchmm.data.storage.remote_files import AnyFile, RemoteFile

PACKED = {".gz": "gzip", ".zst": "zstd"}
_CHUNK_BYTES = 4 << 20


def plain_suffix(path: AnyFile) -> str:
    """The suffix of what a file contains, in lower case: that before ".gz" and ".zst"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED else suffix


def unpacked(path: AnyFile, cache: Path, whole: bool = False) -> AnyFile:
    """Where the text of a file is: the file itself, unless it is packed.

    Args:
        path: the file.
        cache: directory for copies.
        whole: whether it has to be on this machine.

    Ranks that come at the same time each unpack and rename, so no lock is needed.

    Raises:
        ConfigError: nothing can be written into the cache.
        DataError: the file is damaged.
    """
    kind = PACKED.get(path.suffix.lower())
    if kind is None and not (whole and isinstance(path, RemoteFile)):
        return path
    if isinstance(path, RemoteFile):
        named = path.key
    else:
        stat = path.stat()
        named = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(named.encode()).hexdigest()[:32]
    copy = cache / "unpacked" / f"{digest}-{path.stem}"
    if copy.exists():
        return copy
    with naming_the_cache(cache):
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = copy.with_name(f".{copy.name}.{uuid4().hex}")
        try:
            with partial.open("xb") as stream:
                for piece in _pieces(path, kind):
                    stream.write(piece)
            partial.replace(copy)
        finally:
            partial.unlink(missing_ok=True)
    return copy


def _pieces(path: AnyFile, kind: str | None) -> Iterator[bytes]:
    try:
        with open_regular(path) as file, pa.input_stream(file, compression=kind) as stream:
            while piece := stream.read(_CHUNK_BYTES):
                yield piece
    except (OSError, NotImplementedError) as error:
        raise DataError(
            f"{path} cannot be unpacked: {error}; fetch or write it again, or take it out of the "
            "source"
        ) from error


@contextmanager
def naming_the_cache(directory: Path) -> Iterator[None]:
    """Turns errors of writing into the index cache into one that names its key.

    Raises:
        ConfigError: something in the block could not be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"data.index_cache = {str(directory)!r}: cannot write {error.filename or directory}: "
            f"{error.strerror}; name a directory that can be written and has room"
        ) from error
