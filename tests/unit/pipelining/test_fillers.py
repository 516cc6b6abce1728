"""Encoder actions beside LLM actions: what may fill, and what waits for what on two streams."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from test_mirrors import graph

from torchmm.balance.bubbles.optimus import optimus
from torchmm.balance.simulation.simulator import simulate
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.run.runtime import PipelineRuntime, SideStream
from torchmm.pipelining.schedules.classic import forward_only
from torchmm.pipelining.schedules.fillers import encoder_stages, feeds, fill_tensor_bubbles
from torchmm.pipelining.schedules.fillers import filled as filled_places

SHARE = 0.5


def duration(action: Action) -> float:
    """LLM layers take eight times as long as encoder layers."""
    forward = 1.0 if action.stage < 4 else 8.0
    return forward if action.type is ActionType.F else 2 * forward


def planned(inside: bool = True):
    step = graph(parts=(2, 0, 1, 3, 2, 2))
    costs = {Action(kind, *task): duration(Action(kind, *task))
             for task in step.tasks() for kind in COMPUTE}  # fmt: skip
    tensor = {a: SHARE * ms for a, ms in costs.items() if a.stage >= 4}
    found = optimus(step, PlanCosts(costs, tensor), inside=inside)
    return lower_plan(found.order, found.graph, {})


def filled(inside: bool = True):
    plan = fill_tensor_bubbles(planned(inside), duration, SHARE)
    validate_plan(plan).raise_for_problems()
    return plan


def test_encoder_work_is_planned_into_llm_actions_and_fits():
    plan = filled()
    assert plan.fillers
    encoders = encoder_stages(plan.graph)
    places = list(filled_places(plan))
    for llm, fillers in places:
        assert not any(a.stage in encoders for a in llm)
        assert all(f.stage in encoders for f in fillers)
        assert sum(map(duration, fillers)) <= SHARE * sum(map(duration, llm))
        assert sum(map(duration, fillers)) > SHARE * sum(map(duration, llm[:-1]))
        assert not any(feeds(plan.graph, f, a) for f in fillers for a in llm)
    assert sum(len(place.llm) for place in places) == len(plan.fillers)
    assert plan.actions == planned().actions  # fillers change no order
    inside, outside = (
        sum(len(fillers) for fillers in filled(kind).fillers.values()) for kind in (True, False)
    )
    assert inside > outside


def test_what_is_longer_than_one_bubble_fills_those_of_several_actions():
    plan = fill_tensor_bubbles(planned(), duration, SHARE / 8)
    validate_plan(plan).raise_for_problems()
    assert any(len(place.llm) > 1 for place in filled_places(plan))
    place = next(place for place in filled_places(plan) if len(place.llm) > 1)
    wrong = {action: () for action in place.llm[1:]}
    problems = validate_plan(replace(plan, fillers=wrong)).problems
    assert [p.action for p in problems] == list(place.llm[1:])


def test_fillers_take_no_time_where_they_run_beside():
    plan = filled()
    costs = {a: duration(a) for row in plan.actions for a in row if a.type in COMPUTE}
    tensor = {a: SHARE * ms for a, ms in costs.items() if a.stage >= 4}
    serial, beside = (
        simulate(plan, PlanCosts(costs, tensor, runs_beside=runs)) for runs in (False, True)
    )
    assert beside.makespan_ms < serial.makespan_ms
    spans = {record.action: record[2:] for record in beside.records if record.rank == 0}
    llm, fillers = next(place for place in filled_places(plan) if place.llm[0] in spans)
    assert spans[fillers[0]][0] <= spans[llm[0]][0] < spans[fillers[-1]][1] <= spans[llm[-1]][1]
    assert sum(map(duration, llm)) == pytest.approx(spans[llm[-1]][1] - spans[llm[0]][0])
    # What fills bubbles is computation, and no bubble any more.
    total_ms = sum(beside.timeline.busy_ms) + sum(beside.timeline.bubble_ms.values())
    assert total_ms == pytest.approx(len(plan.actions) * beside.makespan_ms)


def test_no_share_no_fillers():
    assert fill_tensor_bubbles(planned(), duration, 0.0).fillers == {}


@pytest.mark.parametrize("mistake", ["apart", "swapped", "not there"])
def test_wrong_fillers_are_found(mistake):
    plan = filled()
    action, fillers = next(iter(plan.fillers.items()))
    row = next(row for row in plan.actions if action in row)
    other = next(a for a in row if a.type in COMPUTE and a.stage >= 4 and a != action)
    wrong = {
        "apart": {other: fillers},
        "swapped": {fillers[0]: (action,)},
        "not there": {action._replace(microbatch=99): fillers},
    }[mistake]
    problems = validate_plan(replace(plan, fillers=wrong)).problems
    assert {p.kind for p in problems} == {"dependency"}


def test_what_feeds_an_action_does_not_fill_it():
    step = graph(parts=(1,))
    plan = lower_plan(forward_only(step), step, {}, training=False)
    row = [a for a in plan.actions[0] if a.type in COMPUTE]
    encoder, llm = row[row.index(Action(ActionType.F, 4, 0)) - 1 :][:2]
    assert (encoder.stage, llm.stage) == (3, 4) and feeds(step, encoder, llm)
    assert llm not in fill_tensor_bubbles(plan, duration, 0.9).fillers
    problems = validate_plan(replace(plan, fillers={llm: (encoder,)})).problems
    assert [p.text for p in problems] == ["a filler feeds it"]


class FakeStreams:
    """Two streams as vector clocks: what each has certainly seen finished of the other."""

    def __init__(self) -> None:
        self.done = {"main": 0, "side": 0}
        self.seen = {"main": 0, "side": 0}
        self.current = "main"

    def main_waits(self) -> None:
        self.seen["main"] = self.done["side"]

    def side_waits(self) -> None:
        self.seen["side"] = self.done["main"]

    @contextmanager
    def on_side(self):
        self.current = "side"
        yield
        self.current = "main"


def test_streams_wait_for_each_other_but_for_fillers():
    plan = filled()
    encoders = encoder_stages(plan.graph)
    beside = {action: place.fillers for place in filled_places(plan) for action in place.llm}
    overlapping = 0
    for program in plan.actions:
        streams = FakeStreams()
        side = SideStream(plan, streams)
        stamps: dict[Action, int] = {}
        for action in program:
            with side.around(action):
                own = streams.current
                assert own == ("side" if action.stage in encoders else "main")
                if own == "side":
                    assert streams.seen["side"] == streams.done["main"]
                elif action.type in COMPUTE:
                    first = stamps[beside[action][0]] if action in beside else streams.done["side"]
                    assert streams.seen["main"] >= first
                    overlapping += streams.seen["main"] < streams.done["side"]
                stamps[action] = streams.done[own]
                streams.done[own] += 1
        side.join()
        assert streams.seen["main"] == streams.done["side"]
    assert overlapping == len(plan.fillers)


def test_on_the_cpu_there_is_one_stream():
    assert PipelineRuntime(0, {}, None)._side_stream(filled()) is None
