"""Folders of images or clips that a `metadata.jsonl` or `metadata.csv` describes.

Its rows are the records, read one by one like those of any text file, so that a broken one costs
one sample. As Hugging Face's `imagefolder` has it, `file_name` is the image, `NAME_file_name` the
file of column NAME, `file_names` a list; names are relative to the metadata's directory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.remote import AnyFile
from torchmm.data.layouts.sample import Record, Root
from torchmm.data.sources.text_files import JsonLines, Table, TextSource

COLUMNS = {"imagefolder": "image", "videofolder": "video"}
"""What `file_name` is, by format."""
_READERS = {"metadata.jsonl": JsonLines, "metadata.csv": Table}


def described(files: Sequence[AnyFile]) -> list[AnyFile]:
    """Those that describe files; others than text are left to `datasets`."""
    return [file for file in files if file.name in _READERS]


class FolderSource:
    """Rows of metadata files as records.

    Args:
        kind: one of COLUMNS.
        files: all files of the folder.
        root: directory that names may not leave.
        fingerprint: of the files.

    Raises:
        DataError: a table is empty.
    """

    def __init__(self, kind: str, files: Sequence[AnyFile], root: Root, fingerprint: str) -> None:
        opened = [_READERS[file.name](file, file) for file in described(files)]
        self._rows = TextSource(opened, fingerprint)
        self._column = COLUMNS[kind]
        self._root = root
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Record:
        """Record `index`; raises CorruptSampleError."""
        record = self._rows.read(index)
        assert record.root is not None
        directory = os.path.relpath(str(record.root), str(self._root))
        columns: dict[str, Any] = {}
        for name, value in record.columns.items():
            column, found, rest = name.rpartition("file_name")
            if not found or rest not in ("", "s") or value is None:
                columns[name] = value
                continue
            column = column.removesuffix("_") or self._column + rest
            values = value if isinstance(value, list) else [value]
            paths = [_joined(directory, each) for each in values]
            columns[column] = paths if rest else paths[0]
        if columns == record.columns:
            raise CorruptSampleError(f"{record.where}: has no file_name")
        return replace(record, columns=columns, root=self._root)


def _joined(directory: str, name: Any) -> Any:
    """Return a file name relative to the root; a blank name stays blank and means no file."""
    named = isinstance(name, str) and name.strip()
    return os.path.join(directory, name) if named else name  # noqa: PTH118 - text
