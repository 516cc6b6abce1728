"""Interfaces of sources and streams, and wrappers that apply the settings of a recipe.

The settings are `split`, `columns`, `files`, `max_samples` and the sample options.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import datasets

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.corrupt import CorruptSampleError, record_errors_at
from torchmm.data.record_formats.columns import with_json_columns
from torchmm.data.record_formats.sample import Record, SampleOptions
from torchmm.recipe.data_section import SourceConfig
from torchmm.recipe.explain import suggest

logger = logging.getLogger(__name__)

MAX_CHECKED_RECORDS = 100
"""Number of first records, at least one of which must have each column of the recipe."""


class MapSource(Protocol):
    """Source with random access to its records."""

    fingerprint: str
    """Key that changes if the content may have changed."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Record:
        """Return record `index`. Raise CorruptSampleError if it cannot be read."""
        ...


class RecordStream(Protocol):
    """Source that is read in order, from the start or from a position."""

    def restart(self, position: Any) -> None:
        """Resume at a position. None is the start."""
        ...

    def position(self) -> Any:
        """Return the JSON-serializable position of the next record."""
        ...

    def next(self) -> Record | CorruptSampleError | None:
        """Return the next record, the error if it cannot be read, or None at the end."""
        ...


class Split(NamedTuple):
    """Parsed `split` of a source."""

    name: str
    rows: datasets.ReadInstruction | None
    """Slices as in "train[:10%]". None for all rows."""

    @classmethod
    def of(cls, config: SourceConfig) -> Split:
        """Parse the `split` of a source like `datasets`. Raise ConfigError if it is not valid."""
        text = config.split
        if not set("[]()+") & set(text):
            return cls(text, None)
        try:
            rows = datasets.ReadInstruction.from_spec(text)
        except (ValueError, AssertionError) as error:
            raise ConfigError(
                f"source {config.path!r}: split = {text!r} is not a split: {error}; use "
                '"NAME", "NAME[:100]" or "NAME[10%:]"'
            ) from error
        return cls(text.partition("[")[0].partition("+")[0].strip(), rows)


class SelectedRows:
    """Source of the rows that the slices of a `split` select.

    Args:
        source: All rows of the split.
        config: Settings of the source. The `split` has slices.

    Raises:
        DataError: The split selects no rows, or has several split names.
    """

    def __init__(self, source: MapSource, config: SourceConfig) -> None:
        self._rows = select_rows(config, len(source))
        self._source = source
        self.fingerprint = source.fingerprint
        self.all_rows = len(source)
        """Number of rows of the split without slices."""
        if not len(self):
            raise DataError(
                f"source {config.path!r}: split = {config.split!r} selects none of {len(source)} "
                "rows; correct the slice"
            )

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    def read(self, index: int) -> Record:
        """Return record `index` of the selected rows. Raise CorruptSampleError if corrupt."""
        for rows in self._rows:
            if index < len(rows):
                return self._source.read(rows[index])
            index -= len(rows)
        raise IndexError(index)


def select_rows(config: SourceConfig, count: int) -> list[range]:
    """Return the row ranges that a `split` selects from `count` rows. May raise DataError."""
    split = Split.of(config)
    if split.rows is None:
        return [range(count)]
    try:
        parts = split.rows.to_absolute({split.name: count})
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"source {config.path!r}: split = {config.split!r} of {count} rows: {error}"
        ) from error
    return [range(part.from_, part.to) for part in parts]


def warn_about_training_rows(
    validation_config: SourceConfig, records: MapSource, training_configs: Sequence[SourceConfig]
) -> None:
    """Warn if rows of a validation source are also training rows.

    Args:
        validation_config: Settings of the validation source.
        records: Records of the validation source.
        training_configs: Settings of all training sources.
    """
    count = records.all_rows if isinstance(records, ConfiguredSource) else None
    for config in training_configs:
        keys = ("path", "config", "revision")
        same = all(getattr(config, key) == getattr(validation_config, key) for key in keys)
        if count is None or not same or Split.of(config).name != Split.of(validation_config).name:
            continue
        selected: list[list[range]] = []
        for source in (validation_config, config):
            left = source.max_samples or count
            selected.append([])
            for rows in select_rows(source, count):
                selected[-1].append(rows[:left])
                left -= len(selected[-1][-1])
        num_shared = sum(
            max(0, min(ours.stop, theirs.stop) - max(ours.start, theirs.start))
            for ours, theirs in itertools.product(*selected)
        )
        if num_shared:
            logger.warning(
                "%d of %d validation samples of %r (split = %r) are also training samples "
                "(split = %r), so the validation loss does not measure generalization. "
                "Select different samples with `split`",
                num_shared,
                len(records),
                validation_config.path,
                validation_config.split,
                config.split,
            )


class ConfiguredSource:
    """Source with the settings of a recipe.

    Args:
        source: Source without the settings.
        config: Settings of the source.

    Raises:
        DataError: The source lacks columns that the recipe requires.
    """

    def __init__(self, source: MapSource, config: SourceConfig) -> None:
        self._source = source
        self._config = config
        self._map_record = make_record_mapper(config)
        self.fingerprint = source.fingerprint
        self.all_rows: int | None = len(source)
        """Number of rows of the split without slices. None if `datasets` applied the slices."""
        if Split.of(config).rows is not None:
            self.all_rows = source.all_rows if isinstance(source, SelectedRows) else None
        _check_columns(config, self._readable())

    def __len__(self) -> int:
        return min(len(self._source), self._config.max_samples or len(self._source))

    def read(self, index: int) -> Record:
        """Return record `index`. Raise CorruptSampleError if it cannot be read."""
        with record_errors_at(""):
            return self._map_record(self._source.read(index))

    def _readable(self) -> Iterator[Record]:
        for index in range(min(len(self), MAX_CHECKED_RECORDS)):
            with suppress(CorruptSampleError), record_errors_at(""):  # reported during indexing
                yield self._source.read(index)


class ConfiguredStream:
    """Stream with the settings of a recipe.

    Args:
        stream: Stream without the settings.
        config: Settings of the source.

    Raises:
        DataError: The source lacks columns that the recipe requires.
    """

    def __init__(self, stream: RecordStream, config: SourceConfig) -> None:
        self._stream = stream
        self._config = config
        self._map_record = make_record_mapper(config)
        self._num_read = 0
        if config.columns:
            records = islice(iter(stream.next, None), MAX_CHECKED_RECORDS)
            _check_columns(config, (r for r in records if isinstance(r, Record)))
            stream.restart(None)

    def restart(self, position: Any) -> None:
        """Resume at a position of the stream."""
        self._num_read = 0
        if position is not None and self._config.max_samples is not None:
            self._num_read, position = position
        self._stream.restart(position)

    def position(self) -> Any:
        """Return the position of the next record."""
        position = self._stream.position()
        return position if self._config.max_samples is None else [self._num_read, position]

    def next(self) -> Record | CorruptSampleError | None:
        """Return the next record, the error if it is corrupt, or None at the end."""
        if self._config.max_samples is not None and self._num_read >= self._config.max_samples:
            return None
        self._num_read += 1
        record = self._stream.next()
        if not isinstance(record, Record):
            return record
        try:
            with record_errors_at(record.location):
                return self._map_record(record)
        except CorruptSampleError as error:
            return error


def make_record_mapper(config: SourceConfig) -> Callable[[Record], Record]:
    """Return a function that applies `columns`, `files` and the sample options to a record.

    Raises:
        DataError: The directory `files` does not exist.
    """
    root = None if config.files is None else str(Path(config.files).expanduser().absolute())
    if root is not None and not Path(root).is_dir():
        raise DataError(
            f"data.sources: files = {config.files!r} of source {config.path!r} is not a "
            "directory; use the local directory to which paths in the records are relative"
        )
    return partial(_map_record, names=config.columns, options=SampleOptions.of(config), root=root)


def _map_record(
    record: Record, names: Mapping[str, str], options: SampleOptions, root: str | None
) -> Record:
    columns = record.columns
    if names:
        # If a record lacks a column, the remaining columns are still renamed.
        present = with_json_columns(columns)
        renamed = {expected: present[name] for expected, name in names.items() if name in present}
        columns = {k: v for k, v in present.items() if k not in names.values()} | renamed
    root_of_files = record.root if root is None else root
    return replace(record, columns=columns, options=options, root=root_of_files)


def _check_columns(config: SourceConfig, records: Iterator[Record]) -> None:
    if not config.columns:
        return
    known: dict[str, None] = {}
    for record in records:
        try:
            known.update(dict.fromkeys(with_json_columns(record.columns)))
        except CorruptSampleError:
            continue  # reported when it is read
        if all(name in known for name in config.columns.values()):
            return
    missing = [name for name in config.columns.values() if name not in known]
    if not known:
        return  # no record could be read, which indexing reports
    raise DataError(
        f"source {config.path!r}: `columns` maps {missing[0]!r}, but none of the first "
        f"{MAX_CHECKED_RECORDS} records has this column{suggest(missing[0], known)}; existing "
        "columns "
        f"are {', '.join(known)}. Use columns = {{ expected = "
        '"name in the source" }}'
    )
