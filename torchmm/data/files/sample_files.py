"""Open files of samples, and represent files inside of tar files and Arrow tables.

A record may name a pipe, which would block, or a device, which has no end. Therefore only regular
files are opened, without blocking. This is checked for each read, because files may change.

Images, videos and audio inside of tar files and Arrow tables (`InnerFile`) are read when they are
decoded. Many ranks require the text of a sample, but few require its pixels.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from torchmm.data.files.remote_files import AnyFile, RemoteFile

INLINE_BYTES = 4096
"""Inner files below this size in bytes are read immediately."""
_FILE_TYPES = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path | RemoteFile | str) -> BinaryIO:
    """Open a local or remote file for reading.

    Raises:
        OSError: The file does not exist, or is not a regular file.
        ValueError: The name is not valid.
    """
    if isinstance(path, RemoteFile):
        return path.open()
    return open(path, "rb", opener=_descriptor)


def _descriptor(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | os.O_NONBLOCK)  # no effect on regular files
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(
            errno.EINVAL, f"is {_FILE_TYPES.get(kind, 'a special file')}, not a regular file", name
        )
    return descriptor


@dataclass(frozen=True)
class FileRange:
    """Range of bytes of a file, such as a member of a tar file."""

    file: AnyFile
    start: int
    size: int

    def __str__(self) -> str:
        return f"{self.file}, byte {self.start}"

    def read(self) -> bytes:
        """Return all bytes.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is truncated.
        """
        with open_regular(self.file) as stream:
            stream.seek(self.start)
            data = stream.read(self.size)
        if len(data) < self.size:
            raise ValueError(f"truncated after {len(data)} of {self.size} bytes")
        return data


@dataclass(frozen=True, eq=False)
class TableValue:
    """Binary value of a memory-mapped Arrow table, which is read on access."""

    buffer: pa.Buffer

    @property
    def size(self) -> int:
        """Size in bytes."""
        return int(self.buffer.size)

    def __str__(self) -> str:
        return "in a table"

    def read(self) -> bytes:
        """Return all bytes."""
        data: bytes = self.buffer.to_pybytes()
        return data


InnerFile = FileRange | TableValue
"""Unread file inside of a tar file or an Arrow table."""


def read_row(table: pa.Table) -> dict[str, Any]:
    """Return the only row of a table as Python values. Large binary values are not read."""
    columns = zip(table.column_names, table.columns, strict=True)
    return {name: _to_python(column[0]) for name, column in columns}


def _to_python(scalar: pa.Scalar) -> Any:
    kind = scalar.type
    if not scalar.is_valid or not _contains_bytes(kind):
        return scalar.as_py()
    if pa.types.is_struct(kind):
        return {name: _to_python(part) for name, part in scalar.items()}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_to_python(part) for part in scalar.values]
    buffer = scalar.as_buffer()
    return TableValue(buffer) if buffer.size >= INLINE_BYTES else buffer.to_pybytes()


def _contains_bytes(kind: pa.DataType) -> bool:
    """Return True if values of a type are bytes, or structs or lists with bytes."""
    if pa.types.is_struct(kind):
        return any(_contains_bytes(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _contains_bytes(kind.value_type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def read_value(value: Any) -> Any:
    """Return a value of a record. An unread value of a table is read."""
    return value.read() if isinstance(value, TableValue) else value
