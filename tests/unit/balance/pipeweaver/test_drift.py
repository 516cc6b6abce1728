"""Tests of drift: when measured times require new plans, and the effect of new plans."""

import random

import pytest

from torchmm.balance.online_calibration import (
    ActionRates,
    ActionTotals,
    DriftMonitor,
    PredictionSpread,
    RateChange,
    scale_durations,
    sum_by_rank,
    sum_over_ranks,
)
from torchmm.balance.schedules import OPTIMUS_SCHEDULE, relative_costs
from torchmm.balance.simulation.simulator import simulate
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import ActionRecord, PipelinePlan
from torchmm.pipelining.schedules.layouts import ModuleLayers
from torchmm.recipe.parallel_section import ParallelConfig

F, B = ActionType.F, ActionType.B
FLOPS = {("vision", F): 1e9, ("vision", B): 2e9, ("llm", F): 1e10, ("llm", B): 2e10}


def step(ms_per_flop: float = 1e-8, **slower: float) -> dict[tuple[str, ActionType], ActionTotals]:
    """Return the totals of a step in which some modules are slower."""
    return {
        kind: ActionTotals(ms_per_flop * slower.get(kind[0], 1.0) * flops, flops)
        for kind, flops in FLOPS.items()
    }


class WatchedRates:
    """Rates and their drift monitor, as in a run."""

    def __init__(self, threshold: float) -> None:
        self.rates = ActionRates()
        self.monitor = DriftMonitor(threshold, self.rates)

    def observe(self, totals: dict[tuple[str, ActionType], ActionTotals]) -> list[RateChange]:
        self.rates.update(totals)
        return self.monitor.observe(totals)

    @property
    def factors(self) -> dict[tuple[str, ActionType], float]:
        return self.monitor.factors


def test_missing_rates_are_completed():
    rates = ActionRates()
    assert rates.fill_missing(["vision", "llm"]) == {}
    rates.update(
        {
            ("llm", F): ActionTotals(1.0, 1e3),
            ("llm", B): ActionTotals(4.0, 1e3),
            ("vision", F): ActionTotals(0.0, 0.0),
        }
    )
    completed = rates.fill_missing(["vision", "llm"])
    assert completed["llm", ActionType.W] == completed["llm", B] == pytest.approx(4e-3)
    assert completed["vision", F] == completed["vision", ActionType.I] == pytest.approx(2.5e-3)
    rates.update({("llm", F): ActionTotals(3.0, 1e3)})
    assert rates.ms_per_flop["llm", F] == pytest.approx(2e-3), "the rate is not smoothed"


def test_uniform_slowdown_is_no_drift():
    monitor = WatchedRates(0.1)
    assert monitor.observe(step()) == []
    assert monitor.observe(step(5e-8)) == []
    assert monitor.factors == {}


def test_slower_module_is_replanned_once():
    monitor, changed = WatchedRates(0.1), []
    for number in range(12):
        changes = monitor.observe(step(vision=3.0 if number >= 2 else 1.0))
        changed.append([change.kind[0] for change in changes])
    assert changed[:2] == [[], []] and "vision" in changed[2] and changed[-5:] == [[]] * 5
    factors = monitor.factors
    assert factors["vision", B] / factors["llm", B] == pytest.approx(3.0, rel=0.1)


def test_kind_without_factor_is_planned_by_flops():
    rates = ActionRates()
    monitor = DriftMonitor(0.1, rates, dict.fromkeys([("llm", F), ("llm", B)], 1.0))
    rates.update(step())
    assert monitor.observe(step()) == []


def test_single_interrupted_step_is_ignored():
    monitor = WatchedRates(0.5)
    changes = [monitor.observe(step(vision=1.6 if n == 3 else 1.0)) for n in range(8)]
    assert changes == [[]] * 8


def test_drift_is_relative_to_planned_times():
    watched = WatchedRates(0.1)
    watched.monitor.set_prior(step(5e-8, vision=3.0))
    assert watched.observe(step(vision=3.0)) == [], "planned times are no drift"
    assert watched.monitor.ms_per_flop == {}
    changes = [watched.observe(step()) for _ in range(12)]
    assert changes[0] and changes[0][0].kind[0] == "vision" and changes[-5:] == [[]] * 5
    rates = watched.monitor.ms_per_flop
    assert rates["vision", F] / rates["llm", F] == pytest.approx(1.0, rel=0.1)
    watched.monitor.set_prior(step(vision=3.0))
    assert watched.observe(step()) == [], "measured times were replaced"


def test_drift_of_negligible_actions_is_ignored():
    tiny = {("vision", F): ActionTotals(1e-4, 1e3), ("llm", F): ActionTotals(100.0, 1e10)}
    assert WatchedRates(0.1).observe(tiny) == []
    assert WatchedRates(0.1).observe({("vision", F): ActionTotals(0.0, 0.0)}) == []


def test_largest_change_is_first():
    changes = WatchedRates(0.1).observe(step(vision=2.0))
    assert changes == sorted(changes, key=lambda change: -abs(change.ratio - 1))
    assert isinstance(changes[0], RateChange) and changes[0].kind[0] == "vision"
    assert changes[0].ratio == pytest.approx(2 * 33 / 36)


LAYERS = [
    ModuleLayers("vision", "encoder", (1.0,) * 4, sub_microbatched=True),
    ModuleLayers("llm", "llm", (1.0,) * 4),
]


def planned(factor: float, images: list[int]) -> tuple[PipelinePlan, StageGraph]:
    """Return the plan of a step with encoder times scaled by a factor."""
    config = ParallelConfig(pipeline=2, schedule="optimus", placement="colocated")
    layout = OPTIMUS_SCHEDULE.layout(config, LAYERS)
    graph = StageGraph(layout, len(images), {"vision": tuple(int(n > 0) for n in images)})
    factors = {("vision", F): factor, ("vision", B): factor}
    durations = scale_durations(durations_of(graph, images), graph, factors)
    placed, order = OPTIMUS_SCHEDULE.plan(config, graph, durations)
    return lower_plan(order, placed, {}), graph


def test_factors_scale_durations_of_their_kinds_only():
    _, graph = planned(1.0, [1, 1])
    durations = durations_of(graph, [1, 1])
    scaled = scale_durations(durations, graph, {("vision", F): 3.0})
    for number, stage in enumerate(graph.layout.stages):
        for kind in (F, B):
            action = Action(kind, number, 0)
            factor = 3.0 if (stage.module, kind) == ("vision", F) else 1.0
            assert scaled(action) == factor * durations(action)


def durations_of(graph: StageGraph, images: list[int]):
    def duration(action: Action) -> float:
        encoder = graph.layout.stages[action.stage].module == "vision"
        size = images[action.microbatch] if encoder else 4.0
        return size * (2.0 if action.type is B else 1.0)

    return duration


def test_plans_with_current_times_are_shorter():
    steps_ms = []
    for seed in range(6):
        rng = random.Random(seed)
        images = [rng.choice((0, 1, 2, 6)) for _ in range(8)]
        (stale, _), (fresh, graph) = planned(1.0, images), planned(0.2, images)
        drifted = scale_durations(
            durations_of(graph, images), graph, {("vision", F): 0.2, ("vision", B): 0.2}
        )
        costs = relative_costs(graph, drifted).costs
        steps_ms.append([simulate(plan, costs).makespan_ms for plan in (stale, fresh)])
    assert all(new_ms <= 1.02 * old_ms for old_ms, new_ms in steps_ms)
    old_ms, new_ms = map(sum, zip(*steps_ms, strict=True))
    assert new_ms < 0.98 * old_ms


def test_totals_are_sums_by_module_and_type():
    images = [2, 3]
    _, graph = planned(1.0, images)
    llm = next(s.index for s in graph.layout.stages if s.module == "llm")
    records = [
        ActionRecord(0, Action(F, 0, 0, 0), 0.0, 2.0),
        ActionRecord(0, Action(F, 0, 1, 0), 2.0, 5.0),
        ActionRecord(0, Action(B, llm, 1, 0), 5.0, 9.0),
        ActionRecord(0, Action(ActionType.UNSHARD, 0), 0.0, 1.0),
    ]
    records += [ActionRecord(1, Action(B, llm, 0, 0), 1.0, 6.0)]
    by_rank = sum_by_rank(records, graph, durations_of(graph, images))
    assert by_rank == {
        (0, "vision", F): ActionTotals(5.0, 5.0, 2, 4.0 + 9.0, 2 * 2.0 + 3 * 3.0),
        (0, "llm", B): ActionTotals(4.0, 8.0, 1, 64.0, 32.0),
        (1, "llm", B): ActionTotals(5.0, 8.0, 1, 64.0, 40.0),
    }
    assert sum_over_ranks(by_rank) == {
        ("vision", F): by_rank[0, "vision", F],
        ("llm", B): ActionTotals(9.0, 16.0, 2, 128.0, 72.0),
    }


def test_required_gain_grows_with_prediction_error():
    exact, noisy, biased = PredictionSpread(), PredictionSpread(), PredictionSpread()
    rng = random.Random(0)
    for step in range(30):
        assert (exact.min_gain is None) == (step < 5)
        exact.observe(100.0, 100.0 + 0.001 * rng.random())
        noisy.observe(100.0, 100.0 + rng.gauss(0, 3))
        biased.observe(100.0, 2 * (100.0 + rng.gauss(0, 1)))
    assert exact.min_gain == 0.001
    assert 0.015 < noisy.min_gain < 0.05
    assert 0.005 < biased.min_gain < 0.02  # twice the predicted time in each step
    wild = PredictionSpread()
    for ms in (10.0, 200.0, 30.0, 400.0, 50.0):
        wild.observe(100.0, ms)
    assert wild.min_gain == 0.05
    wild.observe(0.0, 100.0)  # no prediction
    assert len(wild.ratios) == 5


def test_old_prediction_errors_are_forgotten():
    spread = PredictionSpread()
    for ms in (50.0, 200.0, *[100.0] * 20):
        spread.observe(100.0, ms)
    assert spread.min_gain == 0.001
