"""Processes: who they are, start and end of the data workers, memory that is kept between steps.

`launched` reads what a launcher has put into the environment. Whoever starts a run does so first:
torch finds mistakes only when ranks meet, and then with a traceback.

Workers are forked from a fork server: forking the training process is unsafe once it has CUDA,
NCCL and checkpoint threads, and spawning pays the imports (seconds) once per worker.

They ignore SIGTERM and SIGINT: launchers send these to whole process groups, and the training
process needs its data to reach the step boundary at which it saves. Instead they end with a pipe
whose only writing end the training process holds: it closes when that process exits or dies.
PyTorch's own check, a changed parent id, does not work here, because the parent is the fork server
and lives as long as its children. A worker that was stopped, or is stuck in a read, does not notice
even that; it is killed, or multiprocessing would wait for it when this process exits.

`keep_freed_memory` is for processes that compute on a CPU. glibc gives large freed blocks back to
the system, and the next step's activations come as fresh pages, which the kernel has to find and
clear: a tenth of a step's time for a SigLIP tower with 256 patches per image. Devices have a
caching allocator for this; here malloc is configured to keep what is freed. The price is that a
process stays as large as it has ever been.

Rejected: MALLOC_ variables of the environment, which must be set before a process starts.

`without_collection` is for work that makes many objects, keeps nearly all of them until it ends
and leaves no cycles, such as plans: there Python finds no garbage, however often it looks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from torchmm.common.errors import ConfigError

EXIT_WAIT_S = 2.0
EXIT_PRIORITY = 100
"""Of the end of workers, before multiprocessing closes queues (10) and joins children (0)."""
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "blocked in a read"}
"""Letters of /proc/PID/stat that say why a process does nothing."""

NICENESS = 19
"""Of processes that others go before."""

SHARED_MEMORY = "/dev/shm"
"""Where data workers hand over tensors."""
MORE_SHARED_MEMORY = (
    "make /dev/shm larger (docker run --shm-size=16g, or an emptyDir of medium Memory in "
    "Kubernetes), or set data.workers = 0"
)
OPEN_FILES = 65_536
MIN_OPEN_FILES = 256
MAX_TEMPORARY = 70
"""Bytes of the path of the directory for temporary files. A socket address has at most 107, and
multiprocessing adds "/pymp-xxxxxxxx/listener-xxxxxxxx" to it."""


def check_system(workers: int) -> None:
    """Check what processes need of the system, and raise the limit of open files.

    Args:
        workers: data.workers.

    Raises:
        ConfigError: too few files can be open, TMPDIR is too long, or /dev/shm cannot be written.
    """
    problems: list[str] = []
    if (limit := allow_open_files()) < MIN_OPEN_FILES:
        problems.append(
            f"environment: the limit of open files per process is {limit} (ulimit -n); set it "
            f"to at least {MIN_OPEN_FILES}, preferably {OPEN_FILES}"
        )
    temporary = tempfile.gettempdir()
    if (length := len(os.fsencode(temporary))) > MAX_TEMPORARY:
        problems.append(
            f"environment: TMPDIR = {temporary!r} has {length} bytes, too long for socket "
            f"paths; use a directory with at most {MAX_TEMPORARY} bytes, such as /tmp"
        )
    if workers and Path(SHARED_MEMORY).is_dir():
        try:
            with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
                file.write(bytes(4096))
        except OSError as error:
            problems.append(
                f"data.workers = {workers} requires {SHARED_MEMORY}, which is not writable: "
                f"{error.strerror}; make it writable or {MORE_SHARED_MEMORY}"
            )
    if problems:
        raise ConfigError(problems)


def missing_compiler(device: str) -> str:
    """Return what torch.compile lacks to generate code for a type of device, or "" if nothing.

    On CUDA it needs Triton, which needs a C compiler to call its kernels.
    """
    if device != "cuda":
        return ""
    if importlib.util.find_spec("triton") is None:
        return "the triton package required by this version of torch"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        return "a C compiler (gcc, clang or CC)"
    return ""


def allow_open_files() -> int:
    """Raise the soft limit of open files towards `OPEN_FILES`, and return it.

    Every tensor that arrives from a worker uses a file descriptor; 1024 are soon used up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def fork_server() -> Any:
    """Multiprocessing context whose server has imported the data code (and, from Python 3.13 on,
    the main module)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchmm.data.fork_server", "__main__"])
    multiprocessing.forkserver.ensure_running()  # it imports while this process continues
    return context


class WorkerSetup:
    """What a worker does first; picklable."""

    def __init__(self, alive: Connection) -> None:
        self._alive = alive

    def __call__(self, worker: int) -> None:
        ignore_signals()
        threading.Thread(target=self._exit_with_parent, daemon=True).start()

    def _exit_with_parent(self) -> None:
        self._alive.poll(None)
        os._exit(0)


def make_worker_setup() -> Callable[[int], None]:
    """A `worker_init_fn` that ties the workers' life to this process."""
    alive, ours = multiprocessing.Pipe(duplex=False)
    # `atexit` is too late in a process that multiprocessing started: that joins its children first.
    multiprocessing.util.Finalize(None, _end_all, args=(ours,), exitpriority=EXIT_PRIORITY)
    return WorkerSetup(alive)


def end_workers(workers: Sequence[BaseProcess]) -> None:
    """Kills workers that no longer deliver; they ignore gentler signals."""
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + EXIT_WAIT_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


def describe_state(pid: int | None) -> str:
    """ ", stopped" or the like, for a message; empty if a process looks alive."""
    with suppress(OSError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f", {_STATES[letter]}" if letter in _STATES else ""
    return ""


def _end_all(pipe: Connection) -> None:
    """Lets workers go, then kills those that stay, as multiprocessing would only ask them to."""
    pipe.close()
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline = time.monotonic() + EXIT_WAIT_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    end_workers([child for child in children if child.is_alive()])


def ignore_signals() -> None:
    """From here on SIGTERM and SIGINT have no effect on this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER, _LARGEST = -1, 1 << 30


def yield_to_others(idle: bool) -> None:
    """From here on this process runs where nothing else wants to, or nearly so.

    Args:
        idle: only where nothing else wants to, on Linux; else it gets the little share of a core
            that the lowest priority has.
    """
    os.nice(NICENESS)
    if idle and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # not everywhere allowed
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def restore_priority(pid: int) -> None:
    """Give a process that called `yield_to_others` the time to exit on a busy machine.

    Without privileges its niceness stays.
    """
    with suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, 0)


def keep_freed_memory() -> bool:
    """Makes malloc keep freed blocks of up to 1 GiB for reuse; returns whether it could.

    Only glibc can (Linux); elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))


class Launched(NamedTuple):
    """This process among the ranks of a run."""

    rank: int
    world_size: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """As torchrun, Slurm's script or a user has started this process; alone if nobody has.

    Raises:
        ConfigError: variables are no numbers, contradict each other, or are missing.
    """
    problems: list[str] = []
    size = _number(environment, "WORLD_SIZE", "1", 1, problems)
    rank = _number(environment, "RANK", "0", 0, problems)
    _number(environment, "LOCAL_RANK", "0", 0, problems)
    if not problems and rank >= size:
        problems.append(f"RANK = {rank} is not below WORLD_SIZE = {size}")
    if size > 1:
        if not environment.get("MASTER_ADDR"):
            problems.append("MASTER_ADDR is not set, but there are several ranks")
        if _number(environment, "MASTER_PORT", "", 0, problems) > 65_535:
            problems.append(f"MASTER_PORT = {environment['MASTER_PORT']} is not a port number")
    if problems:
        remedy = (
            "start with torchrun (docs/guides/cluster.md), or unset the variables of an "
            "earlier launcher"
        )
        raise ConfigError([f"environment: {problem}; {remedy}" for problem in problems])
    return Launched(rank, size)


def _number(
    environment: Mapping[str, str], name: str, default: str, least: int, problems: list[str]
) -> int:
    text = environment.get(name, default)
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least:
        return int(text)
    problems.append(f"{name} = {text!r} is not an integer >= {least}")
    return least


@contextmanager
def without_collection() -> Iterator[None]:
    """Nobody looks for garbage in cycles. Nests."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
