"""Runs on data in an object store are bitwise equal to runs on local files, also with faults."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from fault_harness import Job
from object_server import SECRET, ObjectServer
from tiny_recipe import arguments, new_index, records, weights
from train_server import TRAIN, TrainServer

from torchmm.extensions.remote.storage.remote_files import RemoteFileSystem

pytestmark = pytest.mark.slow


SETS = "s3://stores/tuxpaint_stamps"  # the sample order depends on the last two path components
STEPS = 6
OPTIONS = {
    "training__steps": STEPS,
    "checkpoint__interval": 2,
    "data__workers": 1,
    "validation__interval": 0,
}


@pytest.fixture
def store(object_server, real_data) -> ObjectServer:
    files = {
        str(f.relative_to(real_data)): f.read_bytes()
        for f in (real_data / "tuxpaint_stamps").rglob("*.parquet")
    }
    object_server.put_once("stores", files)
    object_server.reset()
    return object_server


@pytest.fixture(scope="module")
def reference(train_server, real_data, tmp_path_factory) -> Path:
    """Run on the same local files."""
    folder = tmp_path_factory.mktemp("reference")
    args = arguments(folder / "run", real_data, **OPTIONS)
    with Job(train_server, TRAIN, args, 1, folder / "logs") as job:
        assert job.wait(300) == [0], job.output()
    return folder / "run"


def command(run_dir: Path, data: Path, **changes: object) -> list[str]:
    # The directory of the index has the cache of remote files.
    text = arguments(run_dir, data, **{**OPTIONS, **new_index(run_dir), **changes})
    return [part.replace(f"{data}/tuxpaint_stamps", SETS) for part in text]


def run(server: TrainServer, log_dir: Path, args: list[str], env: dict[str, str]) -> Job:
    return Job(server, TRAIN, args, 1, log_dir, **env)


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(run_dir)]


def test_object_store_run_equals_local_run(store, reference, train_server, real_data, tmp_path):
    """The results are equal, and no secret is written."""
    run_dir = tmp_path / "run"
    args = command(run_dir, real_data)
    with run(train_server, tmp_path / "logs", args, store.environment) as job:
        assert job.wait(300) == [0], job.output()
        output = job.output()
    assert store.sent_bytes > 0
    assert losses(run_dir) == losses(reference) and len(losses(reference)) == STEPS
    written = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert any(SETS.encode() in f.read_bytes() for f in written)  # control: the search works
    assert not any(SECRET.encode() in f.read_bytes() for f in written)
    assert SECRET not in output


@pytest.mark.campaign
def test_killed_run_resumes_after_store_outage(store, reference, train_server, real_data, tmp_path):
    """Samples, losses and weights are equal to the reference."""
    run_dir = tmp_path / "run"
    args = command(run_dir, real_data)
    with run(train_server, tmp_path / "1", args, store.environment) as job:
        wait_until((run_dir / "checkpoints" / "step-2" / "MANIFEST.json").exists, job)
        job.signal(0, signal.SIGKILL)
        assert job.wait(30) == [-signal.SIGKILL]
    for file in entries(tmp_path):
        file.unlink()  # like on another machine
    store.go_away()
    timer = threading.Timer(3.0, store.come_back)
    timer.start()
    with run(train_server, tmp_path / "2", args, store.environment) as job:
        assert job.wait(300) == [0], job.output()
        assert "retrying" in job.output()
    timer.join()
    assert losses(run_dir) == losses(reference)
    expected = weights(reference)
    actual = weights(run_dir)
    assert expected.keys() == actual.keys()
    assert all(expected[name].equal(actual[name]) for name in expected)


def entries(folder: Path) -> list[Path]:
    return list((folder / "index" / "storage" / "entries").rglob("*-*"))


def wait_until(done, job: Job, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline and job.processes[0].poll() is None, job.output()
        time.sleep(0.05)


@pytest.mark.parametrize(
    "fault", ["away", "rejected", "no credentials", "no bucket", "wrong bytes"]
)
def test_permanent_store_faults_exit_with_3(store, train_server, real_data, tmp_path, fault):
    """The error names the URL and the fix, and hides secrets."""
    args = command(tmp_path / "run", real_data, data__storage__retry_timeout_s=2)
    env = store.environment
    expected = {
        "away": (f"{SETS}/validation", "did not respond", "data.storage.retry_timeout_s"),
        "rejected": (f"{SETS}/validation", "AWS_ACCESS_KEY_ID"),
        "no credentials": ("no credentials found", "set AWS_ACCESS_KEY_ID"),
        "no bucket": ("s3://stumps/", "no such bucket; correct `path`"),
        "wrong bytes": (
            f"{SETS}/validation/",
            "have a different checksum",
            "check the object store",
        ),
    }[fault]
    if fault == "away":
        store.go_away()
    elif fault == "rejected":
        store.faults.status = 403
    elif fault == "no credentials":
        # Machines in AWS get credentials from this address. No server listens on it.
        env = {"AWS_ENDPOINT_URL": env["AWS_ENDPOINT_URL"], "AWS_REGION": "us-east-1"}
        env["AWS_METADATA_ENDPOINT"] = "http://127.0.0.1:9"
    elif fault == "no bucket":
        args = [part.replace("s3://stores", "s3://stumps") for part in args]
    else:  # different bytes than those that another process read
        storage = RemoteFileSystem(tmp_path / "index" / "storage", 10**9, 20.0)
        for file in storage.list(SETS):
            file.read_bytes()
        for entry in entries(tmp_path):
            entry.unlink()
        store.faults.spoil = lambda path, number: True
    try:
        with run(train_server, tmp_path / "1", args, env) as job:
            assert job.wait(200) == [3], job.output()
            output = " ".join(job.output().split())
    finally:
        if fault == "away":
            store.come_back()
    for part in expected:
        assert part in output
    assert SECRET not in output


@pytest.mark.campaign
@pytest.mark.parametrize("fault", ["slow", "away"])
def test_slow_or_absent_store_keeps_losses(
    store, reference, train_server, real_data, tmp_path, fault
):
    run_dir = tmp_path / "run"
    args = command(run_dir, real_data, data__storage__cache_gb=0)
    with run(train_server, tmp_path / "logs", args, store.environment) as job:
        wait_until(lambda: (run_dir / "metrics.jsonl").exists() and records(run_dir), job)
        if fault == "slow":
            store.faults.bytes_per_s = 4e6
        else:
            store.go_away()
            time.sleep(20)
            store.come_back()
        assert job.wait(350) == [0], job.output()
    assert losses(run_dir) == losses(reference)
