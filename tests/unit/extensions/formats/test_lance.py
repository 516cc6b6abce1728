"""Lance tables as sources: rows of one version, in a local directory and in an object store."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from data_cases import caption, caption_rows, write_parquet

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.sources.map_sources import open_map_source, resolve_files
from torchmm.recipe.data_section import SourceConfig

lance = pytest.importorskip("lance", reason="lance is not installed")


@pytest.fixture
def table(tmp_path) -> str:
    """Write a table. Version 1 has 20 rows. Version 2 has 5 more, without row 3."""
    path = str(tmp_path / "set.lance")
    rows = [{"image": row["image"]["bytes"], "text": row["text"]} for row in caption_rows(25)]
    lance.write_dataset(pa.Table.from_pylist(rows[:20]), path, max_rows_per_file=8)
    newer = lance.write_dataset(pa.Table.from_pylist(rows[20:]), path, mode="append")
    newer.delete(f"text = '{caption(3)}'")
    return path


def test_lance_rows_match_parquet(table, tmp_path, reader):
    source = open_map_source(SourceConfig(path=table, revision="1"))
    same = open_map_source(SourceConfig(path=str(write_parquet(tmp_path / "p", caption_rows(20)))))
    assert len(source) == len(same) == 20
    for index in (19, 0, 7):
        assert reader.read(source.read(index)) == reader.read(same.read(index))
    worker = copy.deepcopy(source)
    assert worker.read(5).columns == source.read(5).columns
    assert source.read(5).location.endswith("set.lance row 5")


def test_lance_splits_select_rows_or_are_rejected(table):
    full = open_map_source(SourceConfig(path=table))
    subset = open_map_source(SourceConfig(path=table, split="train[3:5]"))
    assert [subset.read(i) for i in range(len(subset))] == [full.read(3), full.read(4)]
    with pytest.raises(DataError, match='a Lance table has only the split "train"'):
        open_map_source(SourceConfig(path=table, split="validation"))


def test_lance_version_is_pinned_at_opening(table):
    old = open_map_source(SourceConfig(path=table, revision="1"))
    newest = open_map_source(SourceConfig(path=table))
    deleted = sum(caption(i) == caption(3) for i in range(25))
    assert (len(old), len(newest)) == (20, 25 - deleted)
    assert old.fingerprint != newest.fingerprint
    again = open_map_source(SourceConfig(path=table, revision="1"))
    assert again.fingerprint == old.fingerprint
    lance.write_dataset(pa.table({"text": ["x"], "image": [b""]}), table, mode="append")
    assert len(copy.deepcopy(newest)) == 25 - deleted
    assert copy.deepcopy(newest).read(0).columns == newest.read(0).columns


def test_lance_table_in_object_store_is_read(table, object_server, monkeypatch):
    object_server.put_folder("lances", Path(table), "set.lance/")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    remote = open_map_source(SourceConfig(path="s3://lances/set.lance", revision="1"))
    local = open_map_source(SourceConfig(path=table, revision="1"))
    assert [remote.read(i).columns for i in (0, 19)] == [local.read(i).columns for i in (0, 19)]
    object_server.faults.status = 403
    with pytest.raises(DataError, match=r"s3://lances/set\.lance row 12 cannot be read"):
        remote.read(12)


def test_invalid_lance_sources_are_reported(table, tmp_path):
    with pytest.raises(DataError, match=r"none\.lance.*cannot be opened"):
        open_map_source(SourceConfig(path=str(tmp_path / "none.lance")))
    with pytest.raises(DataError, match="revision"):
        open_map_source(SourceConfig(path=table, revision="99"))
    with pytest.raises(ConfigError, match="use its number"):
        open_map_source(SourceConfig(path=table, revision="main"))


def test_missing_lance_library_is_reported(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "lance", None)
    assert resolve_files(SourceConfig(path=table)) == ("lance", [])
    with pytest.raises(ConfigError, match=r"\[lance\]"):
        open_map_source(SourceConfig(path=table))
