"""Run train.py many times without importing its modules every time.

A server process imports all modules once and forks one child per rank; a child calls the `main` of
train.py (or of another script) as `python train.py ARGUMENTS` would. The server has no thread
except that of pyarrow's allocator, which supports forks.

    with TrainServer() as server:
        run = server.start([arguments], log_dir, ranks=2)
        run.kill(1, signal.SIGKILL)
        assert run.wait() == [6, -9]

`train_client.py` replaces `train.py` if another program, such as torchrun, starts the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_port
from preload import preload_modules

TRAIN = Path(__file__).parents[2] / "train.py"
CLIENT = Path(__file__).with_name("train_client.py")


class ForkedRank:
    """A process of the server with the methods of `subprocess.Popen` that end and wait for it."""

    def __init__(self, address: str, job: dict) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw")
        self._lines.write(json.dumps(job) + "\n")
        self._lines.flush()
        self.pid = int(self._lines.readline())
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
            if not select.select([self._socket], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._socket.close()
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


class TrainServer:
    """The server process. The end of the block ends it and all its children."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="train")
        self.address = f"{self._directory.name}/socket"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, __file__, self.address]
        self._process = subprocess.Popen(command, start_new_session=True, env=environment)
        while not Path(self.address).exists():
            assert self._process.poll() is None, "the server ended"
            time.sleep(0.05)

    def __enter__(self) -> TrainServer:
        return self

    def __exit__(self, *exc: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._directory.cleanup()

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
        """Return exit codes by rank and the output of rank 0; `options` as for `start`."""
        run = self.start(arguments, log_dir, ranks, **options)
        return run.wait(), run.output()


def _serve(address: str) -> None:
    preload_modules()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the server does not wait for its watchers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                _watch(connection)
                os._exit(0)
            connection.close()


def _watch(connection: socket.socket) -> None:
    """Start one rank, report its process id and, after its end, its exit code."""
    with connection.makefile("rw") as stream:
        job = json.loads(stream.readline())
        child = os.fork()
        if not child:
            connection.close()
            os._exit(_run(job))
        stream.write(f"{child}\n")
        stream.flush()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stream.write(f"{code}\n")


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
    _serve(sys.argv[1])
