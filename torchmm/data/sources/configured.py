"""What sources and streams are, and what a recipe says of them: columns, how many, options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError, naming_place
from torchmm.data.layouts.columns import with_json_columns
from torchmm.data.layouts.sample import Record, SampleOptions
from torchmm.recipe.data_section import SourceConfig
from torchmm.recipe.explain import suggest

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


class SourceAsConfigured:
    """A source whose records are as the recipe says.

    Raises:
        DataError: the recipe names columns that the source does not have.
    """

    def __init__(self, source: MapSource, config: SourceConfig) -> None:
        self._source = source
        self._config = config
        self._options = SampleOptions.of(config)
        self.fingerprint = source.fingerprint
        _check_columns(config, self._readable())

    def __len__(self) -> int:
        return min(len(self._source), self._config.max_samples or len(self._source))

    def read(self, index: int) -> Record:
        """Record `index`; raises CorruptSampleError."""
        with naming_place(""):
            return _configured(self._source.read(index), self._config, self._options)

    def _readable(self) -> Iterator[Record]:
        for index in range(min(len(self), LOOKED_AT)):
            try:
                with naming_place(""):
                    record = self._source.read(index)
            except CorruptSampleError:
                continue  # reported when it is its turn
            yield record


class StreamAsConfigured:
    """A stream whose records are as the recipe says.

    Raises:
        DataError: the recipe names columns that the source does not have.
    """

    def __init__(self, stream: RecordStream, config: SourceConfig) -> None:
        self._stream = stream
        self._config = config
        self._options = SampleOptions.of(config)
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
                return _configured(record, self._config, self._options)
        except CorruptSampleError as error:
            return error


def _configured(record: Record, config: SourceConfig, options: SampleOptions) -> Record:
    columns = _renamed(record.columns, config.columns) if config.columns else record.columns
    return replace(record, columns=columns, options=options)


def _renamed(columns: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Columns under the names that layouts expect; those a record lacks stay missing."""
    found = with_json_columns(columns)
    taken = {expected: found[own] for expected, own in names.items() if own in found}
    rest = {name: value for name, value in found.items() if name not in names.values()}
    return {**rest, **taken}


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
        f"source {config.path!r}: `columns` names {missing[0]!r}, which none of its first "
        f"{LOOKED_AT} records has{suggest(missing[0], known)}; its columns are {', '.join(known)}. "
        'Write columns = { expected = "name in the source" }'
    )
