"""When measured times ask for new plans, and that the new plans suit them."""

import random

import pytest

from torchmm.balance.rates import (
    Change,
    DriftMonitor,
    Rates,
    Spread,
    Total,
    rank_totals,
    scaled,
    step_totals,
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


def step(ms_per_flop: float = 1e-8, **slower: float) -> dict[tuple[str, ActionType], Total]:
    """Totals of a step in which some modules take longer."""
    return {
        kind: Total(ms_per_flop * slower.get(kind[0], 1.0) * flops, flops)
        for kind, flops in FLOPS.items()
    }


class Watched:
    """Rates and what watches them, as a run has them."""

    def __init__(self, threshold: float) -> None:
        self.rates = Rates()
        self.monitor = DriftMonitor(threshold, self.rates)

    def observe(self, totals: dict[tuple[str, ActionType], Total]) -> list[Change]:
        self.rates.learn(totals)
        return self.monitor.observe(totals)

    @property
    def factors(self) -> dict[tuple[str, ActionType], float]:
        return self.monitor.factors


def test_rates_of_what_never_ran_are_completed():
    rates = Rates()
    assert rates.complete(["vision", "llm"]) == {}
    rates.learn(
        {("llm", F): Total(1.0, 1e3), ("llm", B): Total(4.0, 1e3), ("vision", F): Total(0.0, 0.0)}
    )
    found = rates.complete(["vision", "llm"])
    assert found["llm", ActionType.W] == found["llm", B] == pytest.approx(4e-3)
    assert found["vision", F] == found["vision", ActionType.I] == pytest.approx(2.5e-3)
    rates.learn({("llm", F): Total(3.0, 1e3)})
    assert rates.ms_per_flop["llm", F] == pytest.approx(2e-3), "smoothed by a half"


def test_nothing_drifts_while_all_is_as_planned_or_equally_slow():
    monitor = Watched(0.1)
    assert monitor.observe(step()) == []
    assert monitor.observe(step(5e-8)) == []
    assert monitor.factors == {}


def test_a_module_that_gets_slower_is_planned_with_its_new_time_once():
    monitor, found = Watched(0.1), []
    for number in range(12):
        changes = monitor.observe(step(vision=3.0 if number >= 2 else 1.0))
        found.append([change.kind[0] for change in changes])
    assert found[:2] == [[], []] and "vision" in found[2] and found[-5:] == [[]] * 5
    factors = monitor.factors
    assert factors["vision", B] / factors["llm", B] == pytest.approx(3.0, rel=0.1)


def test_kind_without_factor_is_planned_by_flops():
    rates = Rates()
    monitor = DriftMonitor(0.1, rates, dict.fromkeys([("llm", F), ("llm", B)], 1.0))
    rates.learn(step())
    assert monitor.observe(step()) == []


def test_one_interrupted_step_passes():
    monitor = Watched(0.5)
    found = [monitor.observe(step(vision=1.6 if n == 3 else 1.0)) for n in range(8)]
    assert found == [[]] * 8


def test_drift_is_from_the_times_that_were_planned_with_also_where_these_are_a_models():
    watched = Watched(0.1)
    watched.monitor.expect(step(5e-8, vision=3.0))
    assert watched.observe(step(vision=3.0)) == [], "a third of the speed, as planned"
    assert watched.monitor.ms_per_flop == {}
    found = [watched.observe(step()) for _ in range(12)]
    assert found[0] and found[0][0].kind[0] == "vision" and found[-5:] == [[]] * 5
    rates = watched.monitor.ms_per_flop
    assert rates["vision", F] / rates["llm", F] == pytest.approx(1.0, rel=0.1)
    watched.monitor.expect(step(vision=3.0))
    assert watched.observe(step()) == [], "measured times stay"


def test_what_takes_next_to_no_time_may_drift():
    tiny = {("vision", F): Total(1e-4, 1e3), ("llm", F): Total(100.0, 1e10)}
    assert Watched(0.1).observe(tiny) == []
    assert Watched(0.1).observe({("vision", F): Total(0.0, 0.0)}) == []


def test_the_worst_change_is_told_first():
    changes = Watched(0.1).observe(step(vision=2.0))
    assert changes == sorted(changes, key=lambda change: -abs(change.times - 1))
    assert isinstance(changes[0], Change) and changes[0].kind[0] == "vision"
    assert changes[0].times == pytest.approx(2 * 33 / 36)


LAYERS = [
    ModuleLayers("vision", "encoder", (1.0,) * 4, sub_microbatched=True),
    ModuleLayers("llm", "llm", (1.0,) * 4),
]


def planned(factor: float, images: list[int]) -> tuple[PipelinePlan, StageGraph]:
    """Plan of a step whose encoder is taken to be slower or faster by a factor."""
    config = ParallelConfig(pipeline=2, schedule="optimus", placement="colocated")
    layout = OPTIMUS_SCHEDULE.layout(config, LAYERS)
    graph = StageGraph(layout, len(images), {"vision": tuple(int(n > 0) for n in images)})
    factors = {("vision", F): factor, ("vision", B): factor}
    durations = scaled(durations_of(graph, images), graph, factors)
    placed, order = OPTIMUS_SCHEDULE.plan(config, graph, durations)
    return lower_plan(order, placed, {}), graph


def durations_of(graph: StageGraph, images: list[int]):
    def found(action: Action) -> float:
        encoder = graph.layout.stages[action.stage].module == "vision"
        size = images[action.microbatch] if encoder else 4.0
        return size * (2.0 if action.type is B else 1.0)

    return found


def test_plans_with_drifted_times_are_shorter_than_stale_ones():
    steps_ms = []
    for seed in range(6):
        rng = random.Random(seed)
        images = [rng.choice((0, 1, 2, 6)) for _ in range(8)]
        (stale, _), (fresh, graph) = planned(1.0, images), planned(0.2, images)
        drifted = scaled(
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
    by_rank = rank_totals(records, graph, durations_of(graph, images))
    assert by_rank == {
        (0, "vision", F): Total(5.0, 5.0, 2, 4.0 + 9.0, 2 * 2.0 + 3 * 3.0),
        (0, "llm", B): Total(4.0, 8.0, 1, 64.0, 32.0),
        (1, "llm", B): Total(5.0, 8.0, 1, 64.0, 40.0),
    }
    assert step_totals(by_rank) == {
        ("vision", F): by_rank[0, "vision", F],
        ("llm", B): Total(9.0, 16.0, 2, 128.0, 72.0),
    }


def test_orders_have_to_promise_more_where_predictions_scatter():
    exact, noisy, biased = Spread(), Spread(), Spread()
    rng = random.Random(0)
    for step in range(30):
        assert (exact.least_gain is None) == (step < 5)
        exact.observe(100.0, 100.0 + 0.001 * rng.random())
        noisy.observe(100.0, 100.0 + rng.gauss(0, 3))
        biased.observe(100.0, 2 * (100.0 + rng.gauss(0, 1)))
    assert exact.least_gain == 0.001
    assert 0.015 < noisy.least_gain < 0.05
    assert 0.005 < biased.least_gain < 0.02  # twice as long, each time
    wild = Spread()
    for ms in (10.0, 200.0, 30.0, 400.0, 50.0):
        wild.observe(100.0, ms)
    assert wild.least_gain == 0.05
    wild.observe(0.0, 100.0)  # nothing was predicted
    assert len(wild.ratios) == 5


def test_what_was_long_ago_does_not_count():
    spread = Spread()
    for ms in (50.0, 200.0, *[100.0] * 20):
        spread.observe(100.0, ms)
    assert spread.least_gain == 0.001
