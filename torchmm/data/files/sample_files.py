"""Files that samples name, or that lie inside of a source's own files.

A record may name a pipe, which would block until somebody writes into it; a device, which never
ends; a directory. A file that was measured may be any of these when it is its turn. So regular
files alone are opened, without ever waiting for one.

Pictures, clips and sounds inside of tar files and tables are left where they are (`InnerFile`)
until somebody decodes them: of all ranks that need a sample's text, few need its pixels.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from torchmm.data.files.remote import AnyFile, RemoteFile

SMALL_BYTES = 4096
"""Below this size what a file has inside is read at once: to leave it there costs as much."""
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path | RemoteFile | str) -> BinaryIO:
    """Opens a file for reading, wherever it lies.

    Raises:
        OSError: there is none, or it is no regular file.
        ValueError: no file can have this name.
    """
    if isinstance(path, RemoteFile):
        return path.open()
    return open(path, "rb", opener=_descriptor)


def _descriptor(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | os.O_NONBLOCK)  # which says nothing of regular files
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(
            errno.EINVAL, f"is {_KINDS.get(kind, 'a special file')}, not a regular file", name
        )
    return descriptor


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file: a member of a tar file."""

    file: AnyFile
    start: int
    size: int

    def __str__(self) -> str:
        return f"{self.file}, byte {self.start}"

    def read(self) -> bytes:
        """All of it.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is cut off.
        """
        with open_regular(self.file) as stream:
            stream.seek(self.start)
            data = stream.read(self.size)
        if len(data) < self.size:
            raise ValueError(f"truncated after {len(data)} of {self.size} bytes")
        return data


@dataclass(frozen=True, eq=False)
class TableValue:
    """A value of an Arrow table, whose file is mapped into memory and read when it is touched."""

    buffer: pa.Buffer

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.buffer.size)

    def __str__(self) -> str:
        return "in a table"

    def read(self) -> bytes:
        """All of it."""
        data: bytes = self.buffer.to_pybytes()
        return data


InnerFile = FileRange | TableValue
"""Content of a file inside of another one, not yet read."""


def row_of(table: pa.Table) -> dict[str, Any]:
    """The only row of a table as Python values; binary ones that are not small stay there."""
    columns = zip(table.column_names, table.columns, strict=True)
    return {name: _value(column[0]) for name, column in columns}


def _value(scalar: pa.Scalar) -> Any:
    kind = scalar.type
    if not scalar.is_valid or not _has_bytes(kind):
        return scalar.as_py()
    if pa.types.is_struct(kind):
        return {name: _value(part) for name, part in scalar.items()}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_value(part) for part in scalar.values]
    buffer = scalar.as_buffer()
    return TableValue(buffer) if buffer.size >= SMALL_BYTES else buffer.to_pybytes()


def _has_bytes(kind: pa.DataType) -> bool:
    """Whether values of a type are bytes, or hold some in the forms that files come in."""
    if pa.types.is_struct(kind):
        return any(_has_bytes(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _has_bytes(kind.value_type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def content_of(value: Any) -> Any:
    """A value of a record; the content of one that was left in a table."""
    return value.read() if isinstance(value, TableValue) else value
