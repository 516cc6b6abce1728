"""A run whose producers Ray starts, and which plan for it: one is killed, one is added, and no bit
of the run changes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from ports import free_port
from pyarrow import flight
from test_train_faults import parent_of, process_of
from tiny_recipe import arguments, records, weights
from undisturbed_run import wait_for_step

from torchmm.extensions.remote.producers.calls import connect
from torchmm.extensions.remote.producers.registry import Reported, ask_registry

pytest.importorskip("ray")
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
STEPS, RANKS = 40, 2
CHANGES = {"parallel__shard": 2, "training__steps": STEPS, "checkpoint__interval": STEPS}
PATIENCE_S = 240


def known(registry: str) -> list[Reported]:
    return ask_registry(connect(registry, None, 10**6))


def wait_for_producers(registry: str, count: int) -> set[str]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = set()
        with suppress(flight.FlightUnavailableError):  # its rank has not come so far
            found = {each.address for each in known(registry)}
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def actors_of(rank: int) -> list[int]:
    """Processes of Ray's producers that a rank has started."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::ProducerActor" not in (directory / "cmdline").read_bytes():
                continue
            process = int(directory.name)
            while process > 1 and process != rank:
                process = parent_of(process)
            found += [int(directory.name)] * (process == rank)
        except OSError:  # it has ended
            continue
    return found


def test_one_of_three_is_killed_and_one_is_added(tmp_path, real_data, train_server):
    whole, served = tmp_path / "whole", tmp_path / "served"
    codes, output = train_server.run(
        arguments(whole, real_data, **CHANGES), tmp_path / "log-whole", RANKS
    )
    assert codes == [0] * RANKS, output

    registry = f"127.0.0.1:{free_port()}"
    given = {
        "data__producers__engine": "ray",
        "data__producers__plan": "true",
        "data__producers__count": 3,
        "data__producers__registry": registry,
        "data__producers__timeout_s": 120,
        "data__producers__retry_timeout_s": 400,
        "data__timeout_s": 600,
        "data__workers": 1,
        "data__prefetch": 1,
        "parallel__timeout_s": 1200,
    }
    given = arguments(served, real_data, **CHANGES | given)
    run = train_server.start(given, tmp_path / "log-served", RANKS)
    added = None
    try:
        wait_for_step(served, 1, timeout_s=PATIENCE_S)
        first = wait_for_producers(registry, 3)
        rank = process_of(served, 0)
        actors = actors_of(rank)
        assert len(actors) == 3
        os.kill(actors[0], signal.SIGKILL)
        program = [sys.executable, "-m", "torchmm.data.serve", "--bind", "127.0.0.1:0"]
        own = ["--workers", "1", "--registry", registry, *given]
        added = subprocess.Popen([*program, *own], stdout=subprocess.DEVNULL)
        assert len(records(served)) < STEPS, "over before anything has happened to it"
        assert run.wait() == [0] * RANKS, run.output()
    finally:
        if added is not None:
            added.terminate()
            # The run may be over before it has started; test_ray_producers.py shows who serves.
            assert added.wait(60) in (0, -signal.SIGTERM)
    assert first and [r["loss"] for r in records(served)] == [r["loss"] for r in records(whole)]
    ours, theirs = weights(served), weights(whole)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert actors_of(rank) == []


def test_local_cluster_is_private_and_ends_with_its_process(tmp_path):
    psutil = pytest.importorskip("psutil")
    before = set(Path("/tmp").glob("torchmm-ray-*"))
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, Path(__file__).with_name("ray_cluster.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment
    ) as started:
        assert started.stdout.readline() == b"started\n"
        cluster = psutil.Process(started.pid).children(recursive=True)
        assert len(cluster) > 5
        listening = {
            connection.laddr.ip
            for process in [psutil.Process(started.pid), *cluster]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        started.kill()
    assert listening and listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    _, alive = psutil.wait_procs(cluster, 20)
    assert not alive
    deadline = time.monotonic() + 10
    while set(Path("/tmp").glob("torchmm-ray-*")) - before:
        assert time.monotonic() < deadline
        time.sleep(0.1)
