"""Tests of process states, and of garbage collection during planning."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchmm.common.processes import describe_state, gc_disabled
from torchmm.common.step_process import start_process

HERE = Path(__file__).parent


def sleep_forever(connection):
    while True:
        time.sleep(60)


def fork_and_join():
    """Fork a process that starts a worker and returns. Exit with the exit code of the process."""
    process = multiprocessing.get_context("fork").Process(
        target=start_process, args=(sleep_forever,), kwargs={"name": "sleeping"}
    )
    process.start()
    process.join(60)
    exit_code = process.exitcode
    process.kill()
    sys.exit(1 if exit_code is None else exit_code)


def test_forked_process_exits_with_worker():
    """Check exits: multiprocessing joins the children of a child before `atexit` functions."""
    # Use a new process, because this process may have a fork server, which forks would share.
    code = "import test_processes; test_processes.fork_and_join()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False)
    assert result.returncode == 0


def wait_for_state(pid: int, text: str) -> None:
    """Wait until the process has a state. A process can wait for a disk when it starts."""
    deadline = time.monotonic() + 10
    while (state := describe_state(pid)) != text:
        assert time.monotonic() < deadline, state
        time.sleep(0.01)


def test_state_names_stopped_process():
    assert describe_state(None) == ""
    process = subprocess.Popen(["sleep", "60"])
    try:
        wait_for_state(process.pid, "")
        os.kill(process.pid, signal.SIGSTOP)
        wait_for_state(process.pid, ", stopped")
    finally:
        process.kill()
        process.wait()


def test_garbage_collection_pauses_and_resumes():
    """Check nested blocks, blocks with an error, and blocks without prior garbage collection."""
    assert gc.isenabled()
    with gc_disabled():
        assert not gc.isenabled()
        with gc_disabled():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="wrong"), gc_disabled():
        raise ValueError("wrong")
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
