"""Remote files: byte ranges, caching, and stores that are unavailable, slow or incorrect."""

from __future__ import annotations

import copy
import random
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from recipe_problems import problems_of
from tiny_recipe import QUICKSTART

from torchmm.common.errors import ConfigError, DataError
from torchmm.data.files.remote_files import RemoteFile, RemotePath
from torchmm.extensions.remote.storage.block_cache import BlockCache
from torchmm.extensions.remote.storage.remote_files import (
    BLOCK_BYTES,
    RemoteFileSystem,
)
from torchmm.extensions.remote.storage.store_client import ReplacedError, StoreClient

CONTENT = np.random.default_rng(0).bytes(3_000_000)


@pytest.fixture
def store(object_server):
    files = {"x/a.bin": CONTENT, "x/y/b.bin": b"b", "x/.hidden/c.bin": b"c"}
    object_server.put_once("first", files)
    object_server.reset()
    return object_server


def open_storage(
    path: Path, limit_bytes: int = 10**8, retry_timeout_s: float = 20.0
) -> RemoteFileSystem:
    return RemoteFileSystem(path / "cache", limit_bytes, retry_timeout_s)


def large_file(storage: RemoteFileSystem) -> RemoteFile:
    file = storage.find("s3://first/x/a.bin")
    assert file is not None
    return file


def cached(path: Path) -> list[Path]:
    return [file for file in (path / "cache" / "entries").rglob("*") if file.is_file()]


@pytest.mark.parametrize("limit_bytes", [0, 10**8])
@pytest.mark.parametrize("keep", [False, True])
def test_reads_return_bytes_of_file(store, tmp_path, limit_bytes, keep):
    storage = open_storage(tmp_path, limit_bytes)
    rng = random.Random(0)
    with storage.open(large_file(storage), keep) as stream:
        for _ in range(60):
            at = rng.randrange(len(CONTENT))
            size = rng.choice([0, 1, 512, 70_000, 900_000, 5_000_000])
            assert stream.seek(at) == at
            assert stream.read(size) == CONTENT[at : at + size]
        stream.seek(-100, 2)
        assert stream.read() == CONTENT[-100:]
        stream.seek(0)
        chunks = iter(lambda: stream.read(10_000), b"")
        assert b"".join(chunks) == CONTENT


def test_only_read_blocks_are_fetched_once(store, tmp_path):
    file = large_file(open_storage(tmp_path))
    with file.open() as stream:
        stream.seek(1_000_000)
        stream.read(1000)
    assert store.sent_bytes == BLOCK_BYTES
    again = copy.deepcopy(file)  # as in a worker process
    with again.open() as stream:
        stream.seek(1_000_100)
        assert stream.read(500) == CONTENT[1_000_100:1_000_600]
    assert store.sent_bytes == BLOCK_BYTES


def test_sequential_reading_uses_few_requests(store, tmp_path):
    with large_file(open_storage(tmp_path)).open() as stream:
        while stream.read(512):
            pass
    gets = [r for r in store.requests if r[0] == "GET"]
    assert store.sent_bytes == len(CONTENT)
    assert len(gets) <= 5


def test_remote_lists_and_patterns_match_files(store, tmp_path):
    storage = open_storage(tmp_path)

    def names(address: str) -> list[str]:
        return [file.url.removeprefix("s3://first/") for file in storage.list(address)]

    assert names("s3://first/x") == names("s3://first") == ["x/a.bin", "x/y/b.bin"]
    assert names("s3://first/x/*.bin") == names("s3://first/x/[ab].bin") == ["x/a.bin"]
    assert names("s3://first/x/**/*.bin") == ["x/a.bin", "x/y/b.bin"]
    assert names("s3://first/x/*/b.bin") == names("s3://first/x/y/b.bin") == ["x/y/b.bin"]
    assert names("s3://first/z") == names("s3://first/z/*.bin") == []
    with pytest.raises(DataError, match=r"s3://nobucket.*no such bucket"):
        storage.list("s3://nobucket/x")


def test_temporarily_unavailable_store_is_retried(store, tmp_path, caplog):
    file = large_file(open_storage(tmp_path))
    store.go_away()
    timer = threading.Timer(2.0, store.come_back)
    timer.start()
    try:
        with file.open() as stream:
            assert stream.read(10) == CONTENT[:10]
    finally:
        timer.join()
    assert "s3://first/x/a.bin: " in caplog.text and "retrying" in caplog.text


def test_unavailable_store_raises_after_timeout(store, tmp_path):
    file = large_file(open_storage(tmp_path, retry_timeout_s=1.5))
    store.go_away()
    begin_s = time.monotonic()
    try:
        with file.open() as stream, pytest.raises(DataError) as caught:
            stream.read(10)
    finally:
        store.come_back()
    assert time.monotonic() - begin_s < 15
    assert "s3://first/x/a.bin did not respond" in str(caught.value)
    assert "data.storage.retry_timeout_s" in str(caught.value)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_busy_store_is_retried(store, tmp_path, status):
    file = large_file(open_storage(tmp_path))
    store.faults.status = status
    timer = threading.Timer(0.7, lambda: setattr(store.faults, "status", None))
    timer.start()
    with file.open() as stream:
        assert stream.read(10) == CONTENT[:10]
    timer.join()


def test_slow_store_is_waited_for(store, tmp_path):
    file = large_file(open_storage(tmp_path))
    store.faults.bytes_per_s = BLOCK_BYTES
    begin_s = time.monotonic()
    with file.open() as stream:
        assert stream.read(10) == CONTENT[:10]
    assert time.monotonic() - begin_s > 0.5


def test_truncated_response_is_retried(store, tmp_path):
    file = large_file(open_storage(tmp_path))
    store.faults.cut_after = 1000
    timer = threading.Timer(0.7, lambda: setattr(store.faults, "cut_after", None))
    timer.start()
    with file.open() as stream:
        assert stream.read(5000) == CONTENT[:5000]
    timer.join()


def forget(path: Path) -> None:
    for file in cached(path):
        file.unlink()


def test_incorrect_bytes_are_retried(store, tmp_path, caplog):
    storage = open_storage(tmp_path)
    file = large_file(storage)
    assert storage.read(file, 0, 10) == CONTENT[:10]
    forget(tmp_path)
    wrong_until = len(store.requests) + 2
    store.faults.spoil = lambda path, number: number < wrong_until
    assert storage.read(file, 0, BLOCK_BYTES) == CONTENT[:BLOCK_BYTES]
    assert "checksum of bytes from 0 does not match" in caplog.text


def test_store_with_incorrect_bytes_raises(store, tmp_path):
    storage = open_storage(tmp_path)
    file = large_file(storage)
    storage.read(file, 0, 10)
    forget(tmp_path)
    store.faults.spoil = lambda path, number: True
    with pytest.raises(
        DataError, match=r"s3://first/x/a\.bin: bytes from 0 have a different checksum"
    ):
        storage.read(file, 0, 10)


def test_damaged_cache_entry_is_replaced(store, tmp_path, caplog):
    storage = open_storage(tmp_path)
    file = large_file(storage)
    storage.read(file, 0, 2 * BLOCK_BYTES)
    changed_entry, truncated_entry = cached(tmp_path)
    content = bytearray(changed_entry.read_bytes())
    content[1000] ^= 1
    changed_entry.write_bytes(content)
    truncated_entry.write_bytes(truncated_entry.read_bytes()[:5000])
    assert storage.read(file, 0, 2 * BLOCK_BYTES) == CONTENT[: 2 * BLOCK_BYTES]
    assert storage.cache.num_damaged == 2
    assert caplog.text.count("is corrupt") == 2


def test_cache_respects_limit_and_evicts_old_entries(tmp_path):
    limit = 1_000_000
    cache = BlockCache(tmp_path, limit)
    for number in range(100):
        cache.put(f"{number:040d}", bytes([number]) * 50_000)
        if number % 10 == 0:
            entry = cache.get(f"{0:040d}")
            assert entry is None or entry == bytes(50_000)
        total = sum(f.stat().st_size for f in (tmp_path / "entries").rglob("*") if f.is_file())
        assert total <= limit * 33 / 32 + 50_016
    assert cache.get(f"{1:040d}") is None
    assert cache.get(f"{99:040d}") == bytes([99]) * 50_000


def test_full_disk_disables_cache_only(store, tmp_path, caplog):
    storage = open_storage(tmp_path)
    file = large_file(storage)
    entries = tmp_path / "cache" / "entries"
    entries.rmdir()
    entries.write_bytes(b"")  # no file can be created in it
    assert storage.read(file, 5, 10) == CONTENT[5:10]
    assert "cannot cache" in caplog.text


def test_unwritable_cache_is_config_error(tmp_path):
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data\.storage\.cache_dir"):
        open_storage(tmp_path)


def test_replaced_object_raises(store, tmp_path):
    store.put("second", "c.bin", CONTENT)
    file = open_storage(tmp_path).find("s3://second/c.bin")
    assert file is not None
    store.put("second", "c.bin", CONTENT[::-1])
    with file.open() as stream, pytest.raises(ReplacedError, match=r"c\.bin was replaced"):
        stream.read(10)
    store.delete("second", "c.bin")
    with file.open() as stream, pytest.raises(ReplacedError, match=r"c\.bin was removed"):
        stream.read(10)


@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_reports_fix_without_secret(store, tmp_path, status):
    storage = open_storage(tmp_path)
    store.faults.status = status
    with pytest.raises(DataError) as caught:
        storage.find("s3://first/x/a.bin")
    text = str(caught.value)
    assert "s3://first/x/a.bin" in text and "AWS_ACCESS_KEY_ID" in text
    assert store.environment["AWS_SECRET_ACCESS_KEY"] not in text


def test_missing_credentials_are_reported_without_retry(store, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # Hosts in AWS receive credentials from this endpoint. No process listens on this port.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    begin_s = time.monotonic()
    with pytest.raises(DataError, match=r"no credentials found.*set AWS_ACCESS_KEY_ID"):
        open_storage(tmp_path).find("s3://first/x/a.bin")
    assert time.monotonic() - begin_s < 10


def test_named_remote_files_are_read(store, tmp_path):
    folder = RemotePath("s3://first/x", open_storage(tmp_path))
    named = folder.join("y/b.bin")
    assert named is not None and named.find().read_bytes() == b"b"
    missing = folder.join("z.bin")
    assert missing is not None and missing.find() is None
    assert folder.join("../z.bin") is None


def test_fsspec_store_is_read(tmp_path):
    files = fsspec.filesystem("memory")
    with files.open("/folder/x/a.bin", "wb") as stream:
        stream.write(CONTENT)
    storage = open_storage(tmp_path)
    (file,) = storage.list("memory://folder/x")
    assert file.size == len(CONTENT)
    with file.open() as stream:
        stream.seek(1000)
        assert stream.read(5000) == CONTENT[1000:6000]
    assert storage.client("memory://folder").bytes_read == BLOCK_BYTES
    assert storage.find("memory://folder/x/b.bin") is None


@pytest.mark.parametrize("root", ["nothing://x", "file://x", "simplecache://x"])
def test_unknown_store_is_config_error(root):
    with pytest.raises(ConfigError, match=root):
        StoreClient(root, 1.0)


def test_secret_in_url_is_rejected_without_showing_it():
    sources = '--data.sources=[{path="https://host/x.tar?X-Amz-Signature=hushhush"}]'
    actual = problems_of(QUICKSTART, sources, world_size=1)
    assert any("data.sources[0].path" in p and "?X-Amz-Signature=" in p for p in actual)
    assert not any("hushhush" in p for p in actual)
    plain = '--data.sources=[{path="s3://bucket/x"}]'
    actual = problems_of(QUICKSTART, plain, "--data.storage.retry_timeout_s=500.0", world_size=1)
    assert not any("data.sources[0].path" in p for p in actual)
    assert any("data.storage.retry_timeout_s" in p and "data.timeout_s" in p for p in actual)


@pytest.mark.parametrize("root", ["s3://written", "memory://written"])
def test_objects_are_written_in_parts_and_removed(object_server, tmp_path, root):
    object_server.put("written", "other", b"")
    content = bytes(range(256)) * (9 << 14) + b"end"  # three parts
    (tmp_path / "file").write_bytes(content)
    client = StoreClient(root, 5.0)
    object_server.requests.clear()
    client.write("a/large", tmp_path / "file")
    client.write("a/small", b"small")
    if root.startswith("s3"):
        parts = [path for method, path, _ in object_server.requests if "partNumber" in path]
        assert len(parts) > 1
    actual = {item.path: item for item in client.list("a")}
    assert {path: item.size for path, item in actual.items()} == {
        "a/large": len(content),
        "a/small": 5,
    }
    large = actual["a/large"]
    assert client.read("a/large", 0, large.size, large.version) == content
    client.remove("a/large")
    client.remove("a/large")
    assert [item.path for item in client.list("a")] == ["a/small"]


def test_denied_write_reports_fix(object_server):
    object_server.put("written", "other", b"")
    object_server.faults.write_status = 403
    with pytest.raises(DataError, match="AWS_ACCESS_KEY_ID"):
        StoreClient("s3://written", 5.0).write("a", b"a")
