"""URLs, and sources that are read through the file system interface."""

from __future__ import annotations

import io
import json

import pytest
from data_cases import png, write_shard

from torchmm.common.errors import ConfigError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.remote_files import RemoteFile, RemotePath, open_file_system
from torchmm.data.files.urls import join_url, redact_urls
from torchmm.data.record_formats.detect import parse_record
from torchmm.data.sources.map_sources import open_map_source
from torchmm.data.sources.streams import open_stream
from torchmm.recipe.data_section import DataConfig, SourceConfig, find_credential, is_address

IMAGE_BYTES = png(16, 16)


class FakeFileSystem:
    """Files in memory by URL."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def find(self, address):
        if address not in self._files:
            return None
        return RemoteFile(address, len(self._files[address]), "1", self)

    def list(self, address):
        if (one := self.find(address)) is not None:
            return [one]
        return [self.find(name) for name in sorted(self._files) if name.startswith(f"{address}/")]

    def read(self, file, start, end):
        return self._files[file.url][start:end]

    def open(self, file):
        return io.BytesIO(self._files[file.url])

    def derive(self, file, name, make):
        return make(self.open(file)), None


@pytest.fixture
def storage(tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("0.png", IMAGE_BYTES), ("0.txt", b"a dog")])
    names = ["x.png", "../../secret.png", "fake://other/x.png"]
    rows = [json.dumps({"image": name, "text": "a dog"}) for name in names]
    return FakeFileSystem(
        {
            "fake://set/lines/rows.jsonl": "\n".join(rows).encode(),
            "fake://set/lines/x.png": IMAGE_BYTES,
            "fake://set/tars/a.tar": shard.read_bytes(),
            "fake://secret.png": IMAGE_BYTES,
        }
    )


def contents(record):
    (image, text) = parse_record(record, None).segments
    return image.read(10**6), text.text


@pytest.mark.parametrize("path", ["fake://set/lines", "fake://set/tars", "fake://set/tars/a.tar"])
def test_remote_source_reads_records_in_order(path, storage, tmp_path):
    config = SourceConfig(path=path)
    source = open_map_source(config, str(tmp_path / "index"), storage)
    assert contents(source.read(0)) == (IMAGE_BYTES, "a dog")
    stream = open_stream("set", config, str(tmp_path / "index"), storage)
    assert contents(stream.next()) == (IMAGE_BYTES, "a dog")


def test_remote_record_outside_source_is_rejected(storage, tmp_path):
    source = open_map_source(SourceConfig(path="fake://set/lines"), str(tmp_path), storage)
    for index in (1, 2):
        with pytest.raises(CorruptSampleError, match="is outside of fake://set/lines"):
            contents(source.read(index))


def test_remote_path_hides_secrets(storage):
    path = RemotePath("https://me:word@host/x", storage)
    assert "word" not in str(path)
    assert str(RemoteFile("https://host/x?sig=word", 1, "1", storage)) == "https://host/x?..."


def test_local_path_needs_no_file_system(tmp_path):
    assert open_file_system(str(tmp_path), DataConfig()) is None


@pytest.mark.parametrize("name", ["energon", "lance"])
def test_missing_format_is_rejected(name, tmp_path, monkeypatch):
    """Check that a dataset of a missing format is not read as plain files."""
    monkeypatch.setattr("torchmm.data.sources.formats.find_entries", lambda table: ())
    path = write_shard(tmp_path / "set.lance" / "a.tar", [("0.txt", b"a dog")]).parent
    if name == "energon":
        path = path.rename(tmp_path / "set")
        (path / ".nv-meta").mkdir()
    for config in (SourceConfig(path=str(path)), SourceConfig(path=str(path), format=name)):
        with pytest.raises(ConfigError, match=f"format = {name!r}.*is not installed"):
            open_map_source(config, str(tmp_path / "index"))
    assert len(open_map_source(SourceConfig(path=str(path), format="webdataset"))) == 1


def test_addresses_are_detected_and_joined():
    assert is_address("s3://b/x") and is_address("hf://datasets/o/n")
    assert not is_address("data/x") and not is_address("/x") and not is_address("file:///x")
    assert join_url("s3://b/x", "y/../z.png") == "s3://b/x/z.png"
    assert join_url("s3://b/x", "s3://b/x/z.png") == "s3://b/x/z.png"
    for name in ("../z.png", "/z.png", "y/../../z.png", "s3://b/xy/z.png", "s3://c/x/z.png", "."):
        assert join_url("s3://b/x", name) is None
    assert join_url("s3://b", "z.png") == "s3://b/z.png"


@pytest.mark.parametrize(
    "address",
    [
        "https://me:word@host/x.tar",
        "s3://key:word@bucket/x",
        "https://host/x.tar?X-Amz-Credential=a&X-Amz-Signature=word",
        "https://host/x.tar?sv=2020&sig=word",
        "https://host/x?token=word",
    ],
)
def test_secrets_in_addresses_are_detected_and_hidden(address):
    actual = find_credential(address)
    assert actual is not None and actual != "word"
    shown = redact_urls(f"cannot read {address}: no")
    assert "word" not in shown
    assert "host" in shown or "bucket" in shown
    assert find_credential("az://container@account/x") is None
    assert find_credential("https://host/x?download=true") is None
