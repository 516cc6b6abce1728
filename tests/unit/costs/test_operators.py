"""Tests of operator times against hand-computed values."""

import numpy as np
import pytest

from torchmm.costs.devices import BETWEEN_NODES, DEVICES, Device, LinkRanks
from torchmm.costs.operators import (
    COMPUTE_KINDS,
    KINDS,
    NETWORK_KINDS,
    DeviceProfile,
    EfficiencyCurve,
    Operator,
    OperatorKind,
    OperatorTotals,
    operator_time_ms,
)

DEVICE = Device("toy", {"float32": 1e12}, 1e11, 1e9, 1e10, 1e9, 4, False, "made up")
HALF = EfficiencyCurve((1.0,), (0.5,))


def profile(asynchronous: bool = False, **call_us: float) -> DeviceProfile:
    device = Device(**{**vars(DEVICE), "asynchronous": asynchronous})
    curves: dict[OperatorKind, EfficiencyCurve] = dict.fromkeys(KINDS, HALF)
    return DeviceProfile(device, curves, call_us, launch_us=10.0 if asynchronous else 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operator", "seconds"),
    [
        # 1 GFLOP at 0.5 TFLOP/s. Moving 10 MB would take 0.2 ms.
        (Operator("matmul", flops=1e9, memory_bytes=1e7), 2e-3),
        # The same operator with 1 GB at 50 GB/s is limited by memory bandwidth.
        (Operator("matmul", flops=1e9, memory_bytes=1e9), 20e-3),
        (Operator("attention", flops=2e9, memory_bytes=1e6), 4e-3),
        (Operator("norm", memory_bytes=1e8), 2e-3),
        (Operator("all_gather", network_bytes=1e8, link=LinkRanks(1, 4)), 20e-3),
        (Operator("all_gather", network_bytes=1e8, link=BETWEEN_NODES), 200e-3),
    ],
    ids=str,
)
def test_slowest_resource_determines_time(operator: Operator, seconds: float) -> None:
    assert operator_time_ms(operator, profile(), "float32") == pytest.approx(seconds * 1e3)


def test_every_call_has_an_overhead() -> None:
    operator = Operator("norm", memory_bytes=np.array([0.0, 1e8]), calls=np.array([3.0, 5.0]))
    times = operator_time_ms(operator, profile(norm=100.0), "float32")
    assert times == pytest.approx([0.3, 2.5])


def test_efficiency_depends_on_call_size() -> None:
    curve = EfficiencyCurve((1e6, 1e8), (0.1, 0.5))
    assert curve.at(1e3) == 0.1
    assert curve.at(1e7) == pytest.approx(0.3)  # halfway on a logarithmic scale
    assert curve.at(1e12) == 0.5
    small = DeviceProfile(DEVICE, {**dict.fromkeys(KINDS, HALF), "matmul": curve})
    single_call, parts = Operator("matmul", flops=1e8), Operator("matmul", flops=1e8, calls=100.0)
    assert operator_time_ms(single_call, small, "float32") == pytest.approx(1e8 / 0.5e12 * 1e3)
    assert operator_time_ms(parts, small, "float32") == pytest.approx(1e8 / 0.1e12 * 1e3)


@pytest.mark.parametrize(
    ("sizes", "values"),
    [((), ()), ((1.0, 1.0), (0.5, 0.5)), ((1.0,), (0.0,)), ((2.0, 1.0), (1.0, 1.0)), ((1.0,), ())],
)
def test_invalid_efficiency_curves_are_rejected(sizes, values) -> None:
    with pytest.raises(ValueError, match="efficiencies"):
        EfficiencyCurve(sizes, values)


def test_network_time_overlaps_with_matmuls() -> None:
    operators = [
        Operator("matmul", flops=np.array([1e9, 0.0])),
        Operator("norm", memory_bytes=np.array([1e8, 1e8])),
        Operator("all_reduce", network_bytes=np.array([1e7, 1e7])),
    ]
    work = OperatorTotals.from_operators(operators, profile(), "float32", 2)
    assert work.compute_ms == pytest.approx([4.0, 2.0])
    assert work.network_ms == pytest.approx([2.0, 2.0])
    exposed = work.to_times(profile())
    assert exposed.total_ms == pytest.approx([6.0, 4.0])
    assert exposed.tp_comm_ms == pytest.approx([2.0, 2.0])
    hidden = work.to_times(profile(), hidden_fraction=0.75)
    assert hidden.tp_comm_ms == pytest.approx([0.5, 2.0])  # no matmul to overlap with
    twice = work.add(work, 2.0).to_times(profile())
    assert twice.total_ms == pytest.approx([18.0, 12.0])


def test_host_queue_limits_small_operators() -> None:
    operators = [Operator("norm", memory_bytes=1e6, calls=8.0)]
    time = OperatorTotals.from_operators(
        operators, profile(asynchronous=True), "float32", 1
    ).to_times(profile(True))
    assert time.total_ms == pytest.approx([0.08])  # 8 launches; the device needs 0.02 ms
    large = [Operator("norm", memory_bytes=1e9, calls=8.0)]
    time = OperatorTotals.from_operators(large, profile(asynchronous=True), "float32", 1).to_times(
        profile(True)
    )
    assert time.total_ms == pytest.approx([20.0])


def test_operator_kinds_are_disjoint() -> None:
    assert not set(COMPUTE_KINDS) & set(NETWORK_KINDS)
    assert {*COMPUTE_KINDS, *NETWORK_KINDS} < set(KINDS)


def test_devices_have_sources_and_known_values() -> None:
    testbeds = {"h100_grand_teton", "h800_pipeweaver", "a800_disttrain"}
    assert set(DEVICES) == {"h100", "h200", "h800", "a100", "a800", "cpu"} | testbeds
    for device in DEVICES.values():
        assert device.source
        assert device.node_bytes_per_s > device.network_bytes_per_s > 0
        peaks = device.peak_flops
        assert peaks["bfloat16"] >= peaks["float32"]
        assert peaks.get("float8", 0) in (0, pytest.approx(2 * peaks["bfloat16"], rel=1e-3))
    h100, h800 = DEVICES["h100"], DEVICES["h800"]
    assert h100.peak_flops["bfloat16"] == 989.4e12
    assert (h100.node_bytes_per_s, h800.node_bytes_per_s) == (450e9, 200e9)
