"""Interfaces of sources and streams, and the settings of a recipe for them: split, columns, number
of samples, options.
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
from torchmm.data.corrupt import CorruptSampleError, naming_place
from torchmm.data.layouts.columns import with_json_columns
from torchmm.data.layouts.sample import Record, SampleOptions
from torchmm.recipe.data_section import SourceConfig
from torchmm.recipe.explain import suggest

logger = logging.getLogger(__name__)

LOOKED_AT = 100
"""Records in which every column that the recipe names has to be found at least once."""


class MapSource(Protocol):
    """Random access to the records of one source."""

    fingerprint: str
    """Changes when the content may have changed."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Record:
        """Raises CorruptSampleError if this record cannot be read."""
        ...


class RecordStream(Protocol):
    """Reads one source from the start or from a position."""

    def restart(self, position: Any) -> None:
        """Continue at a position, from the start if it is None."""
        ...

    def position(self) -> Any:
        """JSON-able position of the next record."""
        ...

    def next(self) -> Record | CorruptSampleError | None:
        """The next record, or why it is unreadable; None at the end."""
        ...


class Split(NamedTuple):
    """The `split` of a source."""

    name: str
    rows: datasets.ReadInstruction | None
    """Slices as in "train[:10%]"; None selects all rows."""

    @classmethod
    def of(cls, config: SourceConfig) -> Split:
        """Parse the `split` of a source as `datasets` does; raises ConfigError."""
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
    """The rows of a source that the slices of its `split` select.

    Args:
        source: all rows of the split.
        config: the source; its `split` has slices.

    Raises:
        DataError: the split selects no rows, or names several splits.
    """

    def __init__(self, source: MapSource, config: SourceConfig) -> None:
        self._rows = rows_of_split(config, len(source))
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
        """Return record `index` of the selected rows; raises CorruptSampleError."""
        for rows in self._rows:
            if index < len(rows):
                return self._source.read(rows[index])
            index -= len(rows)
        raise IndexError(index)


def rows_of_split(config: SourceConfig, count: int) -> list[range]:
    """Return the rows that the slices of a `split` select of a number of rows; raises DataError."""
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


def warn_of_trained_rows(
    held_out: SourceConfig, records: MapSource, trained: Sequence[SourceConfig]
) -> None:
    """Warn if rows of a held-out source are training rows, too.

    Args:
        held_out: the held-out source.
        records: its records.
        trained: the training sources.
    """
    count = records.all_rows if isinstance(records, SourceAsConfigured) else None
    for config in trained:
        keys = ("path", "config", "revision")
        same = all(getattr(config, key) == getattr(held_out, key) for key in keys)
        if count is None or not same or Split.of(config).name != Split.of(held_out).name:
            continue
        selected: list[list[range]] = []
        for source in (held_out, config):
            left = source.max_samples or count
            selected.append([])
            for rows in rows_of_split(source, count):
                selected[-1].append(rows[:left])
                left -= len(selected[-1][-1])
        both = sum(
            max(0, min(ours.stop, theirs.stop) - max(ours.start, theirs.start))
            for ours, theirs in itertools.product(*selected)
        )
        if both:
            logger.warning(
                "%d of %d validation samples of %r (split = %r) are also training samples "
                "(split = %r), so the validation loss does not measure generalization. "
                "Select different samples with `split`",
                both, len(records), held_out.path, held_out.split, config.split,
            )  # fmt: skip


class SourceAsConfigured:
    """A source whose records are as the recipe says.

    Raises:
        DataError: the recipe names columns that the source does not have.
    """

    def __init__(self, source: MapSource, config: SourceConfig) -> None:
        self._source = source
        self._config = config
        self._configure = make_configure(config)
        self.fingerprint = source.fingerprint
        self.all_rows: int | None = len(source)
        """Number of rows of the split without slices; None if `datasets` has applied the slices."""
        if Split.of(config).rows is not None:
            self.all_rows = source.all_rows if isinstance(source, SelectedRows) else None
        _check_columns(config, self._readable())

    def __len__(self) -> int:
        return min(len(self._source), self._config.max_samples or len(self._source))

    def read(self, index: int) -> Record:
        """Return record `index`; raise CorruptSampleError."""
        with naming_place(""):
            return self._configure(self._source.read(index))

    def _readable(self) -> Iterator[Record]:
        for index in range(min(len(self), LOOKED_AT)):
            with suppress(CorruptSampleError), naming_place(""):  # reported when it is read
                yield self._source.read(index)


class StreamAsConfigured:
    """A stream whose records are as the recipe says.

    Raises:
        DataError: the recipe names columns that the source does not have.
    """

    def __init__(self, stream: RecordStream, config: SourceConfig) -> None:
        self._stream = stream
        self._config = config
        self._configure = make_configure(config)
        self._given = 0
        if config.columns:
            records = islice(iter(stream.next, None), LOOKED_AT)
            _check_columns(config, (r for r in records if isinstance(r, Record)))
            stream.restart(None)

    def restart(self, position: Any) -> None:
        """Continue at a position of the stream."""
        self._given = 0
        if position is not None and self._config.max_samples is not None:
            self._given, position = position
        self._stream.restart(position)

    def position(self) -> Any:
        """Position of the next record."""
        position = self._stream.position()
        return position if self._config.max_samples is None else [self._given, position]

    def next(self) -> Record | CorruptSampleError | None:
        """The next record."""
        if self._config.max_samples is not None and self._given >= self._config.max_samples:
            return None
        self._given += 1
        record = self._stream.next()
        if not isinstance(record, Record):
            return record
        try:
            with naming_place(record.where):
                return self._configure(record)
        except CorruptSampleError as error:
            return error


def make_configure(config: SourceConfig) -> Callable[[Record], Record]:
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
    return partial(_configure, names=config.columns, options=SampleOptions.of(config), root=root)


def _configure(
    record: Record, names: Mapping[str, str], options: SampleOptions, root: str | None
) -> Record:
    columns = record.columns
    if names:
        # A record without a column keeps its other columns.
        found = with_json_columns(columns)
        renamed = {expected: found[own] for expected, own in names.items() if own in found}
        columns = {k: v for k, v in found.items() if k not in names.values()} | renamed
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
            continue  # reported when it is its turn
        if all(own in known for own in config.columns.values()):
            return
    missing = [own for own in config.columns.values() if own not in known]
    if not known:
        return  # nothing could be read: measuring says why
    raise DataError(
        f"source {config.path!r}: `columns` maps {missing[0]!r}, but none of the first "
        f"{LOOKED_AT} records has this column{suggest(missing[0], known)}; existing columns "
        f"are {', '.join(known)}. Use columns = {{ expected = "
        '"name in the source" }}'
    )
