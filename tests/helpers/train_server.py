"""Run train.py, and functions of tests, many times without importing modules every time.

A server process imports all modules once and forks one child per rank; a child calls the `main` of
train.py (or of another script) as `python train.py ARGUMENTS` would. The server has no thread
except that of pyarrow's allocator, which supports forks.

    server = shared_server()
    run = server.start([arguments], log_dir, ranks=2)
    run.kill(1, signal.SIGKILL)
    assert run.wait() == [6, -9]

All workers of pytest-xdist use one server. `train_client.py` replaces `train.py` if another
program, such as torchrun, starts the ranks. Other helpers call functions in forks (`call`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from ports import free_port
from preload import preload_modules

TRAIN = Path(__file__).parents[2] / "train.py"
CLIENT = Path(__file__).with_name("train_client.py")


def has_traceback(output: str) -> bool:
    """Return whether an output has a traceback or stack with a frame of torchmm.

    For runs whose data workers are killed: a thread of torchdata may print its own traceback.
    """
    return f'File "{TRAIN.parent / "torchmm"}' in output


class ForkedRank:
    """A process of the server with the methods of `subprocess.Popen` that end and wait for it."""

    def __init__(self, address: str, job: dict) -> None:
        self._connection = Client(address, "AF_UNIX")
        self._connection.send(job)
        self.pid: int = self._connection.recv()
        self.returncode: int | None = None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Return the exit code (-N: killed by signal N), or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: The process still runs after that time.
        """
        if self.returncode is None:
            if not self._connection.poll(timeout_s):
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0)
            self.returncode = self._connection.recv()
            self._connection.close()
        return self.returncode


@dataclass
class Run:
    """A run of train.py with a process and a log file for each rank."""

    processes: list[ForkedRank]
    logs: list[Path]

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        self.processes[rank].send_signal(number)

    def wait(self) -> list[int]:
        """Return exit codes by rank (-N: killed by signal N) after all have ended."""
        return [process.wait() for process in self.processes]

    def output(self, rank: int = 0) -> str:
        """Return the stdout and stderr of a rank so far."""
        return self.logs[rank].read_text(errors="replace")

    def outputs(self) -> str:
        """Return the stdout and stderr of all ranks so far, in rank order."""
        return "".join(map(self.output, range(len(self.logs))))


class TrainServer:
    """The server process. It ends with its owner, and ends all its children.

    The owner is the process that starts the workers of pytest-xdist, or else this process.

    Args:
        setup: Module that the server imports before all others.
    """

    def __init__(self, setup: str = "") -> None:
        xdist_run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        if xdist_run:
            owner = os.getppid()
            # A test can run the tests of a copy of the repository, which inherit the variable.
            name = f"train-server-{xdist_run}-{zlib.crc32(bytes(TRAIN)):08x}{setup}"
            directory = Path(tempfile.gettempdir()) / name
            directory.mkdir(exist_ok=True)
        else:
            owner = os.getpid()
            directory = Path(tempfile.mkdtemp(prefix="train-server-"))
        self.address = str(directory / "socket")
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not Path(self.address).exists():
                self._start(owner, setup)

    def _start(self, owner: int, setup: str) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(TRAIN.parent), *filter(None, sys.path)]),
        }
        command = [sys.executable, __file__, self.address, str(owner), setup]
        process = subprocess.Popen(command, start_new_session=True, env=environment)
        while not Path(self.address).exists():
            assert process.poll() is None, "the server ended"
            time.sleep(0.05)

    def call(self, target: str, *arguments: object, preload: Sequence[str] = ()) -> Connection:
        """Call a function in a fork with a connection and arguments. Return the other end.

        Args:
            target: "MODULE:FUNCTION".
            arguments: Further arguments, which are pickled.
            preload: Modules that the server imports for this fork and all later forks.
        """
        connection = Client(self.address, "AF_UNIX")
        module, _, name = target.partition(":")
        job = {"modules": [module, *preload], "function": name, "arguments": arguments}
        connection.send({**job, "sys_path": sys.path})
        return connection

    def start(
        self,
        arguments: Sequence[object],
        log_dir: Path,
        ranks: int = 1,
        *,
        script: Path = TRAIN,
        **env: object,
    ) -> Run:
        """Start train.py, with the environment of torchrun if there is more than one rank.

        Args:
            script: Script to start instead, with a `main` that returns the exit code or None.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        logs = [log_dir / f"rank-{rank}.log" for rank in range(ranks)]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        processes = []
        for rank, log in enumerate(logs):
            log.write_text("")
            rank_variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            rank_env = {**address, **rank_variables, **env} if ranks > 1 else env
            job = {
                "log": str(log),
                "env": {k: str(v) for k, v in rank_env.items()},
                "script": str(script),
                "arguments": [str(a) for a in arguments],
            }
            processes.append(ForkedRank(self.address, job))
        return Run(processes, logs)

    def run(
        self, arguments: Sequence[object], log_dir: Path, ranks: int = 1, **options: Any
    ) -> tuple[list[int], str]:
        """Return exit codes by rank and the outputs of all ranks; `options` as for `start`.

        If several ranks raise the same error, any one of them reports it.
        """
        run = self.start(arguments, log_dir, ranks, **options)
        return run.wait(), run.outputs()


@functools.cache
def shared_server() -> TrainServer:
    """Return the server of this process, and start it at the first call."""
    return TrainServer()


def _serve(address: str, owner: int, setup: str) -> None:
    if setup:
        importlib.import_module(setup)
    preload_modules()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the server does not wait for its watchers
    owner_end = os.pidfd_open(owner)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        Path(f"{address}.new").rename(address)
        while owner_end not in select.select([listener, owner_end], [], [])[0]:
            connection = Connection(listener.accept()[0].detach())
            with connection, contextlib.suppress(EOFError, ConnectionError):
                job = connection.recv()
                _preload_function(job)
                if not os.fork():
                    listener.close()
                    _watch_and_exit(connection, job)
    shutil.rmtree(Path(address).parent)
    os.killpg(0, signal.SIGKILL)


def _preload_function(job: dict) -> None:
    """Import the modules of a function, so that later forks have them."""
    names = set(job.get("modules", ())) - sys.modules.keys()
    if not names:
        return
    paths = sys.path[:]
    sys.path[:] = job["sys_path"]
    for name in names:
        with contextlib.suppress(Exception):  # the fork raises it again
            importlib.import_module(name)
    sys.path[:] = paths
    gc.freeze()


def _watch_and_exit(connection: Connection, job: dict) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        _watch(connection, job)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _watch(connection: Connection, job: dict) -> None:
    """Start one rank, report its process id and, after its end, its exit code.

    A function gets the connection instead.
    """
    if "modules" in job:
        sys.path[:] = job["sys_path"]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        module = importlib.import_module(job["modules"][0])
        getattr(module, job["function"])(connection, *job["arguments"])
        return
    child = os.fork()
    if not child:
        connection.close()
        os._exit(_run(job))
    connection.send(child)
    connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _run(job: dict) -> int:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["env"])
    script = job.get("script", str(TRAIN))
    sys.argv = [script, *job["arguments"]]
    sys.path.insert(0, str(Path(script).parent))
    try:
        return int(runpy.run_path(script)["main"]() or 0)
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
