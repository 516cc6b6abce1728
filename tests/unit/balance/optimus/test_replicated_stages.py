"""Tests of encoders with smaller tensor parallelism than the LLM: mirrors in layouts and plans."""

from dataclasses import replace

import pytest

from torchmm.balance.optimus.action_order import best_optimus_step
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.simulator import simulate
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.orders import split_by_rank
from torchmm.pipelining.schedules.classic import forward_only
from torchmm.pipelining.schedules.colocated import assign_round_robin, colocated_layout
from torchmm.pipelining.schedules.layouts import ModuleLayers

RANKS, MIRRORS = 2, 2
UNEQUAL = [
    (1, 4, {"vision": 2, "audio": 1}, {}),
    (2, 2, {"vision": 2}, {"vision": 2}),
    (1, 6, {"vision": 3, "audio": 2}, {}),
    (2, 4, {"vision": 4, "audio": 2}, {"audio": 2}),
]
"""Pipeline ranks and mirrors of the LLM, then mirrors and pipeline ranks of encoders."""


def graph(pipeline: int = 1, mirrors: int = MIRRORS, parts: tuple[int, ...] = (2, 0, 1, 3)):
    modules = [
        ModuleLayers("vision", "encoder", (1.0,) * 4, sub_microbatched=True),
        ModuleLayers("llm", "llm", (1.0,) * 4, tied=True),
        ModuleLayers("generator", "generator", (1.0,) * 2),
    ]
    # The encoder has stages 0 to 3, one per layer.
    sizes = {"pipelines": {"vision": pipeline}, "slices": {"vision": 4 // pipeline}}
    layout = colocated_layout(modules, RANKS, mirrors=mirrors, **sizes)
    return StageGraph(layout, len(parts), {"vision": parts})


def durations(step: StageGraph) -> dict[Action, float]:
    return {
        Action(kind, *task): 1.0 + (kind is not ActionType.F) + 0.1 * task.microbatch
        for task in step.tasks()
        for kind in COMPUTE
    }


def planned(step: StageGraph, sharding="none"):
    step_plan = best_optimus_step(step, PlanCosts(durations(step)))
    return lower_plan(step_plan.order, step_plan.graph, {}, sharding)


def test_mirrors_have_backbone_and_encoder_pipelines():
    layout = graph(pipeline=2).layout
    assert [s.ranks for s in layout.stages if s.module == "vision"] == [(0, 1)] * 2 + [(2, 3)] * 2
    llm = [(s.ranks, s.mirror) for s in layout.stages if s.module == "llm"]
    assert llm == [((0,), 0), ((2,), 0), ((1,), 1), ((3,), 1)]
    first = next(s.index for s in layout.stages if s.module == "llm")
    assert layout.destinations[first - 1] == layout.mirror_stages[first] == (first, first + 3)
    assert [s.tied_to for s in layout.stages[first:]] == [5, 4, -1, 8, 7, -1]
    assert layout.destinations[first + 4] == (first + 5,)


def test_mirrors_return_one_gradient_of_message():
    step = graph()
    first = next(s.index for s in step.layout.stages if s.module == "llm")
    messages = [Message(first - 1, stage, 0, 0) for stage in step.layout.mirror_stages[first]]
    assert [step.computes_gradient(m) for m in messages] == [True, True]
    assert [step.sends_gradient(m) for m in messages] == [True, False]
    inside = Message(first + 3, first + 4, 0)
    assert step.layout.stages[first + 3].mirror == 1 and step.sends_gradient(inside)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_mirrored_plans_are_valid_on_all_ranks(pipeline):
    plan = planned(graph(pipeline))
    validate_plan(plan).raise_for_problems()
    for row in plan.actions:
        assert any(a.type is ActionType.F and a.stage < 4 for a in row)
    mirrors = [
        [
            a._replace(stage=plan.graph.layout.mirror_stages[a.stage][0])
            for a in row
            if a.type in COMPUTE
        ]
        for row in plan.actions
    ]
    backbone = [[a for a in row if a.stage >= 4] for row in mirrors]
    assert backbone[0] == backbone[1] and backbone[2] == backbone[3]
    forwards = assign_round_robin(plan.graph)
    order = forward_only(forwards)
    validate_plan(lower_plan(order, forwards, {}, training=False)).raise_for_problems()


def test_deviating_mirror_order_is_reported():
    plan = planned(graph())
    row = list(plan.actions[1])
    at = [i for i, a in enumerate(row) if a.type in COMPUTE and a.stage >= 4]
    row[at[0]], row[at[-1]] = row[at[-1]], row[at[0]]
    wrong = replace(plan, actions=(plan.actions[0], tuple(row), *plan.actions[2:]))
    problems = [(p.kind, p.rank) for p in validate_plan(wrong).problems]
    assert ("collective", 1) in problems


def test_deadlock_between_mirrors_is_reported():
    """Build an order that is valid for messages, but not for mirrors.

    Rank 1 needs the gradient of microbatch 0 before its part of the backward pass of microbatch 1.
    Rank 0 sends this gradient only after the backward pass of microbatch 1.
    """
    replica = {("vision", 0, 0): 1, ("vision", 1, 0): 0}
    step = replace(graph(parts=(1, 1)), replica=replica)
    forwards = [Action(ActionType.F, *task) for task in step.tasks()]
    backwards = [a._replace(type=ActionType.B) for a in reversed(forwards)]
    order = [list(row) for row in split_by_rank(step, [*forwards, *backwards])]
    assert validate_plan(lower_plan(tuple(order), step, {})).problems == ()
    encoder_actions = [a for a in order[1] if a.type is ActionType.B and a.stage < 4]
    remaining = [a for a in order[1] if a not in encoder_actions]
    at = next(i for i, a in enumerate(remaining) if a.type is ActionType.B)
    order[1] = [*remaining[:at], *encoder_actions, *remaining[at:]]
    problems = validate_plan(lower_plan(tuple(order), step, {})).problems
    assert {problem.kind for problem in problems} == {"deadlock"}
    assert {problem.rank for problem in problems} >= {0, 1}


def unequal(ranks: int, mirrors: int, encoder_mirrors: dict, pipelines: dict) -> StageGraph:
    """Return the step graph of two encoders with two stages each."""
    modules = [
        *(ModuleLayers(name, "encoder", (1.0,) * 4, sub_microbatched=True) for name in BOTH),
        ModuleLayers("llm", "llm", (1.0,) * 4, tied=True),
        ModuleLayers("generator", "generator", (1.0,) * 2),
    ]
    layout = colocated_layout(
        modules,
        ranks,
        mirrors=mirrors,
        encoder_mirrors=encoder_mirrors,
        pipelines=pipelines,
        slices={name: 2 // pipelines.get(name, 1) for name in BOTH},
    )
    return StageGraph(layout, 4, {"vision": (2, 0, 1, 3), "audio": (1, 2, 2, 0)})


BOTH = ("vision", "audio")


def test_encoder_groups_are_mirrors_of_the_llm():
    """Use an encoder on two ranks and an LLM on four ranks.

    Each encoder rank feeds two LLM mirrors, including the mirror on the same rank. Only the first
    of these mirrors returns the gradient.
    """
    layout = unequal(*UNEQUAL[0]).layout
    vision = [(s.ranks, s.mirror, layout.destinations[s.index]) for s in layout.stages[:4]]
    assert [stage[:2] for stage in vision] == [((0, 2), 0)] * 2 + [((1, 3), 1)] * 2
    llm = [s.index for s in layout.stages if s.module == "llm"]
    assert vision[1][2] == (llm[0], llm[2]) and vision[3][2] == (llm[1], llm[3])
    step = unequal(*UNEQUAL[0])
    back = [(s, d) for s, d in layout.edges if d in llm and step.sends_gradient(Message(s, d, 0))]
    assert back == [(1, llm[0]), (3, llm[1]), (5, llm[0])]
    assert layout.mirror_ranks[1, 2] == layout.mirror_ranks[3, 3] == (2, 3)
    assert layout.mirror_ranks[llm[1], 1] == (0, 1, 2, 3)


@pytest.mark.parametrize("case", UNEQUAL)
def test_mirrors_run_the_same_actions(case):
    plan = planned(unequal(*case), sharding="step")
    validate_plan(plan).raise_for_problems()
    layout = plan.graph.layout
    for (stage, rank), ranks in layout.mirror_ranks.items():
        actions = [a for a in plan.actions[rank] if a.type in COMPUTE and a.stage == stage]
        for other, twin in zip(ranks, layout.mirror_stages[stage], strict=True):
            row = [a for a in plan.actions[other] if a.type in COMPUTE and a.stage == twin]
            assert [a._replace(stage=stage) for a in row] == actions
    forwards = assign_round_robin(plan.graph)
    order = forward_only(forwards)
    validate_plan(lower_plan(order, forwards, {}, training=False)).raise_for_problems()


def test_deviating_encoder_mirror_order_is_reported():
    plan = planned(unequal(*UNEQUAL[0]))
    row = list(plan.actions[1])
    at = [i for i, a in enumerate(row) if a.type is ActionType.F and a.stage == 2]
    assert len(at) > 1
    row[at[0]], row[at[-1]] = row[at[-1]], row[at[0]]
    wrong = replace(plan, actions=(plan.actions[0], tuple(row), *plan.actions[2:]))
    problems = [(p.kind, p.rank) for p in validate_plan(wrong).problems]
    assert ("collective", 1) in problems


def test_simulated_mirrors_start_together():
    """Check equal start times although the ranks have different preceding actions."""
    plan = planned(unequal(*UNEQUAL[0]))
    costs = PlanCosts({a: durations(plan.graph)[a] for row in plan.actions for a in row
                       if a.type in COMPUTE})  # fmt: skip
    starts = {r.action: r.start_ms for r in simulate(plan, costs).records}
    mirrored = plan.graph.layout.mirror_stages
    for action, start in starts.items():
        if action.type in COMPUTE:
            first = action._replace(stage=mirrored[action.stage][0])
            assert starts[first] == pytest.approx(start)
