"""Uploaded checkpoints: complete or absent, found at restart, and not blocking training."""

import errno
import hashlib
import json
import logging
import random
import shutil
import threading
from pathlib import Path

import pytest
from checkpoint_damage import FullDisk, damage, rewrite
from checkpoint_runs import build, everything, make_manager, same, saved, steps

from torchmm.common.errors import CheckpointError
from torchmm.extensions.remote.checkpoints.background_uploads import assign_uploads
from torchmm.extensions.remote.checkpoints.remote_checkpoints import RemoteCheckpoints, StoreError
from torchmm.extensions.remote.section import StorageConfig
from torchmm.extensions.remote.storage import store_client
from torchmm.recipe.data_section import DataConfig
from torchmm.recipe.training_section import BestConfig
from torchmm.training.checkpoint.manifest import MANIFEST_NAME, find_problems, read_manifest
from torchmm.training.checkpoint.store import step_of_upload_folder, upload_folder_name

logger = logging.getLogger("test_checkpoint_upload")
SHORT_RETRY = DataConfig(storage=StorageConfig(retry_timeout_s=1.0))


class Host:
    """Managers of a run on one of several hosts that share only the object store."""

    def __init__(self, place: Path, store: str) -> None:
        self.run_dir = place / "run"
        self._store = store
        self._made: list = []

    def manager(self, **config):
        self._made.append(
            make_manager(self.run_dir, remote_dir=self._store, data=SHORT_RETRY, **config)
        )
        return self._made[-1]

    def save(self, *numbers: int, **config):
        """Save steps of one run, upload each before the next, and return the last state."""
        manager = self.manager(**config)
        model, optimizer = build()
        last = None
        for number in numbers:
            last = saved(manager, number, model=model, optimizer=optimizer)
            manager._uploads.wait()
        self.close()
        return last

    def resume(self, **config):
        """Return the step and state from which another start resumes."""
        manager = self.manager(**config)
        model, optimizer = build(seed=9)
        restored = manager.resume(model, optimizer)
        self.close()
        return (restored and restored.step), everything(model, optimizer)

    def close(self) -> None:
        for manager in self._made:
            manager.close()
        self._made.clear()


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def new_host(tmp_path, store):
    """Yield a function that makes hosts."""
    created = []

    def make() -> Host:
        created.append(Host(tmp_path / f"machine{len(created)}", str(store)))
        return created[-1]

    yield make
    for machine in created:
        machine.close()


def committed(store: Path) -> list[int]:
    """Return the uploaded steps, newest first."""
    return [step_of_upload_folder(folder) for folder in remote(store).committed()]


def remote(store: Path) -> RemoteCheckpoints:
    return RemoteCheckpoints(f"{store}/run", 1.0, logger)


def folder(store: Path, step: int) -> Path:
    return next((store / "run").glob(f"step-{step}-*"))


def test_best_checkpoints_are_retained_locally_and_remotely(new_host, store):
    host = new_host()
    manager = host.manager(keep_latest=1, keep_best=BestConfig(count=2))
    model, optimizer = build()
    for step, loss in enumerate((5.0, 3.0, 4.0, 3.0, None, 9.0), start=1):
        manager.save(step, model, optimizer, {}, {"validation_loss": loss})
        manager.wait()
        manager._uploads.wait()
    names = {path.name for path in (host.run_dir / "checkpoints").glob("step-*")}
    assert names == {"step-2", "step-4", "step-6"}
    assert committed(store) == [6, 4, 2]


def test_another_host_resumes_from_upload(new_host, store):
    last = new_host().save(1, 2)
    assert committed(store) == [2, 1]
    other_host = new_host()
    step, actual = other_host.resume()
    assert step == 2 and same(actual, last)
    assert not find_problems(other_host.run_dir / "checkpoints" / "step-2")


def test_upload_is_bitwise_equal_to_checkpoint(new_host, store):
    machine = new_host()
    machine.save(1)
    local_files = {
        p.name: p.read_bytes() for p in (machine.run_dir / "checkpoints/step-1").iterdir()
    }
    assert {p.name: p.read_bytes() for p in folder(store, 1).iterdir()} == local_files


@pytest.mark.parametrize("address", ["memory://bucket/runs", "s3://uploads/runs"])
def test_upload_to_object_store_urls_resumes(tmp_path, address, object_server):
    object_server.put("uploads", "other/file", b"")
    first_host, second_host = Host(tmp_path / "a", address), Host(tmp_path / "b", address)
    last = first_host.save(1, 2, 3)
    step, actual = second_host.resume()
    assert step == 3 and same(actual, last)
    second_host.save(4)
    actual = RemoteCheckpoints(f"{address}/run", 1.0, logger).committed()
    assert [step_of_upload_folder(name) for name in actual] == [4, 3]


@pytest.mark.parametrize("place", ["file://{}/sp%20ace", "file://localhost{}/sp%20ace", "~/sp ace"])
def test_upload_to_local_url_uses_directory(tmp_path, monkeypatch, place):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    address = place.format(tmp_path)
    last = Host(tmp_path / "a", address).save(1, 2)
    assert committed(tmp_path / "sp ace") == [2, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "sp ace"]
    step, actual = Host(tmp_path / "b", address).resume()
    assert step == 2 and same(actual, last)


@pytest.mark.parametrize("address", ["{}", "file://{}"])
def test_resume_accepts_copy_in_directory(new_host, store, address):
    new_host().save(1, 2)
    named = address.format(folder(store, 1))
    assert new_host().resume(resume=named)[0] == 1


def test_local_checkpoint_is_not_downloaded(new_host, store, monkeypatch):
    machine = new_host()
    last = machine.save(1, 2)
    monkeypatch.setattr(RemoteCheckpoints, "fetch", None)
    step, actual = machine.resume()
    assert step == 2 and same(actual, last)


def test_resume_from_named_url_without_remote_dir(tmp_path):
    host = Host(tmp_path / "a", "memory://named")
    manager = host.manager(keep_latest=3)
    first = saved(manager, 1)
    manager._uploads.wait()
    saved(manager, 2)
    host.close()
    name = RemoteCheckpoints("memory://named/run", 1.0, logger).committed()[1]
    single = make_manager(tmp_path / "alone", resume=f"memory://named/run/{name}")
    model, optimizer = build(seed=4)
    assert single.resume(model, optimizer).step == 1 and same(everything(model, optimizer), first)
    single.close()


@pytest.mark.parametrize("seed", range(5))
def test_damaged_upload_is_skipped_for_older_one(new_host, store, seed):
    first = new_host()
    first.save(1)
    older = first.save(2)
    first.save(3)
    good = {p.name: p.read_bytes() for p in folder(store, 3).iterdir()}
    place = folder(store, 3)
    description = damage(place, random.Random(seed))
    step, actual = new_host().resume()
    assert step == 2 and same(actual, older), description
    for file in place.iterdir():  # a restored copy must be valid again
        file.unlink()
    for name, content in good.items():
        (place / name).write_bytes(content)


def test_start_fails_if_all_uploads_are_damaged(new_host, store):
    new_host().save(1)
    (folder(store, 1) / "index.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"all 1 checkpoints in .* are corrupt"):
        new_host().resume()


def test_upload_without_manifest_is_repeated(new_host, store):
    """Check the files of a host that fails during an upload."""
    machine = new_host()
    machine.save(1, 2)
    before = folder(store, 2)
    (before / MANIFEST_NAME).unlink()
    (before / "index.json").write_bytes(b"half")
    assert committed(store) == [1]
    assert machine.resume()[0] == 2  # from the local disk
    assert committed(store) == [2, 1] and folder(store, 2) == before
    assert new_host().resume()[0] == 2


def test_incomplete_upload_is_removed_by_next_upload(new_host, store):
    new_host().save(1, 2)
    (folder(store, 2) / MANIFEST_NAME).unlink()
    incomplete = folder(store, 2).name
    other_host = new_host()
    assert other_host.resume()[0] == 1
    other_host.save(2, 3, keep_latest=5)
    assert committed(store) == [3, 2, 1]
    names = {path.name for path in (store / "run").iterdir() if any(path.iterdir())}
    assert incomplete not in names or incomplete == folder(store, 2).name


def test_remote_retention_counts_complete_uploads(new_host, store):
    machine = new_host()
    machine.save(1, 2, 3, keep_latest=2)
    assert committed(store) == [3, 2]
    (folder(store, 3) / "index.json").unlink()
    machine.save(4, keep_latest=2)
    assert committed(store) == [4, 3, 2]
    machine.save(5, 6, keep_latest=2)
    assert committed(store) == [6, 5]


@pytest.mark.parametrize("resume", ["none", "step-1"])
def test_uploads_after_resumed_step_are_set_aside(new_host, store, resume):
    machine = new_host()
    machine.save(1, 2, keep_latest=3)
    content = (folder(store, 2) / "index.json").read_bytes()
    at = machine.run_dir / "checkpoints" / "step-1"
    step, _ = machine.resume(resume="none" if resume == "none" else str(at), keep_latest=3)
    assert step == (None if resume == "none" else 1)
    assert committed(store) == ([] if resume == "none" else [1])
    machine.save(3, 4, 5, 6, keep_latest=1)
    assert committed(store) == [6]
    assert (folder(store, 2) / "index.json").read_bytes() == content
    aside = next(folder(store, 2).glob("MANIFEST.set-aside-*.json"))
    aside.rename(folder(store, 2) / MANIFEST_NAME)
    assert 2 in committed(store)


def test_upload_of_newer_format_stops_start(new_host, store):
    first = new_host()
    first.save(1)
    newer = shutil.copytree(folder(store, 1), store / "run" / "step-1")
    rewrite(newer, format=2)
    newer = newer.rename(store / "run" / "step-9-0123456789ab")
    with pytest.raises(CheckpointError, match="has format 2"):
        new_host().resume()
    first.save(10, 11, 12, keep_latest=1)
    assert committed(store) == [12, 9]
    assert (newer / "index.json").exists()


@pytest.mark.parametrize("resume", ["auto", "address"])
@pytest.mark.parametrize("absolute", [False, True])
def test_fetch_of_unsafe_name_writes_nothing(new_host, store, tmp_path, resume, absolute):
    new_host().save(1, 2)
    other_host = new_host()
    planted = other_host.run_dir.parent / "planted.py"
    name = str(planted) if absolute else "../../../planted.py"
    code = b"raise SystemExit(1)"
    entry = {"bytes": len(code), "sha256": hashlib.sha256(code).hexdigest()}
    hostile = shutil.copytree(folder(store, 2), tmp_path / "step-2")
    shutil.rmtree(folder(store, 2))
    rewrite(hostile, files={**read_manifest(hostile)["files"], name: entry})
    (hostile / "planted.py").write_bytes(code)
    manifest = json.loads((hostile / MANIFEST_NAME).read_bytes())
    manifest.pop("manifest_sha256")
    hostile = hostile.rename(store / "run" / upload_folder_name(manifest))
    planted.parent.mkdir(parents=True, exist_ok=True)
    if resume == "auto":
        assert other_host.resume()[0] == 1
    else:
        with pytest.raises(CheckpointError, match="names the file"):
            other_host.resume(resume=f"{store.as_uri()}/run/{hostile.name}")
    assert not planted.exists()


class Gate:
    """Gate that blocks uploads until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self.opened, self.waiting = threading.Event(), threading.Event()
        original = RemoteCheckpoints.put

        def put(remote, folder, file):
            self.waiting.set()
            assert self.opened.wait(30)
            return original(remote, folder, file)

        monkeypatch.setattr(RemoteCheckpoints, "put", put)


def test_slow_store_receives_newest_checkpoint(new_host, store, monkeypatch):
    gate = Gate(monkeypatch)
    machine = new_host()
    manager = machine.manager(keep_latest=1)
    model, optimizer = build()
    for step in (1, 2, 3):
        saved(manager, step, model=model, optimizer=optimizer)
    assert gate.waiting.wait(30)
    # A checkpoint is retained until its upload finishes.
    assert steps(machine.run_dir) == ["step-1", "step-3"]
    gate.opened.set()
    machine.close()
    assert committed(store) == [3]


class FullStore:
    """Store that accepts files up to a total number of bytes, as a disk."""

    def __init__(self, monkeypatch, free_bytes: float) -> None:
        self.free_bytes = free_bytes
        original = store_client._Filesystem.write

        def write(filesystem, path, content):
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            if size > self.free_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            original(filesystem, path, content)

        monkeypatch.setattr(store_client._Filesystem, "write", write)


@pytest.mark.parametrize("free_bytes", [0, 3000])
def test_full_store_is_reported_and_training_continues(
    new_host, store, monkeypatch, caplog, free_bytes
):
    machine = new_host()
    machine.save(1)
    full = FullStore(monkeypatch, free_bytes)
    manager = machine.manager(keep_latest=3)
    model, optimizer = build()
    saved(manager, 2, model=model, optimizer=optimizer)
    manager._uploads.wait()
    assert (
        "step-2 was not uploaded to" in manager.status_warning
        and "No space left" in manager.status_warning
    )
    assert "Training continues without this upload" in caplog.text
    assert manager.pop_metrics()["checkpoint_upload_failures"] == 1
    assert committed(store) == [1]
    assert not list((store / "run").glob("step-2-*/*")), "incomplete uploads must be removed"
    full.free_bytes = float("inf")
    saved(manager, 3, model=model, optimizer=optimizer)
    manager._uploads.wait()
    assert committed(store) == [3, 1] and manager.status_warning == ""
    assert steps(machine.run_dir)[-3:] == ["step-1", "step-2", "step-3"]


def test_full_disk_leaves_no_manifest(new_host, store, monkeypatch):
    """Check a disk that is full when the manifest is written.

    The next start has free space again.
    """
    machine = new_host()
    machine.save(1)
    with monkeypatch.context() as context:
        FullDisk(f".{MANIFEST_NAME}", context)
        manager = machine.manager(keep_latest=3)
        last = saved(manager, 2)
        manager._uploads.wait()
        assert "No space left on device" in manager.status_warning
        machine.close()
    assert {p.name for p in folder(store, 2).iterdir()} == {
        "index.json", "state.json", "rank-00000.safetensors"
    }  # fmt: skip
    assert committed(store) == [1]
    assert machine.resume()[0] == 2
    assert committed(store) == [2, 1]
    step, actual = new_host().resume()
    assert step == 2 and same(actual, last)


def test_failed_commit_removes_incomplete_manifest(tmp_path, monkeypatch):
    """Check a file system that retains the bytes written before an error."""
    original = store_client._Filesystem.write

    def write(filesystem, path, content):
        if path.endswith(MANIFEST_NAME):
            original(filesystem, path, content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        original(filesystem, path, content)

    monkeypatch.setattr(store_client._Filesystem, "write", write)
    machine = Host(tmp_path, "memory://incomplete")
    machine.save(1)
    assert RemoteCheckpoints("memory://incomplete/run", 1.0, logger).committed() == []


@pytest.mark.parametrize(
    "damaged", ["no manifest", "empty manifest", "cut manifest", "other manifest", "short file"]
)
def test_damaged_upload_is_repeated_at_start(new_host, store, damaged):
    machine = new_host()
    last = machine.save(1, 2)
    place = folder(store, 2)
    manifest = place / MANIFEST_NAME
    good = {p.name: p.read_bytes() for p in place.iterdir()}
    if damaged == "no manifest":
        manifest.unlink()
    elif damaged == "empty manifest":
        manifest.write_bytes(b"")
    elif damaged == "cut manifest":
        manifest.write_bytes(good[MANIFEST_NAME][:-1])
    elif damaged == "other manifest":
        shutil.copy(folder(store, 1) / MANIFEST_NAME, manifest)
    else:
        (place / "index.json").write_bytes(good["index.json"][:-1])
    (place / ".index.json.0123").write_bytes(b"of a killed process")
    assert machine.resume()[0] == 2
    assert {p.name: p.read_bytes() for p in place.iterdir()} == good
    step, actual = new_host().resume()
    assert step == 2 and same(actual, last)


def test_complete_upload_is_not_repeated(new_host, store, monkeypatch):
    machine = new_host()
    machine.save(1, 2)
    monkeypatch.setattr(RemoteCheckpoints, "put", None)
    assert machine.resume()[0] == 2


class DyingWrite:
    """Copy function that interrupts the process within a file."""

    def __init__(self, monkeypatch) -> None:
        def copy(source, target, length=0):
            target.write(source.read(100))
            raise KeyboardInterrupt

        monkeypatch.setattr("torchmm.common.files.shutil.copyfileobj", copy)


def test_interrupted_write_preserves_old_object(store, monkeypatch, tmp_path):
    client = store_client.StoreClient(store_client.LOCAL_ROOT, 1.0)
    path = str(store / "object").lstrip("/")
    client.write(path, b"old")
    (tmp_path / "new").write_bytes(bytes(1000))
    DyingWrite(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        client.write(path, tmp_path / "new")
    assert [p.name for p in store.iterdir()] == ["object"]
    assert (store / "object").read_bytes() == b"old"


def test_checkpoint_metrics_cover_finished_saves(new_host, store):
    machine = new_host()
    manager = machine.manager()
    assert manager.pop_metrics() == {}
    saved(manager, 1)
    manager._uploads.wait()
    actual = manager.pop_metrics()
    files = [p for p in (machine.run_dir / "checkpoints/step-1").iterdir()]
    written = sum(p.stat().st_size for p in files if p.name != MANIFEST_NAME)
    assert actual["checkpoint_bytes"] == actual["checkpoint_upload_bytes"] == written
    assert all(
        actual[key] > 0
        for key in ("checkpoint_save_ms", "checkpoint_wait_ms", "checkpoint_upload_ms")
    )
    assert manager.pop_metrics() == {}


def test_unreachable_store_stops_start(tmp_path, new_host, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    manager = Host(tmp_path / "machine", "s3://nowhere/runs").manager()
    with pytest.raises(StoreError, match="s3://nowhere/runs/run did not respond"):
        manager.resume(*build())
    manager.close()


def test_upload_with_missing_file_is_not_committed(new_host, store, monkeypatch):
    original = RemoteCheckpoints.put

    def lose(self, folder, file):
        size_bytes = original(self, folder, file)
        if file.name == "index.json":
            (store / "run" / folder / file.name).unlink()
        return size_bytes

    monkeypatch.setattr(RemoteCheckpoints, "put", lose)
    machine = new_host()
    manager = machine.manager()
    saved(manager, 1)
    manager._uploads.wait()
    assert committed(store) == [] and "index.json has no bytes" in manager.status_warning


def test_ranks_upload_each_file_once():
    names = ["index.json", "rank-00000.safetensors", "rank-00001.safetensors", "state.json"]
    shared = assign_uploads(names, [names, names, names])
    assert sorted(name for part in shared for name in part) == names
    assert [names[1 + rank] in shared[rank] for rank in range(2)] == [True, True]
    separate = assign_uploads(names, [[names[0], names[1], names[3]], [names[2]]])
    assert separate == [[names[0], names[1], names[3]], [names[2]]]
    assert assign_uploads(names, [[names[0]], []]) == [[names[0]], []]
