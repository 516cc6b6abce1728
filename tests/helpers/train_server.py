"""Runs train.py many times without paying for its imports every time.

A warm process imports everything once and forks one child per rank; a child calls the `main` of
train.py (or of another script) as `python train.py ARGUMENTS` would. The warm process has no
thread but that of pyarrow's allocator, which is prepared for forks.

    with TrainServer() as server:
        run = server.start([arguments], log_dir, ranks=2)
        run.kill(1, signal.SIGKILL)
        assert run.wait() == [6, -9]

`train_client.py` stands for `train.py` where something else, such as torchrun, starts the ranks.
"""

from __future__ import annotations

import contextlib
import gc
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

TRAIN = Path(__file__).parents[2] / "train.py"
CLIENT = Path(__file__).with_name("train_client.py")


class ForkedRank:
    """A process of the server, with what `subprocess.Popen` has to wait for it and to kill it."""

    def __init__(self, address: str, job: dict) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw")
        self._lines.write(json.dumps(job) + "\n")
        self._lines.flush()
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Exit code (-N: killed by signal N), or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout_s: float | None = None) -> int:
        """Exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after that time.
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
    """One run of train.py: a process per rank, each with a log file."""

    processes: list[ForkedRank]
    logs: list[Path]

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one rank."""
        self.processes[rank].send_signal(number)

    def wait(self) -> list[int]:
        """Exit codes by rank (-N: killed by signal N) when all have ended."""
        return [process.wait() for process in self.processes]

    def output(self, rank: int = 0) -> str:
        """What a rank has written to stdout and stderr so far."""
        return self.logs[rank].read_text(errors="replace")


class TrainServer:
    """The warm process. Leaving the block ends it and all it started."""

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
        """Starts train.py; with more than one rank in the environment torchrun would give.

        Args:
            script: to start instead; it must have a `main` that returns the exit code or None.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        logs = [log_dir / f"rank-{rank}.log" for rank in range(ranks)]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        processes = []
        for rank, log in enumerate(logs):
            log.write_text("")
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            rank_env = {**address, **where, **env} if ranks > 1 else env
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
        """Exit codes by rank and rank 0's output of a whole run; `options` as for `start`."""
        run = self.start(arguments, log_dir, ranks, **options)
        return run.wait(), run.output()


def _serve(address: str) -> None:
    import torchmm.training.run  # noqa: F401, PLC0415 - what is paid for once

    gc.freeze()  # ranks leave the objects of imports alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
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
    """Starts one rank, reports its process id and, when it has ended, its exit code."""
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
