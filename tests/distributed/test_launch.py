"""Error messages of ranks that die."""

import os
import signal
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed

from torchmm.parallel.mesh import start_process_group
from torchmm.recipe.parallel_section import ParallelConfig


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL"])
def test_killed_rank_is_reported_with_signal(name):
    with pytest.raises(AssertionError) as failure:
        run_distributed(_die_in_the_last_rank, 2, name)
    dead, survivor = str(failure.value).split("\nrank 0 ")  # the first failure comes first
    assert dead.startswith(f"rank 1 was killed by {name}, without a result or a traceback; stderr:")
    assert survivor.startswith("exited with 0:\nTraceback")  # its all-reduce failed
    # No handler can catch SIGKILL.
    assert ("in _die_in_the_last_rank" in dead) == (name != "SIGKILL")


def _die_in_the_last_rank(name: str) -> None:
    start_process_group(ParallelConfig(backend="gloo", timeout_s=30), torch.device("cpu"))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), getattr(signal, name))
    dist.all_reduce(torch.ones(1))


def test_rank_that_exits_badly_fails_call():
    with pytest.raises(AssertionError) as failure:
        run_distributed(_exit_badly, 1)
    assert str(failure.value).startswith("rank 0 exited with 3, after its result")


def _exit_badly() -> None:
    Finalize(None, os._exit, (3,), exitpriority=0)


def test_lost_connections_are_repeated_once(tmp_path):
    assert run_distributed(_lose_connections, 2, tmp_path, 1) == [2, 2]
    with pytest.raises(AssertionError, match="Connection closed by peer"):
        run_distributed(_lose_connections, 2, tmp_path / "twice", 2)


def test_other_failures_are_not_repeated(tmp_path):
    with pytest.raises(AssertionError, match="wrong loss"):
        run_distributed(_lose_connections, 2, tmp_path, 1, "wrong loss")


def _lose_connections(directory: Path, times: int, first_rank: str = "Connection closed") -> int:
    """Fail in the first calls. Return the number of the call."""
    rank = int(os.environ["RANK"])
    (directory / str(rank)).mkdir(parents=True, exist_ok=True)
    call = len(list((directory / str(rank)).iterdir())) + 1
    (directory / str(rank) / str(call)).touch()
    if call <= times:
        raise RuntimeError("Connection closed by peer" if rank else f"{first_rank} by peer [1]:2")
    return call
