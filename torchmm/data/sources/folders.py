"""Folders of images or videos with a `metadata.jsonl` or `metadata.csv`.

The records are the rows of the metadata, which are read individually. The columns are those of the
Hugging Face `imagefolder`: `file_name` is the image, `NAME_file_name` the file of column NAME, and
`file_names` a list of files. File names are relative to the directory of the metadata.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.remote_files import AnyFile
from torchmm.data.record_formats.sample import Record, Root
from torchmm.data.sources.text_files import CsvFile, JsonLines, TextSource

FILE_COLUMNS = {"imagefolder": "image", "videofolder": "video"}
"""Column name for `file_name`, by format."""
_READERS = {"metadata.jsonl": JsonLines, "metadata.csv": CsvFile}


def metadata_files(files: Sequence[AnyFile]) -> list[AnyFile]:
    """Return the metadata files in a format that torchmm reads."""
    return [file for file in files if file.name in _READERS]


class FolderSource:
    """Source of the rows of metadata files.

    Args:
        kind: Format, a key of COLUMNS.
        files: All files of the folder.
        root: Directory that must contain all named files.
        fingerprint: Fingerprint of the files.

    Raises:
        DataError: A CSV file is empty.
    """

    def __init__(self, kind: str, files: Sequence[AnyFile], root: Root, fingerprint: str) -> None:
        opened = [_READERS[file.name](file, file) for file in metadata_files(files)]
        self._rows = TextSource(opened, fingerprint)
        self._column = FILE_COLUMNS[kind]
        self._root = root
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Record:
        """Return record `index`. Raise CorruptSampleError if it cannot be read."""
        record = self._rows.read(index)
        assert record.root is not None
        directory = os.path.relpath(str(record.root), str(self._root))
        columns: dict[str, Any] = {}
        for name, value in record.columns.items():
            column, separator, rest = name.rpartition("file_name")
            if not separator or rest not in ("", "s") or value is None:
                columns[name] = value
                continue
            column = column.removesuffix("_") or self._column + rest
            values = value if isinstance(value, list) else [value]
            paths = [_join_path(directory, each) for each in values]
            columns[column] = paths if rest else paths[0]
        if columns == record.columns:
            raise CorruptSampleError(f"{record.location}: has no file_name")
        return replace(record, columns=columns, root=self._root)


def _join_path(directory: str, name: Any) -> Any:
    """Return a file name relative to the root. An empty name means "no file"."""
    named = isinstance(name, str) and name.strip()
    return os.path.join(directory, name) if named else name  # noqa: PTH118 - text
