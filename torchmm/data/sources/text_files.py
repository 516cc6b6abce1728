"""Random access to the records of text files: JSON Lines, JSON arrays, CSV and TSV.

    file                        offset  size  line
    {"text": "a"}               0       14    1
    {"text": "b"}               14      14    2

A file is read once to find the offsets of its records, in bounded memory and without parsing. JSON
arrays and CSV files are memory-mapped for the search. Then each record is read by its offset. A
corrupt record affects one sample only, columns may have different types per record, and a record
longer than MAX_RECORD_BYTES is rejected before it is read. The readers of `datasets` parse complete
files, require one type per column, and do not report lines.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import mmap
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.offset_cache import OffsetCache
from torchmm.data.files.remote_files import AnyFile, RemoteFile
from torchmm.data.files.sample_files import open_regular
from torchmm.data.record_formats.sample import Record, Root

SEARCH_VERSION = 1
"""Version of the search for records. Offsets of a different version are not used."""
MAX_RECORD_BYTES = 64 << 20
"""Maximum size of a record. Parsing may use 25 times as much memory for lists of lists."""
_CHUNK_BYTES = 1 << 20
_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Possessive quantifiers need no memory for long strings. The last alternatives stop the search at
# an unterminated string and at the end.
_STRUCTURE = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+([\[\]{}"]|\Z)', re.DOTALL)
_DEPTH_CHANGES = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}

logger = logging.getLogger(__name__)


class RecordSpan(NamedTuple):
    """Location of a record in its file."""

    start: int
    size: int
    line: int
    """Number of the first line of the record, from 1. In JSON arrays, number of the element."""


class TextFile:
    """Records of one file.

    Args:
        path: The file. Paths in records are relative to its directory.
        content: The file, or its decompressed copy.
        offset_cache: Cache of the offsets of remote files.
    """

    record_name = "line"
    """Name of a record in messages."""

    def __init__(
        self, path: AnyFile, content: AnyFile, offset_cache: OffsetCache | None = None
    ) -> None:
        self.path = path
        self._content = content
        is_remote = offset_cache is not None and isinstance(content, RemoteFile)
        cache = offset_cache if offset_cache is not None and is_remote else OffsetCache(None)
        spans_N3 = cache.get_or_compute(
            content, f"{type(self).__name__} {SEARCH_VERSION}", self._search
        )
        self._starts = np.ascontiguousarray(spans_N3[:, 0])
        self._sizes = spans_N3[:, 1].astype(np.uint32)
        # Line minus record number, which is constant in most files.
        self._line_offsets = np.ascontiguousarray(spans_N3[:, 2])
        if len(self._line_offsets) and (self._line_offsets == self._line_offsets[0]).all():
            self._line_offsets = self._line_offsets[:1]

    def _search(self) -> np.ndarray:
        """Return (N, 3), int64: offset, size, and line minus record number of each record."""
        spans = array("q")
        for number, (start, size, line) in enumerate(self._find_records()):
            spans.extend((start, min(size, 2**32 - 1), line - number))
        return np.asarray(spans, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int) -> Record:
        """Return a record by number.

        Raises:
            CorruptSampleError: The record is too long or malformed, or the file cannot be read.
        """
        before = int(self._line_offsets[number if len(self._line_offsets) > 1 else 0])
        location = self.location(before + number)
        size = int(self._sizes[number])
        if size > MAX_RECORD_BYTES:
            raise record_too_long(location, self.record_name, size)
        try:
            with open_regular(self._content) as stream:
                stream.seek(int(self._starts[number]))
                data = stream.read(size)
        except OSError as error:
            raise CorruptSampleError(f"{location}: {error.strerror}") from error
        if len(data) < size:
            raise CorruptSampleError(f"{location}: the file was truncated after it was opened")
        return Record(self._parse(data, location), record_root(self.path), location=location)

    def location(self, line: int) -> str:
        """Return the location of a record, for messages."""
        return f"{self.path}:{line}"

    def _find_records(self) -> Iterator[RecordSpan]:
        raise NotImplementedError

    def _parse(self, data: bytes, location: str) -> dict[str, Any]:
        return parse_object(data, location)


class JsonLines(TextFile):
    """JSON Lines file, with one object per line."""

    def _find_records(self) -> Iterator[RecordSpan]:
        start = 0
        line = 1
        with open_regular(self._content) as stream:
            while piece := stream.readline(_CHUNK_BYTES):
                is_blank = piece.isspace()
                size = len(piece)
                while not piece.endswith(b"\n") and (piece := stream.readline(_CHUNK_BYTES)):
                    is_blank = is_blank and piece.isspace()
                    size += len(piece)
                if not is_blank:
                    yield RecordSpan(start, size, line)
                start += size
                line += 1


class JsonArray(TextFile):
    """JSON file with one array of objects. Other content between objects is a corrupt record."""

    record_name = "element"

    def location(self, line: int) -> str:
        """Return the location of an element, for messages."""
        return f"{self.path} element {line}"

    def _find_records(self) -> Iterator[RecordSpan]:
        with _map_file(self._content) as text:
            for number, (start, end) in enumerate(self._elements(text), 1):
                yield RecordSpan(start, end - start, number)

    def _elements(self, text: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
        """Yield start and end of each element."""
        depth = begin = done = 0
        for match in _STRUCTURE.finditer(text):
            step = _DEPTH_CHANGES.get(match.group(1))
            if step is None:  # a string or the array is not closed
                break
            at = match.end() - 1
            before = depth
            depth += step
            if (before, depth) == (2, 1):
                yield begin, at + 1
            elif max(before, depth) == 2 or depth == 0:
                yield from _gap(text, done, at)
                begin = at
            if min(before, depth) <= 1:
                done = at + 1
            if depth == 0:
                break
        if depth > 1:
            yield begin, len(text)
            return
        if depth == 1:
            logger.warning(
                "%s does not close its array. If it is truncated, the elements after byte %d "
                "are missing; compare its size with the original file",
                self.path,
                len(text),
            )
        yield from _gap(text, done, len(text))

    def _parse(self, data: bytes, location: str) -> dict[str, Any]:
        return parse_object(data.strip(_BLANK + b","), location)


class CsvFile(TextFile):
    """CSV or TSV file with column names in the first row. Empty values are missing values."""

    record_name = "row"

    def __init__(
        self, path: AnyFile, content: AnyFile, offset_cache: OffsetCache | None = None
    ) -> None:
        with open_regular(content) as stream:
            head = stream.readline(_CHUNK_BYTES)
        tabs = b"\t" in head and b"," not in head
        semicolons = b";" in head and b"," not in head
        self._delimiter = "\t" if tabs else ";" if semicolons else ","
        super().__init__(path, content, offset_cache)
        if not len(self):
            raise DataError(f"{path} is empty; its first row must contain the column names")
        self._header = self._fields(self._read_header(), self.location(1))
        self._starts = self._starts[1:]
        self._sizes = self._sizes[1:]
        self._line_offsets = (
            self._line_offsets if len(self._line_offsets) == 1 else self._line_offsets[1:]
        ) + 1

    def _read_header(self) -> bytes:
        with open_regular(self._content) as stream:
            data = stream.read(min(int(self._sizes[0]), MAX_RECORD_BYTES))
        return data.removeprefix(_BYTE_ORDER_MARK)

    def _find_records(self) -> Iterator[RecordSpan]:
        delimiter = self._delimiter.encode()
        # A quote is special at the start of a field. An unterminated quote extends to the end.
        field = rb'(?:"[^"]*+(?:""[^"]*+)*+"?)?+[^' + delimiter + rb"\r\n]*+"
        row = re.compile(field + rb"(?:" + delimiter + field + rb")*+(?:\r\n|\r|\n|\Z)")
        line = 1
        with _map_file(self._content) as text:
            for match in row.finditer(text):
                start, end = match.span()
                lines, is_blank = _scan_range(text, start, end)
                if not is_blank:
                    yield RecordSpan(start, end - start, line)
                line += lines

    def _parse(self, data: bytes, location: str) -> dict[str, Any]:
        values = self._fields(data, location)
        if len(values) != len(self._header):
            raise CorruptSampleError(
                f"{location}: row has {len(values)} values, but the first row has "
                f"{len(self._header)} column names ({', '.join(self._header)}); quote values "
                f"that contain {self._delimiter!r} or line breaks, and double the quotes "
                "inside of them"
            )
        named = zip(self._header, values, strict=True)
        return {name: value or None for name, value in named if name}

    def _fields(self, data: bytes, location: str) -> list[str]:
        csv.field_size_limit(MAX_RECORD_BYTES)
        try:
            text = io.StringIO(data.decode(), newline="")
            return next(csv.reader(text, delimiter=self._delimiter), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise CorruptSampleError(f"{location}: {error}") from error


class TextSource:
    """Source of the records of several files."""

    def __init__(self, files: Sequence[TextFile], fingerprint: str) -> None:
        self._files = list(files)
        self._ends = np.cumsum([len(file) for file in files])
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Record:
        """Return record `index`, counted over all files."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[number]
        return file.read(index - (int(self._ends[number]) - len(file)))


def record_root(path: AnyFile) -> Root:
    """Return the directory of a file, to which paths in its records are relative."""
    return path.parent if isinstance(path, RemoteFile) else str(path.parent)


def open_json(path: AnyFile, content: AnyFile, offset_cache: OffsetCache | None = None) -> TextFile:
    """Open a JSON file as an array if it starts with one, else as JSON Lines."""
    return (JsonArray if is_array(content) else JsonLines)(path, content, offset_cache)


def is_array(content: AnyFile) -> bool:
    """Return True if a JSON file starts with an array."""
    with open_regular(content) as stream:
        head = stream.read(_CHUNK_BYTES).removeprefix(_BYTE_ORDER_MARK)
    return head.lstrip(_BLANK).startswith(b"[")


def parse_object(data: bytes, location: str) -> dict[str, Any]:
    """Parse the columns of a JSON record.

    Raises:
        CorruptSampleError: The record is not a JSON object.
    """
    try:
        columns = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise CorruptSampleError(f"{location}: {reason}") from error
    if not isinstance(columns, dict):
        raise CorruptSampleError(f"{location} is {type(columns).__name__}, not an object")
    return columns


def record_too_long(location: str, record_name: str, size: int) -> CorruptSampleError:
    """Return the error for a record longer than MAX_RECORD_BYTES."""
    return CorruptSampleError(
        f"{location}: {record_name} of {size} bytes is longer than the limit of "
        f"{MAX_RECORD_BYTES}; "
        "split it, or store large content in separate files"
    )


def _gap(text: bytes | mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the range between two elements, unless it is a single comma."""
    if end - start > _CHUNK_BYTES or text[start:end].strip(_BLANK) not in (b"", b","):
        yield start, end


def _scan_range(text: bytes | mmap.mmap, start: int, end: int) -> tuple[int, bool]:
    """Return the number of line breaks in a range, and whether it is blank."""
    breaks = 0
    is_blank = True
    for at in range(start, end, _CHUNK_BYTES):
        piece = text[at : min(end, at + _CHUNK_BYTES)]
        breaks += piece.count(b"\n") or piece.count(b"\r")
        is_blank = is_blank and not piece.strip(b" \r\n")
    return breaks, is_blank


@contextmanager
def _map_file(path: AnyFile) -> Iterator[bytes | mmap.mmap]:
    """Return a context with the memory-mapped content of a file."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        yield b""
        return
    assert isinstance(path, Path)  # remote files were copied
    with open_regular(path) as stream:
        # Not closed, because regex matches still refer to it.
        yield mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
