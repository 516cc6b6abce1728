"""Random access to the samples of webdataset shards: members of a tar file that share a name.

Headers of all members are read once, when the source is opened, unless a `.tar.idx` next to the
shard says where samples begin, as Energon writes it. A sample is then read from its place. Nothing
is converted or copied, and samples may have different parts.
"""

from __future__ import annotations

import tarfile
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.sources.archives import check_tars


class TarSamples:
    """The samples of several shards, in order.

    Args:
        shards: not compressed.
        left_out: KEY of samples that do not take part, by shard.

    Raises:
        DataError: a shard is damaged or compressed.
    """

    def __init__(
        self, shards: Sequence[Path], left_out: Mapping[Path, Collection[str]] | None = None
    ) -> None:
        check_tars(shards)
        self._shards = list(shards)
        starts = array("q")
        counts = []
        for shard in shards:
            skipped = (left_out or {}).get(shard, ())
            before = len(starts)
            indexed = None if skipped else _indexed_starts(shard)
            if indexed is not None:
                starts.extend(indexed)
            else:
                starts.extend(start for key, start in _sample_starts(shard) if key not in skipped)
            counts.append(len(starts) - before)
        self._starts = np.asarray(starts, np.int64)
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> tuple[str, dict[str, bytes]]:
        """Where a sample is ("SHARD:KEY"), and its parts by their names.

        Raises:
            CorruptSampleError: the shard was cut off, or changed since it was opened.
        """
        shard = self._shards[int(np.searchsorted(self._ends, index, side="right"))]
        start = int(self._starts[index])
        key = ""
        parts: dict[str, bytes] = {}
        try:
            with shard.open("rb") as stream:
                stream.seek(start)
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        name = _split_name(member)
                        if name is None:
                            continue
                        if key and name[0] != key:
                            break
                        key = name[0]
                        file = tar.extractfile(member)
                        assert file is not None  # a regular file
                        parts[name[1]] = file.read()
        except (OSError, tarfile.TarError) as error:
            raise CorruptSampleError(f"{shard}, sample at byte {start}: {error}") from error
        return f"{shard}:{key}", parts


def _indexed_starts(shard: Path) -> list[int] | None:
    """Places of a shard's samples from its index; None if that is missing or older."""
    index = shard.with_suffix(".tar.idx")
    if not index.exists() or index.stat().st_mtime_ns < shard.stat().st_mtime_ns:
        return None
    starts: list[int] = np.fromfile(index, "<u8").tolist()
    with shard.open("rb") as stream:
        stream.seek(starts[-1] if starts else 0)
        if not stream.read(tarfile.BLOCKSIZE).strip(b"\0"):  # the index has the end, too
            starts = starts[:-1]
    return starts


def _sample_starts(shard: Path) -> Iterator[tuple[str, int]]:
    """Key and place of every sample of a shard: where its first member's header begins."""
    last = None
    try:
        with tarfile.open(shard, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # which would hold all headers
                name = _split_name(member)
                if name is not None and name[0] != last:
                    last = name[0]
                    yield last, member.offset
    except (OSError, tarfile.TarError) as error:
        raise DataError(
            f"{shard} cannot be read ({error}); shards must not be compressed"
        ) from error


def _split_name(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """KEY and name of the part of a file DIR/KEY.PART, as webdataset splits it."""
    directory, _, name = member.name.rpartition("/")
    key, _, part = name.partition(".")
    if not member.isreg() or not key or not part:
        return None
    return (f"{directory}/{key}" if directory else key), part.lower()
