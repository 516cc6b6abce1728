"""Damaged, hostile and unwritable checkpoints."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_damage import FullDisk, damage, rewrite
from checkpoint_runs import build, saved, steps

from torchmm.common.errors import CheckpointError
from torchmm.training.checkpoint import manager as checkpoint
from torchmm.training.checkpoint import storage as checkpoint_storage
from torchmm.training.checkpoint.manifest import WrittenFile, find_problems, read_manifest

ROOT = Path(__file__).parents[3]


def test_fifty_changes_are_detected_and_previous_step_used(manager, tmp_path):
    first = manager(keep_latest=2)
    saved(first, 1, 2)
    good = {p.name: p.read_bytes() for p in (tmp_path / "checkpoints/step-2").iterdir()}
    rng = random.Random(0)
    for _ in range(50):
        description = damage(tmp_path / "checkpoints/step-2", rng)
        assert find_problems(tmp_path / "checkpoints/step-2"), description
        assert first.latest_valid() == tmp_path / "checkpoints/step-1", description
        for name, data in good.items():
            (tmp_path / "checkpoints/step-2" / name).write_bytes(data)
        assert not find_problems(tmp_path / "checkpoints/step-2")


def test_shards_of_different_step_are_rejected(manager, tmp_path):
    first = manager()
    saved(first, 1, 2)
    one, two = (tmp_path / f"checkpoints/step-{n}/rank-00000.safetensors" for n in (1, 2))
    two.write_bytes(one.read_bytes())
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors was modified"):
        first.load(two.parent, *build())


def test_renamed_step_is_rejected(manager, tmp_path):
    saved(manager(), 1)
    (tmp_path / "checkpoints/step-1").rename(tmp_path / "checkpoints/step-9")
    assert "contains step 1" in find_problems(tmp_path / "checkpoints/step-9")[0]


def test_fallback_is_logged_and_sets_damaged_step_aside(manager, tmp_path, caplog):
    first = manager()
    saved(first, 1, 2)
    (tmp_path / "checkpoints/step-2/state.json").unlink()
    restored = first.resume(*build())
    assert restored.step == 1
    assert "SKIPPING CORRUPT CHECKPOINT" in caplog.text and "state.json" in caplog.text
    assert [n for n in steps(tmp_path) if "set-aside" in n] and "step-2" not in steps(tmp_path)


def test_only_damaged_checkpoints_are_an_error(manager, tmp_path):
    first = manager()
    saved(first, 1)
    (tmp_path / "checkpoints/step-1/MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r'checkpoint\.resume = "none"'):
        first.resume(*build())
    assert steps(tmp_path) == ["step-1"]


@pytest.mark.parametrize("name", [".metadata", "state.json", "index.json", "MANIFEST.json"])
def test_pickles_are_not_executed(manager, tmp_path, name):
    """Check also a manifest that lists the pickles with correct checksums."""
    first = manager()
    saved(first, 1)
    sentinel, path = tmp_path / "ran", tmp_path / "checkpoints/step-1"
    bomb = f"cos\nsystem\n(S'touch {sentinel}'\ntR.".encode()
    (path / name).write_bytes(bomb)
    (path / "rank-00000.safetensors").write_bytes(bomb)
    manifest = {"files": {}, "step": 1, **first._facts}
    if name != "MANIFEST.json":
        (path / "MANIFEST.json").unlink()
        checkpoint.write_manifest(path, [], manifest)
    with pytest.raises((CheckpointError, ValueError)):
        first.load(path, *build())
    assert not sentinel.exists()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.glob("step-*/*")}


def test_checkpoint_of_newer_version_stops_start(manager, tmp_path):
    """Check this because resuming an older step would discard the training of the newer version."""
    first = manager(keep_latest=3)
    saved(first, 1, 2)
    newer = tmp_path / "checkpoints/step-2"
    rewrite(newer, format=2, layout=None, of_tomorrow=True)
    before = contents(tmp_path / "checkpoints")
    with pytest.raises(
        CheckpointError, match=r"has format 2, .* reads format 1: a newer version"
    ) as caught:
        first.resume(*build())
    assert str(newer / "MANIFEST.json") in str(caught.value)
    assert "checkpoint.resume" in str(caught.value)
    with pytest.raises(
        CheckpointError, match="has format 2, but this version of torchmm reads format 1"
    ):
        first.load(newer, *build())
    assert contents(tmp_path / "checkpoints") == before


def test_named_checkpoint_resumes_despite_newer_version(manager, tmp_path):
    saved(manager(keep_latest=3), 1, 2)
    rewrite(tmp_path / "checkpoints/step-2", format=2)
    again = manager(resume=str(tmp_path / "checkpoints/step-1"))
    assert again.resume(*build()).step == 1
    assert [n for n in steps(tmp_path) if n.startswith("step-2.set-aside")]


def test_retention_ignores_checkpoints_of_newer_versions(manager, tmp_path, caplog):
    first = manager(keep_latest=1)
    saved(first, 2)
    rewrite(tmp_path / "checkpoints/step-2", format=2)
    first = manager(keep_latest=1)
    saved(first, 1, 3, 4)
    assert steps(tmp_path) == ["step-2", "step-4"]
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("fact", ["layout", "world_size", "recipe_sha256", "format"])
def test_manifest_without_required_value_is_damaged(manager, tmp_path, fact):
    first = manager(keep_latest=2)
    saved(first, 1, 2)
    rewrite(tmp_path / "checkpoints/step-2", **{fact: "x" if fact == "format" else None})
    assert fact in find_problems(tmp_path / "checkpoints/step-2")[0]
    assert first.resume(*build()).step == 1


ENTRY = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "name", ["../../x", "/tmp/x", "a/b", "..", "", "a\\b", "C:x", "a\0", ".lock", "MANIFEST.json"]
)
def test_manifest_with_unsafe_name_is_rejected(manager, tmp_path, name):
    first = manager(keep_latest=2)
    saved(first, 1, 2)
    path = tmp_path / "checkpoints/step-2"
    rewrite(path, files={**read_manifest(path)["files"], name: ENTRY})
    (problem,) = find_problems(path)
    assert str(path / "MANIFEST.json") in problem and "name" in problem
    assert first.resume(*build()).step == 1


@pytest.mark.parametrize(
    "entry",
    [
        *([1, "0" * 64], "x", None, 3, {}, {"bytes": 1}, {"sha256": "0" * 64}),
        *({**ENTRY, "bytes": value} for value in (-1, 1.0, True, "1", None)),
        *({**ENTRY, "sha256": value} for value in ("0" * 63, "G" * 64, 3, None, ["0"] * 64)),
    ],
    ids=str,
)
def test_manifest_with_wrong_entry_is_rejected(manager, tmp_path, entry):
    first = manager(keep_latest=2)
    saved(first, 1, 2)
    path = tmp_path / "checkpoints/step-2"
    rewrite(path, files={**read_manifest(path)["files"], "index.json": entry})
    (problem,) = find_problems(path)
    assert "the entry of index.json" in problem
    assert first.resume(*build()).step == 1
    saved(first, 3, 4)
    assert "step-2" not in steps(tmp_path)


@pytest.mark.parametrize(
    "facts",
    [{"step": True}, {"step": -1}, {"figures": [1]}, {"figures": {"loss": "x"}}, {"recipe": []}],
    ids=str,
)
def test_manifest_with_wrong_value_is_rejected(manager, tmp_path, facts):
    saved(manager(), 1)
    path = tmp_path / "checkpoints/step-1"
    rewrite(path, **facts)
    assert next(iter(facts)) in find_problems(path)[0]


def certify(path: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint and list it in the manifest with its checksum."""
    (path / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(path, files={**read_manifest(path)["files"], name: entry})


@pytest.mark.parametrize("file", ["../../other.safetensors", "/x.safetensors", "other", 3, None])
def test_index_naming_unlisted_file_is_rejected(manager, tmp_path, file):
    first = manager()
    saved(first, 1)
    path = tmp_path / "checkpoints/step-1"
    shutil.copy(path / "rank-00000.safetensors", tmp_path / "other.safetensors")
    index = json.loads((path / "index.json").read_bytes())
    index["model.scale"]["chunks"][0]["file"] = file
    certify(path, "index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match=r"index\.json: model\.scale is in"):
        first.load(path, *build())


@pytest.mark.parametrize(
    "entry",
    [{}, [], {"dtype": "F31"}, {"shape": [-1]}, {"chunks": 3}, {"chunks": [{"file": []}]}],
    ids=str,
)
def test_index_with_wrong_entry_is_rejected(manager, tmp_path, entry):
    first = manager()
    saved(first, 1)
    path = tmp_path / "checkpoints/step-1"
    index = json.loads((path / "index.json").read_bytes())
    old = index["model.scale"]
    index["model.scale"] = {**old, **entry} if entry else entry
    certify(path, "index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match=r"index\.json"):
        first.load(path, *build())


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"state": 1, "trainable": []}'])
def test_state_with_wrong_content_is_rejected(manager, tmp_path, content):
    first = manager()
    saved(first, 1)
    certify(tmp_path / "checkpoints/step-1", "state.json", content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        first.load(tmp_path / "checkpoints/step-1", *build())


@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json", "index.json"])
def test_deeply_nested_files_are_damaged(manager, tmp_path, name):
    """Check also if the manifest has correct checksums."""
    first = manager(keep_latest=2)
    saved(first, 1, 2)
    path = tmp_path / "checkpoints/step-2"
    deep = b"[" * 100_000 + b"]" * 100_000
    manifest = read_manifest(path)
    (path / name).write_bytes(deep)
    if name != "MANIFEST.json":
        entry = WrittenFile(name, len(deep), hashlib.sha256(deep).hexdigest())
        remaining = {k: v for k, v in manifest.pop("files").items() if k != name}
        files = [WrittenFile(n, f["bytes"], f["sha256"]) for n, f in remaining.items()]
        (path / "MANIFEST.json").unlink()
        checkpoint.write_manifest(path, [*files, entry], manifest)
    assert len(find_problems(path)) == 1 and name in find_problems(path)[0]
    assert first.resume(*build()).step == 1


@pytest.mark.parametrize("file", ["rank-", "index.json", "state.json", "MANIFEST.json"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_is_reported_without_damage(manager, tmp_path, monkeypatch, file, asynchronous):
    first = manager(async_save=asynchronous)
    saved(first, 1)
    first.wait()
    model, optimizer = build(seed=3)
    with monkeypatch.context() as context:
        FullDisk(file, context)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            first.save(2, model, optimizer, {})
            first._thread.join()
            assert first.failed
            first.wait()
    assert re.search(
        rf"\d+ bytes are required, \d+ bytes are free: '.*/step-2\.tmp-\w+/{file}",
        str(caught.value),
    )
    assert steps(tmp_path) == ["step-1"]
    first.save(3, model, optimizer, {})
    first.wait()
    assert first.latest_valid() == tmp_path / "checkpoints/step-3"


def test_tmpfs_that_is_full_is_reported(manager, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs")
    (tmp_path / "checkpoints").symlink_to(disk)
    first = manager(keep_latest=3)
    try:
        saved(first, 1)
        filler = disk / "filler"
        with pytest.raises(
            CheckpointError, match=r"No space left on device: .* bytes are required"
        ):
            filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - 9000))
            first.save(2, *build(), {})
        assert first.latest_valid().name == "step-1"
        filler.unlink()
        first.save(3, *build(), {})
        assert first.latest_valid().name == "step-3"
    finally:
        first.close()
        subprocess.run(["umount", str(disk)], check=True)


def test_different_write_errors_preserve_their_message(manager, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_storage.os, "fsync", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        manager().save(1, *build(), {})


def test_verify_script_reports_damaged_step(manager, tmp_path):
    saved(manager(keep_latest=2), 1, 2)
    command = [sys.executable, str(ROOT / "scripts/verify_checkpoint.py"), str(tmp_path)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    (tmp_path / "checkpoints/step-2/index.json").write_text("{}")
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 4
    assert "step-1: valid" in run.stdout and "index.json has 2 bytes" in run.stdout
    assert "step-2: DAMAGED" in run.stdout
    rewrite(tmp_path / "checkpoints/step-2", format=2)
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 4 and "step-2: NOT CHECKED" in run.stdout
