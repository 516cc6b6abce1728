"""Tests of encoder pieces that LLM actions launch: dependencies, timing and execution."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_replicated_stages import graph

from torchmm.balance.optimus.action_order import optimus_steps
from torchmm.balance.optimus.encoder_overlap import EncoderOverlap
from torchmm.balance.optimus.launch_planning import plan_launches
from torchmm.balance.optimus.launches import add_launches
from torchmm.balance.optimus.llm_schedules import llm_schedules
from torchmm.balance.plan_costs import LayerPiece, LayerPieces, PlanCosts
from torchmm.balance.simulation.launch_effects import action_pieces, compute_launch_effects
from torchmm.balance.simulation.simulator import memory_changes, simulate
from torchmm.parallel.tensor.collectives import LayerHooks
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import EncoderLaunch, PipelinePlan
from torchmm.pipelining.plan.serialization import decode_plan, encode_plan
from torchmm.pipelining.schedules.colocated import encoder_stages

SHARE = 0.4
PARTS = (6, 5, 6, 7, 6, 6)
SHARES = (0.2, 0.1, 0.1, 0.3, 0.0, 0.3)
PIECES = LayerPieces(
    tuple(LayerPiece(share, False) for share in SHARES),
    tuple(LayerPiece(share, False) for share in SHARES[::-1]),
)
SENDS = LayerPieces(
    tuple(LayerPiece(share, i in (2, 5)) for i, share in enumerate(SHARES)),
    tuple(LayerPiece(share, i in (2, 5)) for i, share in enumerate(SHARES[::-1])),
)


def costs_of(step, pieces: LayerPieces = PIECES, **more) -> PlanCosts:
    """Return costs: LLM stages take 12 times as long as encoder layers and have 4 collectives."""
    encoders = encoder_stages(step)
    compute, tensor = {}, {}
    for task in step.tasks():
        for kind in COMPUTE:
            action = Action(kind, *task)
            base_ms = 1.0 if task.stage in encoders else 12.0
            compute[action] = (
                base_ms * (1 if kind is ActionType.F else 2) * (1 + 0.1 * task.microbatch)
            )
            sends = task.stage not in encoders or pieces is SENDS
            tensor[action] = SHARE * compute[action] if sends else 0.0
    return PlanCosts(
        compute,
        tensor,
        overlaps_communication=True,
        pieces={"vision": pieces},
        collectives=(4, 4),
        **more,
    )


def planned(pipeline: int = 1, mirrors: int = 1, parts=PARTS):
    """Return a plan with each encoder action at the position of its last piece."""
    step = graph(pipeline, mirrors, parts)
    costs = costs_of(step)
    orders = llm_schedules(step, costs, "interleaved_1f1b", 64)
    step_plan = next(optimus_steps(step, costs, orders, "fine", "step", use_tp_bubbles=True))
    return lower_plan(step_plan.order, step_plan.graph, {}, sharding="step")


def launched(plan: PipelinePlan, pieces: LayerPieces = PIECES) -> PipelinePlan:
    with_pieces = add_launches(plan, plan_launches(plan, costs_of(plan.graph, pieces)))
    validate_plan(with_pieces).raise_for_problems()
    return with_pieces


@pytest.mark.parametrize("pieces", [PIECES, SENDS])
@pytest.mark.parametrize(("pipeline", "mirrors"), [(1, 1), (2, 1), (1, 2)])
def test_launched_pieces_save_time_without_llm_delay(pipeline, mirrors, pieces):
    plan = planned(pipeline, mirrors)
    with_pieces = launched(plan, pieces)
    costs = costs_of(plan.graph, pieces)
    assert with_pieces.launches
    assert sum(sum(launch.pieces_per_collective) for launch in with_pieces.launches.values()) > 50
    times = compute_launch_effects(with_pieces, costs)
    encoders = encoder_stages(plan.graph)
    for action, shift_ms in times.shift_ms.items():
        if action.stage in encoders:
            assert -costs.compute_ms[action] - 1e-9 <= shift_ms <= 0
        else:
            assert shift_ms == pytest.approx(0, abs=1e-9)
    assert min(times.shift_ms.values()) < 0
    before, after = simulate(plan, costs), simulate(with_pieces, costs)
    assert after.makespan_ms < before.makespan_ms
    # The computation that fills bubbles no longer counts as bubble.
    total_ms = sum(after.timeline.busy_ms) + sum(after.timeline.bubble_ms.values())
    hidden_ms = -sum(ms for a, ms in times.shift_ms.items() if a.stage in encoders)
    assert hidden_ms > 0.1 * sum(costs.compute_ms[a] for a in times.shift_ms if a.stage in encoders)
    if pieces is PIECES:
        assert total_ms == pytest.approx(len(plan.actions) * after.makespan_ms)


def test_launches_keep_compute_order():
    plan = planned(2)
    with_pieces = launched(plan)
    for program, other in zip(plan.actions, with_pieces.actions, strict=True):
        assert set(program) == set(other) and len(program) == len(other)
        rows = [[a for a in row if not a.type.value.startswith("WAIT")] for row in (program, other)]
        assert rows[0] == rows[1]
    assert with_pieces.actions != plan.actions, "no wait has moved, so the test checks nothing"


def test_useless_launches_are_not_planned():
    plan = planned()
    costs = costs_of(plan.graph)
    assert not plan_launches(plan, replace(costs, overlaps_communication=False))
    assert not plan_launches(plan, replace(costs, tp_comm_ms={}))
    assert not plan_launches(plan, replace(costs, pieces={}))
    short = {a: ms / 1000 for a, ms in costs.tp_comm_ms.items()}
    assert not plan_launches(plan, replace(costs, tp_comm_ms=short)), (
        "pieces do not fit into collectives"
    )


def test_oversized_pieces_delay_the_llm():
    plan = planned()
    with_pieces = launched(plan)
    costs = costs_of(plan.graph)
    shorter = replace(costs, tp_comm_ms={a: ms / 4 for a, ms in costs.tp_comm_ms.items()})
    late = {
        a: ms for a, ms in compute_launch_effects(with_pieces, shorter).shift_ms.items() if ms > 0
    }
    assert late and not {a.stage for a in late} & encoder_stages(plan.graph)
    serial = simulate(with_pieces, replace(costs, overlaps_communication=False))
    assert serial.makespan_ms == pytest.approx(
        simulate(plan, replace(costs, overlaps_communication=False)).makespan_ms, rel=0.3
    )


def test_pieces_sum_to_action_time():
    step = graph(2, 1, (2, 1))
    for pieces in (PIECES, SENDS):
        costs = costs_of(step, pieces)
        for action in (Action(ActionType.F, 0, 0, 1), Action(ActionType.B, 3, 0, 0)):
            pieces_ms = action_pieces(action, step, costs)
            assert len(pieces_ms) == 7
            total_ms = sum(piece.compute_ms + piece.send_ms for piece in pieces_ms)
            assert total_ms == pytest.approx(costs.compute_ms[action])
    assert action_pieces(Action(ActionType.F, 0, 0, 1), step, replace(costs, pieces={})) == []


def test_launched_activations_are_allocated_at_launch():
    plan = planned()
    with_pieces = launched(plan)
    kept = {task: 100 for task in plan.graph.tasks() if task.stage < 4}
    costs = replace(costs_of(plan.graph), saved_bytes=kept)
    launched_forwards = 0
    for program, before, after in zip(
        with_pieces.actions,
        memory_changes(plan, costs),
        memory_changes(with_pieces, costs),
        strict=True,
    ):
        at = {action: 2 * index for index, action in enumerate(program)}
        assert sum(before) == sum(after) == 0
        for llm in (action for action in program if action in with_pieces.launches):
            forwards = [
                a for a in with_pieces.launches[llm].encoder_actions if a.type is ActionType.F
            ]
            assert after[at[llm]] == 100 * len(forwards)
            assert not any(after[at[action]] for action in forwards)
            launched_forwards += len(forwards)
    assert launched_forwards > 4


def test_launches_survive_plan_encoding():
    plan = launched(planned(2))
    decoded = decode_plan(encode_plan(plan), graph(2, 1, PARTS), lambda _: {})
    assert decoded == plan
    assert decoded.launches


def first_launch(plan: PipelinePlan) -> tuple[int, Action, EncoderLaunch]:
    for rank, program in enumerate(plan.actions):
        for action in program:
            if action in plan.launches and plan.launches[action].encoder_actions:
                return rank, action, plan.launches[action]
    raise AssertionError


@pytest.mark.parametrize("mistake", ["skipped", "by encoder", "negative", "not available"])
def test_invalid_launches_are_reported(mistake):
    plan = launched(planned(2))
    rank, llm, launch = first_launch(plan)
    encoders = encoder_stages(plan.graph)
    row = [a for a in plan.actions[rank] if a.type in COMPUTE and a.stage in encoders]
    changed: Mapping[str, dict[Action, EncoderLaunch]] = {
        "skipped": {
            llm: launch._replace(encoder_actions=(row[row.index(launch.encoder_actions[0]) + 1],))
        },
        "by encoder": {row[0]: launch},
        "negative": {llm: launch._replace(pieces_per_collective=(-1,))},
        "not available": {llm._replace(microbatch=99): launch},
    }
    wrong = replace(plan, launches=changed[mistake])
    problems = validate_plan(wrong).problems
    assert problems and {p.kind for p in problems} == {"dependency"}


def test_launches_wait_for_their_inputs():
    """Launch every encoder action from every LLM action directly before it."""
    plan = planned(2)
    book = PlanRules(plan)
    encoders = encoder_stages(plan.graph)
    rejected = allowed = 0
    for rank, program in enumerate(plan.actions):
        rules = book.rules[rank]
        places = [i for i, a in enumerate(program) if a.type in COMPUTE and a.stage in encoders]
        for before, place in pairwise([-1, *places]):
            needs = {*rules[program[place]].requires}
            gives = [i for i, a in enumerate(program) if needs & {*rules[a].establishes}]
            for position in range(before + 1, place):
                if program[position].type not in COMPUTE:
                    continue
                launches = {program[position]: EncoderLaunch((program[place],), (1,))}
                problems = validate_plan(replace(plan, launches=launches)).problems
                if position <= max(gives):
                    assert ["which requires" in p.text for p in problems] == [True]
                    rejected += 1
                else:
                    assert not problems
                    allowed += 1
    assert rejected and allowed


class StepHandler:
    """Handler of all actions of a step: encoder actions yield, LLM actions communicate."""

    def __init__(self, hooks: LayerHooks, plan: PipelinePlan) -> None:
        self.encoders = encoder_stages(plan.graph)
        self.fill, self.stop = hooks.hook_for("llm"), hooks.hook_for("encoder")
        self.layers = [stage.stop - stage.start for stage in plan.graph.layout.stages]
        self.events: list[tuple[Action, int]] = []

    def __call__(self, action: Action) -> None:
        if action.stage in self.encoders:
            for piece in range(7):
                self.events.append((action, piece))
                if piece < 6:
                    self.stop()
        else:
            for collective in range(4 * self.layers[action.stage]):
                self.events.append((action, collective))
                self.fill()


@pytest.mark.parametrize("timed", [False, True])
def test_runtime_launches_planned_pieces(timed):
    plan = launched(planned())
    encoders = encoder_stages(plan.graph)
    ticks = iter(range(10**6))
    for rank, program in enumerate(plan.actions):
        hooks = LayerHooks()
        handled = StepHandler(hooks, plan)
        mark = (lambda: next(ticks)) if timed else None
        overlap = EncoderOverlap(
            plan, dict.fromkeys(ActionType, handled), hooks, torch.device("cpu"), mark
        )
        context = overlap.activate()
        handlers = context.__enter__()
        row = [action for action in program if action.type in COMPUTE]
        inside: dict[tuple[Action, int], int] = {}
        for action in row:
            begin = len(handled.events)
            handlers[action.type](action)
            events = handled.events[begin:]
            if action.stage in encoders:
                assert all(a == action for a, _ in events), "an encoder action ran other actions"
                continue
            collective = -1
            for event in events:
                if event[0] == action:
                    collective = event[1]
                else:
                    inside[action, collective] = inside.get((action, collective), 0) + 1
        context.__exit__(None, None, None)
        assert hooks.on_collective is hooks.on_yield is None
        expected = {
            (llm, i): count
            for llm, launch in plan.launches.items() if llm in program
            for i, count in enumerate(launch.pieces_per_collective) if count
        }  # fmt: skip
        assert inside == expected, rank
        done = [a for a, piece in handled.events if a.stage in encoders and piece == 6]
        assert done == [a for a in row if a.stage in encoders], (
            "encoder actions are not complete and in order"
        )
        assert bool(overlap.spans) == (timed and bool(expected))
        for span in overlap.spans:
            assert span.llm in plan.launches and span.encoder.stage in encoders
            assert span.begin < span.end


def test_error_in_piece_stops_the_step():
    plan = launched(planned())
    encoders = encoder_stages(plan.graph)
    _, llm, launch = first_launch(plan)

    def handler(action: Action) -> None:
        if action == launch.encoder_actions[0]:
            raise ValueError("failed piece")
        if action.stage not in encoders:
            for _ in range(4):
                hooks.hook_for("llm")()

    hooks = LayerHooks()
    overlap = EncoderOverlap(plan, dict.fromkeys(ActionType, handler), hooks, torch.device("cpu"))
    with pytest.raises(ValueError, match="failed piece"), overlap.activate() as handlers:
        handlers[llm.type](llm)
    assert not overlap._thread.is_alive()
