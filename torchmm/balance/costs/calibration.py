"""From measurements to a device profile, and from recorded steps to better ones.

`scripts/calibrate.py` times single operators of many sizes, and tiny whole layers, which are all
overhead. `fit_profile` turns that into efficiencies by class and size of operator and overheads per
call. What is left, because caches, allocators and neighbours differ inside of a step, `learn` takes
from recorded steps of training: one factor per module and type of action.

Rejected: fitting all efficiencies to steps at once; a step has fewer kinds of actions than there
are unknowns, and a profile so fitted says nothing about another model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, floor, log, log10
from statistics import median
from typing import NamedTuple

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.common.layers import ModuleDescription
from torchmm.costs.devices import Device
from torchmm.costs.operators import (
    COMPUTE_KINDS,
    KINDS,
    NETWORK_KINDS,
    Curve,
    Kind,
    Operator,
    Profile,
    Work,
    main_quantity,
    operator_ms,
    stage_shares,
)
from torchmm.pipelining.plan.actions import COMPUTE
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ActionRecord
from torchmm.pipelining.view.records import StepContent

POINTS_PER_DECADE = 2
OUTLIER = 3.0
"""Actions that took this many times longer than is usual for their kind were interrupted."""


class Measured(NamedTuple):
    """An operator and how long it took, per run of all its calls."""

    operator: Operator
    seconds: float


class WorkingLayers(NamedTuple):
    """Layers that compute, and how long they take."""

    forward_operators: Sequence[Operator]
    backward_operators: Sequence[Operator]
    forward_s: float
    backward_s: float


class SplitLayers(NamedTuple):
    """Layers on several ranks, and how long forward and backward take; on devices that only queue
    work, layers too small to compute anything."""

    operators: Sequence[Operator]
    """Of a rank, with collectives and what Python does for them."""
    seconds: float


@dataclass(frozen=True)
class Measurements:
    """What was measured on one device.

    Attributes:
        operators: of all sizes that matter.
        tiny: by class: seconds of a call that does next to nothing; of the host, if it only queues.
        layers: (calls, seconds) of forward and backward of whole layers that are all overhead.
        compiled: operators and seconds of compiled layers that are all overhead. None if nothing
            compiles for the device.
        working: of layers that do something: what is left of their time is the overhead of calls
            whose code other calls have driven out of caches.
        split: by how layers are on several ranks ("whole", "tensor", "sequence", "shard"); empty:
            there is one.
        tiny_device: Seconds on the device of a call that does next to nothing, by class, if the
            host only queues calls.
    """

    operators: Sequence[Measured]
    tiny: Mapping[Kind, float] = field(default_factory=dict)
    layers: Sequence[tuple[float, float]] = ()
    working: Sequence[WorkingLayers] = ()
    split: Mapping[str, SplitLayers] = field(default_factory=dict)
    compiled: SplitLayers | None = None
    tiny_device: Mapping[Kind, float] = field(default_factory=dict)


def fit_profile(
    found: Measurements, base: Profile, dtype: str, measured_on: str, *, own_peaks: bool
) -> Profile:
    """The profile of the measured device.

    Args:
        base: gives the data sheet, and the efficiencies of classes that were not measured.
        dtype: of the matrix products.
        measured_on: where and how.
        own_peaks: replace the data sheet's peaks by the best rates measured (CPUs, which have no
            useful data sheet).

    Raises:
        ValueError: a class that a cost model cannot do without was not measured.
    """
    kinds = {m.operator.kind for m in found.operators}
    if missing := {"matmul", "copy"} - kinds:
        raise ValueError(f"no measurements of {', '.join(sorted(missing))}")
    tiny_us: dict[Kind, float] = {kind: seconds * 1e6 for kind, seconds in found.tiny.items()}
    host_us: dict[Kind, float] = {}
    if base.device.asynchronous:  # a call that does nothing shows what the host takes to queue it
        host_us = {k: us for k, us in tiny_us.items() if k not in NETWORK_KINDS}
        own_us = {kind: seconds * 1e6 for kind, seconds in found.tiny_device.items()}
        tiny_us |= {kind: own_us.get(kind, base.call_us.get(kind, 0.0)) for kind in host_us}
    rates = [_Rate.of(m, tiny_us) for m in found.operators]
    device = _with_peaks(base.device, rates, dtype) if own_peaks else base.device
    measured = {
        kind: _curve(own, _peak(device, kind, dtype))
        for kind in kinds
        if (own := [r for r in rates if r.kind == kind and not r.between])
    }
    curves = {**base.efficiency, **measured}
    between = [r for r in rates if r.between]
    network = _curve(between, device.network_bytes_per_s) if between else base.network
    call_us = {**base.call_us, **tiny_us}
    launch_us = base.launch_us
    if found.layers:
        per_call_us = median(seconds / calls for calls, seconds in found.layers) * 1e6
        if device.asynchronous:
            launch_us = per_call_us
        else:
            # Inside layers, calls come with views, modules and autograd's bookkeeping.
            alone = Profile(device, curves)
            if found.working:
                forward_us = median(
                    _rest_us(w.forward_operators, w.forward_s, alone, dtype) for w in found.working
                )
                backward_us = median(
                    _rest_us(w.backward_operators, w.backward_s, alone, dtype)
                    for w in found.working
                )
                per_call_us = max(per_call_us / 2, backward_us)
                call_us["forward_call"] = max(0.0, forward_us - per_call_us)
            call_us |= {k: per_call_us for k in KINDS if k not in NETWORK_KINDS}
    if found.split:
        whole = Profile(device, curves, call_us, launch_us, network=network)
        call_us |= _host_us(found.split, whole, dtype)
    profile = Profile(device, curves, call_us, launch_us, {}, measured_on, host_us, network)
    if found.compiled is not None:
        call_us["compiled_call"] = _compiled_call_us(found.compiled, profile, dtype)
    return profile


def _compiled_call_us(layers: SplitLayers, profile: Profile, dtype: str) -> float:
    """Return the host time to enter a compiled layer: the time that its kernels leave."""
    call_us = {**profile.call_us, "compiled_call": 0.0}
    work = Work.of(layers.operators, replace(profile, call_us=call_us), dtype, 1, compiled=True)
    calls = sum(float(np.sum(o.calls)) for o in layers.operators if o.kind == "compiled_call")
    return max(0.0, 1e6 * layers.seconds - 1e3 * float(work.host_ms[0])) / calls


SPLIT_KINDS: dict[str, Kind] = {
    "tensor": "tensor_linear",
    "sequence": "sequence_exchange",
    "shard": "shard_unit",
}
"""By how layers are split: what Python takes for it, in the order in which it is found."""


def _host_us(split: Mapping[str, SplitLayers], profile: Profile, dtype: str) -> dict[Kind, float]:
    """What layers of several ranks take beyond their operators and collectives, by call."""
    calls_us = {**profile.call_us, **dict.fromkeys(SPLIT_KINDS.values(), 0.0)}

    def predicted_ms(layers: SplitLayers) -> tuple[float, float]:
        """On a rank by itself, and of collectives."""
        work = Work.of(layers.operators, replace(profile, call_us=calls_us), dtype, 1)
        if profile.device.asynchronous:  # layers were too small for anything but queueing
            return float(work.host_ms[0]), 0.0
        return float(work.compute_ms[0]), float(work.network_ms[0])

    # By how much operators are mispredicted at this size is nothing that splitting them costs.
    slower = 1e3 * split["whole"].seconds / predicted_ms(split["whole"])[0]
    for name, kind in SPLIT_KINDS.items():
        operators, seconds = split[name]
        own_ms, sent_ms = predicted_ms(split[name])
        calls = sum(float(np.sum(o.calls)) for o in operators if o.kind == kind)
        calls_us[kind] = 1e3 * max(0.0, 1e3 * seconds - slower * own_ms - sent_ms) / calls
    return {kind: calls_us[kind] for kind in SPLIT_KINDS.values()}


def _rest_us(operators: Sequence[Operator], seconds: float, profile: Profile, dtype: str) -> float:
    """Per call: what operators took beyond their work."""
    work_s = sum(float(np.sum(operator_ms(o, profile, dtype))) for o in operators) / 1e3
    return (seconds - work_s) / sum(float(np.sum(o.calls)) for o in operators) * 1e6


class _Rate(NamedTuple):
    """Work per second of calls of one size, without their overhead."""

    kind: Kind
    size: float
    per_s: float
    between: bool
    """Whether bytes are those that pass the network between nodes, per device."""

    @classmethod
    def of(cls, measured: Measured, overhead_us: Mapping[Kind, float]) -> _Rate:
        operator, seconds = measured
        calls = float(operator.calls)
        between = stage_shares(operator.kind, operator.link)[1]
        amount = float(main_quantity(operator)) * (between or 1.0)
        overhead = overhead_us.get(operator.kind, 0.0) * 1e-6 * calls
        # Never more than half: where overhead is nearly all, what is left is noise.
        own = max(seconds - overhead, seconds / 2)
        return cls(operator.kind, amount / calls, amount / own, between > 0)


def _with_peaks(device: Device, rates: Sequence[_Rate], dtype: str) -> Device:
    """A device whose peaks are the best rates that were measured."""
    products = max(r.per_s for r in rates if r.kind == "matmul")
    # Of the largest copies, which no cache holds.
    copies = sorted((r for r in rates if r.kind == "copy"), key=lambda r: r.size)
    node = [r.per_s for r in rates if r.kind in NETWORK_KINDS and not r.between]
    network = [r.per_s for r in rates if r.between]
    return replace(
        device,
        peak_flops={**device.peak_flops, dtype: products},
        memory_bytes_per_s=copies[-1].per_s,
        node_bytes_per_s=max(node, default=device.node_bytes_per_s),
        network_bytes_per_s=max(network, default=device.network_bytes_per_s),
    )


def _peak(device: Device, kind: Kind, dtype: str) -> float:
    """Return the peak rate of a class of operators, without the network between nodes."""
    if kind in COMPUTE_KINDS:
        return device.peak_flops[dtype]
    return device.node_bytes_per_s if kind in NETWORK_KINDS else device.memory_bytes_per_s


def _curve(rates: Sequence[_Rate], peak: float) -> Curve:
    """Efficiency by size: of sizes that are near each other, the median."""
    bins: dict[int, list[_Rate]] = {}
    for rate in rates:
        bins.setdefault(floor(log10(rate.size) * POINTS_PER_DECADE), []).append(rate)
    points = []
    for index in sorted(bins):
        own = bins[index]
        size = exp(sum(log(r.size) for r in own) / len(own))
        points.append((size, median(r.per_s / peak for r in own)))
    sizes, values = zip(*points, strict=True)
    return Curve(sizes, values)


class RecordedStep(NamedTuple):
    """A step of training as its file gives it."""

    records: Sequence[ActionRecord]
    graph: StageGraph
    content: StepContent


class Observed(NamedTuple):
    """An action that ran."""

    module: str
    action_type: str
    predicted_ms: float
    measured_ms: float


def observe(
    step: RecordedStep, modules: Sequence[ModuleDescription], model: CostModel
) -> list[Observed]:
    """Predicted and measured time of every F, B, I and W of a recorded step.

    Raises:
        ValueError: what `plan_costs` raises, or the step has actions that the model has no costs
            of: it was recorded with other modules.
    """
    content = step.content
    costs = plan_costs(step.graph, modules, content.microbatches, model, targets=content.targets)
    found = []
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
        found.append(Observed(stage.module, action.type.value, predicted_ms, took_ms))
    return found


def learn(profile: Profile, observed: Iterable[Observed]) -> Profile:
    """A profile whose factors make predictions add up to what was measured.

    Actions without a predicted time teach nothing, and those that took far longer than is usual
    for their kind were interrupted.

    Args:
        profile: with which `observed` was predicted.
    """
    groups: dict[tuple[str, str], list[Observed]] = {}
    for each in observed:
        if each.predicted_ms > 0 and each.measured_ms > 0:
            groups.setdefault((each.module, each.action_type), []).append(each)
    factors = {module: dict(own) for module, own in profile.factors.items()}
    for (module, kind), own in groups.items():
        usual = median(o.measured_ms / o.predicted_ms for o in own)
        kept = [o for o in own if o.measured_ms <= OUTLIER * usual * o.predicted_ms]
        correction = sum(o.measured_ms for o in kept) / sum(o.predicted_ms for o in kept)
        factors.setdefault(module, {})[kind] = profile.factor(module, kind) * correction
    return replace(profile, factors=factors)
