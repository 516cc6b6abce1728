"""Stalled data workers: the run exits, names them, and can be stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from test_train_faults import assert_preempted, process_of, wait_for_step
from tiny_recipe import arguments, records
from train_server import has_traceback

from torchmm.training.shutdown import read_status

pytestmark = pytest.mark.slow
RUN = {
    "training__steps": 40,
    "training__global_batch_size": 2,
    "data__workers": 2,
    "checkpoint__interval": 0,
}


def children(pid: int) -> list[int]:
    """Return the process ids of the children of a process."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for text in lists for child in text.read_text().split()]


def stop_workers(run_dir: Path, rank: int) -> list[int]:
    """Stop the data workers of a rank, which are children of its fork server."""
    workers = [w for child in children(process_of(run_dir, rank)) for w in children(child)]
    assert len(workers) == RUN["data__workers"]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    return workers


def wait_for_data_wait(run_dir: Path, rank: int, timeout_s: float = 60) -> None:
    """Wait until the heartbeat of a rank shows that it has been waiting for data."""
    stopped, deadline = time.time(), time.monotonic() + timeout_s
    file = run_dir / f"heartbeats/rank-{rank:05}.json"
    while True:
        beat = json.loads(file.read_text())
        waits = beat["phase"] == "waiting for data" and beat["phase_s"] > 1
        if waits and beat["time"] > stopped + 3:  # no prefetched step remains
            return
        assert time.monotonic() < deadline, beat
        time.sleep(0.05)


def assert_gone(processes: list[int], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}/exe").exists() for pid in processes):
        assert time.monotonic() < deadline, f"{processes} are still running"
        time.sleep(0.05)


def test_hung_workers_end_run_with_names(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    changes = {**RUN, "data__timeout_s": 3}
    run = train_server.start(arguments(run_dir, real_data, **changes), tmp_path / "logs")
    wait_for_step(run_dir, 3)
    workers = stop_workers(run_dir, 0)
    assert run.wait() == [3], run.output()
    status = read_status(run_dir)
    assert (status.state, status.exit_code) == ("failed", 3)
    match = re.search(r"data worker \d \(process (\d+), stopped\)", status.message)
    assert match and int(match[1]) in workers and not has_traceback(run.output())
    assert "tuxpaint_stamps/train[" in status.message
    assert_gone(workers)


@pytest.mark.parametrize("timeouts", [(3, 60), (60, 8)], ids=["data first", "peer first"])
def test_peers_name_rank_waiting_for_data(tmp_path, real_data, train_server, timeouts):
    run_dir = tmp_path / "run"
    changes = {**RUN, "data__timeout_s": timeouts[0], "parallel__timeout_s": timeouts[1]}
    run = train_server.start(arguments(run_dir, real_data, **changes), tmp_path / "logs", ranks=2)
    wait_for_step(run_dir, 3)
    stop_workers(run_dir, 1)
    assert run.processes[0].wait(60) == 6
    if timeouts[0] > timeouts[1]:
        named = r"lost a peer .*: rank 1 \(process .* at step \d+, waiting for data for \d+ s"
        assert re.search(named, run.output(0))
        assert read_status(run_dir).exit_code == 6
        run.kill(1, signal.SIGTERM)  # as torchrun does
    assert run.processes[1].wait(60) == 3
    status = read_status(run_dir)
    assert (status.rank, status.exit_code) == (1, 3) and "data worker" in status.message


def test_stop_signal_while_waiting_for_data_saves(tmp_path, real_data, train_server):
    run_dir = tmp_path / "run"
    command = arguments(run_dir, real_data, **RUN)
    run = train_server.start(command, tmp_path / "logs", ranks=2)
    wait_for_step(run_dir, 3)
    workers = stop_workers(run_dir, 1)
    wait_for_data_wait(run_dir, 1)
    for rank in range(2):
        run.kill(rank, signal.SIGTERM)
    assert [process.wait(60) for process in run.processes] == [75, 75], run.output(1)
    assert_preempted(run_dir)
    assert re.search(
        r"a checkpoint of this step is saved. data for step \d+ did not arrive",
        read_status(run_dir).message,
    )
    log = (run_dir / "logs/rank-1.log").read_text()
    named = r"no data for step \d+: (none of )?data worker \d \(process \d+, stopped\)"
    assert re.search(named, log)
    assert_gone(workers)
    first = [r["step"] for r in records(run_dir)]
    changes = {**RUN, "training__steps": first[-1] + 1}
    assert train_server.run(arguments(run_dir, real_data, **changes), tmp_path, 2)[0] == [0, 0]
    assert [r["step"] for r in records(run_dir)] == [*first, first[-1] + 1]


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
@pytest.mark.campaign
def test_lost_stream_reader_ends_run(tmp_path, real_data, train_server, signal_number):
    run_dir = tmp_path / "run"
    stream = f'[{{path="{real_data}/tuxpaint_stamps/train", streaming=true}}]'
    changes = {**RUN, "data__workers": 0, "data__timeout_s": 5, "parallel__shard": 2}
    command = [*arguments(run_dir, real_data, **changes), f"--data.sources={stream}"]
    run = train_server.start(command, tmp_path / "logs", 2)
    wait_for_step(run_dir, 3)
    [reader] = [r for child in children(process_of(run_dir, 0)) for r in children(child)]
    os.kill(reader, signal_number)
    assert 3 in run.wait(), run.output()
    status = read_status(run_dir)
    assert (status.state, status.exit_code) == ("failed", 3)
    expected = (
        "exited unexpectedly" if signal_number == signal.SIGKILL else f"process {reader}, stopped"
    )
    assert expected in status.message or "plan of the next step" in status.message
    assert not has_traceback(run.output())
    assert_gone([reader])
