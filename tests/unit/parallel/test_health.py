import json
import math
import time

import pytest
import torch.distributed as dist

from torchmm.common.errors import NonFiniteError, PeerError
from torchmm.parallel.health import Health, SideGroup, check_finite, gather_floats, is_peer_trouble

NAN, INF = math.nan, math.inf


def test_finite_values_pass_and_further_columns_are_not_looked_at():
    check_finite(1, ("loss", "grad_norm"), [[1.0, 2.0, NAN], [0.0, 1e300, INF]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, 2.0], [NAN, 2.0]], "step 7: loss = nan on rank 1;"),
        ([[1.0, INF], [1.0, INF]], "grad_norm = inf on rank 0, grad_norm = inf on rank 1"),
        ([[-INF, 1.0]], "loss = -inf on rank 0"),
    ],
)
def test_non_finite_values_are_named_with_step_and_rank(values, message):
    with pytest.raises(NonFiniteError, match=message):
        check_finite(7, ("loss", "grad_norm"), values)


def test_alone_there_is_nothing_to_gather():
    assert gather_floats([1.5, 0.0]) == [[1.5, 0.0]]


def _caused_by(text: str) -> RuntimeError:
    """As torch's pipelining says of what a stage's backward met."""
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
def test_lost_peers_are_told_from_other_errors(error, expected):
    assert is_peer_trouble(error) == expected


def test_phase_turns_lost_peers_into_peer_errors_and_leaves_other_errors(tmp_path):
    health = Health(tmp_path, timeout_s=1, heartbeat_s=0.01)
    with (
        pytest.raises(
            PeerError, match=r"rank 0 lost a peer at step 4 in forward: .*closed by peer"
        ),
        health.phase(4, "forward"),
    ):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    with pytest.raises(RuntimeError, match="shapes"), health.phase(4, "forward"):
        raise RuntimeError("shapes")
    health.close()


def test_heartbeat_tells_step_and_phase(tmp_path):
    health = Health(tmp_path, timeout_s=1, heartbeat_s=0.01)
    with health.phase(12, "forward"):
        deadline = time.monotonic() + 30
        while (beat := json.loads((tmp_path / "rank-00000.json").read_text()))["step"] != 12:
            assert time.monotonic() < deadline, beat
    assert beat["phase"] == "forward"
    health.close()


def test_an_exception_on_rank_0_reaches_the_caller():
    group = SideGroup.create()
    assert group.on_rank_0(lambda: 3) == 3 and group.gather(4) == [4]
    with pytest.raises(KeyError):
        group.on_rank_0(lambda: {}["missing"])
