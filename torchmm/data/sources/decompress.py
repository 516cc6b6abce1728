"""Decompress text files (`.jsonl.gz`, `.csv.zst`) once, into the index cache.

Compressed files have no random access. A file is decompressed when it is first opened. The copy is
used as long as the size and the modification time of the file are unchanged. Remote CSV files and
JSON arrays are also copied, because they are searched as one text. Copies are never removed.

A JSON file next to each copy stores its size, times and SHA-256. A copy is written again if its
size differs, or if its times and its hash differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from torchmm.common.errors import ConfigError, DataError
from torchmm.common.files import replace_atomically, sync_directory
from torchmm.data.files.remote_files import AnyFile, RemoteFile
from torchmm.data.files.sample_files import open_regular

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
MAX_RATIO = 50
MIN_SIZE_LIMIT_BYTES = 1 << 30
"""Limit on the decompressed size of a small file. For larger files it is MAX_RATIO times the size.
Text compresses by about a factor of 10, so a higher ratio indicates a damaged or hostile file."""
_CHUNK_BYTES = 4 << 20

logger = logging.getLogger(__name__)


def uncompressed_suffix(path: AnyFile) -> str:
    """Return the lower-case suffix of a file without ".gz" or ".zst"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def decompress_to_cache(path: AnyFile, cache: Path, whole: bool = False) -> AnyFile:
    """Return the decompressed copy of a file, or the file if it is not compressed.

    No lock is required, because each rank writes to a temporary file and renames it.

    Args:
        path: The file.
        cache: Directory for copies.
        whole: Whether to copy a remote file that is not compressed.

    Raises:
        ConfigError: The cache cannot be written.
        DataError: The file is damaged, or its decompressed size exceeds the limit.
    """
    kind = COMPRESSIONS.get(path.suffix.lower())
    if kind is None and not (whole and isinstance(path, RemoteFile)):
        return path
    if isinstance(path, RemoteFile):
        named = path.key
    else:
        stat = path.stat()
        named = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(named.encode()).hexdigest()[:32]
    copy = cache / "unpacked" / f"{digest}-{path.stem}"
    if _is_intact(copy):
        return copy
    if copy.exists():
        logger.warning("%s is not the decompressed content of %s; decompressing again", copy, path)
    sha256 = hashlib.sha256()
    with convert_cache_errors(cache):
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = copy.with_name(f".{copy.name}.{uuid4().hex}")
        try:
            with partial.open("xb") as stream:
                for piece in _read_chunks(path, kind):
                    stream.write(piece)
                    sha256.update(piece)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(copy)
        finally:
            partial.unlink(missing_ok=True)
        sync_directory(copy.parent)
        _write_record(copy, sha256.hexdigest())
    return copy


def _is_intact(copy: Path) -> bool:
    """Return True if a copy has the content that was written.

    A copy may have 100 GB and is opened by each rank. Therefore it is hashed only if its times
    changed since it was written or hashed.
    """
    try:
        record = json.loads(_record_path(copy).read_bytes())
        state = _file_state(copy)
        if record["state"] == state:
            return True
        if record["state"][0] != state[0]:
            return False
        with copy.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != record["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False
    with suppress(OSError):  # a read-only cache is hashed at every start
        _write_record(copy, record["sha256"])
    return True


def _write_record(copy: Path, sha256: str) -> None:
    record = {"state": _file_state(copy), "sha256": sha256}
    replace_atomically(_record_path(copy), json.dumps(record).encode())


def _record_path(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.record")


def _file_state(file: Path) -> list[int]:
    """Return the size and the times of a file. `st_ctime` cannot be set by programs."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_chunks(path: AnyFile, kind: str | None) -> Iterator[bytes]:
    size_bytes = path.stat().st_size
    limit_bytes = size_bytes if kind is None else max(MIN_SIZE_LIMIT_BYTES, MAX_RATIO * size_bytes)
    unpacked_bytes = 0
    try:
        with open_regular(path) as file, pa.input_stream(file, compression=kind) as stream:
            while piece := stream.read(_CHUNK_BYTES):
                unpacked_bytes += len(piece)
                if unpacked_bytes > limit_bytes:
                    raise DataError(
                        f"{path} has {size_bytes:,} bytes and more than {limit_bytes:,} bytes "
                        f"of decompressed text, a ratio above {MAX_RATIO}. If this is "
                        "correct, decompress it, and use the decompressed file as the source"
                    )
                yield piece
    except (OSError, NotImplementedError) as error:
        raise DataError(
            f"{path} cannot be decompressed: {error}; download or write it again, or remove "
            "it from the source"
        ) from error


@contextmanager
def convert_cache_errors(directory: Path) -> Iterator[None]:
    """Convert write errors of a block to a ConfigError with the key of the index cache.

    Raises:
        ConfigError: The block raised OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"data.index_cache_dir = {str(directory)!r}: cannot write "
            f"{error.filename or directory}: {error.strerror}; use a writable directory with "
            "free space"
        ) from error
