"""Run a function on N gloo processes and return the result of each rank.

The ranks are forks of a preloaded process (`train_server`), because importing the modules takes
seconds and a fork takes milliseconds.

If a rank dies without a traceback, the call fails with the signal that killed the rank and with its
stderr, which contains the tracebacks of all threads (faulthandler).
"""

import faulthandler
import os
import pickle
import signal
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
from train_server import shared_server

TIMEOUT_S = int(os.environ.get("LAUNCH_T", "360"))
LOST_CONNECTION = "Connection closed by peer"


@dataclass
class RankExit:
    """Exit status, result and stderr of a rank."""

    exit_code: int | None
    """-N if signal N killed the rank. None if the rank was still running at the time limit."""
    outcome: tuple[bool, Any] | None
    """Whether the function succeeded, and its result or traceback. None if nothing was sent."""
    stderr: str
    end_s: float
    """Time at which the rank sent its outcome or exited, by the monotonic clock."""

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

    def lost_connection(self) -> bool:
        """Return True if the rank failed because gloo closed its connection to another rank."""
        if self.exit_code != 0 or self.outcome is None or self.outcome[0]:
            return False
        return LOST_CONNECTION in self.outcome[1].splitlines()[-1]


def run_distributed(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of a new gloo process group.

    The function must be importable (defined at module level). If a rank fails, the call fails with
    the traceback of the rank, or with the signal that killed it. Ranks that were killed come first,
    then the rank that failed first, because their failures often cause those of other ranks.

    If gloo closes a connection although no rank fails for another reason, the call is repeated
    once. This happens rarely, and the cause is unknown.

    Returns:
        Results in rank order.
    """
    exits = _run_once(function, ranks, args)
    failed = [ending for ending in exits if ending.error() is not None]
    if failed and all(ending.lost_connection() for ending in failed):
        sys.stderr.write("".join(f"repeated after: {ending.error()}\n" for ending in failed))
        exits = _run_once(function, ranks, args)
    order = sorted(range(ranks), key=lambda r: (exits[r].outcome is not None, exits[r].end_s))
    errors = [f"rank {r} {text}" for r in order if (text := exits[r].error()) is not None]
    assert not errors, "\n".join(errors)
    return [ending.outcome[1] for ending in exits if ending.outcome]


def _run_once(function: Callable[..., Any], ranks: int, args: tuple) -> list[RankExit]:
    call = pickle.dumps((function, ranks, args))
    server = shared_server()
    with server.call("launch:send_exits", call, preload=[function.__module__]) as connection:
        exits: list[RankExit] = pickle.loads(connection.recv_bytes())
    sys.stderr.write("".join(ending.stderr for ending in exits))
    return exits


def send_exits(connection: Connection, call: bytes) -> None:
    """Run a pickled function on ranks that are forks of this process, and send their exits.

    Plain pickles contain the values of tensors. `Connection.send` would share their memory, which
    ends with this process.
    """
    connection.send_bytes(pickle.dumps(_fork_ranks(*pickle.loads(call))))


def _fork_ranks(function: Callable[..., Any], ranks: int, args: tuple) -> list[RankExit]:
    """Run the function on forked ranks, and kill the ranks that exceed the time limit."""
    context = mp.get_context("fork")
    port, deadline = free_port(), time.monotonic() + TIMEOUT_S
    processes, readers, outcomes, ends, logs = [], {}, {}, {}, []
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
            ends[rank] = time.monotonic()
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
            end_s = ends.get(rank, deadline)
            exits.append(RankExit(exit_code, outcomes.get(rank), log.read(), end_s))
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
