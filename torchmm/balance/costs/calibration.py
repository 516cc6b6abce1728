"""Calibration: fit device profiles to measurements, and correct them with recorded steps.

1. `scripts/calibrate.py` times operators of many sizes, and tiny layers whose time is overhead.
2. `fit_profile` computes efficiencies by operator class and size, and overheads per call.
3. `correct_profile` computes one factor per module and action type from recorded training steps. It
   corrects effects of caches, allocators and adjacent operators in a step.

Efficiencies are not fitted to steps. A step has fewer action types than unknowns, so the profile
would not transfer to other models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, floor, log, log10
from statistics import median
from typing import NamedTuple

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.common.layers import ModuleDescription
from torchmm.costs.devices import Device
from torchmm.costs.operators import (
    COMPUTE_KINDS,
    KINDS,
    NETWORK_KINDS,
    DeviceProfile,
    EfficiencyCurve,
    Operator,
    OperatorKind,
    OperatorTotals,
    efficiency_quantity,
    link_byte_fractions,
    operator_time_ms,
)
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.records import StepContent

POINTS_PER_DECADE = 2
"""Number of points of an efficiency curve per factor of 10 in size."""
OUTLIER_RATIO = 3.0
"""Maximum ratio of the time of an action to the median. Slower actions were interrupted."""


class TimedOperator(NamedTuple):
    """Operator, and its measured time for all of its calls, in seconds."""

    operator: Operator
    seconds: float


class RealisticLayers(NamedTuple):
    """Operators of layers of realistic size, and their measured times in seconds."""

    forward_operators: Sequence[Operator]
    backward_operators: Sequence[Operator]
    forward_s: float
    backward_s: float


class TimedLayers(NamedTuple):
    """Operators of layers on several ranks, and their measured time of forward and backward passes.

    On GPUs, the layers have negligible computation, so that the time is host time.
    """

    operators: Sequence[Operator]
    """Operators of one rank, including collectives and their host work."""
    seconds: float
    """Time of a forward and a backward pass."""


@dataclass(frozen=True)
class Measurements:
    """Measurements of one device.

    Attributes:
        operators: Measured operators of all relevant sizes.
        tiny: Time of a call with negligible work in seconds, by class. Host time on GPUs.
        layers: (calls, seconds) of forward and backward passes of layers with negligible work.
        realistic: Layers of realistic size. The difference to the sum of operator times is the
            overhead of calls without warm caches.
        parallel: Layers on several ranks, by parallelism: "whole", "tensor", "sequence" or "shard".
            Empty for one rank.
        compiled: Operators and time of compiled layers with negligible work. None if the device
            does not support compilation.
        tiny_device: Device time of a call with negligible work in seconds, by class, on GPUs.
    """

    operators: Sequence[TimedOperator]
    tiny: Mapping[OperatorKind, float] = field(default_factory=dict)
    layers: Sequence[tuple[float, float]] = ()
    realistic: Sequence[RealisticLayers] = ()
    parallel: Mapping[str, TimedLayers] = field(default_factory=dict)
    compiled: TimedLayers | None = None
    tiny_device: Mapping[OperatorKind, float] = field(default_factory=dict)


def fit_profile(
    measurements: Measurements,
    base: DeviceProfile,
    dtype: str,
    measured_on: str,
    *,
    use_measured_peaks: bool,
) -> DeviceProfile:
    """Fit a profile to the measurements of a device.

    Args:
        measurements: Measurements of the device.
        base: Profile with the data sheet, and with efficiencies of classes without measurements.
        dtype: Dtype of the matmuls.
        measured_on: Host and method of the measurement.
        use_measured_peaks: Whether to replace peaks of the data sheet by the maximum measured
            rates. Used for CPUs, which have no suitable data sheet.

    Raises:
        ValueError: Measurements of class "matmul" or "copy" are missing.
    """
    kinds = {m.operator.kind for m in measurements.operators}
    if missing := {"matmul", "copy"} - kinds:
        raise ValueError(f"no measurements of {', '.join(sorted(missing))}")
    tiny_us: dict[OperatorKind, float] = {
        kind: seconds * 1e6 for kind, seconds in measurements.tiny.items()
    }
    host_us: dict[OperatorKind, float] = {}
    if base.device.asynchronous:  # the time of a call without work is the queueing time
        host_us = {k: us for k, us in tiny_us.items() if k not in NETWORK_KINDS}
        device_us = {kind: seconds * 1e6 for kind, seconds in measurements.tiny_device.items()}
        tiny_us |= {kind: device_us.get(kind, base.call_us.get(kind, 0.0)) for kind in host_us}
    rates = [_Rate.of(m, tiny_us) for m in measurements.operators]
    device = _with_peaks(base.device, rates, dtype) if use_measured_peaks else base.device
    measured = {
        kind: _curve(of_kind, _peak(device, kind, dtype))
        for kind in kinds
        if (of_kind := [r for r in rates if r.kind == kind and not r.is_internode])
    }
    curves = {**base.efficiency, **measured}
    internode = [r for r in rates if r.is_internode]
    network = _curve(internode, device.network_bytes_per_s) if internode else base.network
    call_us = {**base.call_us, **tiny_us}
    launch_us = base.launch_us
    if measurements.layers:
        per_call_us = median(seconds / calls for calls, seconds in measurements.layers) * 1e6
        if device.asynchronous:
            launch_us = per_call_us
        else:
            # Calls inside layers include views, modules and autograd bookkeeping.
            without_overhead = DeviceProfile(device, curves)
            if measurements.realistic:
                forward_us = median(
                    _overhead_us(w.forward_operators, w.forward_s, without_overhead, dtype)
                    for w in measurements.realistic
                )
                backward_us = median(
                    _overhead_us(w.backward_operators, w.backward_s, without_overhead, dtype)
                    for w in measurements.realistic
                )
                per_call_us = max(per_call_us / 2, backward_us)
                call_us["forward_call"] = max(0.0, forward_us - per_call_us)
            call_us |= {k: per_call_us for k in KINDS if k not in NETWORK_KINDS}
    if measurements.parallel:
        unsharded = DeviceProfile(device, curves, call_us, launch_us, network=network)
        call_us |= _parallel_host_us(measurements.parallel, unsharded, dtype)
    profile = DeviceProfile(device, curves, call_us, launch_us, {}, measured_on, host_us, network)
    if measurements.compiled is not None:
        call_us["compiled_call"] = _compiled_call_us(measurements.compiled, profile, dtype)
    return profile


def _compiled_call_us(layers: TimedLayers, profile: DeviceProfile, dtype: str) -> float:
    """Return the host time to enter a compiled layer: measured time minus time of its kernels."""
    call_us = {**profile.call_us, "compiled_call": 0.0}
    work = OperatorTotals.from_operators(
        layers.operators, replace(profile, call_us=call_us), dtype, 1, compiled=True
    )
    calls = sum(float(np.sum(o.calls)) for o in layers.operators if o.kind == "compiled_call")
    return max(0.0, 1e6 * layers.seconds - 1e3 * float(work.host_ms[0])) / calls


PARALLEL_KINDS: dict[str, OperatorKind] = {
    "tensor": "tensor_linear",
    "sequence": "sequence_exchange",
    "shard": "shard_unit",
}
"""Host work of each parallelism of `Measurements.parallel`, in the order of fitting."""


def _parallel_host_us(
    parallel: Mapping[str, TimedLayers], profile: DeviceProfile, dtype: str
) -> dict[OperatorKind, float]:
    """Return the host time in us per call of layers on several ranks, by operator class."""
    calls_us = {**profile.call_us, **dict.fromkeys(PARALLEL_KINDS.values(), 0.0)}

    def predicted_ms(layers: TimedLayers) -> tuple[float, float]:
        """Return the time of operators and of collectives in ms."""
        work = OperatorTotals.from_operators(
            layers.operators, replace(profile, call_us=calls_us), dtype, 1
        )
        if profile.device.asynchronous:  # the time of small layers is queueing time
            return float(work.host_ms[0]), 0.0
        return float(work.compute_ms[0]), float(work.network_ms[0])

    # Correct the prediction error of operators at this size with the unsharded layers.
    slowdown = 1e3 * parallel["whole"].seconds / predicted_ms(parallel["whole"])[0]
    for name, kind in PARALLEL_KINDS.items():
        operators, seconds = parallel[name]
        compute_ms, network_ms = predicted_ms(parallel[name])
        calls = sum(float(np.sum(o.calls)) for o in operators if o.kind == kind)
        calls_us[kind] = 1e3 * max(0.0, 1e3 * seconds - slowdown * compute_ms - network_ms) / calls
    return {kind: calls_us[kind] for kind in PARALLEL_KINDS.values()}


def _overhead_us(
    operators: Sequence[Operator], seconds: float, profile: DeviceProfile, dtype: str
) -> float:
    """Return the measured time per call beyond the predicted time of operators, in us."""
    work_s = sum(float(np.sum(operator_time_ms(o, profile, dtype))) for o in operators) / 1e3
    return (seconds - work_s) / sum(float(np.sum(o.calls)) for o in operators) * 1e6


class _Rate(NamedTuple):
    """Measured rate of calls of one size, without call overhead."""

    kind: OperatorKind
    size: float
    per_s: float
    is_internode: bool
    """Whether the size is bytes per device between nodes."""

    @classmethod
    def of(cls, measured: TimedOperator, overhead_us: Mapping[OperatorKind, float]) -> _Rate:
        """Return the rate of a measured operator.

        Args:
            measured: Operator and time.
            overhead_us: Overhead per call, by class.
        """
        operator, seconds = measured
        calls = float(operator.calls)
        internode_fraction = link_byte_fractions(operator.kind, operator.link)[1]
        amount = float(efficiency_quantity(operator)) * (internode_fraction or 1.0)
        overhead = overhead_us.get(operator.kind, 0.0) * 1e-6 * calls
        # At most half of the time is overhead, because the difference is noise otherwise.
        work_s = max(seconds - overhead, seconds / 2)
        return cls(operator.kind, amount / calls, amount / work_s, internode_fraction > 0)


def _with_peaks(device: Device, rates: Sequence[_Rate], dtype: str) -> Device:
    """Return a device whose peaks are the maximum measured rates."""
    products = max(r.per_s for r in rates if r.kind == "matmul")
    # The largest copies do not fit in caches.
    copies = sorted((r for r in rates if r.kind == "copy"), key=lambda r: r.size)
    node = [r.per_s for r in rates if r.kind in NETWORK_KINDS and not r.is_internode]
    network = [r.per_s for r in rates if r.is_internode]
    return replace(
        device,
        peak_flops={**device.peak_flops, dtype: products},
        memory_bytes_per_s=copies[-1].per_s,
        node_bytes_per_s=max(node, default=device.node_bytes_per_s),
        network_bytes_per_s=max(network, default=device.network_bytes_per_s),
    )


def _peak(device: Device, kind: OperatorKind, dtype: str) -> float:
    """Return the peak rate of a class of operators, without the network between nodes."""
    if kind in COMPUTE_KINDS:
        return device.peak_flops[dtype]
    return device.node_bytes_per_s if kind in NETWORK_KINDS else device.memory_bytes_per_s


def _curve(rates: Sequence[_Rate], peak: float) -> EfficiencyCurve:
    """Return the efficiency by size: the median rate of each bin of sizes."""
    bins: dict[int, list[_Rate]] = {}
    for rate in rates:
        bins.setdefault(floor(log10(rate.size) * POINTS_PER_DECADE), []).append(rate)
    points = []
    for index in sorted(bins):
        in_bin = bins[index]
        size = exp(sum(log(r.size) for r in in_bin) / len(in_bin))
        points.append((size, median(r.per_s / peak for r in in_bin)))
    sizes, values = zip(*points, strict=True)
    return EfficiencyCurve(sizes, values)


class RecordedStep(NamedTuple):
    """Training step that was read from a file of recorded actions."""

    records: Sequence[ActionRecord]
    graph: StageGraph
    content: StepContent


class ActionTiming(NamedTuple):
    """Predicted and measured time of an action."""

    module: str
    action_type: str
    predicted_ms: float
    measured_ms: float


def compare_action_times(
    step: RecordedStep, modules: Sequence[ModuleDescription], model: CostModel
) -> list[ActionTiming]:
    """Return the predicted and measured time of every F, B, I and W of a recorded step.

    Args:
        step: Recorded step.
        modules: Complete descriptions of the modules of the recorded run.
        model: Cost model for the predictions.

    Raises:
        ValueError: `compute_plan_costs` raises, or the step has actions without costs, because it
            was recorded with different modules.
    """
    content = step.content
    costs = compute_plan_costs(
        step.graph, modules, content.microbatches, model, targets=content.targets
    )
    observed = []
    for record in step.records:
        action = record.action
        if action.type not in COMPUTE:
            continue
        if action not in costs.compute_ms:
            raise ValueError(
                f"recorded action {action} does not belong to a module of the recipe; use the "
                "recipe of the recorded run"
            )
        stage = step.graph.layout.stages[action.stage]
        took_ms = record.end_ms - record.start_ms
        predicted_ms = costs.compute_ms[action]
        observed.append(ActionTiming(stage.module, action.type.value, predicted_ms, took_ms))
    return observed


def correct_profile(profile: DeviceProfile, observed: Iterable[ActionTiming]) -> DeviceProfile:
    """Return a profile with factors that make the sums of predicted and measured times equal.

    Actions without a predicted time, and interrupted actions (`OUTLIER_RATIO`), are ignored.

    Args:
        profile: Profile that predicted `observed`.
        observed: Predicted and measured times of actions.
    """
    groups: dict[tuple[str, str], list[ActionTiming]] = {}
    for timing in observed:
        if timing.predicted_ms > 0 and timing.measured_ms > 0:
            groups.setdefault((timing.module, timing.action_type), []).append(timing)
    factors = {module: dict(of_module) for module, of_module in profile.factors.items()}
    for (module, kind), actions in groups.items():
        median_ratio = median(o.measured_ms / o.predicted_ms for o in actions)
        regular = [
            o for o in actions if o.measured_ms <= OUTLIER_RATIO * median_ratio * o.predicted_ms
        ]
        correction = sum(o.measured_ms for o in regular) / sum(o.predicted_ms for o in regular)
        factors.setdefault(module, {})[kind] = profile.factor(module, kind) * correction
    return replace(profile, factors=factors)
