"""Text files with many records: locations of records, and the cost of a damaged record."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import re

import pyarrow as pa
import pytest

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.sources import text_files
from torchmm.data.sources.decompress import decompress_to_cache
from torchmm.data.sources.map_sources import open_map_source
from torchmm.data.sources.streams import open_stream
from torchmm.recipe.data_section import SourceConfig


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a file and returns the columns or the error of each record."""

    def read(name, content, stream=False):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        config = SourceConfig(path=str(path))
        if stream:
            records = list(iter(open_stream("a", config, str(tmp_path)).next, None))
            return [r if isinstance(r, CorruptSampleError) else r.columns for r in records]
        source = open_map_source(config, str(tmp_path))
        return [columns_of(source, i) for i in range(len(source))]

    return read


def columns_of(source, index):
    try:
        return source.read(index).columns
    except CorruptSampleError as error:
        return error


def test_records_have_line_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"n": 1}\n\n  \n{"n": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 3}\n{"n": 4}')
    (tmp_path / "t.csv").write_text('a,b\n1,"two\nlines"\n\n3,4\n')
    source = open_map_source(SourceConfig(path=str(tmp_path), format="json"))
    places = [source.read(i).location for i in range(4)]
    assert places == [
        f"{tmp_path}/{p}" for p in ("a.jsonl:2", "a.jsonl:5", "b.jsonl:1", "b.jsonl:2")
    ]
    stream = open_stream("a", SourceConfig(path=str(tmp_path), format="json"))
    assert [r.location for r in iter(stream.next, None)] == places
    table = open_map_source(SourceConfig(path=str(tmp_path / "t.csv")))
    assert [table.read(i).location for i in range(2)] == [f"{tmp_path}/t.csv:{n}" for n in (2, 5)]


def test_stream_position_of_older_checkpoint_is_valid(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    stream = open_stream("a", SourceConfig(path=str(tmp_path)))
    stream.restart([0, 9])
    assert stream.next().location == f"{tmp_path}/a.jsonl:byte 9"


def test_json_scanner_ignores_brackets_in_strings(read):
    rows = [{"text": '}]"{[\\'}, {"text": ['\\"', {"a": []}]}, {}]
    for indent in (None, 2):
        assert read("a.json", json.dumps(rows, indent=indent)) == rows
        assert read("a.json", json.dumps(rows, indent=indent), stream=True) == rows


def random_value(rng, depth=0):
    """Return a random JSON value with many characters that can confuse a scanner."""
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind < 2:
        return "".join(rng.choice('{}[]",:\\/ aü\n\u2028') for _ in range(rng.randrange(6)))
    if kind == 2:
        return rng.choice([None, True, 1.5, -7])
    values = [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return values if kind == 3 else {f"{n}{v!r}"[:9]: v for n, v in enumerate(values)}


def test_arrays_and_csv_match_standard_libraries(read):
    rng = random.Random(5)
    for _ in range(40):
        rows = [{"a": random_value(rng), "b": random_value(rng)} for _ in range(rng.randrange(5))]
        text = json.dumps(rows, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5)
        assert read("a.json", text) == rows
        cells = [[str(random_value(rng, 9)) for _ in "abc"] for _ in range(rng.randrange(1, 5))]
        table = io.StringIO(newline="")
        writer = csv.writer(table, quoting=rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
        writer.writerows([["a", "b", "c"], *cells])
        actual = [list(row.values()) for row in read("a.csv", table.getvalue())]
        assert actual == [[cell or None for cell in row] for row in cells]


@pytest.mark.parametrize(
    ("text", "valid", "reason"),
    [
        ('[{"n": 1}, 7, {"n": 2}]', 2, "element 2 is int, not an object"),
        ('[{"n": 1} "x", {"n": 2}]', 2, "element 2 is str"),
        ('[{"n": 1}, {"n": 2, ]', 1, "element 2: "),
        ('[{"n": 1}, {"n": "cut of', 1, "element 2: "),
        ('[{"n": 1}]\n[{"n": 2}]', 1, "element 2 is list"),
        ('[{"n": [1, 2}, {"n": 3}]', 0, "element 1: "),
    ],
)
def test_array_element_that_is_not_object_is_corrupt(read, text, valid, reason):
    actual = read("a.json", text)
    corrupt = [str(item) for item in actual if isinstance(item, CorruptSampleError)]
    assert len(actual) - len(corrupt) == valid and len(corrupt) == 1
    assert reason in corrupt[0]


def test_unclosed_array_warns(read, caplog):
    assert read("a.json", '[{"n": 1},\n') == [{"n": 1}]
    assert "does not close its array" in caplog.text


def test_csv_rows_are_read(read):
    text = '\ufeffimage,text,\r\n1.png,"a ""b"", c\nd",7\r\n2.png,6" wide,\r\n3.png\r\n,x,\r\n'
    first, second, third, fourth = read("a.csv", text)
    assert first == {"image": "1.png", "text": 'a "b", c\nd'}
    assert second == {"image": "2.png", "text": '6" wide'}
    assert "a.csv:5: row has 1 values, but the first row has 3 column" in str(third)
    assert fourth == {"image": None, "text": "x"}
    assert read("a.csv", text, stream=True)[1] == second


@pytest.mark.parametrize(
    ("name", "head"), [("a.tsv", "image\ttext"), ("a.csv", "image;text"), ("a.csv", "image,text")]
)
def test_csv_delimiter_follows_first_row(read, name, head):
    row = head.replace("image", "1.png").replace("text", "17")
    assert read(name, f"{head}\n{row}\n") == [{"image": "1.png", "text": "17"}]


def test_unclosed_quote_is_corrupt(read):
    actual = read("a.csv", 'image,text\n1.png,one\n2.png,"two\n3.png,three\n')
    assert actual[0]["text"] == "one" and len(actual) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("stream", [False, True])
def test_too_long_record_is_corrupt(read, monkeypatch, name, stream):
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr("torchmm.data.sources.streams.MAX_RECORD_BYTES", 100)
    rows = ['{"n": 1}', json.dumps({"text": "x" * 1000}), '{"n": 2}']
    text = "\n".join(rows) if name == "a.jsonl" else f"[{','.join(rows)}]"
    first, second, third = read(name, text, stream)
    assert (first, third) == ({"n": 1}, {"n": 2})
    assert re.search(r"a\.json.* of 101\d bytes is longer than the limit of 100", str(second))


def test_deeply_nested_line_is_corrupt(read):
    assert isinstance(read("a.jsonl", "[" * 100_000 + "\n" + '{"n": 1}')[0], CorruptSampleError)


def test_compressed_file_is_decompressed_once_per_change(read, tmp_path):
    assert read("a.jsonl.gz", gzip.compress(b'{"n": 1}\n')) == [{"n": 1}]
    copy = next((tmp_path / "unpacked").glob("*.jsonl"))
    written = copy.stat().st_mtime_ns
    source = open_map_source(SourceConfig(path=str(tmp_path / "a.jsonl.gz")), str(tmp_path))
    assert source.read(0).location == f"{tmp_path}/a.jsonl.gz:1"
    assert copy.stat().st_mtime_ns == written
    assert read("a.jsonl.gz", gzip.compress(b'{"n": 1}\n{"n": 2}\n')) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("damage", ["tail", "replaced", "no record", "bad record"])
def test_damaged_decompressed_copy_is_replaced(tmp_path, damage, caplog):
    lines = b"".join(b'{"n": %d}\n' % n for n in range(60))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    copy = decompress_to_cache(path, tmp_path)
    times = copy.stat().st_atime_ns, copy.stat().st_mtime_ns
    record = copy.with_name(f"{copy.name}.record")
    if damage == "tail":
        copy.write_bytes(lines[: len(lines) * 2 // 3])
    elif damage == "replaced":  # same size and modification time
        copy.write_bytes(lines[:-3] + b"7}\n")
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text("[]")
    os.utime(copy, ns=times)
    assert decompress_to_cache(path, tmp_path) == copy and copy.read_bytes() == lines
    assert f"{copy} is not the decompressed content of {path}" in caplog.text


def test_moved_decompressed_copy_is_hashed(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n": 1}\n'))
    copy = decompress_to_cache(path, tmp_path)
    copy.rename(tmp_path / "moved")
    (tmp_path / "moved").rename(copy)
    os.utime(copy, ns=(0, 0))
    before = copy.stat().st_ino
    assert decompress_to_cache(path, tmp_path) == copy and copy.stat().st_ino == before
    record = json.loads(copy.with_name(f"{copy.name}.record").read_text())
    assert record["state"][1] == 0  # not hashed at the next start


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_decompression_stops_at_limit(read, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("torchmm.data.sources.decompress.MIN_SIZE_LIMIT_BYTES", 1 << 20)
    text = b'{"n": "' + b"0" * (8 << 20) + b'"}\n'
    codec = {"gz": "gzip", "zst": "zstd"}[kind]
    content = pa.compress(text, codec, asbytes=True)
    with pytest.raises(DataError, match=rf"a\.jsonl\.{kind} has .* bytes and more than 1,048,576"):
        read(f"a.jsonl.{kind}", content)
    assert not any((tmp_path / "unpacked").iterdir())


def test_damaged_compressed_file_is_reported(read, tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be decompressed: .*download"):
        read("a.jsonl.gz", gzip.compress(b'{"n": 1}\n' * 10_000)[:-20])
    assert not any((tmp_path / "unpacked").iterdir())
    config = SourceConfig(path=str(tmp_path / "a.jsonl.gz"))
    with pytest.raises(ConfigError, match=r"data\.index_cache_dir"):
        open_map_source(config, str(tmp_path / "a.jsonl.gz"))
