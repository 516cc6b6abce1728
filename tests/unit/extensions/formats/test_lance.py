"""Lance tables as sources: the rows of one version, here and in a store."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from data_cases import caption, caption_rows, write_parquet

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.sources.local_and_hub import open_map_source, resolve_files
from torchmm.recipe.data_section import SourceConfig

lance = pytest.importorskip("lance", reason="an extra")


@pytest.fixture
def table(tmp_path) -> str:
    """Version 1: 20 rows; version 2: 5 more, and row 3 is gone."""
    path = str(tmp_path / "set.lance")
    rows = [{"image": row["image"]["bytes"], "text": row["text"]} for row in caption_rows(25)]
    lance.write_dataset(pa.Table.from_pylist(rows[:20]), path, max_rows_per_file=8)
    newer = lance.write_dataset(pa.Table.from_pylist(rows[20:]), path, mode="append")
    newer.delete(f"text = '{caption(3)}'")
    return path


def test_rows_equal_those_of_parquet(table, tmp_path, reader):
    source = open_map_source(SourceConfig(path=table, revision="1"))
    same = open_map_source(SourceConfig(path=str(write_parquet(tmp_path / "p", caption_rows(20)))))
    assert len(source) == len(same) == 20
    for index in (19, 0, 7):
        assert reader.read(source.read(index)) == reader.read(same.read(index))
    worker = copy.deepcopy(source)
    assert worker.read(5).columns == source.read(5).columns
    assert source.read(5).where.endswith("set.lance row 5")


def test_splits_of_a_table_select_rows_or_are_rejected(table):
    whole = open_map_source(SourceConfig(path=table))
    some = open_map_source(SourceConfig(path=table, split="train[3:5]"))
    assert [some.read(i) for i in range(len(some))] == [whole.read(3), whole.read(4)]
    with pytest.raises(DataError, match='a Lance table has only the split "train"'):
        open_map_source(SourceConfig(path=table, split="validation"))


def test_a_version_is_pinned_when_a_table_is_opened(table):
    old = open_map_source(SourceConfig(path=table, revision="1"))
    newest = open_map_source(SourceConfig(path=table))
    gone = sum(caption(i) == caption(3) for i in range(25))
    assert (len(old), len(newest)) == (20, 25 - gone)
    assert old.fingerprint != newest.fingerprint
    again = open_map_source(SourceConfig(path=table, revision="1"))
    assert again.fingerprint == old.fingerprint
    lance.write_dataset(pa.table({"text": ["x"], "image": [b""]}), table, mode="append")
    assert len(copy.deepcopy(newest)) == 25 - gone
    assert copy.deepcopy(newest).read(0).columns == newest.read(0).columns


def test_a_table_in_a_store(table, object_server, monkeypatch):
    object_server.put_folder("lances", Path(table), "set.lance/")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    there = open_map_source(SourceConfig(path="s3://lances/set.lance", revision="1"))
    here = open_map_source(SourceConfig(path=table, revision="1"))
    assert [there.read(i).columns for i in (0, 19)] == [here.read(i).columns for i in (0, 19)]
    object_server.faults.status = 403
    with pytest.raises(DataError, match=r"s3://lances/set\.lance row 12 cannot be read"):
        there.read(12)


def test_mistakes_are_named(table, tmp_path):
    with pytest.raises(DataError, match=r"none\.lance.*cannot be opened"):
        open_map_source(SourceConfig(path=str(tmp_path / "none.lance")))
    with pytest.raises(DataError, match="revision"):
        open_map_source(SourceConfig(path=table, revision="99"))
    with pytest.raises(ConfigError, match="use its number"):
        open_map_source(SourceConfig(path=table, revision="main"))


def test_without_the_library(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "lance", None)
    assert resolve_files(SourceConfig(path=table)) == ("lance", [])
    with pytest.raises(ConfigError, match=r"\[lance\]"):
        open_map_source(SourceConfig(path=table))
