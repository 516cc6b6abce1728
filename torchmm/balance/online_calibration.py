"""Online calibration: measured rates of actions, and detection of changes.

Planners weigh actions by FLOPs or by modeled times. The speed of a device for each module and
action type follows from measured steps, as one rate each (Optimus §6, "online scheduling"):

    records of a step --> sums by kind (all-reduced) --> Rates        ms per FLOP, smoothed
                                                     --> ActionTimes  constant + rate, by rank
                                                     --> DriftMonitor plan again if rates change

Rates are smoothed over steps, so one interrupted step changes little. Only ratios of rates matter:
a device that is uniformly slower needs no other plan.

Searches for orders of single actions use more detail. The time of an action on its rank is a
constant, which dominates small actions, plus a rate (`ActionTimes`). Both follow from the same
sums. Ranks add up five numbers per kind after a step.

Plans are not replaced after every step, because they would differ by noise. Drift is not monitored
per rank, because a permanently slow rank should be replaced. Until then, searches use its times.
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
"""Weight of the newest step in a rate."""
MAX_COMPARED_STEPS, MIN_COMPARED_STEPS = 20, 5
"""Maximum and minimum number of steps whose predictions are compared with measurements."""
LOWEST_MIN_GAIN, HIGHEST_MIN_GAIN = 0.001, 0.05
"""Lower and upper limit of the predicted gain that an order must have."""
NEGLIGIBLE_FRACTION = 0.01
"""Fraction of the step time below which drift of an action kind is ignored."""

REGULARIZATION = 0.01
"""Squared relative deviation of work at which half of the best constant is used. If all actions
have equal work, constant and rate cannot be distinguished."""
MAX_CONSTANT_FRACTION = 0.9
"""Maximum constant as a fraction of a mean action."""

ActionKind = tuple[str, ActionType]
"""Module name and action type F, B, I or W."""
RankKind = tuple[int, str, ActionType]
"""Rank of the plan, module name and action type."""


class ActionTotals(NamedTuple):
    """Sums over all actions of a kind in a step. The time can be measured or modeled."""

    measured_ms: float
    flops: float
    actions: float = 0.0
    flops_squared: float = 0.0
    ms_times_flops: float = 0.0

    def plus(
        self, other: ActionTotals, other_weight: float = 1.0, self_weight: float = 1.0
    ) -> ActionTotals:
        """Return the weighted sum of two totals."""
        return ActionTotals(
            *(self_weight * a + other_weight * b for a, b in zip(self, other, strict=True))
        )


class RateChange(NamedTuple):
    """Action kind whose time has changed."""

    kind: ActionKind
    ratio: float
    """Ratio of the current to the planned time, relative to the complete step."""


@dataclass
class ActionRates:
    """Time per FLOP of each action kind, smoothed over the steps of a run.

    Attributes:
        ms_per_flop: Rate of each kind. Kinds that never ran are missing.
    """

    ms_per_flop: dict[ActionKind, float] = field(default_factory=dict)

    def update(self, totals: Mapping[ActionKind, ActionTotals]) -> None:
        """Update the rates with a step.

        Args:
            totals: Totals of all ranks together, by kind.
        """
        for kind, total in totals.items():
            if total.flops > 0 and total.measured_ms > 0:
                rate = total.measured_ms / total.flops
                old = self.ms_per_flop.get(kind, rate)
                self.ms_per_flop[kind] = SMOOTHING * rate + (1 - SMOOTHING) * old

    def fill_missing(self, modules: Iterable[str]) -> dict[ActionKind, float]:
        """Return the rates of every action kind of the given modules. Empty before the first step.

        Modules without any work have the median of all rates. I and W actions that never ran have
        the rate of B.
        """
        if not self.ms_per_flop:
            return {}
        middle = median(self.ms_per_flop.values())
        completed: dict[ActionKind, float] = {}
        for module in modules:
            backward = self.ms_per_flop.get((module, ActionType.B), middle)
            completed[module, ActionType.F] = self.ms_per_flop.get((module, ActionType.F), middle)
            completed[module, ActionType.B] = backward
            for half in (ActionType.I, ActionType.W):
                completed[module, half] = self.ms_per_flop.get((module, half), backward)
        return completed


class ActionTimeFit(NamedTuple):
    """Linear model of the time of an action kind on a rank."""

    constant_ms: float
    ms_per_flop: float


@dataclass
class ActionTimes:
    """Times of the actions of each rank, smoothed over the steps of a run.

    Attributes:
        totals: Totals of a step. Kinds that never ran on a rank are missing.
    """

    totals: dict[RankKind, ActionTotals] = field(default_factory=dict)

    def update(self, totals: Mapping[RankKind, ActionTotals]) -> None:
        """Update the totals with a step."""
        for key, new in totals.items():
            if new.flops > 0 and new.measured_ms > 0:
                old = self.totals.get(key, new)
                self.totals[key] = old.plus(new, SMOOTHING, 1 - SMOOTHING)

    def fit_lines(self) -> dict[RankKind, ActionTimeFit]:
        """Return the best line through the actions of each kind.

        If the work of actions hardly differs, the line is moved towards one through zero. The total
        time of a step is preserved.
        """
        return {key: _fit_line(total) for key, total in self.totals.items() if total.actions > 0}


def _fit_line(total: ActionTotals) -> ActionTimeFit:
    """Return a regularized least-squares line.

    The regularization adds a fraction of `REGULARIZATION` of actions without work and time.
    """
    ms, flops, count, squares, products = total
    determinant = (1 + REGULARIZATION) * count * squares - flops**2
    constant_ms = (ms * squares - flops * products) / determinant if determinant > 0 else 0.0
    constant_ms = min(max(constant_ms, 0.0), MAX_CONSTANT_FRACTION * ms / count)
    return ActionTimeFit(constant_ms, (ms - count * constant_ms) / flops)


@dataclass
class PredictionSpread:
    """Accuracy of step predictions, which determines the required gain of a searched order.

    A prediction with a constant relative error ranks orders correctly, so the spread matters and
    not the error. It is the standard deviation of measured over predicted times in the latest
    steps, relative to their mean. A fixed fraction would be too large if steps repeat within 0.1 %,
    and too small on a busy host.
    """

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_COMPARED_STEPS))
    """Measured over predicted times."""

    def observe(self, predicted_ms: float, measured_ms: float) -> None:
        """Add a step."""
        if predicted_ms > 0 and measured_ms > 0:
            self.ratios.append(measured_ms / predicted_ms)

    @property
    def min_gain(self) -> float | None:
        """Minimum relative gain of an order. None if too few steps were observed."""
        if len(self.ratios) < MIN_COMPARED_STEPS:
            return None
        share = stdev(self.ratios) / mean(self.ratios)
        return min(max(share, LOWEST_MIN_GAIN), HIGHEST_MIN_GAIN)


@dataclass
class DriftMonitor:
    """Monitor that updates the factors on FLOPs with which steps are planned.

    Args:
        threshold: Relative change of the time of a kind, compared with the other kinds, that
            requires new plans.
        rates: Rates of the same steps, updated before `observe`.

    Attributes:
        factors: Factor of each kind. 1 for missing kinds.
        ms_per_flop: Measured rates of the factors. Empty before any drift.
    """

    threshold: float
    rates: ActionRates
    factors: dict[ActionKind, float] = field(default_factory=dict)
    ms_per_flop: dict[ActionKind, float] = field(default_factory=dict)

    def set_prior(self, totals: Mapping[ActionKind, ActionTotals]) -> None:
        """Set the times of the first plans if these are not FLOPs."""
        ran = {kind: t for kind, t in totals.items() if t.flops > 0 and t.measured_ms > 0}
        if not self.factors and ran:
            mean = sum(t.measured_ms for t in ran.values()) / sum(t.flops for t in ran.values())
            self.factors = {kind: t.measured_ms / t.flops / mean for kind, t in ran.items()}

    def observe(self, totals: Mapping[ActionKind, ActionTotals]) -> list[RateChange]:
        """Compare a step with the factors of the plans.

        Args:
            totals: Totals of all ranks together, by kind.

        Returns:
            Kinds with too much drift, largest first, or an empty list. `factors` are updated if it
            is not empty.
        """
        ran = {kind: t for kind, t in totals.items() if t.flops > 0 and t.measured_ms > 0}
        if not ran:
            return []
        rates = self.rates.ms_per_flop
        now_ms = {kind: rates[kind] * total.flops for kind, total in ran.items()}
        planned = {kind: self.factors.get(kind, 1.0) * t.flops for kind, t in ran.items()}
        scale = sum(now_ms.values()) / sum(planned.values())
        times = {kind: now_ms[kind] / (scale * planned[kind]) for kind in ran}
        least_ms = NEGLIGIBLE_FRACTION * sum(now_ms.values())
        changes = [
            RateChange(kind, value)
            for kind, value in times.items()
            if now_ms[kind] >= least_ms and abs(value - 1) > self.threshold
        ]
        if changes:
            mean = sum(now_ms.values()) / sum(total.flops for total in ran.values())
            self.factors = {kind: rate / mean for kind, rate in rates.items()}
            self.ms_per_flop = dict(rates)
        return sorted(changes, key=lambda change: -abs(change.ratio - 1))


def sum_by_rank(
    records: Iterable[ActionRecord], graph: StageGraph, durations: Durations
) -> dict[RankKind, ActionTotals]:
    """Return measured time and FLOPs of actions by rank and kind.

    Args:
        records: Records of the actions of a step.
        graph: Tasks of the step.
        durations: FLOPs of the actions, without factors.
    """
    totals: dict[RankKind, ActionTotals] = {}
    for record in records:
        action = record.action
        if action.type in COMPUTE:
            key = record.rank, graph.layout.stages[action.stage].module, action.type
            ms = record.end_ms - record.start_ms
            flops = durations(action)
            total = ActionTotals(ms, flops, 1.0, flops**2, ms * flops)
            totals[key] = totals.get(key, ActionTotals(0.0, 0.0)).plus(total)
    return totals


def sum_over_ranks(totals: Mapping[RankKind, ActionTotals]) -> dict[ActionKind, ActionTotals]:
    """Return the totals of all ranks together."""
    summed: dict[ActionKind, ActionTotals] = {}
    for (_, module, kind), total in totals.items():
        summed[module, kind] = summed.get((module, kind), ActionTotals(0.0, 0.0)).plus(total)
    return summed


def scale_durations(
    durations: Durations, graph: StageGraph, factors: Mapping[ActionKind, float] | None
) -> Durations:
    """Return durations multiplied by the factors of their kinds."""
    if not factors:
        return durations
    modules = [stage.module for stage in graph.layout.stages]

    def scaled_duration(action: Action) -> float:
        return durations(action) * factors.get((modules[action.stage], action.type), 1.0)

    return scaled_duration
