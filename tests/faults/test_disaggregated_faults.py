"""Disaggregated modules with samples from producers: killed, restarted and rejected.

Two encoder replicas and one LLM rank train on samples of two producers. A producer is killed, then
a rank. The resumed run is bitwise equal to an undisturbed run without producers, so that no sample
is lost or repeated.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ports import free_port
from test_train_faults import process_of, wait_for_step
from tiny_recipe import arguments, records, weights

from torchmm.common.errors import DataError, PeerError
from torchmm.extensions.remote.producers.rpc import TOKEN_VARIABLE
from torchmm.training.shutdown import read_status

pytestmark = pytest.mark.slow
STEPS, RANKS, SECRET = 8, 3, "the same secret on both hosts"
CHANGES = {
    "parallel__placement": "disaggregated",
    "parallel__vision__shard": 2,
    "parallel__timeout_s": 60,
    "training__steps": STEPS,
    "checkpoint__interval": 1,
}


class Producers:
    """Producer processes of the recipe."""

    def __init__(self, directory: Path, data: Path, count: int) -> None:
        program = [sys.executable, "-m", "torchmm.data.serve", "--bind", "127.0.0.1:0"]
        command = [*program, "--workers", "1", *arguments(directory / "served", data, **CHANGES)]
        environment = {**os.environ, TOKEN_VARIABLE: SECRET, "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            for _ in range(count)
        ]
        self.addresses = [self._address(process) for process in self.processes]

    @staticmethod
    def _address(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return f"127.0.0.1:{process.stdout.readline().split()[-1]}"

    def kill(self, number: int) -> None:
        """Kill a producer with SIGKILL."""
        self.processes[number].send_signal(signal.SIGKILL)
        assert self.processes[number].wait(30) == -signal.SIGKILL


@pytest.fixture(scope="module")
def producers(tmp_path_factory, real_data) -> Iterator[Producers]:
    """Start two producers. The last test kills the first one."""
    started = Producers(tmp_path_factory.mktemp("producers"), real_data, 2)
    yield started
    for process in started.processes:
        process.kill()
        process.wait()


def producer_changes(addresses: list[str], **changes: object) -> dict[str, object]:
    """Return recipe changes that read samples from producers."""
    listed = ", ".join(f'"{address}"' for address in addresses)
    return {**CHANGES, "data__producers__addresses": f"[{listed}]", "data__workers": 1, **changes}


def test_producer_rejection_ends_run_with_message(tmp_path, real_data, producers, train_server):
    unused_address = f"127.0.0.1:{free_port()}"
    cases = {
        "token": ({}, {TOKEN_VARIABLE: "a guess"}, "rejects the token of this run: wrong token"),
        "recipe": ({"training__seed": 7}, {TOKEN_VARIABLE: SECRET}, "uses different data"),
        "address": (
            {
                "data__producers__addresses": f'["{unused_address}"]',
                "data__producers__retry_timeout_s": 1,
            },
            {},
            f"{unused_address}: Unavailable",
        ),
    }
    for name, (changes, environment, message) in cases.items():
        run_dir = tmp_path / name
        command = arguments(
            run_dir,
            real_data,
            **producer_changes(producers.addresses[:1], data__workers=0, **changes),
        )
        run = train_server.start(command, tmp_path / f"log-{name}", RANKS, **environment)
        codes = run.wait()
        assert (
            set(codes) <= {DataError.exit_code, PeerError.exit_code}
            and DataError.exit_code in codes
        ), run.output()
        status = read_status(run_dir)
        assert status.state == "failed" and status.step == 0
        assert message in run.outputs()
        assert not (run_dir / "metrics.jsonl").exists() or records(run_dir) == []


def test_killed_producer_and_rank_lose_no_sample(tmp_path, real_data, producers, train_server):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    codes, output = train_server.run(
        arguments(undisturbed, real_data, **CHANGES), tmp_path / "log-undisturbed", RANKS
    )
    assert codes == [0] * RANKS, output

    command = arguments(disturbed, real_data, **producer_changes(producers.addresses))
    token = {TOKEN_VARIABLE: SECRET}
    run = train_server.start(command, tmp_path / "log-disturbed", RANKS, **token)
    wait_for_step(disturbed, 2)
    producers.kill(0)
    wait_for_step(disturbed, 4)
    os.kill(process_of(disturbed, 1), signal.SIGKILL)  # an encoder replica
    codes = run.wait()
    assert codes[1] == -signal.SIGKILL and codes[0] == codes[2] == PeerError.exit_code, run.output(
        2
    )
    assert len(records(disturbed)) < STEPS

    codes, output = train_server.run(command, tmp_path / "log-resumed", RANKS, **token)
    assert codes == [0] * RANKS, output
    assert "resumed from" in output
    assert [r["step"] for r in records(disturbed)] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in records(disturbed)] == [r["loss"] for r in records(undisturbed)]
    actual, expected = weights(disturbed), weights(undisturbed)
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
