"""Calibration of several ranks: collectives and messages are measured, and all ranks agree."""

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed

from torchmm.balance.costs.calibration import fit_profile
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.measure.operators import measure
from torchmm.costs.operators import KINDS, NETWORK_KINDS


def calibrate() -> tuple[set[str], dict[str, list[float]], list[float]]:
    """(classes measured, efficiencies of the network, all times of operators)."""
    dist.init_process_group("gloo")
    found = measure(torch.device("cpu"), torch.float32, seconds=0.2, quick=True)
    profile = fit_profile(found, load_profile("cpu"), "float32", "", own_peaks=True)
    values = {kind: list(profile.efficiency[kind].values) for kind in NETWORK_KINDS}
    kinds = {m.operator.kind for m in found.operators} | set(found.tiny)
    return kinds, values, [m.seconds for m in found.operators]


def test_two_ranks_measure_their_network() -> None:
    (kinds, values, times), other = run_distributed(calibrate, 2)
    assert kinds == set(KINDS)
    # The best of all messages is the peak, and nothing is faster.
    best = max(value for own in values.values() for value in own)
    assert best == pytest.approx(1.0, rel=0.5)
    assert all(0 < value <= 1 for own in values.values() for value in own)
    assert min(times) > 0
    assert times == other[2]
