"""Runs a function on N gloo processes and returns what each rank returned.

The ranks are forks of one warm process per pytest process: importing what a rank needs takes
seconds, a fork milliseconds. The warm process has no threads, so forking it is safe.
"""

import atexit
import functools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 200


def run_distributed(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Calls `function(*args)` on every rank of a fresh gloo world; results in rank order.

    The function must be importable (defined at module level). A failing rank fails the call with
    its traceback, and the others are stopped.
    """
    warm = _warm_process()
    assert warm.stdin is not None and warm.stdout is not None
    pickle.dump((sys.path, pickle.dumps((function, args)), ranks), warm.stdin)
    warm.stdin.flush()
    outcomes, hung = pickle.load(warm.stdout)
    failures = [f"rank {r}:\n{v}" for r, (passed, v) in sorted(outcomes.items()) if not passed]
    assert not failures and not hung, "\n".join([*failures, f"ranks still running: {hung}"])
    missing = [rank for rank in range(ranks) if rank not in outcomes]
    assert not missing, f"ranks {missing} ended without a result"
    return [pickle.loads(outcomes[rank][1]) for rank in range(ranks)]


@functools.cache
def _warm_process() -> subprocess.Popen[bytes]:
    """Ends when this process closes its input, or ends."""
    command = [sys.executable, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    atexit.register(process.communicate)
    return process


def _serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Starts the ranks of one job after the other."""
    import torchmm.trainer  # noqa: F401, PLC0415 - what is paid for once

    while True:
        try:
            path, call, ranks = pickle.load(jobs)
        except EOFError:
            return
        sys.path[:] = path
        pickle.dump(_fork_ranks(call, ranks), answers)
        answers.flush()


def _fork_ranks(call: bytes, ranks: int) -> tuple[dict[int, tuple[bool, Any]], list[int]]:
    """(whether it passed, pickled value or traceback) by rank; ranks that did not end."""
    context = mp.get_context("fork")
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / str(rank) for rank in range(ranks)]
        processes = [
            context.Process(target=_main, args=(call, rank, ranks, port, file))
            for rank, file in enumerate(files)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        ended = {r: f.read_bytes() for r, f in enumerate(files) if f.exists()}
    return {rank: pickle.loads(outcome) for rank, outcome in ended.items()}, hung


def _main(call: bytes, rank: int, ranks: int, port: int, file: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(call)
        outcome = True, pickle.dumps(function(*args))
    except BaseException:
        outcome = False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    partial = file.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(file)


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print must not get between the answers
    _serve(sys.stdin.buffer, answers)
