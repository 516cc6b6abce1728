"""Birth and death of the data workers.

Workers are forked from a fork server: forking the training process is unsafe once it has CUDA,
NCCL and checkpoint threads, and spawning pays the imports (seconds) once per worker.

They ignore SIGTERM and SIGINT: launchers send these to whole process groups, and the training
process needs its data to reach the step boundary at which it saves. What ends them instead is a
pipe whose only writing end the training process holds: it closes when that process exits or dies.
PyTorch's own check, a changed parent id, does not work here, because the parent is the fork server
and lives as long as its children.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def fork_server() -> Any:
    """Multiprocessing context whose server has imported the data code (and, from Python 3.13 on,
    the main module)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchmm.data.fork_server", "__main__"])
    multiprocessing.forkserver.ensure_running()  # it imports while this process goes on
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
    atexit.register(ours.close)  # before multiprocessing joins its children at exit
    return WorkerSetup(alive)


def ignore_signals() -> None:
    """From here on SIGTERM and SIGINT have no effect on this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
