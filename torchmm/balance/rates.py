"""Whether actions still take as long as steps are planned with, and what to plan with otherwise.

Planners weigh actions by FLOPs, or by a model's times; how fast a device does the FLOPs of each
module and kind of action follows from measured steps, as one rate each (Optimus §6, "online
scheduling"). Rates are smoothed over steps, so that one interrupted step changes little. Only rates
compared with each other count: a device that does everything slower needs no other plan.

Orders of single actions are searched with more than that: what an action takes on its rank is a
constant, which small actions consist of, and a rate (`ActionTimes`). Both follow from the same
sums, of which ranks add up five numbers for each of their kinds of actions after a step.

Rejected: new plans after every step, which would differ by noise and hide what changed; a drift by
rank, as a rank that is slow for good is to be replaced: until then orders are searched with its
times, but no plan is made anew for them.
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

STEADINESS = 0.01
"""How far work has to vary, as the square of its relative deviation, for half of the constant that
fits best to be believed: where all actions are alike, constant and rate cannot be told apart."""
MOST_CONSTANT = 0.9
"""Share of a mean action that its constant can be."""

ActionKind = tuple[str, ActionType]
"""A module's name and F, B, I or W."""
RankKind = tuple[int, str, ActionType]
"""The same of a rank of the plan."""


class Total(NamedTuple):
    """All actions of a kind in a step: sums over them. Its time may be a model's."""

    measured_ms: float
    flops: float
    actions: float = 0.0
    flops_squared: float = 0.0
    ms_times_flops: float = 0.0

    def plus(self, other: Total, share: float = 1.0, own: float = 1.0) -> Total:
        """Both, each times a factor."""
        return Total(*(own * a + share * b for a, b in zip(self, other, strict=True)))


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
        for kind, total in totals.items():
            if total.flops > 0 and total.measured_ms > 0:
                rate = total.measured_ms / total.flops
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


class ActionFit(NamedTuple):
    """What an action of a kind takes on a rank."""

    constant_ms: float
    ms_per_flop: float


@dataclass
class ActionTimes:
    """What actions of each rank take, smoothed over the steps of a run.

    Attributes:
        totals: of a step; kinds that never ran on a rank are missing.
    """

    totals: dict[RankKind, Total] = field(default_factory=dict)

    def learn(self, totals: Mapping[RankKind, Total]) -> None:
        """Takes in a step."""
        for key, new in totals.items():
            if new.flops > 0 and new.measured_ms > 0:
                old = self.totals.get(key, new)
                self.totals[key] = old.plus(new, SMOOTHING, 1 - SMOOTHING)

    def fits(self) -> dict[RankKind, ActionFit]:
        """The best line through the actions of each kind, bent towards one through zero where their
        work hardly differs. A step's actions of a kind together take what was measured."""
        return {key: _line(total) for key, total in self.totals.items() if total.actions > 0}


def _line(total: Total) -> ActionFit:
    """Least squares, in which a constant costs as much as if `STEADINESS` of the actions had no
    work and took no time."""
    ms, flops, count, squares, products = total
    determinant = (1 + STEADINESS) * count * squares - flops**2
    constant_ms = (ms * squares - flops * products) / determinant if determinant > 0 else 0.0
    constant_ms = min(max(constant_ms, 0.0), MOST_CONSTANT * ms / count)
    return ActionFit(constant_ms, (ms - count * constant_ms) / flops)


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
        ms_per_flop: the measured rates behind them; none before anything drifted.
    """

    threshold: float
    rates: Rates
    factors: dict[ActionKind, float] = field(default_factory=dict)
    ms_per_flop: dict[ActionKind, float] = field(default_factory=dict)

    def expect(self, totals: Mapping[ActionKind, Total]) -> None:
        """Takes the times that the first plans are made with, where these are not FLOPs."""
        ran = {kind: t for kind, t in totals.items() if t.flops > 0 and t.measured_ms > 0}
        if not self.factors and ran:
            mean = sum(t.measured_ms for t in ran.values()) / sum(t.flops for t in ran.values())
            self.factors = {kind: t.measured_ms / t.flops / mean for kind, t in ran.items()}

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
            self.ms_per_flop = dict(rates)
        return sorted(changes, key=lambda change: -abs(change.times - 1))


def rank_totals(
    records: Iterable[ActionRecord], graph: StageGraph, durations: Durations
) -> dict[RankKind, Total]:
    """Measured time and FLOPs of actions by rank and kind.

    Args:
        durations: FLOPs of the step's actions, without factors.
    """
    found: dict[RankKind, Total] = {}
    for record in records:
        action = record.action
        if action.type in COMPUTE:
            key = record.rank, graph.layout.stages[action.stage].module, action.type
            ms = record.end_ms - record.start_ms
            flops = durations(action)
            own = Total(ms, flops, 1.0, flops**2, ms * flops)
            found[key] = found.get(key, Total(0.0, 0.0)).plus(own)
    return found


def step_totals(totals: Mapping[RankKind, Total]) -> dict[ActionKind, Total]:
    """Of all ranks together."""
    found: dict[ActionKind, Total] = {}
    for (_, module, kind), total in totals.items():
        found[module, kind] = found.get((module, kind), Total(0.0, 0.0)).plus(total)
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
