"""Tests of lowering: every valid order becomes an executable plan with correct communication."""

import itertools
import random
from dataclasses import replace

import pytest
from module_cases import MODELS, freeze_cases, steps
from naive_execution import WAIT_OF, execution_failure, replicas_failure, run_until
from random_orders import random_graph, random_order, random_specs, random_step

from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.reductions import reduction_turns
from torchmm.pipelining.schedules.classic import forward_only, gpipe, one_f_one_b
from torchmm.pipelining.schedules.registry import ORDERS, schedule_layout

T = ActionType
SENDS, RECEIVES, WAITS = (T.SEND_F, T.SEND_B), (T.RECV_F, T.RECV_B), (T.WAIT_F, T.WAIT_B)
RELEASES = (T.WAIT_SEND_F, T.WAIT_SEND_B)
WAIT_FOR = dict(zip(SENDS, WAITS, strict=True))
POST_OF = {wait: post for post, wait in WAIT_OF.items()}


def chain(stages: int, ranks: int, *, trainable=(), tied=()) -> StageLayout:
    """Return a layout of one module with round-robin stages. `tied` pairs share a weight."""
    specs = [StageSpec(s, "llm", s, s + 1, (s % ranks,)) for s in range(stages)]
    for index, flag in enumerate(trainable):
        specs[index] = replace(specs[index], trainable=flag)
    for a, b in tied:
        specs[a], specs[b] = replace(specs[a], tied_to=b), replace(specs[b], tied_to=a)
    return StageLayout(tuple(specs), tuple((s, s + 1) for s in range(stages - 1)))


def random_plan(seed, **options):
    graph = random_graph(seed)
    order = random_order(graph, seed)
    sharding = ("none", "step")[seed % 2]
    options = {"sharding": sharding, "receives_ahead": seed % 4} | options
    return lower_plan(order, graph, random_specs(graph, seed), **options)


def texts(plan):
    return [" ".join(str(a) for a in program) for program in plan.actions]


@pytest.mark.parametrize("tenth", range(10))
def test_random_orders_become_valid_plans(tenth):
    sizes = set()
    for seed in range(tenth * 60, tenth * 60 + 60):
        plan = random_plan(seed)
        assert [str(p) for p in validate_plan(plan).problems] == [], seed
        assert execution_failure(plan) == "", seed
        compute = [tuple(a for a in p if a.type in COMPUTE) for p in plan.actions]
        assert tuple(compute) == random_order(plan.graph, seed)
        sizes.add(sum(map(len, plan.actions)))
    assert len(sizes) > 20  # the graphs have different sizes


def test_random_orders_are_reproducible():
    graph = random_graph(3, ranks=3, microbatches=4)
    orders = [random_order(graph, seed) for seed in range(20)]
    assert orders == [random_order(graph, seed) for seed in range(20)]
    assert len(set(orders)) == 20


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ORDERS)
def test_schedules_become_valid_plans(schedule, model):
    plans = 0
    for frozen, modules in freeze_cases(MODELS[model]).items():
        for ranks, microbatches in ((1, 3), (2, 4), (4, 3), (4, 9)):
            layout = schedule_layout(schedule, modules, ranks, 1 if schedule == "1f1b" else 2)
            for graph in steps(layout, microbatches, seed=ranks):
                order = ORDERS[schedule](graph)
                plan = lower_plan(order, graph, random_specs(graph, 0), sharding="step")
                problems = validate_plan(plan).problems
                assert not problems, (frozen, ranks, microbatches, str(problems[0]))
                plans += 1
    assert plans == 5 * 4 * 2


def test_small_plans_match_expected_actions():
    graph = StageGraph(chain(2, 2, trainable=(False, True)), 2)
    frozen = lower_plan(one_f_one_b(graph), graph, {}, sharding="step")
    assert texts(frozen) == [
        "0UNSHARD 0F0 0SEND_F0>1@1 0F1 0SEND_F1>1@1 "
        "0WAIT_SEND_F0>1@1 0WAIT_SEND_F1>1@1 0RESHARD",
        "1UNSHARD 1RECV_F0>0@0 1RECV_F1>0@0 1WAIT_F0>0@0 1F0 1B0 1WAIT_F1>0@0 1F1 1B1 "
        "1REDUCE_GRAD",
    ]  # fmt: skip
    graph = StageGraph(chain(2, 2, tied=[(0, 1)]), 2)
    trained = lower_plan(one_f_one_b(graph), graph, {}, receives_ahead=1)
    assert texts(trained) == [
        "0RECV_B0>1@1 0F0 0SEND_F0>1@1 0F1 0SEND_F1>1@1 "
        "0WAIT_B0>1@1 0RECV_B1>1@1 0WAIT_SEND_F0>1@1 0B0 "
        "0WAIT_B1>1@1 0WAIT_SEND_F1>1@1 0B1 0REDUCE_TIED>1@1",
        "1RECV_F0>0@0 1WAIT_F0>0@0 1RECV_F1>0@0 1F0 1B0 1SEND_B0>0@0 "
        "1WAIT_F1>0@0 1F1 1B1 1SEND_B1>0@0 1WAIT_SEND_B0>0@0 1WAIT_SEND_B1>0@0 1REDUCE_TIED>0@0",
    ]  # fmt: skip


def test_release_follows_proof_around_ranks():
    """Use 3 ranks with 2 stages each, in which the second pass depends on all ranks."""
    graph = StageGraph(chain(6, 3), 1)
    program = lower_plan(gpipe(graph), graph, {}).actions[0]
    wait = program.index(Action(T.WAIT_F, 3, 0, 0, 2, 2))
    assert program.index(Action(T.WAIT_SEND_F, 0, 0, 0, 1, 1)) == wait + 1


def test_releases_are_early_and_never_block():
    """Advance other ranks only as far as necessary."""
    counts = [0, 0]
    for seed in range(100):
        plan = random_plan(seed, sharding="none")
        for rank, program in enumerate(plan.actions):
            done = max((i for i, a in enumerate(program) if a.type in COMPUTE), default=-1)
            for position, action in enumerate(program):
                if action.type not in RELEASES:
                    continue
                waits = [i for i in range(position) if program[i].type in WAITS]
                assert not is_received(plan, rank, action, (waits or [0])[-1]), (seed, action)
                proven = is_received(plan, rank, action, min(position, done + 1))
                assert proven == (position < done), (seed, action)
                counts[proven] += 1
    assert min(counts) > 200


def is_received(plan, rank, release, position) -> bool:
    """Return True if the receiver has passed its wait when a rank reaches a position."""
    program = plan.actions[rank]
    if program.index(release._replace(type=POST_OF[release.type])) >= position:
        return False
    kind = {T.WAIT_SEND_F: T.WAIT_F, T.WAIT_SEND_B: T.WAIT_B}[release.type]
    mirrored = release._replace(type=kind, stage=release.other, other=release.stage, peer=rank)
    wait_position = plan.actions[release.peer].index(mirrored)
    return run_until(plan, rank, position).position[release.peer] > wait_position


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_receives_are_posted_early_within_bounds(ahead):
    forced = channels = 0
    for seed in range(80):
        plan = random_plan(seed, receives_ahead=ahead)
        for source, destination in itertools.permutations(range(len(plan.actions)), 2):
            sent = [a for a in plan.actions[source] if a.type in SENDS and a.peer == destination]
            if sent:
                program = plan.actions[destination]
                forced += check_receives(sent, program, source, ahead)
                channels += 1
    assert channels > 50
    assert forced > 5  # some orders consume in a different order than the peer sends


def check_receives(sent, program, source, ahead) -> int:
    """Check the receives of one channel. Return the number of receives that exceed the bound."""
    expected = [  # waits in the order of sending
        a._replace(type=WAIT_FOR[a.type], stage=a.other, other=a.stage, peer=source) for a in sent
    ]
    waits = [a for a in program if a in expected]
    posted = waited = forced = 0
    for action in program:
        if action.type in COMPUTE + WAITS:
            assert posted >= min(len(sent), waited + ahead), "a receive is posted too late"
            later = [expected.index(wait) for wait in waits[waited : waited + ahead]]
            assert posted > max(later, default=-1), "a receive is posted after its wait is due"
        if action.type in RECEIVES and action.peer == source:
            assert action._replace(type=WAIT_OF[action.type]) == expected[posted]
            if posted - waited >= ahead:
                forced += 1
                later = [expected.index(wait) for wait in waits[waited : waited + max(1, ahead)]]
                assert max(later) >= posted, "a receive exceeds the bound without need"
            posted += 1
        waited += action in expected
    assert posted == waited == len(sent)
    return forced


def test_messages_within_a_rank_need_no_actions():
    graph = StageGraph(chain(4, 1), 3)
    (program,) = lower_plan(gpipe(graph), graph, {}).actions
    assert {a.type for a in program} == {T.F, T.B}
    assert len(program) == 4 * 3 * 2


def test_forward_only_plans_have_no_gradients():
    graph = StageGraph(chain(4, 2, tied=[(0, 3)]), 3)
    plan = lower_plan(forward_only(graph), graph, {}, sharding="step", training=False)
    assert validate_plan(plan).problems == () and execution_failure(plan) == ""
    kinds = {a.type for program in plan.actions for a in program}
    assert kinds == {T.F, T.SEND_F, T.RECV_F, T.WAIT_F, T.WAIT_SEND_F, T.UNSHARD, T.RESHARD}


def test_stages_without_tasks_join_collectives():
    """Use a replica without images. Other replicas of the encoder can have images."""
    vision = [StageSpec(s, "vision", s, s + 1, (s,)) for s in range(2)]
    llm = [StageSpec(2 + s, "llm", s, s + 1, (s,), trainable=False) for s in range(2)]
    layout = StageLayout((*vision, *llm), ((0, 1), (1, 2), (2, 3)), frozenset({"vision"}))
    graph = StageGraph(layout, 2, {"vision": (0, 0)})
    plan = lower_plan(gpipe(graph), graph, {}, sharding="step")
    assert validate_plan(plan).problems == ()
    for rank, program in enumerate(plan.actions):
        assert [str(a) for a in program if a.type in (T.UNSHARD, T.REDUCE_GRAD, T.RESHARD)] == [
            f"{rank}UNSHARD", f"{rank + 2}UNSHARD", f"{rank}REDUCE_GRAD", f"{rank + 2}RESHARD",
        ]  # fmt: skip
        assert not any(a.type in (T.B, T.I, T.W) for a in program)


def test_reductions_follow_last_backward_of_stage():
    """Use 1F1B with two stages per rank. The second stage is reduced first."""
    graph = StageGraph(chain(4, 2), 4)
    order = ORDERS["interleaved_1f1b"](graph)
    plan = lower_plan(order, graph, {}, sharding="step")
    assert validate_plan(plan).problems == () and execution_failure(plan) == ""
    for rank, program in enumerate(plan.actions):
        for stage in (rank + 2, rank):
            after = program[program.index(Action(T.REDUCE_GRAD, stage)) :]
            following = [a for a in after if a.type in COMPUTE]
            assert not any(a.stage == stage for a in following)
            assert bool(following) == (stage > 1)
    late = lower_plan(order, graph, {}, sharding="step", reduces_early=False)
    assert validate_plan(late).problems == () and execution_failure(late) == ""
    for program in late.actions:
        kinds = [a.type for a in program]
        assert not set(kinds[kinds.index(T.REDUCE_GRAD) :]) & set(COMPUTE)


def replicas(seed, lower):
    """Return plans of three data-parallel replicas with equal stages, but different tasks."""
    layout = random_graph(seed, ranks=2 + seed % 2).layout
    plans = []
    for replica in range(3):
        graph = random_step(layout, 100 * seed + replica)
        plans.append(lower(random_order(graph, 7 * seed + replica), graph))
    return plans


def reduced_immediately(order, graph):
    """Return the plan with the reduction of each stage directly after its last action."""
    plan = lower_plan(order, graph, {}, sharding="step")
    order_of_stages = reduction_turns(graph.layout)
    programs = []
    for program in plan.actions:
        rest = [a for a in program if a.type is not T.REDUCE_GRAD]
        begin = sum(a.type is T.UNSHARD for a in rest)
        for stage in sorted({*(a.stage for a in program)}, key=order_of_stages.__getitem__):
            if Action(T.REDUCE_GRAD, stage) in program:
                stage_actions = [
                    i for i, a in enumerate(rest) if a.type in COMPUTE and a.stage == stage
                ]
                begin = max([begin, *(i + 1 for i in stage_actions[-1:])])
                rest.insert(begin, Action(T.REDUCE_GRAD, stage))
                begin += 1
        programs.append(tuple(rest))
    return replace(plan, actions=tuple(programs))


def test_replicas_never_deadlock_in_reductions():
    locked = 0
    for seed in range(80):
        plans = replicas(seed, lambda order, graph: lower_plan(order, graph, {}, sharding="step"))
        assert replicas_failure(plans) == "", seed
        assert not any(validate_plan(plan).problems for plan in plans)
        # Without a common order, some replicas deadlock, and validation reports a participating
        # plan.
        plans = replicas(seed, reduced_immediately)
        if replicas_failure(plans).startswith("('stuck'"):
            locked += 1
            kinds = {p.kind for plan in plans for p in validate_plan(plan).problems}
            assert kinds <= {"collective", "deadlock"} and kinds, seed
    assert locked > 5


@pytest.mark.parametrize("sharding", ["none", "step"])
def test_tied_reductions_have_one_order(sharding):
    graph = StageGraph(chain(4, 4, tied=[(0, 3), (1, 2)]), 2)
    plan = lower_plan(one_f_one_b(graph), graph, {}, sharding=sharding)
    assert validate_plan(plan).problems == () and execution_failure(plan) == ""
    for rank, program in enumerate(plan.actions):
        assert program[-1] == Action(T.REDUCE_TIED, rank, other=3 - rank, peer=3 - rank)
    # With both pairs on the same two ranks, both ranks must start with the same pair.
    layout = StageLayout(
        tuple(replace(s, ranks=(r,)) for s, r in zip(graph.layout.stages, (0, 1, 0, 1),
                                                     strict=True)),
        graph.layout.edges,
    )  # fmt: skip
    graph = StageGraph(layout, 2)
    plan = lower_plan(random_order(graph, 0), graph, {}, sharding=sharding)
    assert [[str(a) for a in p[-2:]] for p in plan.actions] == [
        ["0REDUCE_TIED>3@1", "2REDUCE_TIED>1@1"],
        ["3REDUCE_TIED>0@0", "1REDUCE_TIED>2@0"],
    ]
    assert validate_plan(plan).problems == () and execution_failure(plan) == ""


def test_frozen_tied_weights_are_not_reduced():
    graph = StageGraph(chain(2, 2, trainable=(False, True), tied=[(0, 1)]), 2)
    plan = lower_plan(one_f_one_b(graph), graph, {})
    assert not any(a.type is T.REDUCE_TIED for program in plan.actions for a in program)


def test_unpairable_tied_stages_are_rejected():
    layout = chain(3, 2, tied=[(0, 2)])
    graph = StageGraph(layout, 1)
    with pytest.raises(ValueError, match=r"stages 0 and 2 are tied and share rank\(s\) \[0\]"):
        lower_plan(gpipe(graph), graph, {})
    stages = (replace(layout.stages[0], ranks=(0, 2)), layout.stages[1],
              replace(layout.stages[2], ranks=(1,)))  # fmt: skip
    graph = StageGraph(StageLayout(stages, layout.edges), 1)
    with pytest.raises(ValueError, match="more replicas than"):
        lower_plan(random_order(graph, 0), graph, {})


def test_invalid_lowering_arguments_are_rejected():
    graph = StageGraph(chain(2, 2), 1)
    with pytest.raises(ValueError, match="the order has 1 ranks, but the stages are on 2"):
        lower_plan(one_f_one_b(graph)[:1], graph, {})
    with pytest.raises(ValueError, match="receives_ahead = -1"):
        lower_plan(one_f_one_b(graph), graph, {}, receives_ahead=-1)


def test_invalid_orders_are_lowered_for_validation():
    """Check that validation matches execution for shuffled, incomplete and duplicated orders."""
    legal = 0
    for seed in range(300):
        rng, graph = random.Random(seed), random_graph(seed)
        order = [list(program) for program in random_order(graph, seed)]
        program = rng.choice([p for p in order if p])
        position = rng.randrange(len(program))
        match seed % 4:
            case 0:
                rng.shuffle(program)
            case 1:
                del program[position]
            case 2:
                program.insert(rng.randrange(len(program) + 1), program[position])
            case 3:
                rng.choice(order).append(program.pop(position))
        plan = lower_plan(tuple(map(tuple, order)), graph, {})
        assert bool(validate_plan(plan).problems) == bool(execution_failure(plan)), (
            seed,
            execution_failure(plan),
        )
        legal += not execution_failure(plan)
    assert 5 < legal < 100
