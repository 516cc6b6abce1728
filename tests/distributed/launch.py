"""Run a function on N gloo processes and return the result of each rank.

The ranks are forks of one preloaded process per pytest process, because importing the modules takes
seconds and a fork takes milliseconds. The only thread of this process belongs to the allocator of
pyarrow, which supports forks.

If a rank dies without a traceback, the call fails with the signal that killed the rank and with its
stderr, which contains the tracebacks of all threads (faulthandler).
"""

import atexit
import faulthandler
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port
from preload import preload_modules

TIMEOUT_S = int(os.environ.get("LAUNCH_T", "360"))


@dataclass
class RankExit:
    """Exit status, result and stderr of a rank."""

    exit_code: int | None
    """-N if signal N killed the rank. None if the rank was still running at the time limit."""
    outcome: tuple[bool, Any] | None
    """Whether the function succeeded, and its result or traceback. None if nothing was sent."""
    stderr: str

    def error(self) -> str | None:
        """Return the failure, or None if the rank sent a result and exited with 0."""
        if self.exit_code == 0 and self.outcome is not None and self.outcome[0]:
            return None
        status = f"exited with {self.exit_code}"
        if self.exit_code is None:
            status = f"was still running after {TIMEOUT_S} s"
        elif self.exit_code < 0:
            status = f"was killed by {signal.Signals(-self.exit_code).name}"
        if self.outcome is None:
            return f"{status}, without a result or a traceback; stderr:\n{self.stderr}"
        passed, value = self.outcome
        if passed:
            return f"{status}, after its result; stderr:\n{self.stderr}"
        return f"{status}:\n{value}"


def run_distributed(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of a new gloo process group.

    The function must be importable (defined at module level). If a rank fails, the call fails with
    the traceback of the rank, or with the signal that killed it.

    Returns:
        Results in rank order.
    """
    warm = _warm_process()
    warm.send(sys.path)  # needed to import the function
    warm.send((function, ranks, args))
    exits: list[RankExit] = warm.recv()
    sys.stderr.write("".join(ending.stderr for ending in exits))
    errors = [f"rank {r} {text}" for r, e in enumerate(exits) if (text := e.error()) is not None]
    assert not errors, "\n".join(errors)
    return [ending.outcome[1] for ending in exits if ending.outcome]


@functools.cache
def _warm_process() -> Connection:
    """Return a connection to the preloaded process, which exits when the connection is closed."""
    connection, child_connection = mp.Pipe()
    # Not as __main__, because pickled classes refer to their module.
    serve = f"import launch; launch.serve({child_connection.fileno()})"
    command = [sys.executable, "-c", serve]
    python_path = os.pathsep.join(sys.path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    process = subprocess.Popen(command, env=environment, pass_fds=[child_connection.fileno()])
    child_connection.close()
    atexit.register(process.wait)
    atexit.register(connection.close)  # runs first
    return connection


def serve(descriptor: int) -> None:
    """Run jobs sequentially: fork the ranks of each job and send their exits."""
    preload_modules()
    jobs = Connection(descriptor)
    with suppress(EOFError):
        while True:
            sys.path[:] = jobs.recv()
            jobs.send(_fork_ranks(*jobs.recv()))


def _fork_ranks(function: Callable[..., Any], ranks: int, args: tuple) -> list[RankExit]:
    """Run the function on forked ranks, and kill the ranks that exceed the time limit."""
    context = mp.get_context("fork")
    port, deadline = free_port(), time.monotonic() + TIMEOUT_S
    processes, readers, outcomes, logs = [], {}, {}, []
    for rank in range(ranks):
        reader, writer = context.Pipe(duplex=False)
        readers[reader] = rank
        logs.append(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 - closed below
        rank_address = (rank, ranks, port)
        processes.append(
            context.Process(target=_main, args=(function, rank_address, writer, logs[-1], args))
        )
        processes[-1].start()
        writer.close()
    while readers and (ready := wait(list(readers), max(0.0, deadline - time.monotonic()))):
        for reader in ready:
            rank = readers.pop(reader)
            with suppress(EOFError):  # the rank exited without a result
                outcomes[rank] = reader.recv()
    exits = []
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        process.join(max(0.1, deadline - time.monotonic()))
        exit_code = process.exitcode
        process.kill()
        process.join()
        with log:
            log.seek(0)
            exits.append(RankExit(exit_code, outcomes.get(rank), log.read()))
    return exits


def _main(
    function: Callable,
    rank_address: tuple[int, int, int],
    writer: Connection,
    log: IO[str],
    args: tuple,
) -> None:
    os.dup2(log.fileno(), 2)
    faulthandler.enable()
    rank, ranks, port = rank_address
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
