"""Random access to the rows of Parquet files that are not converted by `datasets`.

    source = ParquetSource(files, root, fingerprint)
    source.read(index)

Reading a row requires its decompressed row group. A group of a remote file is decompressed once per
node. The cache of `FileSystem.derive` stores it as an Arrow file that all processes map. Groups of
local files are cached in memory, up to MAX_CACHED_BYTES. Local files are read in this way if they
are streamed, or if a row group is damaged so that `datasets` cannot convert them. Only the rows of
the damaged group are corrupt.

Footers are validated before use, because a small file can claim any number of rows. A group is read
in batches, up to MAX_GROUP_BYTES.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError, list_messages
from torchmm.data.files.remote_files import AnyFile, RemoteFile
from torchmm.data.files.sample_files import open_regular, read_row
from torchmm.data.record_formats.sample import Record, Root

MIN_SUSPICIOUS_ROWS = 100_000
MIN_ROW_BYTES = 4
"""Files with at least MIN_SUSPICIOUS_ROWS rows and fewer uncompressed bytes per row are invalid."""
MAX_RATIO = 1000
"""Largest ratio of uncompressed to compressed bytes of files that claim over MAX_GROUP_BYTES."""
MAX_GROUP_BYTES = 4 << 30
"""Maximum size of a row group in memory."""
MAX_CACHED_BYTES = 256 << 20
"""Maximum total size of row groups in memory. The last group is always cached."""
MAX_CACHED_GROUPS = 1024
"""Maximum number of cached row groups. Mapped groups use address space instead of memory."""
BATCH_ROWS = 256
"""Number of rows that are read at a time."""
FOOTER_THREADS = 16
"""Number of footers that are read concurrently."""


def count_group_rows(files: Sequence[AnyFile]) -> list[list[int]]:
    """Return the number of rows of every row group, by file.

    Raises:
        DataError: Files have no readable footer, or claim implausible sizes. The message lists all.
    """
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        footers = list(pool.map(_read_footer, files))
    problems = [problem for _, problem in footers if problem]
    if problems:
        raise DataError(
            f"parquet files:{list_messages(problems)}\nDownload or write them again, or remove "
            "them from the source"
        )
    return [rows for rows, _ in footers]


def _read_footer(file: AnyFile) -> tuple[list[int], str]:
    """Return the number of rows of each row group, and an error message, which may be empty."""
    try:
        with open_regular(file) as stream:
            footer = pq.read_metadata(stream)
            groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        return [], f"{file} cannot be read (not a parquet file, or truncated): {error}"
    uncompressed_bytes = sum(group.total_byte_size for group in groups)
    compressed_bytes = sum(
        group.column(column).total_compressed_size
        for group in groups
        for column in range(group.num_columns)
    )
    problem = ""
    if (
        footer.num_rows >= MIN_SUSPICIOUS_ROWS
        and uncompressed_bytes < MIN_ROW_BYTES * footer.num_rows
    ):
        problem = (
            f"{file} claims {footer.num_rows} rows in {uncompressed_bytes} bytes, "
            "which is not plausible"
        )
    elif uncompressed_bytes > max(MAX_GROUP_BYTES, MAX_RATIO * compressed_bytes):
        problem = (
            f"{file} claims {uncompressed_bytes} bytes, of {compressed_bytes} compressed, "
            "which is not plausible"
        )
    return [group.num_rows for group in groups], problem


class ParquetSource:
    """Source of the rows of several Parquet files.

    Args:
        files: Local or remote files.
        root: Directory that image paths are relative to.
        fingerprint: Fingerprint of the files.

    Raises:
        DataError: A footer cannot be read.
    """

    def __init__(self, files: Sequence[AnyFile], root: Root, fingerprint: str) -> None:
        self._root = root
        self.fingerprint = fingerprint
        rows = count_group_rows(files)
        self._groups = [
            (file, number)
            for file, each in zip(files, rows, strict=True)
            for number in range(len(each))
        ]
        self._ends = np.cumsum([n for each in rows for n in each], dtype=np.int64)
        file_rows = [sum(each) for each in rows]
        starts = (np.cumsum(file_rows) - file_rows).tolist()
        self._firsts = dict(zip(files, starts, strict=True))
        self._tables: OrderedDict[int, tuple[pa.Table, Path | None]] = OrderedDict()
        """Row groups and their cache entries. The entry is None for groups in memory."""
        self._damaged_groups: dict[int, str] = {}
        """Errors of damaged row groups."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": OrderedDict()}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> Record:
        """Return record `index`.

        Raises:
            CorruptSampleError: The row group is damaged.
            DataError: The store does not respond.
        """
        group = int(np.searchsorted(self._ends, index, side="right"))
        file, number = self._groups[group]
        location = f"{file} row {index - self._firsts[file]}"
        if group not in self._damaged_groups:
            try:
                table = self._table(group)
                start = int(self._ends[group]) - len(table)
                columns = read_row(table.slice(index - start, 1))
                return Record(columns, self._root, location=location)
            except (pa.ArrowException, OSError, ValueError, IndexError) as error:
                self._damaged_groups[group] = str(error)
        raise CorruptSampleError(f"{location}: row group {number}: {self._damaged_groups[group]}")

    def _table(self, group: int) -> pa.Table:
        if group in self._tables:
            self._tables.move_to_end(group)
            return self._tables[group][0]
        # The disk space of an evicted cache entry is free only when no process maps it.
        for old, (_, entry) in list(self._tables.items()):
            if entry is not None and not entry.exists():
                del self._tables[old]
        file, number = self._groups[group]
        entry = None
        if isinstance(file, RemoteFile):
            make = partial(_read_as_arrow_file, number=number)
            content, entry = file.storage.derive(file, f"rows{number}", make)
            table = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(content))).read_all()
        else:
            with open_regular(file) as stream:
                table = read_group(stream, number)
        self._tables[group] = table, entry
        while len(self._tables) > 1 and (
            len(self._tables) > MAX_CACHED_GROUPS
            or sum(t.nbytes for t, entry in self._tables.values() if entry is None)
            > MAX_CACHED_BYTES
        ):
            self._tables.popitem(last=False)
        return table


def read_group(stream: BinaryIO, number: int) -> pa.Table:
    """Return a row group of a Parquet file.

    Raises:
        OSError: The group is damaged.
        ValueError: The group is damaged, or larger than MAX_GROUP_BYTES.
        pa.ArrowException: The group is damaged.
    """
    parquet = pq.ParquetFile(stream, pre_buffer=True, page_checksum_verification=True)
    batches = []
    size = 0
    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[number], use_threads=False):
        size += batch.nbytes
        if size > MAX_GROUP_BYTES:
            raise ValueError(f"more than {MAX_GROUP_BYTES} bytes in memory")
        batches.append(batch)
    table = pa.Table.from_batches(batches, parquet.schema_arrow)
    expected_rows = parquet.metadata.row_group(number).num_rows
    if len(table) != expected_rows:
        raise ValueError(f"{len(table)} rows instead of {expected_rows}")
    # Values of a chunk are within 2 GiB, because their offsets have 32 bits.
    return table.combine_chunks() if size < 1 << 31 else table


def _read_as_arrow_file(stream: BinaryIO, number: int) -> memoryview:
    table = read_group(stream, number)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())
