"""Webdataset shards without their end, as after an interrupted download."""

from __future__ import annotations

import gzip
import io
import json
import logging
import tarfile

import pytest
from data_cases import caption_rows

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.sources.map_sources import open_map_source
from torchmm.data.sources.streams import open_stream
from torchmm.recipe.data_section import SourceConfig


@pytest.fixture
def shard(tmp_path):
    """Return the second of two shards, to be damaged, and the offsets of its members."""
    for name in ("a.tar", "b.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            for i, row in enumerate(caption_rows(6)):
                for suffix, body in (("png", row["image"]["bytes"]), ("txt", row["text"].encode())):
                    info = tarfile.TarInfo(f"{name[0]}{i:05d}.{suffix}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
    with tarfile.open(tmp_path / "b.tar") as tar:
        members = [(m.offset, m.offset_data) for m in tar]
    return tmp_path / "b.tar", members


def read_all(directory, streaming):
    config = SourceConfig(path=str(directory))
    if streaming:
        return list(iter(open_stream("shards", config).next, None))
    source = open_map_source(config)
    return [source.read(i) for i in range(len(source))]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("where", ["header", "body", "padding", "empty"])
def test_truncated_shard_is_reported(shard, streaming, where):
    path, members = shard
    full_data = path.read_bytes()
    header, body = members[6]
    end = {"header": header + 100, "body": body + 40, "padding": body + 1100, "empty": 0}
    path.write_bytes(full_data[: end[where]])
    with pytest.raises(DataError, match=r"b\.tar.*again") as caught:
        read_all(path.parent, streaming)
    if where != "empty":
        assert "b00002.txt" in str(caught.value) or "b00003.png" in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_shard_truncated_between_members_warns(shard, streaming, caplog):
    path, members = shard
    path.write_bytes(path.read_bytes()[: members[8][0]])
    with caplog.at_level(logging.WARNING, "torchmm"):
        assert len(read_all(path.parent, streaming)) == 6 + 4
    assert "b.tar has no end-of-archive marker" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_compressed_shard_is_rejected(shard, streaming):
    path, _ = shard
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=r"b\.tar is compressed; decompress it"):
        read_all(path.parent, streaming)


def test_all_truncated_shards_are_reported(shard):
    path, members = shard
    for name in ("a.tar", "b.tar"):
        file = path.with_name(name)
        file.write_bytes(file.read_bytes()[: members[6][1] + 40])
    with pytest.raises(DataError, match=r"(?s)a\.tar is truncated.*b\.tar is truncated"):
        read_all(path.parent, False)


@pytest.mark.parametrize("streaming", [False, True])
def test_intact_shards_are_read_without_warning(shard, streaming, caplog):
    with caplog.at_level(logging.WARNING, "torchmm"):
        assert len(read_all(shard[0].parent, streaming)) == 12
    assert not caplog.records


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("part", ["json", "txt"])
def test_large_text_member_is_corrupt(tmp_path, monkeypatch, streaming, part):
    monkeypatch.setattr("torchmm.data.sources.tar_samples.MAX_RECORD_BYTES", 1000)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, text in (("a", "dog"), ("b", "dog " * 999)):
            body = json.dumps({"text": text}).encode()
            info = tarfile.TarInfo(f"{name}.{part}")
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    config = SourceConfig(path=str(tmp_path))
    if streaming:
        _, error = iter(open_stream("shards", config).next, None)
    else:
        with pytest.raises(CorruptSampleError) as raised:
            open_map_source(config).read(1)
        error = raised.value
    assert isinstance(error, CorruptSampleError)
    assert f"b.{part} has 4008 bytes, but the limit is 1000" in str(error)
