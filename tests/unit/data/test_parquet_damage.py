"""Parquet files that are damaged, or whose footers specify excessive sizes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import caption_rows

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.sources import parquet_rows
from torchmm.data.sources.map_sources import ArrowSource, open_map_source
from torchmm.data.sources.streams import open_stream
from torchmm.recipe.data_section import SourceConfig

ROWS = 12
GROUP = 4


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "set" / "rows.parquet"
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(caption_rows(ROWS)), path, row_group_size=GROUP)
    return path


def overwrite_images(path, group):
    """Overwrite the images of a row group."""
    column = pq.read_metadata(path).row_group(group).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    with path.open("r+b") as stream:
        stream.seek(start)
        stream.write(b"\xff" * column.total_compressed_size)


def read_all(path, streaming):
    """Return the text of each row, or its error message."""
    config = SourceConfig(path=str(path.parent))
    if streaming:
        results = list(iter(open_stream("set", config).next, None))
    else:
        source = open_map_source(config)
        results = []
        for index in range(len(source)):
            try:
                results.append(source.read(index))
            except CorruptSampleError as error:
                results.append(error)
    return [str(f) if isinstance(f, CorruptSampleError) else f.columns["text"] for f in results]


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "stream"])
def test_damaged_row_group_costs_its_rows(file, streaming):
    texts = [row["text"] for row in caption_rows(ROWS)]
    assert read_all(file, streaming) == texts
    overwrite_images(file, 1)
    actual = read_all(file, streaming)
    assert actual[:GROUP] == texts[:GROUP] and actual[2 * GROUP :] == texts[2 * GROUP :]
    for row, message in enumerate(actual[GROUP : 2 * GROUP], GROUP):
        assert message.startswith(f"{file} row {row}: row group 1: ")


def test_parquet_file_is_converted_to_arrow(file):
    source = open_map_source(SourceConfig(path=str(file)))
    assert isinstance(source._source, ArrowSource)


@pytest.mark.parametrize("streaming", [False, True], ids=["indexed", "stream"])
def test_rows_without_bytes_are_rejected(tmp_path, streaming):
    rows = 200_000
    column = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["x" * 10_000])
    path = tmp_path / "set" / "bomb.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"text": column}), path, row_group_size=rows)
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match=r"bomb\.parquet claims 200000 rows in \d+ bytes"):
        read_all(path, streaming)


def test_row_group_beyond_memory_limit_is_rejected(file, monkeypatch):
    monkeypatch.setattr(parquet_rows, "MAX_GROUP_BYTES", 1000)
    with file.open("rb") as stream, pytest.raises(ValueError, match="more than 1000 bytes"):
        parquet_rows.read_group(stream, 0)
    monkeypatch.setattr(parquet_rows, "MAX_RATIO", 0)
    with pytest.raises(DataError, match=r"rows\.parquet claims \d+ bytes, of \d+ compressed"):
        read_all(file, False)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 1000, b"PAR1" + b"\xff" * 100 + b"PAR1"])
def test_all_files_without_footer_are_reported(file, content):
    for name in ("a.parquet", "b.parquet"):
        file.with_name(name).write_bytes(content)
    with pytest.raises(DataError, match=r"(?s)a\.parquet cannot.*b\.parquet cannot"):
        read_all(file, False)


def test_stream_position_of_older_format_is_rejected(file):
    stream = open_stream("set", SourceConfig(path=str(file)))
    with pytest.raises(DataError, match="an earlier torchmm"):
        stream.restart({"examples_iterable": {}})
