"""Random access to files of text with many records: JSON lines, JSON arrays, CSV and TSV.

A file is read once to find where its records begin, in bounded memory: nothing is parsed, arrays
and tables are searched where they are mapped. Then a record is read by its place. So a broken
record costs one sample and not the file, rows may have different types, and a record longer than
MAX_RECORD_BYTES is refused without being read.

Rejected: the readers of `datasets`, which parse files as a whole, give one type to a column, and
report no line.
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
from torchmm.data.files.places import Places
from torchmm.data.files.remote import AnyFile, RemoteFile
from torchmm.data.files.sample_files import open_regular
from torchmm.data.layouts.sample import Record, Root

VERSION = 1
"""Increased when records are found differently, so that what was kept is not used."""
MAX_RECORD_BYTES = 64 << 20
"""Longest record that is read. Parsing may take 25 times as much memory (lists of lists)."""
_PIECE_BYTES = 1 << 20
_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Possessive, so that a string of any length takes no memory. The last alternatives stop the search
# at a string that is never closed and at the end.
_STRUCTURE = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+([\[\]{}"]|\Z)', re.DOTALL)
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    """Where a record is in its file."""

    start: int
    size: int
    line: int
    """Number of the line that it begins in, from 1; in an array: number of the element."""


class TextFile:
    """The records of one file.

    Args:
        path: the file, for messages; files that records name are relative to its directory.
        content: where its text is: the file itself, or an unpacked copy.
        places: keeps where records begin in files elsewhere.
    """

    unit = "line"
    """What a record is, for messages."""

    def __init__(self, path: AnyFile, content: AnyFile, places: Places | None = None) -> None:
        self.path = path
        self._content = content
        elsewhere = places is not None and isinstance(content, RemoteFile)
        kept = places if places is not None and elsewhere else Places(None)
        found_N3 = kept.find(content, f"{type(self).__name__} {VERSION}", self._search)
        self._starts = np.ascontiguousarray(found_N3[:, 0])
        self._sizes = found_N3[:, 1].astype(np.uint32)
        # A record's line less its number: the same for all in most files.
        self._before = np.ascontiguousarray(found_N3[:, 2])
        if len(self._before) and (self._before == self._before[0]).all():
            self._before = self._before[:1]

    def _search(self) -> np.ndarray:
        """(N, 3): where records begin, their sizes, and their lines less their numbers."""
        found = array("q")
        for number, (start, size, line) in enumerate(self._spans()):
            found.extend((start, min(size, 2**32 - 1), line - number))
        return np.asarray(found, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int) -> Record:
        """The record of this number.

        Raises:
            CorruptSampleError: it is too long or malformed, or the file has gone.
        """
        before = int(self._before[number if len(self._before) > 1 else 0])
        where = self.where(before + number)
        size = int(self._sizes[number])
        if size > MAX_RECORD_BYTES:
            raise too_long(where, self.unit, size)
        try:
            with open_regular(self._content) as stream:
                stream.seek(int(self._starts[number]))
                data = stream.read(size)
        except OSError as error:
            raise CorruptSampleError(f"{where}: {error.strerror}") from error
        if len(data) < size:
            raise CorruptSampleError(f"{where}: the file was truncated after it was opened")
        return Record(self._parse(data, where), root_of(self.path), where=where)

    def where(self, line: int) -> str:
        """A place in this file, for messages."""
        return f"{self.path}:{line}"

    def _spans(self) -> Iterator[Span]:
        raise NotImplementedError

    def _parse(self, data: bytes, where: str) -> dict[str, Any]:
        return parse_object(data, where)


class JsonLines(TextFile):
    """One object per line."""

    def _spans(self) -> Iterator[Span]:
        start = 0
        line = 1
        with open_regular(self._content) as stream:
            while piece := stream.readline(_PIECE_BYTES):
                blank = piece.isspace()
                size = len(piece)
                while not piece.endswith(b"\n") and (piece := stream.readline(_PIECE_BYTES)):
                    blank = blank and piece.isspace()
                    size += len(piece)
                if not blank:
                    yield Span(start, size, line)
                start += size
                line += 1


class JsonArray(TextFile):
    """One array of objects. What is between them and no object is a corrupt record."""

    unit = "element"

    def where(self, line: int) -> str:
        """An element's number."""
        return f"{self.path} element {line}"

    def _spans(self) -> Iterator[Span]:
        with _mapped(self._content) as text:
            for number, (start, end) in enumerate(self._elements(text), 1):
                yield Span(start, end - start, number)

    def _elements(self, text: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
        """Beginning and end of every element."""
        depth = begin = done = 0
        for match in _STRUCTURE.finditer(text):
            step = _STEPS.get(match.group(1))
            if step is None:  # a string or the array is not closed
                break
            at = match.end() - 1
            before = depth
            depth += step
            if (before, depth) == (2, 1):
                yield begin, at + 1
            elif max(before, depth) == 2 or depth == 0:
                yield from _between(text, done, at)
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
        yield from _between(text, done, len(text))

    def _parse(self, data: bytes, where: str) -> dict[str, Any]:
        return parse_object(data.strip(_BLANK + b","), where)


class Table(TextFile):
    """CSV or TSV with names of columns in the first row; values are texts, empty ones missing."""

    unit = "row"

    def __init__(self, path: AnyFile, content: AnyFile, places: Places | None = None) -> None:
        with open_regular(content) as stream:
            head = stream.readline(_PIECE_BYTES)
        tabs = b"\t" in head and b"," not in head
        semicolons = b";" in head and b"," not in head
        self._delimiter = "\t" if tabs else ";" if semicolons else ","
        super().__init__(path, content, places)
        if not len(self):
            raise DataError(f"{path} is empty; its first row must contain the column names")
        self._header = self._fields(self._read_header(), self.where(1))
        self._starts = self._starts[1:]
        self._sizes = self._sizes[1:]
        self._before = (self._before if len(self._before) == 1 else self._before[1:]) + 1

    def _read_header(self) -> bytes:
        with open_regular(self._content) as stream:
            data = stream.read(min(int(self._sizes[0]), MAX_RECORD_BYTES))
        return data.removeprefix(_BYTE_ORDER_MARK)

    def _spans(self) -> Iterator[Span]:
        delimiter = self._delimiter.encode()
        # A quote counts at the beginning of a field; one that is never closed takes all the rest.
        field = rb'(?:"[^"]*+(?:""[^"]*+)*+"?)?+[^' + delimiter + rb"\r\n]*+"
        row = re.compile(field + rb"(?:" + delimiter + field + rb")*+(?:\r\n|\r|\n|\Z)")
        line = 1
        with _mapped(self._content) as text:
            for match in row.finditer(text):
                start, end = match.span()
                lines, blank = _look_at(text, start, end)
                if not blank:
                    yield Span(start, end - start, line)
                line += lines

    def _parse(self, data: bytes, where: str) -> dict[str, Any]:
        values = self._fields(data, where)
        if len(values) != len(self._header):
            raise CorruptSampleError(
                f"{where}: row has {len(values)} values, but the first row has "
                f"{len(self._header)} column names ({', '.join(self._header)}); quote values "
                f"that contain {self._delimiter!r} or line breaks, and double the quotes "
                "inside of them"
            )
        named = zip(self._header, values, strict=True)
        return {name: value or None for name, value in named if name}

    def _fields(self, data: bytes, where: str) -> list[str]:
        csv.field_size_limit(MAX_RECORD_BYTES)
        try:
            text = io.StringIO(data.decode(), newline="")
            return next(csv.reader(text, delimiter=self._delimiter), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise CorruptSampleError(f"{where}: {error}") from error


class TextSource:
    """The records of several files, one file after another."""

    def __init__(self, files: Sequence[TextFile], fingerprint: str) -> None:
        self._files = list(files)
        self._ends = np.cumsum([len(file) for file in files])
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Record:
        """Record `index`, counted through all files."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[number]
        return file.read(index - (int(self._ends[number]) - len(file)))


def root_of(path: AnyFile) -> Root:
    """What paths in the records of a file are relative to: the folder that it is in."""
    return path.parent if isinstance(path, RemoteFile) else str(path.parent)


def open_json(path: AnyFile, content: AnyFile, places: Places | None = None) -> TextFile:
    """A file of JSON: an array if that is what it begins with, else lines."""
    return (JsonArray if is_array(content) else JsonLines)(path, content, places)


def is_array(content: AnyFile) -> bool:
    """Whether a file of JSON begins with an array."""
    with open_regular(content) as stream:
        head = stream.read(_PIECE_BYTES).removeprefix(_BYTE_ORDER_MARK)
    return head.lstrip(_BLANK).startswith(b"[")


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The columns of a record in JSON.

    Raises:
        CorruptSampleError: not a JSON object.
    """
    try:
        columns = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise CorruptSampleError(f"{where}: {reason}") from error
    if not isinstance(columns, dict):
        raise CorruptSampleError(f"{where} is {type(columns).__name__}, not an object")
    return columns


def too_long(where: str, unit: str, size: int) -> CorruptSampleError:
    """The error of a record longer than MAX_RECORD_BYTES."""
    return CorruptSampleError(
        f"{where}: {unit} of {size} bytes is longer than the limit of {MAX_RECORD_BYTES}; "
        "split it, or store large content in separate files"
    )


def _between(text: bytes | mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int]]:
    """What is between two elements, unless it is the one comma that belongs there."""
    if end - start > _PIECE_BYTES or text[start:end].strip(_BLANK) not in (b"", b","):
        yield start, end


def _look_at(text: bytes | mmap.mmap, start: int, end: int) -> tuple[int, bool]:
    """Number of line breaks in a part of a text, and whether it has nothing else than blanks."""
    breaks = 0
    blank = True
    for at in range(start, end, _PIECE_BYTES):
        piece = text[at : min(end, at + _PIECE_BYTES)]
        breaks += piece.count(b"\n") or piece.count(b"\r")
        blank = blank and not piece.strip(b" \r\n")
    return breaks, blank


@contextmanager
def _mapped(path: AnyFile) -> Iterator[bytes | mmap.mmap]:
    """A file as bytes that are read where they are looked at."""
    if path.stat().st_size == 0:  # which cannot be mapped
        yield b""
        return
    assert isinstance(path, Path)  # copied to this machine
    with open_regular(path) as stream:
        # Not closed here: what was found in it still refers to it.
        yield mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
