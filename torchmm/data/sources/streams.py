"""Sources without random access, which are read in order and shuffled within a window.

    stream = open_stream(name, config, data.index_cache_dir, storage)
    feed = StreamFeed(options, stream, reader, data.shuffle_window)

A feed reads a window of records, permutes it by (seed, epoch, window), and returns its samples. The
planning process reads the full stream and measures each record. There is one such process per node
(`torchmm.data.shared_reader`). All nodes compute the same order without communication, and workers
only decode.

Open sequences contain samples of earlier windows. Therefore the state has the position of the
oldest window that is still needed, and a resumed feed reads forward from this position. The shuffle
buffer of `datasets` would lose samples on resume, because its state does not include its content.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from tarfile import TarError
from typing import Any

import datasets
import pyarrow as pa

from torchmm.common.batch import ImageSizes
from torchmm.common.errors import ConfigError, DataError
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.files.offset_cache import OffsetCache
from torchmm.data.files.remote_files import AnyFile, FileSystem
from torchmm.data.files.sample_files import open_regular, read_row
from torchmm.data.items import Item
from torchmm.data.record_formats.sample import Record, Root
from torchmm.data.sources.index.length_index import describe_filtered, no_usable_samples_error
from torchmm.data.sources.map_sources import (
    INDEX_CACHE,
    decompressed_text,
    has_native_reader,
    load_with_datasets,
    open_file_source,
    resolve_files,
    sample_key,
    source_root,
)
from torchmm.data.sources.reader import MeasuredSample, SampleReader
from torchmm.data.sources.source_options import (
    ConfiguredStream,
    MapSource,
    RecordStream,
    SelectedRows,
    Split,
)
from torchmm.data.sources.tar_samples import WebdatasetStream
from torchmm.data.sources.text_files import (
    MAX_RECORD_BYTES,
    is_array,
    parse_object,
    record_root,
    record_too_long,
)
from torchmm.data.steps.feeds import FeedOptions, SampleArrays, make_permutation
from torchmm.data.steps.shuffling import Int64s
from torchmm.recipe.data_section import SourceConfig

_UNREADABLE = (
    OSError, EOFError, ValueError, TarError, pa.ArrowException, datasets.exceptions.DatasetsError,
)  # fmt: skip


class ArrowStream:
    """Stream of the records of a `datasets.IterableDataset` as raw Arrow values."""

    def __init__(self, name: str, dataset: datasets.IterableDataset, root: Root) -> None:
        self._name = name
        self._dataset = dataset
        self._root = root
        self.restart(None)

    def restart(self, position: Any) -> None:
        """Resume at a state of the dataset."""
        self._rows = self._dataset.with_format("arrow")
        if position is not None:
            self._rows.load_state_dict(position)
        self._iterator: Iterator[pa.Table] = iter(self._rows)

    def position(self) -> Any:
        """Return the state of the dataset."""
        return self._rows.state_dict()

    def next(self) -> Record | CorruptSampleError | None:
        """Return the next row, or None at the end."""
        try:
            table = next(self._iterator, None)
        except _UNREADABLE as error:
            raise DataError(f"source {self._name!r}: cannot continue reading: {error}") from error
        if table is None:
            return None
        columns = read_row(table)
        return Record(columns, self._root, location=sample_key(columns))


class JsonLinesStream:
    """Stream of the records of JSON Lines files, which are read once."""

    def __init__(self, files: Sequence[AnyFile]) -> None:
        self._files = list(files)
        self._file, self._offset = 0, 0
        self._line: int | None = 1

    def restart(self, position: Any) -> None:
        """Resume at a position [file, byte offset, line]."""
        self._file, self._offset, *line = position or (0, 0, 1)
        self._line = line[0] if line else None  # missing in old checkpoints

    def position(self) -> Any:
        """Return the position of the next line: [file, byte offset, line]."""
        return [self._file, self._offset, *([] if self._line is None else [self._line])]

    def next(self) -> Record | CorruptSampleError | None:
        """Return the next non-empty line, or None at the end."""
        while self._file < len(self._files):
            path = self._files[self._file]
            place = f"byte {self._offset}" if self._line is None else str(self._line)
            with open_regular(path) as stream:
                stream.seek(self._offset)
                line = stream.readline(MAX_RECORD_BYTES)
                size = len(line)
                while not line.endswith(b"\n") and (rest := stream.readline(MAX_RECORD_BYTES)):
                    size += len(rest)
                    line = rest
            self._offset += size
            if not size:
                self._file, self._offset, self._line = self._file + 1, 0, 1
                continue
            if self._line is not None:
                self._line += 1
            location = f"{path}:{place}"
            if size > MAX_RECORD_BYTES:
                return record_too_long(location, "line", size)
            if line.strip():
                try:
                    return Record(
                        parse_object(line, location), record_root(path), location=location
                    )
                except CorruptSampleError as error:
                    return error
        return None


class IndexedStream:
    """Stream of the records of a source with random access, in order."""

    def __init__(self, source: MapSource) -> None:
        self._source = source
        self._next = 0

    def restart(self, position: Any) -> None:
        """Resume at a record. Raise DataError for a saved state of `datasets`."""
        if isinstance(position, dict):
            raise DataError(
                "the checkpoint has the loader state of an earlier torchmm version, which "
                "read parquet files with `datasets`; continue with that version, or start a "
                "new run"
            )
        self._next = position or 0

    def position(self) -> Any:
        """Return the index of the next record."""
        return self._next

    def next(self) -> Record | CorruptSampleError | None:
        """Return the next record, or None at the end."""
        if self._next >= len(self._source):
            return None
        self._next += 1
        try:
            return self._source.read(self._next - 1)
        except CorruptSampleError as error:
            return error


def open_stream(
    name: str, config: SourceConfig, cache: str = INDEX_CACHE, storage: FileSystem | None = None
) -> RecordStream:
    """Open a source for reading in order.

    Args:
        name: Name of the source, for messages.
        config: The source.
        cache: Directory for decompressed files.
        storage: File system of the source. None if the source is local.

    Raises:
        ConfigError: The cache cannot be written, or the slice of `split` cannot be streamed.
        DataError: The source has no readable files, or lacks columns that the recipe requires.
    """
    kind, files = resolve_files(config, storage)
    is_native = has_native_reader(kind, files) or kind == "parquet"
    stream: RecordStream
    if kind != "hub" and Split.of(config).rows is not None:
        if not is_native:
            raise ConfigError(
                f"source {config.path!r}: split = {config.split!r} has a slice, which a stream of "
                f"{kind} files cannot select; set streaming = false"
            )
        rows = SelectedRows(open_file_source(config, kind, files, cache), config)
        stream = IndexedStream(rows)
    elif kind == "json" and all(
        content == file and not is_array(content)
        for content, file in [(decompressed_text(file, kind, cache), file) for file in files]
    ):
        stream = JsonLinesStream(files)
    elif kind == "webdataset":
        stream = WebdatasetStream(files, OffsetCache(cache))
    elif is_native:
        stream = IndexedStream(open_file_source(config, kind, files, cache))
    else:
        dataset = load_with_datasets(config, kind, files, streaming=True)
        stream = ArrowStream(name, dataset, source_root(config, files))
    return ConfiguredStream(stream, config)


def check_stream(
    name: str, config: SourceConfig, stream: RecordStream, reader: SampleReader, max_corrupt: int
) -> None:
    """Read a stream up to its first usable sample, then restart it.

    Args:
        name: Name of the source, for messages.
        config: The source.
        stream: Stream of the records.
        reader: Reader that measures records.
        max_corrupt: Maximum number of corrupt samples of a run.

    Raises:
        DataError: No sample is usable, or too many samples before it are corrupt.
    """
    messages: list[str] = []
    corrupt = num_filtered = 0
    filtered: Counter[str] = Counter()
    records: Iterator[Record | CorruptSampleError] = iter(stream.next, None)
    for number, record in enumerate(records):
        item = measure_record(record, reader)
        if isinstance(item, BeyondLimitError):
            if not filtered[item.limit]:
                messages.insert(0, f"{name}[{number}]: {item}")
            filtered[item.limit] += 1
        elif isinstance(item, CorruptSampleError):
            messages.append(f"{name}[{number}]: {item}")
            corrupt += 1
        elif config.filter.keeps(len(item.text.ids)):
            stream.restart(None)
            return
        else:
            num_filtered += 1
        if corrupt > max_corrupt:
            break
    total = corrupt + num_filtered + filtered.total()
    parts = [f"{corrupt} are corrupt", f"{num_filtered} are removed by its `filter`"]
    counts = ", ".join([*parts, *describe_filtered(filtered, total)])
    raise no_usable_samples_error(
        name, f"none of its first {total} records are usable: {counts}", messages
    )


def measure_record(
    record: Record | CorruptSampleError, reader: SampleReader
) -> MeasuredSample | CorruptSampleError:
    """Return a measured sample of a stream, or the error if it cannot be used."""
    try:
        return record if isinstance(record, CorruptSampleError) else reader.read(record)
    except CorruptSampleError as error:
        return error


class StreamFeed:
    """Feed of the samples of a stream.

    Args:
        options: Name, seed and shuffling of the feed.
        stream: Stream of the records.
        reader: Reader that measures records.
        window: Number of records that are shuffled together.
    """

    sequential = True

    def __init__(
        self, options: FeedOptions, stream: RecordStream, reader: SampleReader, window: int
    ) -> None:
        self.options = options
        self.size: int | None = None
        self._stream = stream
        self._reader = reader
        self._window_size = window
        self._epoch = 0
        self._next_index = 0
        stream.restart(None)
        self._windows: deque[tuple[int, int, Any]] = deque()
        """Epoch, first record and stream position of windows that open sequences may need. The last
        entry is the current window."""
        self._records: list[tuple[int, Record | CorruptSampleError]] = []
        """Indices and records of the current window, shuffled."""
        self._num_used = 0
        """Number of records of the current window that were used."""
        self._filtered: Counter[str] = Counter()
        """Number of samples beyond each limit."""
        self._dropped: Counter[str] = Counter()
        """Number of used samples by dropped content (`MeasuredSample.dropped`)."""
        self._pass_samples: int | None = None
        """Number of samples of a pass, including corrupt samples. None during the first pass."""

    def samples(self, first: int, count: int) -> SampleArrays:
        """Return the next sample that is not filtered, or the message about a corrupt sample."""
        while self._num_used < len(self._records) or self._read_window(first):
            index, record = self._records[self._num_used]
            self._num_used += 1
            sample = measure_record(record, self._reader)
            if isinstance(sample, BeyondLimitError):
                self._filtered[sample.limit] += 1
            elif isinstance(sample, CorruptSampleError):
                skipped = [f"{self.options.name}[{index}]: {sample}"]
                return replace(SampleArrays.from_items([]), skipped=skipped)
            elif not self.options.filter.keeps(len(sample.text.ids)):
                self._filtered["removed by its `filter`"] += 1
            else:
                self._dropped.update(list(sample.dropped))
                item = self._item(index, record, sample)
                return replace(SampleArrays.from_items([item]), items=[item])
        return SampleArrays.from_items([])

    def passes(self, taken: int, unused_epochs_N: Int64s) -> float:
        """Return the number of trained samples, divided by the samples of a pass.

        Returns 0 during the first pass, because the length of the stream is unknown.
        """
        if self._pass_samples is None:
            return float(self._epoch)
        return (taken - len(unused_epochs_N)) / self._pass_samples

    def item(self, epoch: int, index: int) -> Item:
        """Raise NotImplementedError, because a stream is read once."""
        raise NotImplementedError

    def image_sizes(self, indices_N: Int64s, modules: Sequence[str]) -> ImageSizes:
        """Raise NotImplementedError, because a stream is read once."""
        raise NotImplementedError

    def state(self, taken: int, needed: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the positions of the oldest needed window and in the current window."""
        oldest = min(needed, default=None)
        while len(self._windows) > 1 and (oldest is None or self._windows[1][:2] <= oldest):
            self._windows.popleft()
        return {
            "draws": taken,
            "given": self._num_used,
            "windows": len(self._windows),
            "oldest": list(self._windows[0]) if self._windows else None,
            "filtered": dict(self._filtered),
            "dropped": dict(self._dropped),
            "pass_samples": self._pass_samples,
        }

    def restore(self, state: dict[str, Any], needed: Sequence[tuple[int, int]]) -> list[Item]:
        """Read forward from the oldest window, and return the needed samples."""
        self._epoch = 0
        self._next_index = 0
        self._windows.clear()
        self._records = []
        self._num_used = 0
        self._filtered = Counter(state.get("filtered"))  # checkpoints of old versions have none
        self._dropped = Counter(state.get("dropped"))
        self._pass_samples = state.get("pass_samples")
        if state["oldest"] is None:
            self._stream.restart(None)
            return []
        self._epoch, self._next_index, position = state["oldest"]
        self._stream.restart(position)
        names, items = set(needed), []
        for _ in range(state["windows"]):
            self._read_window(state["draws"])
            for index, record in self._records:
                if (self._epoch, index) in names:
                    sample = measure_record(record, self._reader)
                    if isinstance(sample, MeasuredSample):
                        items.append(self._item(index, record, sample))
        self._num_used = state["given"]
        return items

    def _read_window(self, taken: int) -> bool:
        """Read and shuffle the next window. Return False at the end of a feed of one epoch.

        Args:
            taken: Number of samples taken so far.
        """
        while True:
            position = self._stream.position()
            records: list[tuple[int, Record | CorruptSampleError]] = []
            while len(records) < self._window_size and (record := self._stream.next()) is not None:
                records.append((self._next_index + len(records), record))
            if records:
                break
            if self._next_index == 0:
                raise DataError(f"source {self.options.name!r} has no samples")
            if self.options.one_epoch:
                return False
            if self._epoch == 0 and self._pass_samples is None:
                self._pass_samples = taken
            self._epoch += 1
            self._next_index = 0
            self._stream.restart(None)
        first_index = self._next_index
        self._windows.append((self._epoch, first_index, position))
        self._next_index += len(records)
        order = make_permutation(len(records), self.options, self._epoch, first_index)
        self._records = [records[i] for i in order]
        self._num_used = 0
        return True

    def _item(
        self, index: int, record: Record | CorruptSampleError, sample: MeasuredSample
    ) -> Item:
        assert isinstance(record, Record)
        meta = self._reader.meta(self.options.name, index, sample)
        return Item(self.options.feed, self._epoch, meta, record)
