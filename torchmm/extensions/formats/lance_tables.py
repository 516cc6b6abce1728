"""Lance tables: rows by index of one version of a table, stored locally or remotely.

The format supports random access to rows, and versions are immutable. A table therefore has the
same exact sample order as other sources, without an index or a cache of torchmm. Lance reads remote
storage itself, with credentials from the environment. A table is opened by the process that reads
it, because the threads of Lance do not survive a fork.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchmm.common.errors import ConfigError, DataError, install_command
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.offset_cache import OffsetCache
from torchmm.data.files.remote_files import AnyFile, FileSystem
from torchmm.data.files.sample_files import read_row
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.formats import check_train_split
from torchmm.data.sources.source_options import MapSource
from torchmm.recipe.data_section import SourceConfig, is_address


class LanceFormat:
    """Format "lance", see `SourceFormat`."""

    def find_files(self, config: SourceConfig, storage: FileSystem | None) -> list[AnyFile]:
        """Return no files, because Lance reads tables itself. Raise DataError for a split."""
        check_train_split(config, "a Lance table")
        return []

    def open(
        self, config: SourceConfig, files: Sequence[AnyFile], fingerprint: str, places: OffsetCache
    ) -> MapSource:
        """Open a table. Raise ConfigError or DataError if it cannot be read."""
        return LanceSource(config)


class LanceSource:
    """Rows of a table as records.

    Args:
        config: Source. Its `revision` is the number of a version. Without it, the newest version is
            read.

    Raises:
        ConfigError: Lance is not installed, or the revision is not a number.
        DataError: The table or the version does not exist.
    """

    def __init__(self, config: SourceConfig) -> None:
        if config.revision is not None and not config.revision.isdecimal():
            raise ConfigError(
                f"source {config.path!r}: revision = {config.revision!r} is not a version of "
                "a Lance table; use its number"
            )
        path = config.path
        self._path = path if is_address(path) else str(Path(path).expanduser().absolute())
        self._version = None if config.revision is None else int(config.revision)
        self._table: Any = None
        try:
            table = self._opened()
            self._version = int(table.version)
            self._rows = int(table.count_rows())
            parts = [self._path, self._version, sorted(f.path for f in _files(table))]
        except (OSError, ValueError) as error:
            raise DataError(
                f"source {path!r} cannot be opened as a Lance table: {_brief(error)}; correct "
                "`path` or `revision`"
            ) from error
        self.fingerprint = hashlib.sha256(str(parts).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def __len__(self) -> int:
        return self._rows

    def read(self, index: int) -> Record:
        """Return a record.

        Raises:
            CorruptSampleError: The row cannot be read.
            DataError: The row of a remote table cannot be read, possibly because of the storage.
        """
        location = f"{self._path} row {index}"
        try:
            columns = read_row(self._opened().take([index]))
        except (OSError, ValueError) as error:
            if is_address(self._path):  # probably an error of the storage, so no sample is skipped
                raise DataError(f"{location} cannot be read: {_brief(error)}") from error
            raise CorruptSampleError(f"{location}: {_brief(error)}") from error
        return Record(columns, location=location)

    def _opened(self) -> Any:
        if self._table is None:
            try:
                import lance  # noqa: PLC0415 - an extra
            except ImportError as error:
                raise ConfigError(
                    f"source {self._path!r}: Lance tables require pylance; "
                    f"{install_command('lance')}"
                ) from error
            self._table = lance.dataset(self._path, version=self._version)
        return self._table


def _files(table: Any) -> list[Any]:
    """Return the files with rows. Their names are random, so that they are unique to a table."""
    return [file for fragment in table.get_fragments() for file in fragment.data_files()]


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
