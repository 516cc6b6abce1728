"""Tests of plan validation: problems are reported with their position, and memory is computed."""

import random
from dataclasses import replace

import pytest
import torch
from naive_execution import execution_failure
from naive_memory import naive_memory
from random_orders import random_graph, random_order, random_specs

from torchmm.common.errors import MAX_LISTED, PlanError
from torchmm.pipelining.checks.rules import MemoryModel, PlanRules
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import TensorSpec
from torchmm.pipelining.schedules.classic import forward_only, gpipe, one_f_one_b

T = ActionType


def small_plan(seed=5):
    """Return a plan of two ranks with all action types, frozen stages and tied weights."""
    trained = (False, True, True, False, True, True)
    modules = ("vision", "vision", "llm", "llm", "llm", "llm")
    stages = [
        StageSpec(i, module, i, i + 1, (i % 2,), trainable=flag)
        for i, (module, flag) in enumerate(zip(modules, trained, strict=True))
    ]
    stages[2], stages[5] = replace(stages[2], tied_to=5), replace(stages[5], tied_to=2)
    layout = StageLayout(tuple(stages), tuple((i, i + 1) for i in range(5)), frozenset({"vision"}))
    graph = StageGraph(layout, 2, {"vision": (2, 1)})
    order = random_order(graph, seed, split=0.5)
    return lower_plan(order, graph, random_specs(graph, 0), sharding="step")


PLAN = small_plan()
POSITIONS = [(rank, i) for rank, program in enumerate(PLAN.actions) for i in range(len(program))]


def changed(plan, rank, program):
    return replace(plan, actions=(*plan.actions[:rank], tuple(program), *plan.actions[rank + 1 :]))


def program_of(rank):
    return list(PLAN.actions[rank])


def problems_of(plan):
    return [(p.kind, p.rank, p.position) for p in validate_plan(plan).problems]


def test_small_plan_has_all_actions_and_is_valid():
    assert {a.type for program in PLAN.actions for a in program} == set(T)
    assert problems_of(PLAN) == [] and execution_failure(PLAN) == ""


@pytest.mark.parametrize(("rank", "position"), POSITIONS)
def test_every_missing_action_is_reported(rank, position):
    """Check that no action is redundant: each is used later, or completes or frees something."""
    program = program_of(rank)
    action = program.pop(position)
    plan = changed(PLAN, rank, program)
    named = action._replace(type=T.B) if action.type is T.I else action
    problems = validate_plan(plan).problems
    assert ("missing", rank, named) in [(p.kind, p.rank, p.action) for p in problems]
    assert str(action) in " ".join(p.text for p in problems if p.kind == "missing")
    assert execution_failure(plan)


@pytest.mark.parametrize(("rank", "position"), POSITIONS)
def test_every_duplicate_action_is_reported(rank, position):
    program = program_of(rank)
    program.insert(position, program[position])
    plan = changed(PLAN, rank, program)
    assert ("duplicate", rank, position + 1) in problems_of(plan)
    assert execution_failure(plan)


@pytest.mark.parametrize(("rank", "position"), POSITIONS)
def test_every_changed_field_is_reported(rank, position):
    """Change the peer, the rank and the task."""
    program = program_of(rank)
    action = program[position]

    def problems(**fields):
        altered = [*program[:position], action._replace(**fields), *program[position + 1 :]]
        return problems_of(changed(PLAN, rank, altered))

    if action.peer >= 0:
        assert ("wrong_peer", rank, position) in problems(peer=rank)
        assert ("wrong_peer", rank, position) in problems(peer=7)
        assert ("unknown", rank, position) in problems(other=action.stage)
    else:
        assert ("unknown", rank, position) in problems(peer=1 - rank)
    for fields in ({"stage": 99}, {"stage": -2}, {"microbatch": 99}, {"sub_microbatch": 7}):
        assert ("unknown", rank, position) in problems(**fields)
    other_program = program_of(1 - rank)
    other_program.insert(20, program.pop(position))
    plan = changed(changed(PLAN, rank, program), 1 - rank, other_program)
    assert ("wrong_rank", 1 - rank, 20) in problems_of(plan)
    assert ("missing", rank, -1) in problems_of(plan)


def test_changed_actions_are_validated_as_executed():
    """Swap neighbors, replace types and move actions. Some changes are harmless."""
    verdicts = {"bad": 0, "harmless": 0}

    def check(rank, program, change):
        plan = changed(PLAN, rank, program)
        problems = validate_plan(plan).problems
        assert bool(problems) == bool(execution_failure(plan)), (
            change,
            execution_failure(plan),
            *map(str, problems),
        )
        verdicts["bad" if problems else "harmless"] += 1

    rng = random.Random(0)
    for rank, position in POSITIONS:
        program = program_of(rank)
        for kind in T:
            if kind is not program[position].type:
                renamed = program[position]._replace(type=kind)
                check(rank, [*program[:position], renamed, *program[position + 1 :]], renamed)
        for target in [position + 1, *(rng.randrange(len(program)) for _ in range(8))]:
            if target < len(program):
                moved = program_of(rank)
                moved.insert(target, moved.pop(position))
                check(rank, moved, (rank, position, target))
    assert verdicts["bad"] > 1000 and verdicts["harmless"] > 200


def exchange(rank, first, second):
    """Return the plan in which a rank swaps two actions."""
    program = program_of(rank)
    program[first], program[second] = program[second], program[first]
    return changed(PLAN, rank, program)


def position_of(rank, *types, after=0):
    return next(i for i, a in enumerate(PLAN.actions[rank]) if a.type in types and i >= after)


def test_actions_before_their_inputs_are_reported():
    for kinds in [(T.WAIT_F, T.F), (T.RECV_B, T.WAIT_B), (T.SEND_F, T.WAIT_SEND_F), (T.I, T.W),
                  (T.WAIT_B, T.I, T.B)]:  # fmt: skip
        first, *then = kinds
        for rank in range(2):
            position = position_of(rank, first)
            action = PLAN.actions[rank][position]
            user = next(
                i for i, a in enumerate(PLAN.actions[rank])
                if a.type in then and a[1:4] == action[1:4] and i > position
            )  # fmt: skip
            problems = validate_plan(exchange(rank, position, user)).problems
            named = [p for p in problems if (p.kind, p.rank, p.position) ==
                     ("dependency", rank, position)]  # fmt: skip
            assert any(str(action) in p.text and str(action) in p.fix for p in named)
            assert str(named[0]).startswith(
                f"rank {rank}, action {position} ({PLAN.actions[rank][user]}): "
            )


def test_receives_in_wrong_order_are_reported():
    for rank in range(2):
        first = position_of(rank, T.RECV_F, T.RECV_B)
        second = position_of(rank, T.RECV_F, T.RECV_B, after=first + 1)
        plan = exchange(rank, first, second)
        assert problems_of(plan)[0] == ("channel", rank, first)
        (problem, *_) = validate_plan(plan).problems
        assert f"receive 0 from rank {1 - rank}" in problem.text


@pytest.mark.parametrize("kind", [T.UNSHARD, T.REDUCE_GRAD])
def test_collectives_in_wrong_order_are_reported(kind):
    for rank in range(2):
        first = position_of(rank, kind)
        second = position_of(rank, kind, after=first + 1)
        problems = problems_of(exchange(rank, first, second))
        assert ("collective", rank, second) in problems or kind is T.REDUCE_GRAD
        # A reduction before the last backward of its stage is first reported as a dependency
        # problem.
        assert problems[0][0] in ("collective", "dependency")
    program = program_of(0)
    late, early = program_of(0), program_of(0)
    late.insert(position_of(0, T.F) + 1, late.pop(2))
    assert ("collective", 0, position_of(0, T.F) + 1) in problems_of(changed(PLAN, 0, late))
    tied = position_of(0, T.REDUCE_TIED)
    last = max(i for i, a in enumerate(program) if a.type in COMPUTE)
    early.insert(last, early.pop(tied))
    assert ("collective", 0, last) in problems_of(changed(PLAN, 0, early))


def test_early_reductions_are_reported():
    for rank, program in enumerate(PLAN.actions):
        for stage in {a.stage for a in program if a.type is T.REDUCE_GRAD}:
            stage_actions = [
                i for i, a in enumerate(program) if a.type in COMPUTE and a.stage == stage
            ]
            early = program_of(rank)
            early.remove(Action(T.REDUCE_GRAD, stage))
            early.insert(stage_actions[-1], Action(T.REDUCE_GRAD, stage))
            plan = changed(PLAN, rank, early)
            assert ("dependency", rank, stage_actions[-1]) in problems_of(
                plan
            ) and execution_failure(plan)


def chain(stages, ranks):
    return StageLayout(
        tuple(StageSpec(s, "llm", s, s + 1, (s % ranks,)) for s in range(stages)),
        tuple((s, s + 1) for s in range(stages - 1)),
    )


def test_deadlock_names_the_waiting_ranks():
    """Run the second pass of rank 0 first."""
    graph = StageGraph(chain(4, 2), 1)
    order = [list(program) for program in gpipe(graph)]
    order[0][0], order[0][1] = order[0][1], order[0][0]
    plan = lower_plan(tuple(map(tuple, order)), graph, {})
    assert execution_failure(plan).startswith("('stuck'")
    first, second = validate_plan(plan).problems
    waits = [plan.actions[p.rank][p.position] for p in (first, second)]
    assert [str(a) for a in waits] == ["2WAIT_F0>1@1", "1WAIT_F0>0@0"]
    assert (first.kind, first.rank, second.kind, second.rank) == ("deadlock", 0, "deadlock", 1)
    assert "because rank 1 does not reach action" in first.text
    assert "(1SEND_F0>2@0) but is blocked in action" in first.text
    assert "(1WAIT_F0>0@0)" in first.text
    assert "because rank 0 does not reach action" in second.text


def test_wait_for_finished_rank_is_reported():
    graph = StageGraph(chain(2, 2), 1)
    plan = lower_plan(forward_only(graph), graph, {}, training=False)
    program = [a for a in plan.actions[0] if a.type is T.F]
    *missing, last = validate_plan(changed(plan, 0, program)).problems
    assert [p.kind for p in missing] == ["missing", "missing"]
    assert (last.kind, last.rank, str(last.action)) == ("deadlock", 1, "1WAIT_F0>0@0")
    assert last.text == (
        "waits for rank 0 and never continues, because rank 0 posts 0 of 1 required tensors"
    )  # fmt: skip


def test_tied_reductions_in_wrong_order_deadlock():
    layout = chain(4, 2)
    pairs = {0: 3, 3: 0, 1: 2, 2: 1}
    stages = tuple(replace(s, tied_to=pairs[s.index]) for s in layout.stages)
    graph = StageGraph(StageLayout(stages, layout.edges), 1)
    plan = lower_plan(gpipe(graph), graph, {})
    assert problems_of(plan) == []
    program = plan.actions[1]
    plan = changed(plan, 1, (*program[:-2], program[-1], program[-2]))
    kinds = [p.kind for p in validate_plan(plan).problems]
    assert kinds == ["collective", "deadlock", "deadlock"]
    assert execution_failure(plan).startswith("('stuck'")


def test_blocking_sends_are_validated_by_execution():
    """Wait for every send immediately and post every receive late, so that many plans deadlock."""
    stuck = 0
    for seed in range(150):
        graph = random_graph(seed)
        plan = lower_plan(random_order(graph, seed), graph, {}, receives_ahead=0)
        blocking = []
        for program in plan.actions:
            actions = []
            for action in program:
                if action.type in (T.SEND_F, T.SEND_B):
                    wait = T.WAIT_SEND_F if action.type is T.SEND_F else T.WAIT_SEND_B
                    actions += [action, action._replace(type=wait)]
                elif action.type not in (T.WAIT_SEND_F, T.WAIT_SEND_B):
                    actions.append(action)
            blocking.append(tuple(actions))
        plan = replace(plan, actions=tuple(blocking))
        kinds = {p.kind for p in validate_plan(plan).problems}
        assert kinds == ({"deadlock"} if execution_failure(plan) else set()), seed
        stuck += bool(kinds)
    assert 20 < stuck < 130


def test_forward_only_plans_require_training_false():
    graph = StageGraph(chain(2, 2), 2)
    plan = lower_plan(forward_only(graph), graph, {})
    problem = validate_plan(plan).problems[0]
    assert problem.kind == "missing" and "training=False" in problem.fix
    plan = replace(lower_plan(one_f_one_b(graph), graph, {}), training=False)
    problem = validate_plan(plan).problems[0]
    assert problem.kind == "unknown" and "only forward passes" in problem.text


def test_wrong_number_of_programs_is_reported():
    graph = StageGraph(chain(2, 2), 1)
    plan = lower_plan(gpipe(graph), graph, {})
    assert ("missing", 1, -1) in problems_of(replace(plan, actions=plan.actions[:1]))
    more = replace(plan, actions=(*plan.actions, (Action(T.F, 0, 0),)))
    assert problems_of(more) == [("wrong_rank", 2, 0)]


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(T.W, 3, 0), "no parameter of stage 3 is trained"),
        (Action(T.B, 0, 0), "neither this stage nor anything that feeds it is trained"),
        (Action(T.F, 0, 0, 2), "stage 0 has 2 task(s) for microbatch 0 of 2"),
        (Action(T.F, 0, 5), "stage 0 has 0 task(s) for microbatch 5 of 2"),
        (Action(T.REDUCE_GRAD, 3), "stage 3 is not trained"),
        (Action(T.RESHARD, 5), "stage 5 is trained"),
        (Action(T.UNSHARD, 5, 3), "it sets fields that only computation and transfers have"),
        (Action(T.REDUCE_TIED, 1, other=4, peer=0), "no trained weight of stage 1"),
        (Action(T.RECV_B, 1, 0, 0, 0, 0), "the graph has no Message(source=1, destination=0"),
        (Action(T.SEND_B, 1, 0, 0, 0, 0), "no gradient is sent"),
    ],
)
def test_invalid_actions_explain_why(action, text):
    rank = action.stage % 2
    plan = changed(PLAN, rank, [*PLAN.actions[rank], action])
    (problem,) = [p for p in validate_plan(plan).problems if p.kind == "unknown"]
    assert text in problem.text and problem.fix and problem.action == action


def test_transfers_within_a_rank_are_reported():
    graph = StageGraph(chain(2, 1), 1)
    plan = lower_plan(gpipe(graph), graph, {})
    plan = changed(plan, 0, [*plan.actions[0], Action(T.SEND_F, 0, 0, 0, 1, 0)])
    assert "both stages are on one rank" in validate_plan(plan).problems[0].text


def test_invalid_specs_are_reported():
    def problem(message, specs):
        altered = {m: s for m, s in PLAN.specs.items() if m != message}
        altered |= {} if specs is None else {message: specs}
        (only,) = validate_plan(replace(PLAN, specs=altered)).problems
        assert only.kind == "specs"
        return only

    message = Message(1, 2, 0, 1)
    position = PLAN.actions[1].index(Action(T.F, 1, 0, 1))
    for specs, text in [
        (None, "no tensors"),
        ((), "no tensors"),
        ((TensorSpec((3, -1), torch.float32),), "[3, -1] has a negative size"),
        ((TensorSpec((3,), torch.int64),), "torch.int64 cannot have a gradient"),
        ((TensorSpec((3,), torch.float32, False),), "no tensor that requires a gradient"),
    ]:
        problems_of = problem(message, specs)
        assert text in problems_of.text and "to stage 2" in problems_of.text
        assert (problems_of.rank, problems_of.position) == (1, position)
    frozen = Message(0, 1, 0, 1)  # no gradient is sent back
    altered = {**PLAN.specs, frozen: (TensorSpec((3,), torch.float32, False),)}
    assert found_nothing(replace(PLAN, specs=altered))
    foreign = problem(Message(0, 5, 0), (TensorSpec((3,), torch.float32),))
    assert "destination=5" in foreign.text
    assert found_nothing(replace(PLAN, specs={}))  # a plan for simulation


def found_nothing(plan) -> bool:
    return not validate_plan(plan).problems


def peaks(plan, model):
    """Return the peak of allocated bytes per rank, with the position of the action."""
    book = PlanRules(plan)
    problems_of = []
    for rank, program in enumerate(plan.actions):
        used, usage = 0, []
        for action in program:
            allocates, frees = book.bytes_of(rank, action, model)
            usage.append(used + allocates)
            used = usage[-1] - frees
        maximum = max(usage, default=0)
        problems_of.append((maximum, usage.index(maximum) if maximum else 0))
    return problems_of


def test_memory_peaks_match_naive_recount():
    for seed in range(150):
        graph = random_graph(seed)
        order = random_order(graph, seed)
        plan = lower_plan(order, graph, random_specs(graph, seed), receives_ahead=seed % 3)
        if seed % 5 == 0:
            plan = lower_plan(
                forward_only(graph) if graph.layout.rank_count == 1 else
                tuple(tuple(a for a in p if a.type is T.F) for p in order),
                graph, plan.specs, training=False,
            )  # fmt: skip
        assert not validate_plan(plan).problems
        rng = random.Random(seed)
        kept = {task: rng.randrange(1000) for task in graph.tasks()}
        later = {task: nbytes // 3 for task, nbytes in kept.items()}
        model = MemoryModel(kept.__getitem__, later.__getitem__)
        usage = naive_memory(plan, model, [0] * len(order))
        recounted = [(max(u, default=0), u.index(max(u)) if any(u) else 0) for u in usage]
        assert peaks(plan, model) == recounted, seed


def test_memory_is_freed_at_the_end():
    graph = StageGraph(chain(1, 1), 3)
    model = MemoryModel(lambda task: 10 + task.microbatch)
    actions = [(T.F, 0), (T.F, 1), (T.I, 0), (T.F, 2), (T.W, 0), (T.B, 1), (T.B, 2)]
    plan = lower_plan((tuple(Action(t, 0, m) for t, m in actions),), graph, {})
    assert validate_plan(plan).problems == ()
    assert peaks(plan, model) == [(33, 3)]
    split = replace(model, saved_for_weights_bytes=lambda task: 4)
    assert peaks(plan, split)[0][0] == 27


def test_problems_raise_one_error():
    validate_plan(PLAN).raise_for_problems()
    plan = changed(PLAN, 0, program_of(0)[: position_of(0, T.F)])
    with pytest.raises(PlanError) as caught:
        validate_plan(plan).raise_for_problems()
    error = caught.value
    assert error.exit_code == 2 and len(error.problems) > MAX_LISTED
    lines = str(error).splitlines()
    assert lines[0] == f"{len(error.problems)} problems in the pipeline plan:"
    assert len(lines) == MAX_LISTED + 2
    assert lines[-1] == f"  ... and {len(error.problems) - MAX_LISTED} more"
    assert str(PlanError(["x"])) == "1 problem in the pipeline plan:\n  - x"


def test_encoder_replicas_have_separate_programs():
    stages = (StageSpec(0, "vision", 0, 1, (0, 1)), StageSpec(1, "llm", 0, 1, (2,)))
    layout = StageLayout(stages, ((0, 1),), frozenset({"vision"}))
    graph = StageGraph(layout, 1, {"vision": (2,)}, {("vision", 0, 1): 1})
    plan = lower_plan(random_order(graph, 0), graph, {}, sharding="step")
    assert problems_of(plan) == [] and execution_failure(plan) == ""
    assert [graph.rank(Task(0, 0, part)) for part in range(2)] == [0, 1]
    program = list(plan.actions[1])
    program.remove(Action(T.REDUCE_GRAD, 0))
    assert problems_of(changed(plan, 1, program)) == [("missing", 1, -1)]
