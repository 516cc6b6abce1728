"""A run with producers and planning on Ray.

One producer is killed and one is added. The results of the run are bitwise unchanged.
"""

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

from torchmm.extensions.remote.producers.registry import ProducerStatus, list_producers
from torchmm.extensions.remote.producers.rpc import connect_client

pytest.importorskip("ray")
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
STEPS, RANKS = 40, 2
CHANGES = {"parallel__shard": 2, "training__steps": STEPS, "checkpoint__interval": STEPS}
PATIENCE_S = 240


def registered_producers(registry: str) -> list[ProducerStatus]:
    return list_producers(connect_client(registry, None, 10**6))


def wait_for_producers(registry: str, count: int) -> set[str]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        addresses = set()
        with suppress(flight.FlightUnavailableError):  # its rank has not started it yet
            addresses = {each.address for each in registered_producers(registry)}
        if len(addresses) == count:
            return addresses
        assert time.monotonic() < deadline, addresses
        time.sleep(0.2)


def actors_of(rank: int) -> list[int]:
    """Return the processes of the Ray producers that a rank has started."""
    actors = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::ProducerActor" not in (directory / "cmdline").read_bytes():
                continue
            process = int(directory.name)
            while process > 1 and process != rank:
                process = parent_of(process)
            actors += [int(directory.name)] * (process == rank)
        except OSError:  # it has exited
            continue
    return actors


def test_ray_producers_are_killed_and_added(tmp_path, real_data, train_server):
    undisturbed, served = tmp_path / "undisturbed", tmp_path / "served"
    codes, output = train_server.run(
        arguments(undisturbed, real_data, **CHANGES), tmp_path / "log-undisturbed", RANKS
    )
    assert codes == [0] * RANKS, output

    registry = f"127.0.0.1:{free_port()}"
    producers = {
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
    options = arguments(served, real_data, **CHANGES | producers)
    run = train_server.start(options, tmp_path / "log-served", RANKS)
    added = None
    try:
        wait_for_step(served, 1, timeout_s=PATIENCE_S)
        first = wait_for_producers(registry, 3)
        rank = process_of(served, 0)
        actors = actors_of(rank)
        assert len(actors) == 3
        os.kill(actors[0], signal.SIGKILL)
        program = [sys.executable, "-m", "torchmm.data.serve", "--bind", "127.0.0.1:0"]
        producer_options = ["--workers", "1", "--registry", registry, *options]
        added = subprocess.Popen([*program, *producer_options], stdout=subprocess.DEVNULL)
        assert len(records(served)) < STEPS, "the run finished before the fault"
        assert run.wait() == [0] * RANKS, run.output()
    finally:
        if added is not None:
            added.terminate()
            # The run may finish before the producer starts (see test_ray_producers.py).
            assert added.wait(60) in (0, -signal.SIGTERM)
    assert first and [r["loss"] for r in records(served)] == [
        r["loss"] for r in records(undisturbed)
    ]
    actual, expected = weights(served), weights(undisturbed)
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
    assert actors_of(rank) == []


def test_local_cluster_is_private_and_exits(tmp_path):
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
