"""Durations of actions whose host runs ahead of the device."""

from __future__ import annotations

import pytest

from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.plan import PipelinePlan

GRAPH = StageGraph(StageLayout((StageSpec(0, "llm", 0, 1, (0,)),), ()), 3)


def durations(*times: tuple[float, float], tuned: tuple[int, ...] = ()) -> list[float]:
    """Durations of forwards with these device and host times, on one rank."""
    actions = [Action(ActionType.F, 0, i, 0) for i in range(len(times))]
    costs = PlanCosts(
        {action: max(own) for action, own in zip(actions, times, strict=True)},
        device_ms={action: own[0] for action, own in zip(actions, times, strict=True)},
        host_ms={action: own[1] for action, own in zip(actions, times, strict=True)},
    )
    recompute = {actions[i].task: ("full",) for i in tuned}
    plan = PipelinePlan(GRAPH, (tuple(actions),), recompute=recompute)  # type: ignore[arg-type]
    return [costs.with_host_ahead(plan).compute_ms[action] for action in actions]


def test_first_action_waits_for_host() -> None:
    assert durations((10.0, 50.0)) == [50.0]


def test_host_ahead_hides_small_action() -> None:
    # After 200 ms of the device, the host has queued the small action long ago.
    assert durations((200.0, 30.0), (10.0, 50.0)) == [200.0, 10.0]


def test_slow_host_sets_time_of_step() -> None:
    found = durations((20.0, 50.0), (30.0, 40.0), (10.0, 35.0))
    assert sum(found) == pytest.approx(125.0)
    # The lead of the host is used up: 100 + 10 + 5 ms of the device, and 120 ms of the host.
    assert sum(durations((100.0, 30.0), (10.0, 50.0), (5.0, 40.0))) == pytest.approx(120.0)


def test_tuned_action_keeps_its_duration() -> None:
    assert durations((200.0, 30.0), (10.0, 50.0), tuned=(1,)) == [200.0, 50.0]


def test_costs_without_host_stay_the_same() -> None:
    plan = PipelinePlan(GRAPH, ((Action(ActionType.F, 0, 0, 0),),))
    costs = PlanCosts({Action(ActionType.F, 0, 0, 0): 1.0})
    assert costs.with_host_ahead(plan) is costs
