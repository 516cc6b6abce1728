"""Tests of ranks whose device waits for a lost peer."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torchmm.common.errors import PeerError
from torchmm.parallel.health.watchdog import FINISHED, REPORT_FILE, PeerWatchdog


def watch(directory: Path, rank: int, **limits: float) -> PeerWatchdog:
    settings = {"timeout_s": 60.0, "silent_s": 0.05, "grace_s": 0.05, **limits}
    return PeerWatchdog(directory, rank, 3, heartbeat=lambda r: directory / f"{r}", **settings)


def beat(directory: Path, rank: int, phase: str) -> None:
    content = {"process": 70 + rank, "host": "here", "phase": phase}
    (directory / f"{rank}").write_text(json.dumps(content))


def test_rank_with_changing_heartbeat_is_not_missing(tmp_path):
    peers = watch(tmp_path, 0)
    for number in range(4):
        beat(tmp_path, 1, str(number))
        assert peers.check(3, "step", 100.0, False) is None
        time.sleep(0.03)
    assert not (tmp_path / REPORT_FILE).exists()


def test_silent_rank_is_reported_to_all_ranks(tmp_path):
    for rank in range(3):
        beat(tmp_path, rank, "same")
    before, other = watch(tmp_path, 0), watch(tmp_path, 2, silent_s=60.0)
    assert before.check(3, "step", 100.0, False) is None
    time.sleep(0.1)
    assert "rank 1 (process 71 on here) has not responded" in str(
        before.check(3, "step", 100.0, False)
    )
    error = other.check(3, "step", 100.0, False)
    assert isinstance(error, PeerError) and "rank 2 lost a peer at step 3 in step" in str(error)
    assert "rank 1 (process 71 on here) has not responded" in str(error)
    PeerWatchdog.clear_report(tmp_path)
    assert other.check(3, "step", 100.0, False) is None


def test_finished_rank_is_not_missing(tmp_path):
    beat(tmp_path, 1, FINISHED)
    peers = watch(tmp_path, 0)
    assert peers.check(3, "export", 100.0, False) is None
    time.sleep(0.1)
    assert peers.check(3, "export", 100.0, False) is None


def test_new_phase_has_a_grace_period(tmp_path):
    beat(tmp_path, 1, "same")
    peers = watch(tmp_path, 0, grace_s=10.0)
    peers.check(3, "step", 0.0, False)
    time.sleep(0.1)
    assert peers.check(3, "step", 9.0, False) is None
    assert peers.check(3, "step", 11.0, False) is not None


@pytest.mark.parametrize(("is_device_wait", "is_lost"), [(True, True), (False, False)])
def test_device_wait_times_out(is_device_wait, is_lost, tmp_path):
    beat(tmp_path, 1, "same")
    peers = watch(tmp_path, 0, silent_s=60.0)
    assert peers.check(3, "waiting for the device", 59.0, is_device_wait) is None
    assert (peers.check(3, "waiting for the device", 61.0, is_device_wait) is not None) == is_lost


def test_single_rank_misses_no_peer(tmp_path):
    peers = PeerWatchdog(tmp_path, 0, 1, 60.0, lambda r: tmp_path / f"{r}", 0.0, 0.0)
    assert peers.check(3, "step", 100.0, False) is None


@pytest.mark.parametrize(
    ("guarded", "raises", "phase"),
    [
        (True, False, "step"),
        (False, False, "step"),
        (True, True, "step"),
        (True, True, "checkpoint"),
    ],
)
def test_process_with_blocked_main_thread_is_terminated(guarded, raises, phase, tmp_path):
    """Block the main thread outside of Python, as CUDA, or gloo in a checkpoint, can do."""
    program = f"""
        import ctypes, os, sys
        from pathlib import Path
        from torchmm.parallel.health import watchdog, peers as health
        health.PeerWatchdog.__init__.__defaults__ = (0.3, 0.1)
        health.SideGroup.size = property(lambda self: 2, lambda self, size: None)
        def end(error):
            print(error, flush=True)
            os._exit(error.exit_code)
        own = health.HealthMonitor(Path({str(tmp_path)!r}), 60.0, heartbeat_s=0.05,
                            on_lost=end if {guarded} else None, raises={raises})
        with own.phase(5, "{phase}"):
            ctypes.CDLL(None).sleep(4)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if guarded and not (raises and phase == "step"):
        assert done.returncode == PeerError("").exit_code, done.stderr
        assert f"at step 5 in {phase}: rank 1 has not responded" in done.stdout
    else:
        assert done.returncode == 0, done.stderr
