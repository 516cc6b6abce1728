"""Calibration on several ranks measures collectives and messages, and all ranks agree."""

import pytest
import torch
import torch.distributed as dist
from launch import run_distributed

from torchmm.balance.costs.calibration import fit_profile
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.measurement.operators import measure
from torchmm.costs.operators import KINDS, NETWORK_KINDS


def calibrate() -> tuple[set[str], dict[str, list[float]], list[float]]:
    """Return measured operator kinds, network efficiencies and the times of all operators."""
    dist.init_process_group("gloo")
    measurement = measure(torch.device("cpu"), torch.float32, seconds=0.2, quick=True)
    profile = fit_profile(measurement, load_profile("cpu"), "float32", "", use_measured_peaks=True)
    values = {kind: list(profile.efficiency[kind].values) for kind in NETWORK_KINDS}
    kinds = {m.operator.kind for m in measurement.operators} | set(measurement.tiny)
    return kinds, values, [m.seconds for m in measurement.operators]


def test_two_ranks_calibrate_network_equally() -> None:
    (kinds, values, times), other = run_distributed(calibrate, 2)
    assert kinds == set(KINDS)
    # The fastest message defines the peak bandwidth.
    best = max(value for of_kind in values.values() for value in of_kind)
    assert best == pytest.approx(1.0, rel=0.5)
    assert all(0 < value <= 1 for of_kind in values.values() for value in of_kind)
    assert min(times) > 0
    assert times == other[2]
