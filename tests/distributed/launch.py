"""Runs a function on N gloo processes and returns what each rank returned.

The ranks are forks of one warm process per pytest process: importing what a rank needs takes
seconds, a fork milliseconds. The warm process has no thread but that of pyarrow's allocator, which
is prepared for forks.

A rank that dies without a word is told of all the same: the call fails with the signal that killed
it and what it wrote to stderr, where faulthandler leaves the tracebacks of its threads.
"""

import atexit
import faulthandler
import functools
import gc
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

TIMEOUT_S = int(os.environ.get("LAUNCH_T", "360"))


@dataclass
class Ending:
    """How a rank ended."""

    exit_code: int | None
    """-N: killed by signal N; None: still running when time was over."""
    outcome: tuple[bool, Any] | None
    """Whether it passed, and its result or traceback; None: it has not told."""
    stderr: str

    def problem(self) -> str | None:
        """What is wrong; None: nothing, it has told a result and exited."""
        if self.exit_code == 0 and self.outcome is not None and self.outcome[0]:
            return None
        how = f"exited with {self.exit_code}"
        if self.exit_code is None:
            how = f"was still running after {TIMEOUT_S} s"
        elif self.exit_code < 0:
            how = f"was killed by {signal.Signals(-self.exit_code).name}"
        if self.outcome is None:
            return f"{how}, without a result or a traceback; stderr:\n{self.stderr}"
        passed, told = self.outcome
        return f"{how}, after its result; stderr:\n{self.stderr}" if passed else f"{how}:\n{told}"


def run_distributed(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Calls `function(*args)` on every rank of a fresh gloo world; results in rank order.

    The function must be importable (defined at module level). A failing rank fails the call with
    its traceback, a dying one with its signal.
    """
    warm = _warm_process()
    warm.send(sys.path)  # without which the function is not found
    warm.send((function, ranks, args))
    endings: list[Ending] = warm.recv()
    sys.stderr.write("".join(ending.stderr for ending in endings))
    found = [f"rank {r} {text}" for r, e in enumerate(endings) if (text := e.problem()) is not None]
    assert not found, "\n".join(found)
    return [ending.outcome[1] for ending in endings if ending.outcome]


@functools.cache
def _warm_process() -> Connection:
    """To the process that ranks are forks of. It ends when this one closes the connection."""
    ours, its = mp.Pipe()
    serve = f"import launch; launch.serve({its.fileno()})"  # not as __main__: classes are sent
    command = [sys.executable, "-c", serve]
    found = os.pathsep.join(sys.path)  # without which it does not find what it imports
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()])
    its.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # first
    return ours


def serve(descriptor: int) -> None:
    """Starts the ranks of one job after the other."""
    import torchmm.training.run  # noqa: F401, PLC0415 - what is paid for once

    gc.freeze()  # ranks leave the 600,000 objects of imports alone, and their pages shared
    jobs = Connection(descriptor)
    with suppress(EOFError):
        while True:
            sys.path[:] = jobs.recv()
            jobs.send(_fork_ranks(*jobs.recv()))


def _fork_ranks(function: Callable[..., Any], ranks: int, args: tuple) -> list[Ending]:
    """By rank; those that do not end in time are killed."""
    context = mp.get_context("fork")
    port, deadline = free_port(), time.monotonic() + TIMEOUT_S
    processes, readers, outcomes, logs = [], {}, {}, []
    for rank in range(ranks):
        reader, writer = context.Pipe(duplex=False)
        readers[reader] = rank
        logs.append(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 - closed below
        place = (rank, ranks, port)
        processes.append(
            context.Process(target=_main, args=(function, place, writer, logs[-1], args))
        )
        processes[-1].start()
        writer.close()
    while readers and (ready := wait(list(readers), max(0.0, deadline - time.monotonic()))):
        for reader in ready:
            rank = readers.pop(reader)
            with suppress(EOFError):  # ended without telling
                outcomes[rank] = reader.recv()
    endings = []
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        process.join(max(0.1, deadline - time.monotonic()))
        exit_code = process.exitcode
        process.kill()
        process.join()
        with log:
            log.seek(0)
            endings.append(Ending(exit_code, outcomes.get(rank), log.read()))
    return endings


def _main(
    function: Callable, place: tuple[int, int, int], writer: Connection, log: IO[str], args: tuple
) -> None:
    os.dup2(log.fileno(), 2)
    faulthandler.enable()
    rank, ranks, port = place
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
