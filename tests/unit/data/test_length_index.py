"""The length index of a source: independent of who measures it, with bounded waiting."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest
from data_cases import caption, png

from torchmm.common.errors import DataError
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.index import index_builder, measure_shards
from torchmm.data.sources.index.index_builder import BuildLock, IndexBuilder
from torchmm.data.sources.index.length_index import read_index
from torchmm.data.sources.reader import SampleReader
from torchmm.recipe.data_section import LengthFilter

COUNT = 25


class Records:
    """Captions with images. Record 7 is corrupt. `read_counts` counts the reads of each record."""

    fingerprint = "records"

    def __init__(self, count: int = COUNT, dies_at: int | None = None) -> None:
        self.count, self.dies_at = count, dies_at
        self.read_counts = np.zeros(count, int)

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Record:
        self.read_counts[index] += 1
        if index == self.dies_at:
            raise KeyboardInterrupt
        if index == 7:
            raise CorruptSampleError("corrupt")
        columns = {"text": caption(index)}
        if index % 3:
            columns["image"] = {"bytes": png(16 + index % 4 * 8, 24), "path": None}
        return Record(columns, None)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(measure_shards, "SMALL_SHARD_SAMPLES", 4)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "key"


def test_indexed_sizes_match_samples(reader: SampleReader, directory):
    records = Records()
    index = IndexBuilder("r", records, reader, directory).load()
    assert len(index) == COUNT and len(index.shards) == 7 and records.read_counts.max() == 1
    for number in range(COUNT):
        assert index.is_usable(number) == (number != 7)
        if number != 7:
            sample = reader.read(records.read(number))
            expected = reader.meta("r", number, sample)
            assert index.meta("r", number, reader.encoders) == expected
    assert not index.is_usable(COUNT)
    assert list(index.corrupt()) == [(7, "corrupt")] and index.corrupt_count == 1
    tiles = np.concatenate([index.sizes(n).tiles_N() for n in range(7)])
    assert tiles.tolist() == [int(n % 3 > 0 and n != 7) for n in range(COUNT)]
    patches = np.concatenate([index.sizes(n).patches_N() for n in range(7)])
    metas = [index.meta("r", n, reader.encoders) for n in range(COUNT)]
    assert patches.tolist() == [meta.patches for meta in metas] and patches.any()


@pytest.mark.parametrize("limits", [LengthFilter(), LengthFilter(min_tokens=9, max_tokens=12)])
def test_index_counts_samples_within_limits(reader, directory, limits):
    index = IndexBuilder("r", Records(), reader, directory).load()
    tokens = np.concatenate([index.sizes(n).tokens_N for n in range(7)])
    is_usable_N = (tokens >= limits.min_tokens) & (tokens <= (limits.max_tokens or 999))
    expected = [is_usable_N[start : start + 4].sum() for start in range(0, COUNT, 4)]
    assert index.count_usable(limits).tolist() == expected


def files(directory):
    return {f.name: f.read_bytes() for f in directory.iterdir()}


def test_job_array_writes_same_index(reader, directory, tmp_path):
    IndexBuilder("r", Records(), reader, directory).load()
    for first in (2, 0, 1):
        job = IndexBuilder("r", Records(), reader, tmp_path / "jobs")
        job.prepare()
        job.measure(range(first, len(job.ranges), 3))
        assert job.finish() == (first == 1), "the last job writes the manifest"
    assert files(tmp_path / "jobs") == files(directory)


def test_measured_shards_remain_after_crash(reader, directory):
    with pytest.raises(KeyboardInterrupt):
        IndexBuilder("r", Records(dies_at=13), reader, directory).load()
    assert read_index(directory) is None and not (directory / "building.lock").exists()
    again = Records()
    assert len(IndexBuilder("r", again, reader, directory).load()) == COUNT
    assert again.read_counts[:12].max() == 0 and again.read_counts[12:].min() == 1


def test_one_thread_measures_while_others_wait(reader, directory):
    records = Records()
    contents = []
    threads = [
        threading.Thread(
            target=lambda: contents.append(
                IndexBuilder("r", records, reader, directory).load().content
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(contents) == 4 and len(set(contents)) == 1
    assert records.read_counts.max() == 1


@pytest.mark.parametrize("owner", ["dead process", "other host", "truncated file"])
def test_stale_lock_is_taken_over(reader, directory, monkeypatch, owner):
    directory.mkdir()
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    content = {"host": index_builder.socket.gethostname(), "pid": pid}
    if owner != "dead process":
        content["host"] = "elsewhere"
        monkeypatch.setattr(index_builder, "STALE_S", 0.5)
    text = json.dumps(content)
    (directory / "building.lock").write_text("{" if owner == "truncated file" else text)
    assert len(IndexBuilder("r", Records(), reader, directory).load()) == COUNT
    assert not list(directory.glob("*.lock*"))


def test_refreshed_lock_is_respected(directory, monkeypatch):
    directory.mkdir()
    monkeypatch.setattr(index_builder, "STALE_S", 0.3)
    path = directory / "building.lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    lock = BuildLock(path)
    for second in range(4):
        os.utime(path, (second, second))
        assert not lock.try_acquire() and path.exists()
        threading.Event().wait(0.2)


def test_damaged_index_shard_is_measured_again(reader, directory):
    original = IndexBuilder("r", Records(), reader, directory).load()
    content = original.content
    (directory / "000003.sizes").write_bytes(b"short")
    again = Records()
    assert IndexBuilder("r", again, reader, directory).load().content == content
    assert again.read_counts.nonzero()[0].tolist() == [12, 13, 14, 15], "one shard only"
    data = bytearray((directory / "000002.sizes").read_bytes())
    data[1] ^= 1
    (directory / "000002.sizes").write_bytes(data)
    index = IndexBuilder("r", Records(), reader, directory).load()
    index.sizes(1)
    with pytest.raises(DataError, match=r"000002\.sizes is corrupt"):
        index.sizes(2)
    (directory / "000002.sizes").unlink()
    assert IndexBuilder("r", Records(), reader, directory).load().content == content


def test_source_with_changed_count_is_rejected(reader, directory):
    IndexBuilder("r", Records(), reader, directory).load()
    with pytest.raises(DataError, match=r"has 20 records, but its index .* 25"):
        IndexBuilder("r", Records(20), reader, directory).load()


def test_worker_processes_write_same_index(reader, directory, tmp_path, monkeypatch):
    IndexBuilder("r", Records(), reader, directory).load()
    monkeypatch.setattr(index_builder, "MIN_SAMPLES_FOR_WORKERS", 1)
    IndexBuilder("r", Records(), reader, tmp_path / "workers", workers=2).load()
    assert files(tmp_path / "workers") == files(directory)


def test_index_content_depends_on_samples_only(reader, directory, tmp_path):
    one = IndexBuilder("r", Records(), reader, directory).load().content
    assert IndexBuilder("other", Records(), reader, tmp_path / "b").load().content == one
    assert IndexBuilder("r", Records(24), reader, tmp_path / "c").load().content != one
