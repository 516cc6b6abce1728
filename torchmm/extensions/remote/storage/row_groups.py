"""Random access to the rows of parquet files elsewhere, without a copy of the files.

Parquet is compressed row group by row group: one row costs the whole group. So a group that is met
is fetched and decompressed once and kept, as Arrow's own format, in the bounded cache of this
machine (`torchmm.extensions.remote.storage`), from which any row of it is then mapped, by all
processes. An order that stays within some shards for a while meets their groups again and again.

Rejected: converting everything at the start, as `datasets` does with files of this machine, which
needs room for all of it; groups in memory, which are too few: at 100 MB each, a sample of every
hundredth one would be a hit; pages instead of groups, which pyarrow cannot read one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.remote import RemoteFile, RemotePath
from torchmm.data.files.sample_files import row_of
from torchmm.data.layouts.sample import Record
from torchmm.extensions.remote.storage.block_cache import BlockCache, entry_name

MAX_GROUP_BYTES = 4 << 30
"""Largest row group that is decompressed."""
MAPPED_GROUPS = 1024
"""Groups that a process keeps mapped from the cache; they take address space, not memory."""
LOOSE_BYTES = 256 << 20
"""Of decompressed groups that the cache does not take."""
READERS = 16
"""Footers that are read at the same time."""


class ParquetSource:
    """Rows of files as records, one file after another.

    Args:
        cache: Cache of decompressed groups.
        open_uncached: Function that opens a file without storing its bytes in the cache.
        files: Files of one file system.
        root: what image paths are relative to.
        fingerprint: of the files.

    Raises:
        DataError: a footer cannot be read.
    """

    def __init__(
        self,
        cache: BlockCache,
        open_uncached: Callable[[RemoteFile], BinaryIO],
        files: Sequence[RemoteFile],
        root: RemotePath,
        fingerprint: str,
    ) -> None:
        self._files = list(files)
        self._root = root
        self.fingerprint = fingerprint
        self._cache = cache
        self._open_uncached = open_uncached
        with ThreadPoolExecutor(READERS) as pool:
            rows = list(pool.map(_rows_of_groups, files))
        self._first_groups = np.cumsum([0, *(len(each) for each in rows)])
        self._ends = np.cumsum([n for each in rows for n in each])
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._loose: set[int] = set()
        """Groups among those that are in memory."""
        self._broken: dict[int, str] = {}
        self.decoded = 0
        """Row groups decompressed by this process."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": OrderedDict(), "_loose": set()}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Record:
        """Record `index`.

        Raises:
            CorruptSampleError: its row group cannot be read.
            DataError: the store does not answer.
        """
        group = int(np.searchsorted(self._ends, index, side="right"))
        number = int(np.searchsorted(self._first_groups, group, side="right")) - 1
        first_group = int(self._first_groups[number])
        file = self._files[number]
        start = int(self._ends[group - 1]) if group else 0
        file_start = int(self._ends[first_group - 1]) if first_group else 0
        where = f"{file} row {index - file_start}"
        if group in self._broken:
            raise CorruptSampleError(f"{where}: {self._broken[group]}")
        try:
            table = self._table(group, file, group - first_group)
            columns = row_of(table.slice(index - start, 1))
        except (pa.ArrowException, OSError, ValueError) as error:
            self._broken[group] = f"row group {group - first_group}: {error}"
            raise CorruptSampleError(f"{where}: {self._broken[group]}") from error
        return Record(columns, self._root, where=where)

    def _table(self, group: int, file: RemoteFile, number: int) -> pa.Table:
        table = self._tables.get(group)
        if table is not None:
            self._tables.move_to_end(group)
            return table
        self._forget()
        name = entry_name(file, f"rows{number}")
        kept = self._cache.get(name)
        if kept is None:
            self.decoded += 1
            table = self._read_group(file, number)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            self._cache.put(name, memoryview(sink.getvalue()))
            kept = self._cache.get(name)
        if kept is None:
            self._loose.add(group)
        else:
            table = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(kept))).read_all()
        self._tables[group] = table
        return table

    def _forget(self) -> None:
        """Lets go of groups: those used longest ago, and those whose room on the disk only becomes
        free when nobody has them mapped."""
        gone = [
            group
            for group in self._tables
            if group not in self._loose and not self._cache.place(self._entry(group)).exists()
        ]
        for group in gone:
            del self._tables[group]
        while len(self._tables) >= MAPPED_GROUPS or (
            self._loose and sum(self._tables[g].nbytes for g in self._loose) > LOOSE_BYTES
        ):
            group, _ = self._tables.popitem(last=False)
            self._loose.discard(group)

    def _entry(self, group: int) -> str:
        number = int(np.searchsorted(self._first_groups, group, side="right")) - 1
        return entry_name(self._files[number], f"rows{group - int(self._first_groups[number])}")

    def _read_group(self, file: RemoteFile, number: int) -> pa.Table:
        with self._open_uncached(file) as stream:
            # Checksums of pages are compared where the writer left them.
            parquet = pq.ParquetFile(stream, pre_buffer=True, page_checksum_verification=True)
            size = parquet.metadata.row_group(number).total_byte_size
            if size > MAX_GROUP_BYTES:
                raise ValueError(f"{size} bytes when decompressed, at most {MAX_GROUP_BYTES}")
            return parquet.read_row_group(number, use_threads=False)


def _rows_of_groups(file: RemoteFile) -> list[int]:
    try:
        with file.open() as stream:
            footer = pq.read_metadata(stream)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file} is no parquet file, or damaged: {error}") from error
    return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
