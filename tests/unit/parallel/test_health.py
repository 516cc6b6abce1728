import gc
import json
import logging
import math
import threading
import time
import weakref

import pytest
import torch.distributed as dist

from torchmm.common import log
from torchmm.common.errors import NonFiniteError, PeerError
from torchmm.common.files import replace_atomically
from torchmm.parallel.gather import gather_floats
from torchmm.parallel.health.peers import HealthMonitor, SideGroup, check_finite, is_peer_failure

NAN, INF = math.nan, math.inf


def test_finite_columns_pass_and_others_are_ignored():
    check_finite(1, ("loss", "grad_norm"), [[1.0, 2.0, NAN], [0.0, 1e300, INF]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, 2.0], [NAN, 2.0]], "step 7: loss = nan on rank 1;"),
        ([[1.0, INF], [1.0, INF]], "grad_norm = inf on rank 0, grad_norm = inf on rank 1"),
        ([[-INF, 1.0]], "loss = -inf on rank 0"),
    ],
)
def test_non_finite_values_name_step_and_rank(values, message):
    with pytest.raises(NonFiniteError, match=message):
        check_finite(7, ("loss", "grad_norm"), values)


def test_single_rank_gathers_local_values():
    assert gather_floats([1.5, 0.0]) == [[1.5, 0.0]]


def _caused_by(text: str) -> RuntimeError:
    """Return an error as torch raises it for an exception in the backward of a stage."""
    error = RuntimeError("Failed to run stage backward")
    error.__cause__ = RuntimeError(text)
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True),
        (RuntimeError("Ranks 1 failed to pass monitoredBarrier in 5000 ms"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (_caused_by("Read error [127.0.0.1]:27838: Connection reset by peer"), True),
        (_caused_by("Trying to backward through the graph a second time"), False),
        (ValueError("bad sample"), False),
    ],
)
def test_lost_peers_are_distinguished_from_other_errors(error, expected):
    assert is_peer_failure(error) == expected


def test_phase_converts_lost_peers_to_peer_errors(tmp_path):
    health = HealthMonitor(tmp_path, timeout_s=1, heartbeat_s=0.01)
    with (
        pytest.raises(
            PeerError, match=r"rank 0 lost a peer at step 4 in forward: .*closed by peer"
        ),
        health.phase(4, "forward"),
    ):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    with (
        pytest.raises(PeerError, match=r"rank 0 lost a peer at step 5 in checkpoint: .*saving"),
        health.phase(5, "checkpoint"),
    ):
        raise PeerError("a rank was lost while saving step-4: of a background save")
    with pytest.raises(RuntimeError, match="shapes"), health.phase(4, "forward"):
        raise RuntimeError("shapes")
    health.close()


def test_heartbeat_contains_step_and_phase(tmp_path):
    health = HealthMonitor(tmp_path, timeout_s=1, heartbeat_s=0.01)
    with health.phase(12, "forward"):
        deadline = time.monotonic() + 30
        while (beat := json.loads((tmp_path / "rank-00000.json").read_text()))["step"] != 12:
            assert time.monotonic() < deadline, beat
    assert beat["phase"] == "forward"
    health.close()


def test_closed_health_keeps_no_run_alive(tmp_path):
    """Check that no reference to the run and its data workers remains after `close`."""

    class Run:
        def end(self, error: PeerError) -> None:
            raise error

    run = Run()
    reference = weakref.ref(run)
    health = HealthMonitor(tmp_path, timeout_s=1, heartbeat_s=0.01, on_lost=run.end)
    del run
    gc.disable()
    try:
        assert reference() is not None
        health.close()
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("clock_s", [-60.0, 0.0, 60.0])
@pytest.mark.parametrize("alive", [True, False])
def test_silent_rank_is_named_despite_clock_offset(alive, clock_s, tmp_path):
    health = HealthMonitor(tmp_path, timeout_s=1, heartbeat_s=0.1)
    health._group.size = 2
    other = {"rank": 1, "step": 4, "phase": "step", "phase_s": 0.0, "lost_peer": False}
    other |= {"process": 77, "host": "node1"}
    ended = threading.Event()

    def beat() -> None:
        for _ in range(1000 if alive else 1):
            content = json.dumps({**other, "time": time.time() + clock_s})
            replace_atomically(tmp_path / "rank-00001.json", content.encode())
            if ended.wait(0.02):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    time.sleep(0.1)
    with pytest.raises(PeerError) as raised, health.phase(4, "forward"):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    ended.set()
    thread.join()
    health.close()
    named = "rank 1 (process 77 on node1) did not respond; its last heartbeat was 0 s ago" in str(
        raised.value
    )
    assert named != alive and ("all ranks still respond" in str(raised.value)) == alive


@pytest.mark.parametrize("is_lost_peer", [True, False])
def test_hanging_rank_0_is_named_by_other_ranks(is_lost_peer, tmp_path, monkeypatch):
    """Check that other ranks name rank 0, which would lead the barrier that finds missing ranks."""
    health = HealthMonitor(tmp_path, timeout_s=1, heartbeat_s=0.05)
    health._group.rank = 1
    health._group.size = 2

    def time_out(timeout_s: float) -> None:
        raise RuntimeError("timed out waiting for rank 0")

    monkeypatch.setattr(health, "_barrier", time_out)
    leader = {"rank": 0, "step": 4, "phase": "step", "phase_s": 9.0, "lost_peer": is_lost_peer}
    leader |= {"process": 77, "host": "node1"}
    ended = threading.Event()

    def beat() -> None:
        for number in range(1000):
            content = json.dumps({**leader, "time": number})
            replace_atomically(tmp_path / "rank-00000.json", content.encode())
            if ended.wait(0.02):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(PeerError) as raised, health.phase(4, "step"):
        raise RuntimeError("Timed out waiting 15000ms for recv operation to complete")
    ended.set()
    thread.join()
    health.close()
    assert ("rank 0 (process 77 on node1) did not respond" in str(raised.value)) != is_lost_peer


@pytest.mark.parametrize("raises", [True, False])
def test_watchdog_ends_ranks_without_raised_errors(raises, tmp_path):
    """Check that with gloo, only a long phase ends the process if a peer is lost."""
    ended: list[str] = []
    health = HealthMonitor(
        tmp_path, timeout_s=1, heartbeat_s=100, raises=raises, on_lost=lambda e: ended.append(phase)
    )
    health._watch.check = lambda *state: PeerError("lost")
    for phase in ("step", "checkpoint", "waiting for data"):
        health._phase = phase
        health._check_peers()
    health.close()
    assert ended == (["checkpoint"] if raises else ["step", "checkpoint"])


def test_exception_on_rank_0_reaches_the_caller():
    group = SideGroup.create()
    assert group.run_on_rank_zero(lambda: 3) == 3 and group.gather(4) == [4]
    with pytest.raises(KeyError):
        group.run_on_rank_zero(lambda: {}["missing"])


def test_long_steps_log_the_current_operation(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(log, "QUIET_S", 0.05)
    monkeypatch.setattr(logging.getLogger("torchmm"), "propagate", True)
    caplog.set_level(logging.INFO, "torchmm")
    health = HealthMonitor(tmp_path, timeout_s=5.0, heartbeat_s=0.02)
    deadline = time.monotonic() + 30
    with health.phase(7, "step"), health.waiting_for_data():
        while "step 7, waiting for data" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    health.close()
    messages = len(caplog.records)
    time.sleep(0.2)
    assert len(caplog.records) == messages
