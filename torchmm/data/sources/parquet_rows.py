"""Parquet files that are not trusted: what their footers claim, and rows of damaged files.

Files are converted as a whole (`local_and_hub.py`), which one damaged row group would stop, and
which a few bytes may blow up: a column of equal values takes none, however many rows it has. So
footers are checked first. Files that cannot be converted, and streams, are read row group by row
group, in bounded memory, and rows of a damaged group are corrupt one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError, first_of
from torchmm.data.files.remote import AnyFile
from torchmm.data.files.sample_files import open_regular, row_of
from torchmm.data.layouts.sample import Record, Root

MANY_ROWS = 100_000
MIN_ROW_BYTES = 4
"""Samples take more; files of MANY_ROWS rows and fewer bytes per row, not compressed, are bombs."""
MAX_RATIO = 1000
"""Of uncompressed to compressed bytes, in files that claim more than MAX_GROUP_BYTES."""
MAX_GROUP_BYTES = 2 << 30
"""Of one row group in memory."""
KEPT_BYTES = 256 << 20
"""Of row groups that are kept in memory; the last one always is."""
BATCH_ROWS = 256


def rows_of_groups(files: Sequence[AnyFile]) -> list[list[int]]:
    """Rows of every row group, by file.

    Raises:
        DataError: files have no readable footer, or claim what no samples are: all are named.
    """
    rows = []
    refused = []
    for file in files:
        try:
            with open_regular(file) as stream:
                footer = pq.read_metadata(stream)
                rows.append([footer.row_group(n).num_rows for n in range(footer.num_row_groups)])
                if problem := _bomb(footer):
                    refused.append(f"{file} {problem}")
        except (pa.ArrowException, OSError, ValueError) as error:
            refused.append(f"{file} cannot be read (no parquet file, or cut off): {error}")
    if refused:
        raise DataError(
            f"parquet files:{first_of(refused)}\nFetch or write them again, or take them out of "
            "the source"
        )
    return rows


def _bomb(footer: pq.FileMetaData) -> str:
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    plain = sum(group.total_byte_size for group in groups)
    if footer.num_rows >= MANY_ROWS and plain < MIN_ROW_BYTES * footer.num_rows:
        return f"claims {footer.num_rows} rows in {plain} bytes, which no samples are"
    packed = sum(
        group.column(column).total_compressed_size
        for group in groups
        for column in range(group.num_columns)
    )
    if plain > max(MAX_GROUP_BYTES, MAX_RATIO * packed):
        return f"claims {plain} bytes, of {packed} compressed, which no samples are"
    return ""


class RowGroups:
    """Rows of files as records, read group by group.

    Args:
        files: one after another.
        root: directory that image paths are relative to.
        fingerprint: of the files.

    Raises:
        DataError: a footer cannot be read.
    """

    def __init__(self, files: Sequence[AnyFile], root: Root, fingerprint: str) -> None:
        self._root = root
        self.fingerprint = fingerprint
        rows = rows_of_groups(files)
        self._groups = [
            (file, number)
            for file, each in zip(files, rows, strict=True)
            for number in range(len(each))
        ]
        self._ends = np.cumsum([n for each in rows for n in each], dtype=np.int64)
        self._firsts = {
            file: end - sum(each)
            for file, each, end in zip(
                files, rows, np.cumsum([sum(each) for each in rows]), strict=True
            )
        }
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._broken: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": OrderedDict()}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> Record:
        """Record `index`; raises CorruptSampleError if its row group is damaged."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        file, number = self._groups[group]
        where = f"{file} row {index - int(self._firsts[file])}"
        if group not in self._broken:
            try:
                table = self._table(group)
                start = int(self._ends[group]) - len(table)
                columns = row_of(table.slice(index - start, 1))
                return Record(columns, self._root, where=where)
            except (pa.ArrowException, OSError, ValueError, IndexError) as error:
                self._broken[group] = str(error)
        raise CorruptSampleError(f"{where}: row group {number}: {self._broken[group]}")

    def _table(self, group: int) -> pa.Table:
        if group in self._tables:
            self._tables.move_to_end(group)
            return self._tables[group]
        table = read_group(*self._groups[group])
        self._tables[group] = table
        while len(self._tables) > 1 and sum(t.nbytes for t in self._tables.values()) > KEPT_BYTES:
            self._tables.popitem(last=False)
        return table


def read_group(file: AnyFile, number: int) -> pa.Table:
    """One row group, whatever its footer claims, as long as it fits into MAX_GROUP_BYTES.

    Raises:
        OSError, ValueError, pa.ArrowException: it is damaged, or larger.
    """
    with open_regular(file) as stream:
        parquet = pq.ParquetFile(stream, page_checksum_verification=True)
        batches = []
        size = 0
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[number], use_threads=False):
            size += batch.nbytes
            if size > MAX_GROUP_BYTES:
                raise ValueError(f"more than {MAX_GROUP_BYTES} bytes in memory")
            batches.append(batch)
        table = pa.Table.from_batches(batches, parquet.schema_arrow)
        claimed = parquet.metadata.row_group(number).num_rows
        if len(table) != claimed:
            raise ValueError(f"{len(table)} rows instead of {claimed}")
        return table
