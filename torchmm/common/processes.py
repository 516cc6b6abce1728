"""Processes: environment of a rank, start and exit of data workers, memory of CPU training.

`read_launch_environment` reads the variables of a launcher and checks them before the start of a
run. torch finds errors only when ranks connect, and raises exceptions without advice.

Workers are forked from a fork server. Forking the training process is unsafe with CUDA, NCCL and
checkpoint threads. Spawned processes would import all modules again, which takes seconds.

    training process --- pipe (write end) ---+
    fork server -> worker 0 <-- read end ----+      end of file: the training process has exited
                -> worker 1 <-- read end ----+

Workers ignore SIGTERM and SIGINT. Launchers send these signals to the process group, but the
training process needs data until the step at which it saves. Workers exit when the pipe of the
training process is closed, which happens at its exit for any reason. The check of torch, a changed
parent process ID, does not work, because the parent is the fork server. Workers that are stopped or
blocked in a read do not notice the closed pipe. They are killed, because multiprocessing would
otherwise wait for them.

`set_malloc_retention` is for processes that compute on a CPU. glibc returns large freed blocks to
the system, so activations of the next step need new pages, which the kernel must clear. This takes
10% of a step for a SigLIP encoder with 256 patches per image. With this setting, malloc keeps freed
blocks, like the caching allocator of a GPU, and a process retains its peak memory. The MALLOC_
environment variables are not suitable, because they must be set before a process starts.

`gc_disabled` is for functions that create many objects without cycles, keep nearly all of
them, and return soon, such as planning. Garbage collection would find nothing to free.
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
"""Priority of the exit handler of workers. multiprocessing closes queues at 10, joins at 0."""
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "blocked in a read"}
"""Letters in /proc/PID/stat of processes that do not run."""

NICENESS = 19
"""Niceness of low-priority processes."""

SHARED_MEMORY = "/dev/shm"
"""Directory through which data workers send tensors."""
SHARED_MEMORY_ADVICE = (
    "make /dev/shm larger (docker run --shm-size=16g, or an emptyDir of medium Memory in "
    "Kubernetes), or set data.workers = 0"
)
OPEN_FILES = 65_536
MIN_OPEN_FILES = 256
MAX_TMPDIR_BYTES = 70
"""Maximum length of TMPDIR in bytes. A socket address has at most 107 bytes, and multiprocessing
appends "/pymp-xxxxxxxx/listener-xxxxxxxx"."""


def check_system(workers: int) -> None:
    """Check the system requirements of processes, and raise the limit of open files.

    Args:
        workers: Value of `data.workers`.

    Raises:
        ConfigError: The limit of open files is too low, TMPDIR is too long, or /dev/shm is not
            writable.
    """
    problems: list[str] = []
    if (limit := raise_open_file_limit()) < MIN_OPEN_FILES:
        problems.append(
            f"environment: the limit of open files per process is {limit} (ulimit -n); set it "
            f"to at least {MIN_OPEN_FILES}, preferably {OPEN_FILES}"
        )
    temporary = tempfile.gettempdir()
    if (length := len(os.fsencode(temporary))) > MAX_TMPDIR_BYTES:
        problems.append(
            f"environment: TMPDIR = {temporary!r} has {length} bytes, too long for socket "
            f"paths; use a directory with at most {MAX_TMPDIR_BYTES} bytes, such as /tmp"
        )
    if workers and Path(SHARED_MEMORY).is_dir():
        try:
            with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
                file.write(bytes(4096))
        except OSError as error:
            problems.append(
                f"data.workers = {workers} requires {SHARED_MEMORY}, which is not writable: "
                f"{error.strerror}; make it writable or {SHARED_MEMORY_ADVICE}"
            )
    if problems:
        raise ConfigError(problems)


def find_missing_compiler(device: str) -> str:
    """Return the missing requirement of torch.compile for a type of device, or "".

    On CUDA, it needs Triton, and Triton needs a C compiler to call its kernels.
    """
    if device != "cuda":
        return ""
    if importlib.util.find_spec("triton") is None:
        return "the triton package required by this version of torch"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        return "a C compiler (gcc, clang or CC)"
    return ""


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files towards `OPEN_FILES`, and return it.

    Each tensor from a worker uses a file descriptor. The usual limit of 1024 is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def start_fork_server() -> Any:
    """Return a multiprocessing context whose fork server has imported the data modules.

    From Python 3.13 on, it has also imported the main module.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchmm.data.fork_server", "__main__"])
    multiprocessing.forkserver.ensure_running()  # it imports while this process continues
    return context


class WorkerSetup:
    """Initialization of a worker. Picklable."""

    def __init__(self, alive: Connection) -> None:
        self._alive = alive

    def __call__(self, worker: int) -> None:
        ignore_signals()
        threading.Thread(target=self._exit_with_parent, daemon=True).start()

    def _exit_with_parent(self) -> None:
        self._alive.poll(None)
        os._exit(0)


def make_worker_setup() -> Callable[[int], None]:
    """Return a `worker_init_fn` with which workers exit when this process exits."""
    alive, write_end = multiprocessing.Pipe(duplex=False)
    # `atexit` is too late in a multiprocessing child, which joins its children before.
    multiprocessing.util.Finalize(
        None, _stop_children, args=(write_end,), exitpriority=EXIT_PRIORITY
    )
    return WorkerSetup(alive)


def kill_workers(workers: Sequence[BaseProcess]) -> None:
    """Kill workers that no longer respond. They ignore other signals."""
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + EXIT_WAIT_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


def describe_state(pid: int | None) -> str:
    """Return a suffix for messages, such as ", stopped", or "" for a running process."""
    with suppress(OSError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f", {_STATES[letter]}" if letter in _STATES else ""
    return ""


def _stop_children(pipe: Connection) -> None:
    """Stop workers, and kill those that remain. multiprocessing would only send SIGTERM."""
    pipe.close()
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    deadline = time.monotonic() + EXIT_WAIT_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    kill_workers([child for child in children if child.is_alive()])


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT in this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER, _LARGEST = -1, 1 << 30


def lower_priority(idle: bool) -> None:
    """Reduce the priority of this process.

    Args:
        idle: Whether to run only on idle cores, on Linux. Otherwise, the process has the lowest
            normal priority.
    """
    os.nice(NICENESS)
    if idle and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # not permitted on all systems
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def restore_priority(pid: int) -> None:
    """Restore the priority of a process that called `lower_priority`, so that it exits quickly.

    Without privileges, its niceness does not change.
    """
    with suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, 0)


def set_malloc_retention() -> bool:
    """Make malloc keep freed blocks of up to 1 GiB for reuse. Return True if supported.

    Only glibc (Linux) supports it. Other platforms are unchanged.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))


class LaunchEnvironment(NamedTuple):
    """Rank of this process, and number of ranks."""

    rank: int
    world_size: int


def read_launch_environment(environment: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Return the rank of this process from torchrun, Slurm or the user. The default is one rank.

    Raises:
        ConfigError: Variables are not integers, are inconsistent, or are missing.
    """
    problems: list[str] = []
    size = _read_integer(environment, "WORLD_SIZE", "1", 1, problems)
    rank = _read_integer(environment, "RANK", "0", 0, problems)
    _read_integer(environment, "LOCAL_RANK", "0", 0, problems)
    if not problems and rank >= size:
        problems.append(f"RANK = {rank} is not below WORLD_SIZE = {size}")
    if size > 1:
        if not environment.get("MASTER_ADDR"):
            problems.append("MASTER_ADDR is not set, but there are several ranks")
        if _read_integer(environment, "MASTER_PORT", "", 0, problems) > 65_535:
            problems.append(f"MASTER_PORT = {environment['MASTER_PORT']} is not a port number")
    if problems:
        fix = (
            "start with torchrun (docs/guides/cluster.md), or unset the variables of an "
            "earlier launcher"
        )
        raise ConfigError([f"environment: {problem}; {fix}" for problem in problems])
    return LaunchEnvironment(rank, size)


def _read_integer(
    environment: Mapping[str, str], name: str, default: str, minimum: int, problems: list[str]
) -> int:
    text = environment.get(name, default)
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= minimum:
        return int(text)
    problems.append(f"{name} = {text!r} is not an integer >= {minimum}")
    return minimum


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection of cycles. Can be nested."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
