"""Random access to the samples of WebDataset shards, tar files whose members share a name.

    samples = TarSamples(shards, places=Places(data.index_cache_dir))
    location, parts = samples.read(index)

    shard-0.tar    dog.jpg  dog.json | cat.jpg  cat.json | end marker
                   sample 0          | sample 1

The offsets of samples are found by reading the headers of all members once, or in a `.tar.idx` file
from Energon. `OffsetCache` stores the offsets. Images, videos and audio files stay in the shard
until they are decoded. Parts are bytes unless they are text or JSON. No part is unpickled, unlike
`.pth` parts in the reader of Hugging Face.

Common tar readers stop silently at damaged data. This reader continues after the damage, and only
samples that may have lost a part are corrupt. Truncated shards are rejected at each start, which
requires one small read per shard. Compressed shards are rejected, because they have no random
access.
"""

from __future__ import annotations

import json
import logging
import tarfile
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError, list_messages, record_errors_at
from torchmm.data.files.offset_cache import OffsetCache
from torchmm.data.files.remote_files import AnyFile, RemoteFile
from torchmm.data.files.sample_files import INLINE_BYTES, FileRange, open_regular
from torchmm.data.record_formats.columns import MEDIA_TYPES
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.text_files import MAX_RECORD_BYTES

SEARCH_VERSION = 1
"""Version of the search for samples. Offsets of different versions are not used."""
MAX_PART_BYTES = 2 << 30
"""Maximum size of a part of a sample."""
MAX_HEADER_BYTES = 1 << 20
"""Maximum size of a name or extended header of a member."""
MEDIA_SUFFIXES = frozenset(suffix for suffixes, _ in MEDIA_TYPES.values() for suffix in suffixes)
"""Last suffixes of parts that are images, videos or audio files."""
JSON_SUFFIXES = ("json", "jsn")
TEXT_SUFFIXES = ("txt", "text", "caption", "transcript")
INTEGER_SUFFIXES = ("cls", "cls2", "index", "inx", "id")
"""Last suffixes of parts that are decoded as integers, like in WebDataset."""

END_OF_ARCHIVE = bytes(2 * tarfile.BLOCKSIZE)
_COMPRESSION_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_HOW_TO_FIX = "download or write it again, or remove it from the source"

Parts = Mapping[str, bytes | FileRange]
"""Parts of a sample by name: bytes, or the range of a file in the shard."""

logger = logging.getLogger(__name__)


class TarSamples:
    """Samples of several shards in order.

    Args:
        shards: Uncompressed tar files.
        omitted_keys: Keys of omitted samples, by shard.
        offset_cache: Cache of the offsets.

    Raises:
        DataError: A shard is truncated or compressed.
    """

    def __init__(
        self,
        shards: Sequence[AnyFile],
        omitted_keys: Mapping[AnyFile, Collection[str]] | None = None,
        offset_cache: OffsetCache | None = None,
    ) -> None:
        offset_cache = offset_cache or OffsetCache(None)
        check_tars(shards)
        self._shards = list(shards)
        starts = []
        for shard in shards:
            skipped = (omitted_keys or {}).get(shard, ())
            kind = f"tar {SEARCH_VERSION} without {sorted(skipped)}"
            indexed = None if skipped else _read_energon_index(shard)
            if indexed is None:
                indexed = offset_cache.get_or_compute(
                    shard, kind, partial(_find_samples, shard, skipped)
                )
            starts.append(indexed)
        self._starts, damaged = np.concatenate([np.empty((0, 2), np.int64), *starts]).T
        self._after_corruption = set(np.flatnonzero(damaged).tolist())
        self._ends = np.cumsum([len(each) for each in starts])

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> tuple[str, Parts]:
        """Return the location of a sample ("SHARD:KEY") and its parts by name.

        Raises:
            CorruptSampleError: The shard is damaged at the sample, or changed since it was opened,
                or a part is too large.
        """
        shard = self.shard_of(index)
        start = int(self._starts[index])
        location = f"{shard}, sample at byte {start}"
        if index in self._after_corruption:
            raise CorruptSampleError(
                f"{location}: its first members may be in the corrupt range before it"
            )
        try:
            with open_regular(shard) as stream:
                return self._read(shard, stream, start)
        except OSError as error:
            raise CorruptSampleError(f"{location}: {error.strerror}") from error
        except (tarfile.TarError, ValueError) as error:
            raise CorruptSampleError(f"{location}: {error}") from error

    def shard_of(self, index: int) -> AnyFile:
        """Return the shard of a sample."""
        return self._shards[int(np.searchsorted(self._ends, index, side="right"))]

    def _read(self, shard: AnyFile, stream: BinaryIO, start: int) -> tuple[str, Parts]:
        key = ""
        members: dict[str, tarfile.TarInfo] = {}
        for member in _members(stream, start):
            if isinstance(member, CorruptRange):
                raise CorruptSampleError(f"is followed by {member}")
            name = _split_name(member)
            if name is None:
                continue
            if key and name[0] != key:
                break
            key = name[0]
            if name[1] in members:
                raise CorruptSampleError(f"{key} has two members {name[1]}")
            members[name[1]] = member
        parts = {part: _read_part(shard, stream, part, m) for part, m in members.items()}
        return f"{shard}:{key}", parts


class WebdatasetSource:
    """Source of the samples of shards. The columns of a record are the parts of the sample.

    Args:
        shards: Uncompressed tar files.
        fingerprint: Fingerprint of the shards.
        offset_cache: Cache of the offsets.
    """

    def __init__(
        self, shards: Sequence[AnyFile], fingerprint: str, offset_cache: OffsetCache | None = None
    ) -> None:
        self._samples = TarSamples(shards, offset_cache=offset_cache)
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, index: int) -> Record:
        """Return record `index`. Raise CorruptSampleError if it cannot be read."""
        location, parts = self._samples.read(index)
        with record_errors_at(location):
            columns: dict[str, Any] = {part: decode_part(part, parts[part]) for part in parts}
        shard = self._samples.shard_of(index)
        columns |= {"__key__": location.removeprefix(f"{shard}:"), "__url__": str(shard)}
        return Record(columns, location=location)


class WebdatasetStream:
    """Stream of the samples of shards. The headers of a shard are read when it is reached."""

    def __init__(self, shards: Sequence[AnyFile], offset_cache: OffsetCache | None = None) -> None:
        check_tars(shards)
        self._shards = list(shards)
        self._offset_cache = offset_cache
        self.restart(None)

    def restart(self, position: Any) -> None:
        """Resume at a position [shard, sample]. Raise DataError for a state of `datasets`."""
        if isinstance(position, dict):
            raise DataError(
                "the checkpoint has the loader state of an earlier torchmm version, which "
                "read tar files with `datasets`; continue with that version, or start a new "
                "run"
            )
        self._shard: int
        self._next: int
        self._shard, self._next = position or (0, 0)
        self._opened: WebdatasetSource | None = None

    def position(self) -> Any:
        """Return the position of the next record: [shard, sample]."""
        return [self._shard, self._next]

    def next(self) -> Record | CorruptSampleError | None:
        """Return the next record, the error if it is corrupt, or None at the end."""
        while self._shard < len(self._shards):
            if self._opened is None:
                self._opened = WebdatasetSource([self._shards[self._shard]], "", self._offset_cache)
            if self._next < len(self._opened):
                self._next += 1
                try:
                    return self._opened.read(self._next - 1)
                except CorruptSampleError as error:
                    return error
            self._shard += 1
            self._next = 0
            self._opened = None
        return None


def check_tars(shards: Sequence[AnyFile]) -> None:
    """Check the ends of tar files.

    Raises:
        DataError: Files are truncated inside a member, compressed, or not tar files. The message
            lists all of them.
    """
    rejected = []
    for shard in shards:
        try:
            _check_tar(shard)
        except OSError as error:
            rejected.append(f"{shard}: {error.strerror}")
        except DataError as error:
            rejected.append(str(error))
    if rejected:
        raise DataError(
            rejected[0] if len(rejected) == 1 else f"tar files:{list_messages(rejected)}"
        )


def _check_tar(shard: AnyFile) -> None:
    """Raise DataError for a truncated tar file, and warn about a missing end-of-archive marker."""
    size = shard.stat().st_size
    last = ""
    with open_regular(shard) as stream:
        if stream.read(8).startswith(_COMPRESSION_MAGIC):
            raise DataError(f"{shard} is compressed; decompress it, or remove it from the source")
        stream.seek(max(0, size - len(END_OF_ARCHIVE)))
        if size % tarfile.BLOCKSIZE == 0 and stream.read() == END_OF_ARCHIVE:
            return
        # The headers show which member is incomplete.
        stream.seek(0)
        try:
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    if member.offset_data + member.size > size:
                        raise DataError(
                            f"{shard} is truncated after {size} bytes, inside its member "
                            f"{member.name}; {_HOW_TO_FIX}"
                        )
                    last = member.name
                end = tar.offset
        except tarfile.TarError as error:
            state = (
                f"truncated after {size} bytes, after {last}" if last else "not a complete tar file"
            )
            raise DataError(f"{shard} is {state} ({error}); {_HOW_TO_FIX}") from error
        stream.seek(end - end % tarfile.BLOCKSIZE)
        rest = stream.read(tarfile.BLOCKSIZE)
    if rest.strip(b"\0"):
        raise DataError(f"{shard} is truncated after {size} bytes, after {last}; {_HOW_TO_FIX}")
    logger.warning(
        "%s has no end-of-archive marker. If it is truncated between two members, the "
        "samples after %s are missing; compare its size with the original file",
        shard,
        last or "its start",
    )


def decode_part(part: str, data: bytes | FileRange) -> Any:
    """Decode a part like WebDataset, except for files and pickled parts, which stay bytes.

    Raises:
        CorruptSampleError: The part is not valid JSON.
    """
    if isinstance(data, FileRange):
        return data
    suffix = part.rpartition(".")[2]
    try:
        if suffix in JSON_SUFFIXES:
            return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptSampleError(f"{part}: {error}") from error
    if suffix in INTEGER_SUFFIXES and data.strip().isdigit():
        return int(data)
    return data.decode("utf-8", "replace") if suffix in TEXT_SUFFIXES else data


class CorruptRange(NamedTuple):
    """Range of bytes without a valid header."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"corrupt data in bytes {self.start} to {self.end}"


class _HeaderStream:
    """Stream of a tar file that limits the size of a read, because headers may claim any size."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.tell = stream.tell
        self.seek = stream.seek

    def read(self, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"header of {size} bytes")
        return self._stream.read(size)


def _members(stream: BinaryIO, start: int) -> Iterator[tarfile.TarInfo | CorruptRange]:
    """Yield the members after an offset, and the damage between them."""
    size = stream.seek(0, 2)
    while start < size:
        stream.seek(start)
        at = start
        try:
            with tarfile.open(fileobj=_HeaderStream(stream), mode="r:") as tar:  # type: ignore[call-overload]
                while (member := tar.next()) is not None:
                    tar.members = []  # do not store all headers
                    at = member.offset_data
                    yield member
                    at = tar.offset
                at = tar.offset
        except tarfile.TarError:
            at += -at % tarfile.BLOCKSIZE
        stream.seek(at)
        if not stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
            return  # the archive ends, or is truncated
        start = _next_header(stream, at, size)
        yield CorruptRange(at, start)


def _next_header(stream: BinaryIO, start: int, size: int) -> int:
    """Return the offset of the next header of a member, or the size of the file."""
    for offset in range(start + tarfile.BLOCKSIZE, size, tarfile.BLOCKSIZE):
        stream.seek(offset)
        block = stream.read(tarfile.BLOCKSIZE)
        if block[257:262] != b"ustar":  # cheap check before parsing
            continue
        try:
            tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.TarError:
            continue
        return offset
    return size


def _read_part(
    shard: AnyFile, stream: BinaryIO, part: str, member: tarfile.TarInfo
) -> bytes | FileRange:
    if member.issparse():
        raise CorruptSampleError(f"{member.name} is a sparse member, which is not supported")
    if part.rpartition(".")[2] in MEDIA_SUFFIXES and member.size >= INLINE_BYTES:
        return FileRange(shard, member.offset_data, member.size)
    is_text = part.rpartition(".")[2] in (*JSON_SUFFIXES, *TEXT_SUFFIXES, *INTEGER_SUFFIXES)
    limit = MAX_RECORD_BYTES if is_text else MAX_PART_BYTES  # parsed JSON uses 25 times its size
    if member.size > limit:
        raise CorruptSampleError(f"{member.name} has {member.size} bytes, but the limit is {limit}")
    stream.seek(member.offset_data)
    data = stream.read(member.size)
    if len(data) < member.size:
        raise CorruptSampleError(f"{member.name} is truncated after {len(data)} bytes")
    return data


def _find_samples(shard: AnyFile, skipped: Collection[str]) -> np.ndarray:
    """Return (N, 2), int64: the offset of the first header of each sample, and a damage flag.

    The flag is 1 if the sample follows damaged data.
    """
    offsets = array("q")
    last, damaged = None, False
    try:
        with open_regular(shard) as stream:
            for member in _members(stream, 0):
                if isinstance(member, CorruptRange):
                    logger.warning("%s: %s; skipping the affected samples", shard, member)
                    damaged, last = True, None
                    continue
                name = _split_name(member)
                if name is None or name[0] == last:
                    continue
                last = name[0]
                if last not in skipped:
                    offsets.extend((member.offset, damaged))
                damaged = False
    except OSError as error:
        raise DataError(f"{shard} cannot be read: {error.strerror}") from error
    return np.asarray(offsets, np.int64).reshape(-1, 2)


def _read_energon_index(shard: AnyFile) -> np.ndarray | None:
    """Return the result of `_find_samples` from a `.tar.idx` file, in which no damage is recorded.

    Returns None if the file is missing, older than the shard or corrupt. Indexes of remote shards
    are not requested, because a request is as slow as reading a header.
    """
    if isinstance(shard, RemoteFile):
        return None
    index = shard.with_suffix(".tar.idx")
    if not index.is_file() or index.stat().st_mtime_ns < shard.stat().st_mtime_ns:
        return None
    size = shard.stat().st_size
    offsets = np.fromfile(index, "<u8")
    ascending = (np.diff(offsets.astype(np.int64)) > 0).all()
    if (
        not len(offsets)
        or not ascending
        or offsets[-1] > size
        or (offsets % tarfile.BLOCKSIZE).any()
    ):
        logger.warning("%s is corrupt; reading the headers of the shard instead", index)
        return None
    starts = offsets.astype(np.int64)
    with open_regular(shard) as stream:
        stream.seek(starts[-1])
        if not stream.read(tarfile.BLOCKSIZE).strip(b"\0"):  # the index may include the end
            starts = starts[:-1]
    return np.stack([starts, np.zeros_like(starts)], 1)


def _split_name(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Split the name DIR/KEY.PART of a member into DIR/KEY and PART, like WebDataset."""
    directory, _, name = member.name.rpartition("/")
    key, _, part = name.partition(".")
    if not member.isreg() or not key or not part:
        return None
    return (f"{directory}/{key}" if directory else key), part.lower()
