"""Tests of processes that compute the next step: requests, exits, hangs and restarts."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from torchmm.common.step_process import RestartingProcess, StepProcess, StepProcessError

WAIT_S = 60.0
MAX_DEATHS = 6


def square(request, progress):
    return request**2


def count_up(request, progress):
    """Send the numbers up to `request`. If it is None, continue until a newer request arrives."""
    last, number = 10**9 if request is None else request, 0
    while number < last:
        number += 1
        progress.send_preliminary(number)
        time.sleep(0.01)
        if progress.is_superseded():
            return None
    return last


def length(request, progress):
    return len(request)


def fail(request, progress):
    return ValueError(f"{request} is odd") if request % 2 else request


@pytest.fixture
def start():
    processes = []

    def start(work):
        processes.append(StepProcess(work, "test"))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_process_returns_newest_request(start):
    process = start(square)
    for number in range(4, 8):
        process.submit(number, number)
    assert process.take(7, WAIT_S) == 49
    assert process.take(5) is None and process.take(8) is None


def test_take_returns_preliminary_result(start):
    process = start(count_up)
    process.submit(1, None)
    numbers = []
    while len(set(numbers)) < 3:
        numbers.append(process.take(1, 0.05) or 0)
    assert numbers == sorted(numbers)
    process.submit(2, 3)  # the unlimited request ends
    assert process.take(2, WAIT_S) == 3


def test_take_raises_exception_of_process(start):
    process = start(fail)
    process.submit(1, 3)
    with pytest.raises(ValueError, match="3 is odd"):
        process.take(1, WAIT_S)
    process.submit(2, 4)
    assert process.take(2, WAIT_S) == 4


def test_killed_process_is_named(start):
    process = start(square)
    process.submit(1, 1)
    process.take(1, WAIT_S)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(StepProcessError, match=rf"test process \({process.pid}.*code -?\d+"):
        process.take(2, WAIT_S)


def test_stopped_process_blocks_no_caller(start):
    """Use requests that are larger than the buffer of a pipe."""
    process = start(length)
    process.submit(1, b"")
    process.take(1, WAIT_S)
    os.kill(process.pid, signal.SIGSTOP)
    large = bytes(2 << 20)
    assert len(ForkingPickler.dumps(large)) > 10**6
    submitted = threading.Thread(target=lambda: [process.submit(n, large) for n in (2, 3, 4)])
    submitted.daemon = True
    submitted.start()
    submitted.join(WAIT_S / 2)
    assert not submitted.is_alive()
    assert process.take(4, 0.1) is None
    process.submit(5, b"12")
    os.kill(process.pid, signal.SIGCONT)
    assert process.take(5, WAIT_S) == 2


def test_close_kills_stopped_process(start):
    process = start(length)
    os.kill(process.pid, signal.SIGSTOP)
    process.submit(1, bytes(2 << 20))
    process.close()
    assert not any(thread.is_alive() for thread in process._threads)
    with pytest.raises(OSError, match="closed"):
        process._connection.fileno()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no idle priority")
def test_idle_process_gets_time_to_exit(monkeypatch):
    process = StepProcess(square, "test", "idle")
    process.submit(1, 3)
    assert process.take(1, WAIT_S) == 9
    policies = [os.sched_getscheduler(process.pid)]
    kill = process._process.kill
    monkeypatch.setattr(
        process._process,
        "kill",
        lambda: (policies.append(os.sched_getscheduler(process.pid)), kill()),
    )
    process.close()
    assert policies == [os.SCHED_IDLE, os.SCHED_OTHER]


@pytest.mark.slow
def test_exit_does_not_wait_for_process():
    code = """if __name__ == "__main__":
        import sys
        sys.path[:0] = [{paths}]
        from test_step_process import StepProcess, count_up
        process = StepProcess(count_up, "test")
        process.submit(1, None)
        while process.take(1, 0.1) is None:
            pass
        print(process.pid)"""
    paths = ", ".join(map(repr, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code.format(paths=paths)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(done.stdout)}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class FakeProcess:
    """Process that returns a plan, is late, or exits, depending on the mood."""

    def __init__(self, processes):
        self.processes, self.requested, self.closed = processes, None, False
        processes.append(self)

    def submit(self, step, request):
        self.requested = step

    def take(self, step, wait_s=0.0):
        if self.processes.mood == "dies":
            raise StepProcessError("exited with code -9")
        return "plan" if self.processes.mood == "plans" and self.requested == step else None

    def error(self, problem):
        return StepProcessError(problem)

    def close(self):
        self.closed = True


class FakeProcesses(list):
    mood = "plans"


def restarting(processes, max_deaths=MAX_DEATHS):
    return RestartingProcess(
        lambda: FakeProcess(processes),
        logging.getLogger("restarting"),
        task="a task",
        fallback="steps are slow",
        final_fallback="every step is slow",
        max_deaths=max_deaths,
    )


def steps_with_result(process, moods, processes, wait_s=0.0):
    """Return the steps with a result."""
    completed = []
    for step, mood in enumerate(moods, 1):
        processes.mood = mood
        if process.take(step, wait_s):
            completed.append(step)
        if process.accepts(step + 1):
            process.submit(step + 1, None)
    assert all(each.closed for each in processes[:-1])
    return completed


def test_process_restarts_after_a_pause(caplog):
    processes = FakeProcesses()
    process = restarting(processes)
    process.restart()
    moods = ["plans"] * 3 + ["dies"] + ["plans"] * 6
    assert steps_with_result(process, moods, processes) == [2, 3, 7, 8, 9, 10]
    assert len(processes) == 2 and not process.is_lost
    assert "a new process starts with step 6; until then steps are slow" in caplog.text


def test_process_that_always_exits_is_lost(caplog):
    processes = FakeProcesses()
    process = restarting(processes)
    process.restart()
    assert steps_with_result(process, ["dies"] * 300, processes) == []
    assert process.is_lost and len(processes) == MAX_DEATHS
    assert "from now on every step is slow" in caplog.text


def test_process_without_result_in_time_is_terminated(caplog):
    processes = FakeProcesses()
    process = restarting(processes, 1)
    process.restart()
    process.submit(1, None)
    assert steps_with_result(process, ["plans"] * 2 + ["late"] * 20, processes, 2.0) == [1, 2]
    assert process.is_lost and processes[0].closed and not process.is_running
    assert "has not returned a step for 2 s; from now on" in caplog.text


def use_cpu(busy_s: float) -> None:
    end_s = time.thread_time() + busy_s
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize(("remaining_steps", "started"), [(100, False), (100_000, True)])
def test_process_starts_if_enough_steps_remain(remaining_steps, started):
    process = restarting(FakeProcesses(), 1)
    for _ in range(2):
        with process.compute_locally(remaining_steps):
            use_cpu(0.01)
    assert process.is_running == started


@pytest.mark.parametrize(("max_deaths", "started"), [(0, False), (1, True)])
def test_process_starts_after_two_slow_steps(caplog, max_deaths, started):
    caplog.set_level(logging.INFO)
    processes = FakeProcesses()
    process = restarting(processes, max_deaths)
    running = []
    for busy_s in (0.0, 0.01, 0.0, 0.01, 0.01):
        with process.compute_locally():
            use_cpu(busy_s)
        running.append(process.is_running)
    assert running == [False] * 4 + [started]
    assert ("a task takes" in caplog.text) == started
