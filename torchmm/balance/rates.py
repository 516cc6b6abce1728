"""Whether actions still take as long as steps are planned with, and what to plan with otherwise.

Planners weigh actions by FLOPs; how fast a device does those of each module and kind of action
follows from measured steps, as one rate each (Optimus §6, "online scheduling"). Rates are smoothed
over steps, so that one interrupted step changes little. Only rates compared with each other count:
a device that does everything slower needs no other plan.

Rejected: new plans after every step, which would differ by noise and hide what changed; rates by
rank, as a rank that is slow for good is to be replaced, not planned around.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from typing import NamedTuple

from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import ActionRecord, Durations

SMOOTHING = 0.5
"""Share of the newest step in a rate."""
SPREAD_STEPS, LEAST_STEPS = 20, 5
"""Steps whose predictions are compared with what was measured: at most, and at least."""
FINEST_GAIN, COARSEST_GAIN = 0.001, 0.05
"""Between these is what an order has to promise."""
NEGLIGIBLE = 0.01
"""Share of a step's time below which a kind of action drifts unnoticed."""

ActionKind = tuple[str, ActionType]
"""A module's name and F, B, I or W."""


class Total(NamedTuple):
    """All actions of a kind in a step."""

    measured_ms: float
    flops: float


class Change(NamedTuple):
    """A kind whose time moved."""

    kind: ActionKind
    times: float
    """What it takes now, as a multiple of what was planned with, relative to the whole step."""


@dataclass
class Rates:
    """What a FLOP of each kind of action takes, smoothed over the steps of a run.

    Attributes:
        ms_per_flop: by kind; kinds that never ran are missing.
    """

    ms_per_flop: dict[ActionKind, float] = field(default_factory=dict)

    def learn(self, totals: Mapping[ActionKind, Total]) -> None:
        """Takes in a step.

        Args:
            totals: of all ranks together, by kind.
        """
        for kind, (measured_ms, flops) in totals.items():
            if flops > 0 and measured_ms > 0:
                rate = measured_ms / flops
                old = self.ms_per_flop.get(kind, rate)
                self.ms_per_flop[kind] = SMOOTHING * rate + (1 - SMOOTHING) * old

    def complete(self, modules: Iterable[str]) -> dict[ActionKind, float]:
        """Rates of every kind of action of these modules; none before the first step.

        Modules without any work so far have the median of the others, and halves of a backward
        that never ran alone have the rate of the whole one.
        """
        if not self.ms_per_flop:
            return {}
        middle = median(self.ms_per_flop.values())
        found: dict[ActionKind, float] = {}
        for module in modules:
            backward = self.ms_per_flop.get((module, ActionType.B), middle)
            found[module, ActionType.F] = self.ms_per_flop.get((module, ActionType.F), middle)
            found[module, ActionType.B] = backward
            for half in (ActionType.I, ActionType.W):
                found[module, half] = self.ms_per_flop.get((module, half), backward)
        return found


@dataclass
class Spread:
    """How exact predictions of steps are: what a searched order has to promise to be taken.

    A prediction that is always wrong by the same share ranks orders as well as a right one, so the
    spread counts, not the error: the standard deviation of measured over predicted times in the
    latest steps, as a share of their mean. Rejected: a fixed share, which is too much where steps
    repeat to a thousandth, and too little on a busy host.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SPREAD_STEPS))
    """Measured over predicted times."""

    def observe(self, predicted_ms: float, measured_ms: float) -> None:
        """Takes in a step."""
        if predicted_ms > 0 and measured_ms > 0:
            self.ratios.append(measured_ms / predicted_ms)

    @property
    def least_gain(self) -> float | None:
        """Share by which an order has to be faster than others; None: too few steps to say."""
        if len(self.ratios) < LEAST_STEPS:
            return None
        share = stdev(self.ratios) / mean(self.ratios)
        return min(max(share, FINEST_GAIN), COARSEST_GAIN)


@dataclass
class DriftMonitor:
    """Factors on FLOPs with which to plan, kept up to date.

    Args:
        threshold: relative change of a kind's time, compared with the others', that asks for new
            plans.
        rates: learned from the same steps, before `observe`.

    Attributes:
        factors: by kind; 1 where none is given.
    """

    threshold: float
    rates: Rates
    factors: dict[ActionKind, float] = field(default_factory=dict)

    def observe(self, totals: Mapping[ActionKind, Total]) -> list[Change]:
        """Compares a step with the plans' factors.

        Args:
            totals: of all ranks together, by kind.

        Returns:
            What drifted too far, worst first; then `factors` are new. Empty otherwise.
        """
        ran = {kind: t for kind, t in totals.items() if t.flops > 0 and t.measured_ms > 0}
        if not ran:
            return []
        rates = self.rates.ms_per_flop
        now_ms = {kind: rates[kind] * total.flops for kind, total in ran.items()}
        planned = {kind: self.factors.get(kind, 1.0) * t.flops for kind, t in ran.items()}
        scale = sum(now_ms.values()) / sum(planned.values())
        times = {kind: now_ms[kind] / (scale * planned[kind]) for kind in ran}
        least_ms = NEGLIGIBLE * sum(now_ms.values())
        changes = [
            Change(kind, value)
            for kind, value in times.items()
            if now_ms[kind] >= least_ms and abs(value - 1) > self.threshold
        ]
        if changes:
            mean = sum(now_ms.values()) / sum(total.flops for total in ran.values())
            self.factors = {kind: rate / mean for kind, rate in rates.items()}
        return sorted(changes, key=lambda change: -abs(change.times - 1))


def step_totals(
    records: Iterable[ActionRecord], graph: StageGraph, durations: Durations
) -> dict[ActionKind, Total]:
    """Measured time and FLOPs of a rank's actions by kind.

    Args:
        durations: FLOPs of the step's actions, without factors.
    """
    found: dict[ActionKind, Total] = {}
    for record in records:
        action = record.action
        if action.type in COMPUTE:
            kind = graph.layout.stages[action.stage].module, action.type
            measured_ms, flops = found.get(kind, Total(0.0, 0.0))
            measured_ms += record.end_ms - record.start_ms
            found[kind] = Total(measured_ms, flops + durations(action))
    return found


def scaled(
    durations: Durations, graph: StageGraph, factors: Mapping[ActionKind, float] | None
) -> Durations:
    """Durations with the factors of their kinds."""
    if not factors:
        return durations
    modules = [stage.module for stage in graph.layout.stages]

    def found(action: Action) -> float:
        return durations(action) * factors.get((modules[action.stage], action.type), 1.0)

    return found
