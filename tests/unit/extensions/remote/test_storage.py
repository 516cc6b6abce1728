"""Files at addresses: ranges, what is kept, stores that are away, slow, wrong or refusing."""

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
from torchmm.data.files.remote import RemoteFile, RemotePath
from torchmm.extensions.remote.storage.block_cache import BlockCache
from torchmm.extensions.remote.storage.clients import ReplacedError, StoreClient
from torchmm.extensions.remote.storage.remote_files import (
    BLOCK_BYTES,
    Storage,
)

CONTENT = np.random.default_rng(0).bytes(3_000_000)


@pytest.fixture
def store(object_server):
    files = {"x/a.bin": CONTENT, "x/y/b.bin": b"b", "x/.hidden/c.bin": b"c"}
    object_server.put_once("first", files)
    object_server.reset()
    return object_server


def open_storage(path: Path, limit_bytes: int = 10**8, retry_timeout_s: float = 20.0) -> Storage:
    return Storage(path / "cache", limit_bytes, retry_timeout_s)


def big(storage: Storage) -> RemoteFile:
    file = storage.find("s3://first/x/a.bin")
    assert file is not None
    return file


def cached(path: Path) -> list[Path]:
    return [file for file in (path / "cache" / "entries").rglob("*") if file.is_file()]


@pytest.mark.parametrize("limit_bytes", [0, 10**8])
@pytest.mark.parametrize("keep", [False, True])
def test_any_reading_gives_the_bytes_of_the_file(store, tmp_path, limit_bytes, keep):
    storage = open_storage(tmp_path, limit_bytes)
    chance = random.Random(0)
    with storage.open(big(storage), keep) as stream:
        for _ in range(60):
            at = chance.randrange(len(CONTENT))
            size = chance.choice([0, 1, 512, 70_000, 900_000, 5_000_000])
            assert stream.seek(at) == at
            assert stream.read(size) == CONTENT[at : at + size]
        stream.seek(-100, 2)
        assert stream.read() == CONTENT[-100:]
        stream.seek(0)
        pieces = iter(lambda: stream.read(10_000), b"")
        assert b"".join(pieces) == CONTENT


def test_only_what_is_read_is_fetched_and_once(store, tmp_path):
    file = big(open_storage(tmp_path))
    with file.open() as stream:
        stream.seek(1_000_000)
        stream.read(1000)
    assert store.sent_bytes == BLOCK_BYTES
    again = copy.deepcopy(file)  # as a worker process gets it
    with again.open() as stream:
        stream.seek(1_000_100)
        assert stream.read(500) == CONTENT[1_000_100:1_000_600]
    assert store.sent_bytes == BLOCK_BYTES


def test_reading_in_order_takes_few_requests_and_no_byte_twice(store, tmp_path):
    with big(open_storage(tmp_path)).open() as stream:
        while stream.read(512):
            pass
    gets = [r for r in store.requests if r[0] == "GET"]
    assert store.sent_bytes == len(CONTENT)
    assert len(gets) <= 5


def test_lists_and_patterns(store, tmp_path):
    storage = open_storage(tmp_path)

    def names(address: str) -> list[str]:
        return [file.address.removeprefix("s3://first/") for file in storage.list(address)]

    assert names("s3://first/x") == names("s3://first") == ["x/a.bin", "x/y/b.bin"]
    assert names("s3://first/x/*.bin") == names("s3://first/x/[ab].bin") == ["x/a.bin"]
    assert names("s3://first/x/**/*.bin") == ["x/a.bin", "x/y/b.bin"]
    assert names("s3://first/x/*/b.bin") == names("s3://first/x/y/b.bin") == ["x/y/b.bin"]
    assert names("s3://first/z") == names("s3://first/z/*.bin") == []
    with pytest.raises(DataError, match=r"s3://nobucket.*no such bucket"):
        storage.list("s3://nobucket/x")


def test_a_store_that_is_away_for_a_while_costs_only_time(store, tmp_path, caplog):
    file = big(open_storage(tmp_path))
    store.go_away()
    timer = threading.Timer(2.0, store.come_back)
    timer.start()
    try:
        with file.open() as stream:
            assert stream.read(10) == CONTENT[:10]
    finally:
        timer.join()
    assert "s3://first/x/a.bin: " in caplog.text and "retrying" in caplog.text


def test_a_store_that_stays_away_ends_the_run_in_time(store, tmp_path):
    file = big(open_storage(tmp_path, retry_timeout_s=1.5))
    store.go_away()
    began = time.monotonic()
    try:
        with file.open() as stream, pytest.raises(DataError) as caught:
            stream.read(10)
    finally:
        store.come_back()
    assert time.monotonic() - began < 15
    assert "s3://first/x/a.bin did not respond" in str(caught.value)
    assert "data.storage.retry_timeout_s" in str(caught.value)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_busy_store_is_asked_again(store, tmp_path, status):
    file = big(open_storage(tmp_path))
    store.faults.status = status
    timer = threading.Timer(0.7, lambda: setattr(store.faults, "status", None))
    timer.start()
    with file.open() as stream:
        assert stream.read(10) == CONTENT[:10]
    timer.join()


def test_a_slow_store_is_waited_for(store, tmp_path):
    file = big(open_storage(tmp_path))
    store.faults.bytes_per_s = BLOCK_BYTES
    began = time.monotonic()
    with file.open() as stream:
        assert stream.read(10) == CONTENT[:10]
    assert time.monotonic() - began > 0.5


def test_an_answer_that_is_cut_off_is_asked_for_again(store, tmp_path):
    file = big(open_storage(tmp_path))
    store.faults.cut_after = 1000
    timer = threading.Timer(0.7, lambda: setattr(store.faults, "cut_after", None))
    timer.start()
    with file.open() as stream:
        assert stream.read(5000) == CONTENT[:5000]
    timer.join()


def forget(path: Path) -> None:
    for file in cached(path):
        file.unlink()


def test_wrong_bytes_are_asked_for_again(store, tmp_path, caplog):
    storage = open_storage(tmp_path)
    file = big(storage)
    assert storage.read(file, 0, 10) == CONTENT[:10]
    forget(tmp_path)
    wrong_until = len(store.requests) + 2
    store.faults.spoil = lambda path, number: number < wrong_until
    assert storage.read(file, 0, BLOCK_BYTES) == CONTENT[:BLOCK_BYTES]
    assert "checksum of bytes from 0 does not match" in caplog.text


def test_a_store_that_stays_wrong_ends_the_run(store, tmp_path):
    storage = open_storage(tmp_path)
    file = big(storage)
    storage.read(file, 0, 10)
    forget(tmp_path)
    store.faults.spoil = lambda path, number: True
    with pytest.raises(
        DataError, match=r"s3://first/x/a\.bin: bytes from 0 have a different checksum"
    ):
        storage.read(file, 0, 10)


def test_damage_on_the_own_disk_is_found_and_mended(store, tmp_path, caplog):
    storage = open_storage(tmp_path)
    file = big(storage)
    storage.read(file, 0, 2 * BLOCK_BYTES)
    flipped, cut = cached(tmp_path)
    content = bytearray(flipped.read_bytes())
    content[1000] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:5000])
    assert storage.read(file, 0, 2 * BLOCK_BYTES) == CONTENT[: 2 * BLOCK_BYTES]
    assert storage.cache.damaged == 2
    assert caplog.text.count("is corrupt") == 2


def test_the_cache_stays_within_its_limit_and_drops_what_is_old(tmp_path):
    limit = 1_000_000
    cache = BlockCache(tmp_path, limit)
    for number in range(100):
        cache.put(f"{number:040d}", bytes([number]) * 50_000)
        if number % 10 == 0:
            kept = cache.get(f"{0:040d}")
            assert kept is None or kept == bytes(50_000)
        total = sum(f.stat().st_size for f in (tmp_path / "entries").rglob("*") if f.is_file())
        assert total <= limit * 33 / 32 + 50_016
    assert cache.get(f"{1:040d}") is None
    assert cache.get(f"{99:040d}") == bytes([99]) * 50_000


def test_a_full_disk_costs_the_cache_and_not_the_run(store, tmp_path, caplog):
    storage = open_storage(tmp_path)
    file = big(storage)
    entries = tmp_path / "cache" / "entries"
    entries.rmdir()
    entries.write_bytes(b"")  # nothing can be made in it, whoever asks
    assert storage.read(file, 5, 10) == CONTENT[5:10]
    assert "cannot cache" in caplog.text


def test_a_cache_that_cannot_be_written_is_a_mistake_of_the_recipe(tmp_path):
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data\.storage\.cache_dir"):
        open_storage(tmp_path)


def test_an_object_that_is_replaced_ends_the_run(store, tmp_path):
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
def test_refused_access_names_the_remedy_and_no_secret(store, tmp_path, status):
    storage = open_storage(tmp_path)
    store.faults.status = status
    with pytest.raises(DataError) as caught:
        storage.find("s3://first/x/a.bin")
    text = str(caught.value)
    assert "s3://first/x/a.bin" in text and "AWS_ACCESS_KEY_ID" in text
    assert store.environment["AWS_SECRET_ACCESS_KEY"] not in text


def test_missing_credentials_are_told_at_once(store, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # Where machines in Amazon's cloud get theirs: here nobody listens.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(DataError, match=r"no credentials found.*set AWS_ACCESS_KEY_ID"):
        open_storage(tmp_path).find("s3://first/x/a.bin")
    assert time.monotonic() - began < 10


def test_whole_named_files(store, tmp_path):
    folder = RemotePath("s3://first/x", open_storage(tmp_path))
    named = folder.join("y/b.bin")
    assert named is not None and named.find().read_bytes() == b"b"
    missing = folder.join("z.bin")
    assert missing is not None and missing.find() is None
    assert folder.join("../z.bin") is None


def test_other_stores_through_fsspec(tmp_path):
    files = fsspec.filesystem("memory")
    with files.open("/room/x/a.bin", "wb") as stream:
        stream.write(CONTENT)
    storage = open_storage(tmp_path)
    (file,) = storage.list("memory://room/x")
    assert file.size == len(CONTENT)
    with file.open() as stream:
        stream.seek(1000)
        assert stream.read(5000) == CONTENT[1000:6000]
    assert storage.client("memory://room").bytes_read == BLOCK_BYTES
    assert storage.find("memory://room/x/b.bin") is None


@pytest.mark.parametrize("root", ["nothing://x", "file://x", "simplecache://x"])
def test_unknown_stores_are_mistakes_of_the_recipe(root):
    with pytest.raises(ConfigError, match=root):
        StoreClient(root, 1.0)


def test_a_recipe_with_a_secret_in_an_address_is_refused_without_showing_it():
    sources = '--data.sources=[{path="https://host/x.tar?X-Amz-Signature=hushhush"}]'
    found = problems_of(QUICKSTART, sources, world_size=1)
    assert any("data.sources[0].path" in p and "?X-Amz-Signature=" in p for p in found)
    assert not any("hushhush" in p for p in found)
    plain = '--data.sources=[{path="s3://bucket/x"}]'
    found = problems_of(QUICKSTART, plain, "--data.storage.retry_timeout_s=500.0", world_size=1)
    assert not any("data.sources[0].path" in p for p in found)
    assert any("data.storage.retry_timeout_s" in p and "data.timeout_s" in p for p in found)


@pytest.mark.parametrize("root", ["s3://written", "memory://written"])
def test_objects_are_written_as_bytes_and_from_files_in_parts_and_removed(
    object_server, tmp_path, root
):
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
    found = {item.path: item for item in client.list("a")}
    assert {path: item.size for path, item in found.items()} == {
        "a/large": len(content),
        "a/small": 5,
    }
    large = found["a/large"]
    assert client.read("a/large", 0, large.size, large.version) == content
    client.remove("a/large")
    client.remove("a/large")
    assert [item.path for item in client.list("a")] == ["a/small"]


def test_a_store_that_may_not_be_written_names_the_remedy(object_server):
    object_server.put("written", "other", b"")
    object_server.faults.write_status = 403
    with pytest.raises(DataError, match="AWS_ACCESS_KEY_ID"):
        StoreClient("s3://written", 5.0).write("a", b"a")
