"""Start ranks as processes, wait for their output, and kill them.

    with Job(train_server, SCRIPT, [run_dir], ranks=2, log_dir=tmp_path) as job:
        job.wait_for("step 3")
        job.signal(1, signal.SIGKILL)
        codes = job.wait(30)

`Job` starts processes with the environment variables of torchrun. It is fast, because they are
forks of the train server, and shows the exit code of each rank. `TorchrunJob` starts torchrun, for
restarts. Leaving the `with` block kills remaining processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ports import free_port
from train_server import ForkedRank, TrainServer

POLL_S = 0.02


class Job:
    """Local processes, one per rank, with the gloo backend."""

    processes: Sequence[ForkedRank | subprocess.Popen[bytes]]

    def __init__(
        self,
        server: TrainServer,
        script: Path,
        args: Sequence[object],
        ranks: int,
        log_dir: Path,
        **env: str,
    ) -> None:
        run = server.start(args, log_dir, ranks, script=script, **env)
        self.logs, self.processes = run.logs, run.processes

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def output(self, rank: int = 0) -> str:
        """Return the stdout and stderr of a rank so far."""
        return self.logs[rank].read_text(errors="replace")

    def wait_for(self, marker: str, timeout_s: float = 60) -> None:
        """Wait until every rank has written `marker`. Fail if a rank exits earlier."""
        deadline = time.monotonic() + timeout_s
        for rank in range(len(self.logs)):
            while marker not in self.output(rank):
                ended = self.processes[rank % len(self.processes)].poll() is not None
                if (ended and marker not in self.output(rank)) or time.monotonic() > deadline:
                    raise AssertionError(f"no {marker!r} from rank {rank}:\n{self.output(rank)}")
                time.sleep(POLL_S)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the process of one rank only."""
        self.processes[rank].send_signal(number)

    def wait(self, timeout_s: float = 60) -> list[int]:
        """Wait for all ranks and return their exit codes (-N if signal N killed the rank)."""
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(POLL_S, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"rank {rank} still runs after {timeout_s} s:\n{self.output(rank)}"
                ) from None
        return [process.returncode for process in self.processes]


class TorchrunJob(Job):
    """A job of torchrun, with one process and one log for all ranks."""

    def __init__(  # starts other processes, so no super().__init__
        self,
        script: Path,
        args: Sequence[object],
        ranks: int,
        log_dir: Path,
        restarts: int = 0,
        options: Sequence[str] = (),
        **env: str,
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.logs = [log_dir / "torchrun.log"]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        command += options or [f"--master-port={free_port()}"]
        self.processes = [_start([*command, script, *args], self.logs[0], env)]

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including the ranks
            process.wait()


def _start(command: Sequence[object], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env}
    with log.open("wb") as stream:
        return subprocess.Popen(
            [str(part) for part in command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
