"""Runs a function on N gloo processes and returns what each rank returned.

The ranks are forks of one warm process per pytest process: importing what a rank needs takes
seconds, a fork milliseconds. The warm process has no threads, so forking it is safe.
"""

import atexit
import functools
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port

TIMEOUT_S = 360
Outcomes = dict[int, tuple[bool, Any]]
"""Whether it passed, and its result or traceback, by rank that has told."""


def run_distributed(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Calls `function(*args)` on every rank of a fresh gloo world; results in rank order.

    The function must be importable (defined at module level). A failing rank fails the call with
    its traceback, and the others are stopped.
    """
    warm = _warm_process()
    warm.send(sys.path)  # without which the function is not found
    warm.send((function, ranks, args))
    outcomes, hung = warm.recv()
    failures = [f"rank {r}:\n{v}" for r, (passed, v) in sorted(outcomes.items()) if not passed]
    assert not failures and not hung, "\n".join([*failures, f"ranks still running: {hung}"])
    missing = [rank for rank in range(ranks) if rank not in outcomes]
    assert not missing, f"ranks {missing} ended without a result"
    return [outcomes[rank][1] for rank in range(ranks)]


@functools.cache
def _warm_process() -> Connection:
    """To the process that ranks are forks of. It ends when this one closes the connection."""
    ours, its = mp.Pipe()
    command = [sys.executable, __file__, str(its.fileno())]
    found = os.pathsep.join(sys.path)  # without which it does not find what it imports
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()])
    its.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # first
    return ours


def _serve(jobs: Connection) -> None:
    """Starts the ranks of one job after the other."""
    import torchmm.training.run  # noqa: F401, PLC0415 - what is paid for once

    with suppress(EOFError):
        while True:
            sys.path[:] = jobs.recv()
            jobs.send(_fork_ranks(*jobs.recv()))


def _fork_ranks(
    function: Callable[..., Any], ranks: int, args: tuple
) -> tuple[Outcomes, list[int]]:
    """What the ranks have told, and those that did not end."""
    context = mp.get_context("fork")
    port, deadline = free_port(), time.monotonic() + TIMEOUT_S
    processes, readers = [], {}
    for rank in range(ranks):
        reader, writer = context.Pipe(duplex=False)
        readers[reader] = rank
        given = (function, rank, ranks, port, writer, args)
        processes.append(context.Process(target=_main, args=given))
        processes[-1].start()
        writer.close()
    outcomes: Outcomes = {}
    while readers and (ready := wait(list(readers), max(0.0, deadline - time.monotonic()))):
        for reader in ready:
            rank = readers.pop(reader)
            with suppress(EOFError):  # ended without telling
                outcomes[rank] = reader.recv()
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hung:
        processes[rank].kill()
        processes[rank].join()
    return outcomes, hung


def _main(
    function: Callable, rank: int, ranks: int, port: int, writer: Connection, args: tuple
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        writer.send((True, function(*args)))
    except BaseException:
        writer.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
