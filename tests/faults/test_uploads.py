"""Runs with uploaded checkpoints: lost machines and object store faults."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from object_server import ObjectServer
from tiny_recipe import arguments, records, weights
from undisturbed_run import COMMON, STEPS, wait_for_step

from torchmm.training.checkpoint.manifest import MANIFEST_NAME
from torchmm.training.shutdown import read_status

pytestmark = pytest.mark.slow
CAMPAIGN = pytest.mark.campaign
BUCKET = "checkpoints"
RUN = {
    "training__steps": 6,
    "training__global_batch_size": 2,
    "checkpoint__interval": 2,
    "data__storage__retry_timeout_s": 2,
}


@pytest.fixture
def store(object_server, tmp_path) -> ObjectServer:
    """Return an object store with an empty prefix for each test (`address`)."""
    object_server.put(BUCKET, f"{tmp_path.name}/of-other-runs", b"")
    object_server.reset()
    return object_server


def address(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def command(machine: Path, data: Path, upload: str, **changes: object) -> list[str]:
    """Return the arguments of the run "run" on a separate machine."""
    return arguments(machine / "run", data, **{**RUN, "checkpoint__remote_dir": upload, **changes})


def committed(store: ObjectServer, tmp_path: Path) -> list[int]:
    """Return the steps with a manifest in ascending order."""
    names = [name.split("/") for name in store.names(BUCKET)]
    return sorted(
        int(name[2].split("-")[1])
        for name in names
        if name[0] == tmp_path.name and name[-1] == MANIFEST_NAME
    )


def folder(store: ObjectServer, tmp_path: Path, step: int) -> str:
    start = f"{tmp_path.name}/run/step-{step}-"
    names = [name for name in store.names(BUCKET) if name.startswith(start)]
    return names[0].rpartition("/")[0]


def same_weights(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@CAMPAIGN
def test_lost_machine_resumes_from_last_upload(
    store, tmp_path, real_data, undisturbed, train_server
):
    changes = {**COMMON, "checkpoint__keep_latest": 2}
    lost = command(tmp_path / "lost", real_data, address(tmp_path), **changes)
    run = train_server.start(lost, tmp_path / "logs", ranks=2, **store.environment)
    wait_for_step(tmp_path / "lost/run", 6)
    while not committed(store, tmp_path):
        time.sleep(0.02)
    for rank in range(2):
        run.kill(rank, signal.SIGKILL)
    assert run.wait() == [-9, -9]
    newest = committed(store, tmp_path)[-1]
    other = command(tmp_path / "other", real_data, address(tmp_path), **changes)
    codes, output = train_server.run(other, tmp_path / "2", ranks=2, **store.environment)
    assert codes == [0, 0], output
    assert "fetching s3://" in output and "resumed from" in output
    run_dir = tmp_path / "other/run"
    assert [r["step"] for r in records(run_dir)] == list(range(newest + 1, STEPS + 1))
    expected = {r["step"]: r["loss"] for r in records(undisturbed)}
    assert all(r["loss"] == expected[r["step"]] for r in records(run_dir))
    assert same_weights(run_dir, undisturbed)
    assert committed(store, tmp_path)[-1] == STEPS


@pytest.mark.parametrize(
    "fault", ["full", *(pytest.param(f, marks=CAMPAIGN) for f in ("away", "rejects"))]
)
def test_rejected_uploads_warn_and_training_continues(
    store, tmp_path, real_data, train_server, fault
):
    args = command(tmp_path / "here", real_data, address(tmp_path), training__steps=2)
    assert train_server.run(args, tmp_path / "1", **store.environment)[0] == [0]
    assert committed(store, tmp_path) == [2]
    run_dir = tmp_path / "here/run"
    more = command(tmp_path / "here", real_data, address(tmp_path), training__steps=8)
    if fault == "away":
        store.faults.cut_writes = True
    else:
        store.faults.write_status = 507 if fault == "full" else 403
    codes, output = train_server.run(more, tmp_path / "2", **store.environment)
    assert codes == [0], output
    assert f"was not uploaded to {address(tmp_path)}/run" in output and "Traceback" not in output
    assert "Training continues without this upload" in output
    status = read_status(run_dir)
    assert (status.state, status.step, status.exit_code) == ("done", 8, 0)
    assert f"step-8 was not uploaded to {address(tmp_path)}/run" in status.message
    assert [r["step"] for r in records(run_dir)] == list(range(1, 9))
    assert committed(store, tmp_path) == [2]
    store.reset()
    rerun = command(tmp_path / "here", real_data, address(tmp_path), training__steps=8)
    codes, output = train_server.run(rerun, tmp_path / "3", **store.environment)
    assert codes == [0], output
    assert committed(store, tmp_path) == [2, 8], "the missing upload is repeated"
    assert read_status(run_dir).message == ""


@CAMPAIGN
def test_run_killed_during_upload_uploads_again(store, tmp_path, real_data, train_server):
    args = command(tmp_path / "here", real_data, address(tmp_path), training__steps=400)
    store.faults.write_s = 0.3
    run = train_server.start(args, tmp_path / "1", **store.environment)
    half = f"{tmp_path.name}/run/step-2-"
    while not any(name.startswith(half) for name in store.names(BUCKET)):
        assert run.processes[0].poll() is None, run.output()
        time.sleep(0.01)
    run.kill(0, signal.SIGKILL)
    assert run.wait() == [-9]
    assert committed(store, tmp_path) == []
    incomplete = {name for name in store.names(BUCKET) if name.startswith(half)}
    store.reset()
    saved = sorted((tmp_path / "here/run/checkpoints").glob("step-?*"))
    steps = max(int(p.name.split("-")[1]) for p in saved if p.name.count("-") == 1) + 2
    rerun = command(tmp_path / "here", real_data, address(tmp_path), training__steps=steps)
    codes, output = train_server.run(rerun, tmp_path / "2", **store.environment)
    assert codes == [0] and "resumed from" in output, output
    assert committed(store, tmp_path)[-1] == steps
    remaining = set(store.names(BUCKET))
    assert incomplete <= remaining or not incomplete & remaining, "complete or removed"
    store_only = command(tmp_path / "other", real_data, address(tmp_path), training__steps=steps)
    codes, output = train_server.run(store_only, tmp_path / "3", **store.environment)
    assert codes == [0] and f"all {steps} steps are complete" in output
    assert same_weights(tmp_path / "here/run", tmp_path / "other/run")


def test_damaged_upload_is_skipped_at_start(store, tmp_path, real_data, train_server):
    """If all uploads are damaged, the start fails."""
    args = command(tmp_path / "here", real_data, address(tmp_path), training__steps=4)
    assert train_server.run(args, tmp_path / "1", **store.environment)[0] == [0]
    file = f"{folder(store, tmp_path, 4)}/rank-00000.safetensors"
    content = bytearray(store.get(BUCKET, file))
    content[-1] ^= 1
    store.put(BUCKET, file, bytes(content))
    other = command(tmp_path / "other", real_data, address(tmp_path), training__steps=4)
    run = train_server.start(other, tmp_path / "2", 2, **store.environment)
    assert run.wait() == [0, 0], run.output()
    output = run.output(0) + run.output(1)
    assert "SKIPPING CORRUPT CHECKPOINT step-4-" in output and "was modified" in output
    assert "resumed from" in output and "step-2" in output
    for step in (2, 4):
        for name in store.names(BUCKET):
            if f"/step-{step}-" in name and name.startswith(tmp_path.name):
                store.put(BUCKET, name, b"no more")
    third = command(tmp_path / "third", real_data, address(tmp_path), training__steps=4)
    run = train_server.start(third, tmp_path / "3", 2, **store.environment)
    assert run.wait() == [4, 4]
    output = run.output(0) + run.output(1)
    assert output.count("CheckpointError: all ") == 1 and "Traceback" not in output


@pytest.mark.parametrize("fault", ["away", "rejected", "no bucket", "password"])
def test_store_errors_at_start_are_named(store, tmp_path, real_data, train_server, fault):
    upload, code = address(tmp_path), 4
    expected = {
        "away": f"{upload}/run did not respond",
        "rejected": "AWS_ACCESS_KEY_ID",
        "no bucket": "no such bucket; correct checkpoint.remote_dir",
        "password": "checkpoint.remote_dir",
    }[fault]
    if fault == "away":
        store.go_away()
    elif fault == "rejected":
        store.faults.status = 403
    elif fault == "no bucket":
        upload = "s3://nowhere/runs"
    else:
        upload, code = "s3://me:hunter2@bucket/runs", 2
    try:
        args = command(tmp_path / "here", real_data, upload)
        codes, output = train_server.run(args, tmp_path / "1", **store.environment)
    finally:
        if fault == "away":
            store.come_back()
    assert codes == [code], output
    assert expected in " ".join(output.split()) and "Traceback" not in output
    assert "hunter2" not in output


@CAMPAIGN
def test_slow_store_receives_latest_checkpoint(store, tmp_path, real_data, train_server):
    """The training results are unchanged."""
    store.faults.write_s = 0.4
    changes = {"training__steps": 12, "checkpoint__interval": 1, "checkpoint__keep_latest": 20}
    args = command(tmp_path / "here", real_data, address(tmp_path), **changes)
    codes, output = train_server.run(args, tmp_path / "1", **store.environment)
    assert codes == [0], output
    uploaded = committed(store, tmp_path)
    assert uploaded[-1] == 12 and uploaded[0] == 1 and len(uploaded) < 12
    steps = records(tmp_path / "here/run")
    assert [r["step"] for r in steps] == list(range(1, 13))
    for key in ("checkpoint_wait_ms", "checkpoint_save_ms", "checkpoint_bytes"):
        assert any(r[key] for r in steps), key
    assert any(r["checkpoint_upload_ms"] and r["checkpoint_upload_bytes"] for r in steps) == (
        len(uploaded) > 2
    )
