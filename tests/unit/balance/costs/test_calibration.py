"""Tests of calibration: fitted profiles reproduce the device that generated the timings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipeline_cases import Case
from support.measurements import mean_measurements
from test_plan_costs import Step

from torchmm.balance.costs.calibration import (
    ActionTiming,
    Measurements,
    RealisticLayers,
    RecordedStep,
    TimedLayers,
    TimedOperator,
    _Rate,
    compare_action_times,
    correct_profile,
    fit_profile,
)
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.costs.operators import (
    KINDS,
    DeviceProfile,
    EfficiencyCurve,
    Operator,
    OperatorTotals,
    operator_time_ms,
)
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.records import StepContent

CPU = load_profile("cpu")
TRUTH = DeviceProfile(
    replace(CPU.device, peak_flops={"float32": 2e11}, memory_bytes_per_s=4e10),
    {
        **{kind: EfficiencyCurve((1e3, 1e5, 1e7, 1e9), (0.1, 0.4, 0.9, 1.0)) for kind in KINDS},
        "elementwise": EfficiencyCurve((1e3, 1e9), (0.8, 0.8)),
    },
    dict.fromkeys(KINDS, 5.0),
)
SIZES = [10.0**e for e in range(4, 10)]


def timed(kind: str, size: float) -> TimedOperator:
    """Return an operator with its time on the true device."""
    if kind in ("matmul", "attention", "attention_backward"):
        operator = Operator(kind, flops=size, memory_bytes=size / 1e3)  # type: ignore[arg-type]
    elif kind in ("all_gather", "reduce_scatter", "all_reduce", "p2p"):
        operator = Operator(kind, network_bytes=size)  # type: ignore[arg-type]
    else:
        operator = Operator(kind, memory_bytes=size)  # type: ignore[arg-type]
    return TimedOperator(operator, float(operator_time_ms(operator, TRUTH, "float32")) * 1e-3)


def measurements() -> Measurements:
    operators = [timed(kind, size) for kind in KINDS for size in SIZES]
    return Measurements(operators, dict.fromkeys(KINDS, 5e-6))


def test_rate_subtracts_at_most_half_of_the_time() -> None:
    measured = TimedOperator(Operator("matmul", flops=1e6, memory_bytes=1e3), 1e-5)
    rates = [_Rate.of(measured, {"matmul": overhead_us}).per_s for overhead_us in (0.0, 2.0, 9.0)]
    assert rates == pytest.approx([1e11, 1.25e11, 2e11])


def test_fitted_profile_predicts_measured_times() -> None:
    timings = measurements()
    profile = fit_profile(timings, CPU, "float32", "here", use_measured_peaks=True)
    assert profile.measured_on == "here"
    for operator, seconds in timings.operators:
        predicted_ms = float(operator_time_ms(operator, profile, "float32"))
        # For very short operators, half of the time counts as work although it is overhead.
        assert predicted_ms == pytest.approx(seconds * 1e3, rel=0.01 if seconds > 2e-5 else 0.5)
    assert profile.device.peak_flops["float32"] == pytest.approx(2e11, rel=0.01)
    between = Operator("matmul", flops=3e7, memory_bytes=3e4)
    truth_ms = float(operator_time_ms(between, TRUTH, "float32"))
    assert float(operator_time_ms(between, profile, "float32")) == pytest.approx(truth_ms, rel=0.05)


def test_datasheet_peaks_scale_efficiencies() -> None:
    profile = fit_profile(
        measurements(), load_profile("a100"), "float32", "", use_measured_peaks=False
    )
    assert profile.device == load_profile("a100").device
    assert profile.efficiency["matmul"].at(1e9) == pytest.approx(2e11 / 19.5e12, rel=0.01)


def test_unmeasured_kinds_keep_assumed_efficiency() -> None:
    timings = [timed(kind, size) for kind in ("matmul", "copy") for size in SIZES]
    profile = fit_profile(Measurements(timings), CPU, "float32", "", use_measured_peaks=True)
    assert profile.efficiency["p2p"] == CPU.efficiency["p2p"]
    with pytest.raises(ValueError, match="no measurements of copy"):
        fit_profile(
            Measurements(timings[: len(SIZES)]), CPU, "float32", "", use_measured_peaks=True
        )


def test_call_overhead_matches_layer_timings() -> None:
    timings = replace(measurements(), layers=[(100.0, 2e-3), (300.0, 6e-3)])
    profile = fit_profile(timings, CPU, "float32", "", use_measured_peaks=True)
    assert profile.call_us["matmul"] == profile.call_us["norm"] == pytest.approx(20.0)
    assert profile.call_us["p2p"] == pytest.approx(5.0)
    assert profile.launch_us == 0
    queued = fit_profile(timings, load_profile("h100"), "float32", "", use_measured_peaks=False)
    assert queued.launch_us == pytest.approx(20.0)
    assert queued.host_us["matmul"] == pytest.approx(5.0)
    assert queued.call_us["matmul"] == load_profile("h100").call_us["matmul"]
    measured = replace(timings, tiny_device=dict.fromkeys(KINDS, 3e-6))
    queued = fit_profile(measured, load_profile("h100"), "float32", "", use_measured_peaks=False)
    assert (queued.host_us["matmul"], queued.call_us["matmul"]) == pytest.approx((5.0, 3.0))
    assert "all_gather" not in queued.host_us


def test_compiled_call_cost_is_fitted() -> None:
    operators = [
        Operator("matmul", calls=14.0),
        Operator("elementwise", calls=20.0),
        Operator("elementwise", calls=7.0, in_layer=False),
        Operator("compiled_call", calls=4.0),
    ]
    # 34 kernels of compiled code, 7 gradient sums by autograd, and 4 calls of 300 us.
    seconds = (34 * 5 + 7 * 20 + 4 * 300) * 1e-6
    compiled = TimedLayers(operators, seconds)
    timings = replace(measurements(), layers=[(100.0, 2e-3)], compiled=compiled)
    profile = fit_profile(timings, load_profile("h100"), "float32", "", use_measured_peaks=False)
    assert profile.call_us["compiled_call"] == pytest.approx(300.0)


def test_working_layers_determine_call_overhead() -> None:
    operators = [timed("matmul", 1e7).operator, timed("norm", 1e6).operator] * 2
    plain = fit_profile(measurements(), CPU, "float32", "", use_measured_peaks=True)
    work_s = (
        sum(float(operator_time_ms(o, replace(plain, call_us={}), "float32")) for o in operators)
        / 1e3
    )
    tiny = replace(measurements(), layers=[(100.0, 2e-3)])

    def fit(forward_us: float, backward_us: float) -> DeviceProfile:
        times_s = (work_s + 4 * rest_us * 1e-6 for rest_us in (forward_us, backward_us))
        working = [RealisticLayers(operators, operators, *times_s)]
        return fit_profile(
            replace(tiny, realistic=working), CPU, "float32", "", use_measured_peaks=True
        )

    profile = fit(70.0, 50.0)
    assert profile.call_us["copy"] == pytest.approx(50)
    assert profile.call_us["forward_call"] == pytest.approx(20)
    profile = fit(3.0, 3.0)  # at least half of the cost in tiny layers
    assert profile.call_us["copy"] == pytest.approx(10)
    assert profile.call_us["forward_call"] == 0


def test_repeated_measurements_are_averaged() -> None:
    first = replace(
        measurements(),
        layers=[(100.0, 2e-3)],
        realistic=[RealisticLayers([], [], 1.0, 3.0)],
        parallel={"tensor": TimedLayers([], 1.0)},
    )
    second = replace(
        measurements(),
        operators=[m._replace(seconds=3 * m.seconds) for m in measurements().operators],
        tiny=dict.fromkeys(KINDS, 15e-6),
        layers=[(100.0, 4e-3)],
        realistic=[RealisticLayers([], [], 3.0, 5.0)],
        parallel={"tensor": TimedLayers([], 2.0)},
    )
    assert mean_measurements(first) == replace(first, operators=list(first.operators))
    averaged = mean_measurements(first, second, second, first)
    for timing, mean in zip(first.operators, averaged.operators, strict=True):
        assert mean == (timing.operator, pytest.approx(2 * timing.seconds))
    assert averaged.tiny["copy"] == pytest.approx(10e-6)
    assert averaged.parallel == {"tensor": TimedLayers([], 1.5)}
    assert averaged.layers == [(100.0, pytest.approx(3e-3))]
    assert averaged.realistic == [RealisticLayers([], [], 2.0, 4.0)]


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_python_overhead_of_parallelism_is_fitted(device: str) -> None:
    base = load_profile(device)
    timings = replace(measurements(), layers=[(100.0, 2e-3)])
    plain = fit_profile(timings, base, "float32", "", use_measured_peaks=device == "cpu")
    host_us = {"tensor_linear": 50.0, "sequence_exchange": 30.0, "shard_unit": 400.0}
    truth = replace(plain, call_us={**plain.call_us, **host_us})  # type: ignore[dict-item]
    product = timed("matmul", 1e7).operator
    linears = Operator("tensor_linear", calls=14)
    operators = {
        "whole": [product, product],
        "tensor": [product, linears, Operator("all_reduce", network_bytes=1e6, calls=4)],
        "sequence": [product, linears, Operator("sequence_exchange", calls=8)],
        "shard": [
            product, Operator("all_gather", network_bytes=1e6), Operator("shard_unit", calls=2)
        ],
    }  # fmt: skip
    split = {}
    for name, layer_operators in operators.items():
        work = OperatorTotals.from_operators(layer_operators, truth, "float32", 1)
        both_ms = work.compute_ms + work.network_ms
        seconds = float((both_ms if device == "cpu" else work.host_ms)[0]) / 1e3
        split[name] = TimedLayers(layer_operators, seconds)
    profile = fit_profile(
        replace(timings, parallel=split), base, "float32", "", use_measured_peaks=device == "cpu"
    )
    for kind, us in host_us.items():
        assert profile.call_us[kind] == pytest.approx(us)  # type: ignore[index]
    # Operators that always take twice as long contain no information about sharding.
    slow = {name: layers._replace(seconds=layers.seconds * 2) for name, layers in split.items()}
    slow["shard"] = split["shard"]
    profile = fit_profile(
        replace(timings, parallel=slow), base, "float32", "", use_measured_peaks=device == "cpu"
    )
    assert profile.call_us["tensor_linear"] > 49 and profile.call_us["shard_unit"] < 400
    faster = {name: layers._replace(seconds=1e-9) for name, layers in split.items()}
    faster["whole"] = split["whole"]
    profile = fit_profile(
        replace(timings, parallel=faster), base, "float32", "", use_measured_peaks=False
    )
    assert all(profile.call_us[kind] == 0 for kind in host_us)  # type: ignore[index]


def test_close_sizes_use_median_time() -> None:
    good = [timed(kind, size) for kind in ("matmul", "copy") for size in SIZES]
    slow = [TimedOperator(m.operator, 9 * m.seconds) for m in good if m.operator.kind == "matmul"]
    steady = fit_profile(Measurements(good * 2 + slow), CPU, "float32", "", use_measured_peaks=True)
    clean = fit_profile(Measurements(good), CPU, "float32", "", use_measured_peaks=True)
    assert steady.efficiency == clean.efficiency


def test_learned_factors_match_observed_sums() -> None:
    observed = [
        *(ActionTiming("llm", "F", 2.0, ms) for ms in (2.0, 3.0, 2.5)),
        ActionTiming("llm", "F", 2.0, 80.0),  # interrupted
        ActionTiming("llm", "W", 0.0, 0.1),  # too short to learn from
        ActionTiming("vision", "B", 4.0, 2.0),
    ]
    learned = correct_profile(CPU, observed)
    assert learned.factors == {"llm": {"F": pytest.approx(1.25)}, "vision": {"B": 0.5}}
    # Predictions of the learned profile already include the factor.
    again = correct_profile(learned, [ActionTiming("llm", "F", 2.5, 5.0)])
    assert again.factor("llm", "F") == pytest.approx(2.5)
    assert again.factor("vision", "B") == 0.5


def test_learned_profile_reproduces_recorded_step() -> None:
    step = Step(Case("recorded", pipeline=2))
    costs = step.costs()
    slower = {"vision": 1.5, "llm": 0.8}
    records, clock_ms = [], 0.0
    for action, ms in costs.compute_ms.items():
        took_ms = ms * slower[step.graph.layout.stages[action.stage].module]
        records.append(ActionRecord(0, action, clock_ms, clock_ms + took_ms))
        clock_ms += took_ms
    content = StepContent(tuple(step.metas), tuple(step.targets))
    model = CostModel(CPU, "float32")
    recorded = RecordedStep(records, step.graph, content)
    learned = correct_profile(CPU, compare_action_times(recorded, step.modules, model))
    for module, factor in slower.items():
        assert list(learned.factors[module].values()) == pytest.approx([factor] * 4)
    updated = step.costs(CostModel(learned, "float32"))
    assert sum(updated.compute_ms.values()) == pytest.approx(clock_ms)


def test_steps_of_different_models_are_rejected() -> None:
    step, other = Step(Case("recorded", pipeline=2)), Step(Case("other", freeze=("vision", "llm")))
    action = next(a for a in step.costs().compute_ms if a not in other.costs().compute_ms)
    content = StepContent(tuple(other.metas), tuple(other.targets))
    recorded = RecordedStep([ActionRecord(0, action, 0.0, 1.0)], other.graph, content)
    with pytest.raises(ValueError, match="recorded run"):
        compare_action_times(recorded, other.modules, CostModel(CPU, "float32"))
