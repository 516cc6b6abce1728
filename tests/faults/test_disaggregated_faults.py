"""Disaggregated modules, samples from producers: killed, restarted, and misled.

Two encoder replicas and one LLM rank train on what two producers prepare. A producer is killed in
the middle, then a rank; the run resumed from the last checkpoint ends with the bits of a run that
nothing happened to, which prepared its samples itself: none is lost, none comes twice.
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
from torchmm.extensions.remote.producers.calls import TOKEN_VARIABLE
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
    """Processes that prepare samples of the recipe."""

    def __init__(self, directory: Path, data: Path, count: int) -> None:
        program = [sys.executable, "-m", "torchmm.data.serve", "--bind", "127.0.0.1:0"]
        given = [*program, "--workers", "1", *arguments(directory / "served", data, **CHANGES)]
        environment = {**os.environ, TOKEN_VARIABLE: SECRET, "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(given, stdout=subprocess.PIPE, text=True, env=environment)
            for _ in range(count)
        ]
        self.addresses = [self._address(process) for process in self.processes]

    @staticmethod
    def _address(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return f"127.0.0.1:{process.stdout.readline().split()[-1]}"

    def kill(self, number: int) -> None:
        """Without a chance to say anything."""
        self.processes[number].send_signal(signal.SIGKILL)
        assert self.processes[number].wait(30) == -signal.SIGKILL


@pytest.fixture(scope="module")
def producers(tmp_path_factory, real_data) -> Iterator[Producers]:
    """Two; the last test kills the first of them."""
    found = Producers(tmp_path_factory.mktemp("producers"), real_data, 2)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


def asking(addresses: list[str], **changes: object) -> dict[str, object]:
    """Changes of a recipe whose samples come from producers."""
    listed = ", ".join(f'"{address}"' for address in addresses)
    return {**CHANGES, "data__producers__addresses": f"[{listed}]", "data__workers": 1, **changes}


def test_what_producers_refuse_ends_the_run_and_is_named(
    tmp_path, real_data, producers, train_server
):
    nobody = f"127.0.0.1:{free_port()}"
    cases = {
        "token": ({}, {TOKEN_VARIABLE: "a guess"}, "rejects the token of this run: wrong token"),
        "recipe": ({"training__seed": 7}, {TOKEN_VARIABLE: SECRET}, "uses different data"),
        "nobody": (
            {"data__producers__addresses": f'["{nobody}"]', "data__producers__retry_timeout_s": 1},
            {},
            f"{nobody}: Unavailable",
        ),
    }
    for name, (changes, environment, message) in cases.items():
        run_dir = tmp_path / name
        given = arguments(
            run_dir, real_data, **asking(producers.addresses[:1], data__workers=0, **changes)
        )
        run = train_server.start(given, tmp_path / f"log-{name}", RANKS, **environment)
        codes = run.wait()
        assert (
            set(codes) <= {DataError.exit_code, PeerError.exit_code}
            and DataError.exit_code in codes
        ), run.output()
        status = read_status(run_dir)
        assert status.state == "failed" and status.step == 0
        assert message in "".join(run.output(rank) for rank in range(RANKS))
        assert not (run_dir / "metrics.jsonl").exists() or records(run_dir) == []


def test_a_killed_producer_and_a_killed_rank_cost_no_sample(
    tmp_path, real_data, producers, train_server
):
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    codes, output = train_server.run(
        arguments(whole, real_data, **CHANGES), tmp_path / "log-whole", RANKS
    )
    assert codes == [0] * RANKS, output

    given = arguments(hurt, real_data, **asking(producers.addresses))
    token = {TOKEN_VARIABLE: SECRET}
    run = train_server.start(given, tmp_path / "log-hurt", RANKS, **token)
    wait_for_step(hurt, 2)
    producers.kill(0)
    wait_for_step(hurt, 4)
    os.kill(process_of(hurt, 1), signal.SIGKILL)  # an encoder replica
    codes = run.wait()
    assert codes[1] == -signal.SIGKILL and codes[0] == codes[2] == PeerError.exit_code, run.output(
        2
    )
    assert len(records(hurt)) < STEPS

    codes, output = train_server.run(given, tmp_path / "log-again", RANKS, **token)
    assert codes == [0] * RANKS, output
    assert "resumed from" in output
    assert [r["step"] for r in records(hurt)] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in records(hurt)] == [r["loss"] for r in records(whole)]
    ours, theirs = weights(hurt), weights(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
