"""Remote sources have the records, samples and identities of local sources."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import CLIP, caption, caption_rows, data_config, png, write_meta, write_shard
from object_server import ObjectServer

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.files.remote_files import RemotePath, open_file_system
from torchmm.data.identity import SamplesDigest
from torchmm.data.sources.formats import url_with_revision
from torchmm.data.sources.map_sources import open_map_source, resolve_files
from torchmm.data.sources.reader import SampleReader
from torchmm.data.sources.streams import open_stream
from torchmm.recipe.data_section import DataConfig, SourceConfig

COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write the same captions in every format."""
    root = tmp_path_factory.mktemp("formats")
    rows = caption_rows(COUNT)
    for name, part in (("a", rows[:25]), ("b", rows[25:])):
        (root / "parquet").mkdir(exist_ok=True)
        table = datasets.Dataset.from_list(part).data.table
        pq.write_table(
            table, root / "parquet" / f"{name}.parquet", row_group_size=10, write_page_checksum=True
        )
        members = []
        for i, row in enumerate(part):
            members += [
                (f"{i:03d}.png", row["image"]["bytes"]),
                (f"{i:03d}.txt", row["text"].encode()),
            ]
        write_shard(root / "tar" / f"{name}.tar", members)
        write_shard(root / "energon" / "shards" / f"{name}.tar", members)
    fields = {"image": "png", "caption": "txt"}
    split = {"split_parts": {"train": ["shards/{a,b}.tar"], "val": ["shards/b.tar"]}}
    write_meta(root / "energon", "CaptioningSample", fields, split)
    for kind in ("jsonl", "json", "csv", "gz", "described"):
        (root / kind / "images").mkdir(parents=True)
        for i, row in enumerate(rows):
            (root / kind / "images" / f"{i:03d}.png").write_bytes(row["image"]["bytes"])
    named = [{"image": f"images/{i:03d}.png", "text": caption(i)} for i in range(COUNT)]
    lines = "".join(json.dumps(row) + "\n" for row in named)
    (root / "jsonl" / "a.jsonl").write_text(lines)
    (root / "gz" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (root / "json" / "a.json").write_text(json.dumps(named))
    table = "".join(f"{row['image']},{row['text']}\n" for row in named)
    (root / "csv" / "a.csv").write_text("image,text\n" + table)
    rows_of = [{"file_name": row["image"], "text": row["text"]} for row in named]
    text = "".join(json.dumps(row) + "\n" for row in rows_of)
    (root / "described" / "metadata.jsonl").write_text(text)
    return root


@pytest.fixture
def store(object_server, folder) -> ObjectServer:
    files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    object_server.put_once("formats", files)
    object_server.reset()
    return object_server


def data_of(path: Path, **storage: object) -> DataConfig:
    return data_config(path, storage={"retry_timeout_s": 20.0, **storage})


def open_at(path: Path, address: str | Path, data: DataConfig | None = None, **options: object):
    data = data or data_of(path)
    config = SourceConfig(path=str(address), **options)
    return open_map_source(config, data.index_cache_dir, open_file_system(config.path, data))


def samples_of(source, reader) -> str:
    digest = SamplesDigest()
    for index in range(len(source)):
        digest.add(reader.read(source.read(index)))
    return digest.hexdigest()


FORMATS = ("parquet", "tar", "energon", "jsonl", "json", "csv", "gz", "described")


@pytest.mark.parametrize("kind", FORMATS)
def test_remote_source_has_same_samples(store, folder, tmp_path, reader, kind):
    local = open_at(tmp_path, folder / kind)
    remote = open_at(tmp_path, f"s3://formats/{kind}")
    assert len(local) == len(remote) == COUNT
    for index in (0, COUNT - 1, 7):
        sample = reader.read(remote.read(index))
        assert sample == reader.read(local.read(index))
        assert sample.files and sample.text.ids
        location = remote.read(index).location
        assert location.replace("s3://formats", str(folder)) == local.read(index).location
    assert samples_of(local, reader) == samples_of(remote, reader)
    worker = copy.deepcopy(remote)
    assert reader.read(worker.read(3)) == reader.read(local.read(3))


def test_energon_splits_of_remote_folder_apply(object_server, folder, tmp_path):
    def write_split(parts):
        split = {"split_parts": {"train": parts}, "exclude": ["shards/a.tar", "shards/b.tar/003"]}
        content = json.dumps(split).encode()
        object_server.put("excluded", "energon/.nv-meta/split.yaml", content)

    object_server.put_folder("excluded", folder / "energon", "energon/")
    write_split(["shards/{a,b}.tar"])
    config = SourceConfig(path="s3://excluded/energon")
    actual = open_at(tmp_path, config.path)
    assert len(actual) == 14 and ":003" not in " ".join(actual.read(i).location for i in range(14))
    kind, files = resolve_files(config, open_file_system(config.path, data_of(tmp_path)))
    assert kind == "energon" and [f.name for f in files][-2:] == ["split.yaml", "b.tar"]
    with pytest.raises(DataError, match="no shards for split 'test'"):
        open_at(tmp_path, config.path, split="test")
    write_split(["shards/c.tar"])
    with pytest.raises(DataError, match=r"shards/c\.tar, which does not exist"):
        open_at(tmp_path, config.path)
    with pytest.raises(DataError, match=r"not a directory with \.nv-meta"):
        open_at(tmp_path, f"{config.path}/shards", format="energon")


@pytest.mark.parametrize("kind", ["tar", "jsonl", "json", "csv"])
def test_remote_stream_resumes(store, folder, tmp_path, kind):
    data = data_of(tmp_path)
    config = SourceConfig(path=f"s3://formats/{kind}", streaming=True)
    stream = open_stream("x", config, data.index_cache_dir, open_file_system(config.path, data))
    records = []
    while (record := stream.next()) is not None:
        records.append((record.location, stream.position()))
    assert len(records) == COUNT
    stream.restart(records[10][1])
    assert stream.next().location == records[11][0]


def test_shard_sample_reads_its_blocks_only(tmp_path, object_server):
    members = [(f"{i:02d}.bin", bytes([i]) * 400_000) for i in range(20)]
    shard = write_shard(tmp_path / "big.tar", members).read_bytes()
    object_server.put("big", "big.tar", shard)
    object_server.reset()
    data = data_of(tmp_path)
    source = open_at(tmp_path, "s3://big/big.tar", data)
    assert len(source) == 20
    # Headers have intervals of 400 kB: blocks of 256 KiB without a header are not fetched.
    assert object_server.sent_bytes < len(shard)
    again = data_of(tmp_path, cache_dir=str(tmp_path / "other cache"))
    object_server.reset()
    source = open_at(tmp_path, "s3://big/big.tar", again)
    assert len(source) == 20
    assert object_server.sent_bytes < 700_000
    assert source.read(7).columns["bin"] == bytes([7]) * 400_000
    assert object_server.sent_bytes < 700_000 + 1_100_000


def test_row_groups_are_fetched_once_when_read(store, folder, tmp_path):
    remote = open_at(tmp_path, "s3://formats/parquet")
    for index in (3, 4, 9, 3, 30, 31):
        remote.read(index)
    entries = tmp_path / "index" / "storage" / "entries"
    assert len(list(entries.rglob("*-rows*"))) == 2
    sent = store.sent_bytes
    fresh = open_at(tmp_path, "s3://formats/parquet")  # another process on this host
    assert fresh.read(5).columns == remote.read(5).columns
    assert store.sent_bytes == sent


@pytest.mark.parametrize("cache_gb", [0.0, 1e-5])
def test_rows_are_read_without_cache_space(store, folder, tmp_path, cache_gb):
    data = data_of(tmp_path, cache_gb=cache_gb)
    remote = open_at(tmp_path, "s3://formats/parquet", data)
    local = open_at(tmp_path, folder / "parquet")
    for index in (39, 0, 12, 39):
        assert remote.read(index).columns == local.read(index).columns


def test_damaged_remote_row_group_costs_its_rows(object_server, tmp_path):
    rows = pa.table({"text": [f"{i:05d}" * 40 for i in range(40)]})
    path = tmp_path / "broken.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(rows, path, row_group_size=10, **options)
    column = pq.read_metadata(path).row_group(2).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 20] ^= 1
    object_server.put("broken", "a.parquet", bytes(content))
    source = open_at(tmp_path, "s3://broken/a.parquet")
    with pytest.raises(CorruptSampleError, match=r"s3://broken/a\.parquet row 23: row group 2: "):
        source.read(23)
    assert source.read(19).columns["text"] == "00019" * 40
    assert source.read(30).columns["text"] == "00030" * 40


def test_unavailable_store_is_not_corruption(store, tmp_path):
    source = open_at(tmp_path, "s3://formats/parquet", data_of(tmp_path, retry_timeout_s=0.5))
    shutil.rmtree(tmp_path / "index" / "storage" / "entries")  # remove the cached footer
    store.go_away()
    try:
        with pytest.raises(DataError, match=r"s3://formats/parquet/a\.parquet did not respond"):
            source.read(3)
    finally:
        store.come_back()
    assert source.read(3).columns["text"] == caption(3)


def test_remote_file_that_is_not_parquet_is_reported(object_server, tmp_path):
    object_server.put("broken", "no.parquet", b"x" * 5000)
    with pytest.raises(DataError, match=r"s3://broken/no\.parquet cannot be read \(not a parquet"):
        open_at(tmp_path, "s3://broken/no.parquet")


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("../jsonl/images/000.png", "is outside of s3://paths/in"),
        ("s3://formats/jsonl/images/000.png", "is outside of s3://paths/in"),
        ("https://127.0.0.1:9/x.png", "is outside of s3://paths/in"),
        ("/etc/hostname", "is outside of s3://paths/in"),
        ("missing.png", r"image file s3://paths/in/missing\.png: no such object"),
        ("s3://paths/in/a.png", None),
        ("a.png", None),
    ],
)
def test_remote_file_names_stay_in_source_folder(object_server, tmp_path, reader, image, reason):
    object_server.put("paths", "in/a.png", png(16, 16))
    line = json.dumps({"image": image, "text": "a red square"}) + "\n"
    object_server.put("paths", "in/rows.jsonl", line.encode())
    source = open_at(tmp_path, "s3://paths/in")
    object_server.reset()
    if reason is None:
        assert reader.read(source.read(0)).files == [png(16, 16)]
        return
    with pytest.raises(CorruptSampleError, match=reason):
        reader.read(source.read(0))
    assert not any("formats" in path for _, path, _ in object_server.requests)


def test_too_large_remote_file_is_not_fetched(object_server, tmp_path, tokenizer, text_spec):
    object_server.put("paths", "large/a.png", bytes(2_000_000))
    object_server.put("paths", "large/rows.jsonl", b'{"image": "a.png", "text": "a red square"}\n')
    source = open_at(tmp_path, "s3://paths/large")
    limits = DataConfig(max_file_mb=1.0)
    strict = SampleReader(limits, 64, text_spec, {"vision": CLIP}, tokenizer)
    object_server.reset()
    with pytest.raises(CorruptSampleError, match=r"s3://paths/large/a\.png has 2000000 bytes"):
        strict.read(source.read(0))
    assert object_server.sent_bytes < 1000


def test_missing_remote_source_is_reported(store, tmp_path):
    with pytest.raises(DataError, match=r"s3://formats/nothing.*no such file"):
        open_at(tmp_path, "s3://formats/nothing")
    with pytest.raises(DataError, match="no such bucket"):
        open_at(tmp_path, "s3://nobucket/nothing/*.tar")


def test_remote_split_can_be_folder(object_server, tmp_path):
    for split in ("train", "validation"):
        row = json.dumps({"text": split}) + "\n"
        object_server.put("splits", f"set/{split}/a.jsonl", row.encode())
    for split in ("train", "validation"):
        source = open_at(tmp_path, "s3://splits/set", split=split)
        assert [source.read(i).columns["text"] for i in range(len(source))] == [split]
    with pytest.raises(DataError, match=r"split = 'test', but .* splits train, validation"):
        open_at(tmp_path, "s3://splits/set", split="test")


def test_splits_of_remote_files_are_selected_or_rejected(object_server, tmp_path):
    for split in ("train", "validation"):
        rows = "".join(json.dumps({"text": f"{split} {i}"}) + "\n" for i in range(4))
        object_server.put("named", f"set/{split}-0.jsonl", rows.encode())

    def read(path, split):
        source = open_at(tmp_path, f"s3://named/{path}", split=split)
        return [source.read(i).columns["text"] for i in range(len(source))]

    assert read("set", "validation[:2]") == ["validation 0", "validation 1"]
    assert read("set", "train[3:]") == ["train 3"]
    assert read("set/validation-0.jsonl", "train[:1]") == ["validation 0"]
    for path in ("set/validation-0.jsonl", "set/*.jsonl"):
        with pytest.raises(DataError, match='a file or glob has only the split "train"'):
            read(path, "validation")


def test_revision_is_added_to_hub_url():
    config = SourceConfig(path="hf://datasets/owner/name/train/*.parquet", revision="abc")
    assert url_with_revision(config) == "hf://datasets/owner/name@abc/train/*.parquet"
    for path in ("hf://datasets/owner/name@main/x", "hf://datasets/owner"):
        with pytest.raises(ConfigError, match="revision"):
            url_with_revision(SourceConfig(path=path, revision="abc"))
    with pytest.raises(ConfigError, match="revision = 'abc' applies only to Hub data sets"):
        resolve_files(SourceConfig(path="data", revision="abc", format="json"))


def test_root_of_remote_source_is_its_folder(store, tmp_path):
    for address in ("s3://formats/tar", "s3://formats/tar/", "s3://formats/tar/*.tar"):
        assert len(open_at(tmp_path, address)) == COUNT
    record = open_at(tmp_path, "s3://formats/parquet/*.parquet").read(0)
    assert isinstance(record.root, RemotePath)
    assert record.root.url == "s3://formats/parquet"
