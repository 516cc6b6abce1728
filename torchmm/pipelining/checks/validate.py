"""Validation of a plan before it runs.

A wrong plan does not fail with an error. It blocks all ranks, or trains with the gradients of a
different microbatch. Each plan is therefore validated where it is built, before it is sent to other
ranks. One pass over the actions of each rank checks them against `PlanRules`: each action exists
exactly once, after its inputs. Then both ends of each channel are compared, and all ranks are
simulated together (`simulate_events`). Validation needs no cost model and is fast enough for every
step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

from torchmm.common.extensions import find_entries
from torchmm.pipelining.checks.problems import PlanProblem, PlanReport, ProblemKind
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.checks.scan import ProgramScan, ScanResult, simulate_events
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.plan import PipelinePlan, RecomputeMode, TensorSpec

COLLECTIVES = (ActionType.UNSHARD, ActionType.REDUCE_GRAD, ActionType.REDUCE_TIED)
WAITS = (ActionType.WAIT_F, ActionType.WAIT_B, ActionType.WAIT_SEND_F, ActionType.WAIT_SEND_B)


def validate_plan(plan: PipelinePlan) -> PlanReport:
    """Check that a plan executes the complete step in a valid order and without deadlocks.

    If a plan unshards or reduces any stage, it must do so for all stages. The simulator computes
    memory use with the same `PlanRules`.

    Extensions can add checks with entries in the table "plan_checks". An entry is a function of
    the plan and its `PlanRules` that yields problems. `is_used` of the entry receives the plan.
    """
    book = PlanRules(plan)
    scan = ProgramScan(book, plan)
    for rank in range(len(plan.actions)):
        scan.run(rank)
    simulated = simulate_events(scan.events, len(book.counters))
    extension_problems = [
        problem
        for entry in find_entries("plan_checks")
        if entry.is_used(plan)
        for problem in entry.load()(plan, book)
    ]
    problems = [
        *scan.problems,
        *_specs(plan, book),
        *_missing(plan, book, scan.established),
        *(p for rank in range(len(plan.actions)) for p in _collectives(rank, plan, book)),
        *_unsafe_reductions(plan, book, simulated),
        *_mirrors(plan),
        *extension_problems,
        *_channels(plan, book, scan),
        *_deadlocks(plan, book, scan, simulated),
        *_recompute(plan),
    ]
    order = get_args(ProblemKind)
    problems.sort(key=lambda p: (order.index(p.kind), p.position < 0, p.rank, p.position))
    return PlanReport(tuple(problems))


def _specs(plan: PipelinePlan, book: PlanRules) -> Iterator[PlanProblem]:
    """Yield messages without tensors, invalid tensors, and specs of unknown messages."""
    if not plan.specs:
        return
    fix = "build the specs from the metadata of the microbatches of this step"
    wrong: dict[tuple[TensorSpec, ...], str] = {}
    for message in book.messages:
        specs = plan.specs.get(message, ())
        if specs not in wrong:
            wrong[specs] = _wrong_tensors(specs)
        text = wrong[specs]
        if not text and book.training and plan.graph.sends_gradient(message):
            text = (
                "" if any(s.requires_grad for s in specs) else "no tensor that requires a gradient"
            )
        if text:
            producer = plan.graph.producer(message)
            rank = plan.graph.rank(producer)
            action = Action(ActionType.F, *producer)
            position = _position(plan, rank, action)
            text = f"message to stage {message.destination}: {text}"
            yield PlanProblem("specs", rank, position, action, text, fix)
    if len(plan.specs) > len(book.messages) or not plan.specs.keys() <= set(book.messages):
        for message in sorted(plan.specs.keys() - set(book.messages)):
            yield PlanProblem("specs", 0, -1, None, f"specs of {message}, which is not sent", fix)


def _wrong_tensors(specs: tuple[TensorSpec, ...]) -> str:
    if not specs:
        return "it has no tensors"
    for shape, dtype, requires_grad, _ in specs:
        if any(size < 0 for size in shape):
            return f"shape {list(shape)} has a negative size"
        if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            return f"a tensor of {dtype} cannot have a gradient"
    return ""


def _position(plan: PipelinePlan, rank: int, action: Action) -> int:
    program = plan.actions[rank] if rank < len(plan.actions) else ()
    return program.index(action) if action in program else -1


def _missing(plan: PipelinePlan, book: PlanRules, established: bytearray) -> Iterator[PlanProblem]:
    if 0 not in established:
        return
    with_gradient = {
        f.weights: f.gradient
        for f in book.tasks.values()
        if f.weights is not None and f.gradient is not None
    }
    has_no_backward = not any(a.type in COMPUTE[1:] for program in plan.actions for a in program)
    for fact, is_established in enumerate(established):
        if is_established or (fact in with_gradient and not established[with_gradient[fact]]):
            continue
        rank = book.fact_ranks[fact]
        action = book.fact_actions[fact]
        fix = "build the plan with lower_plan"
        if action.type in COMPUTE:
            fix = "build the order from the graph of this step"
            if has_no_backward and action.type is not ActionType.F:
                fix = "lower an order without backward passes only with training=False"
        text = f"{book.describe_fact(fact)} is missing from the program"
        yield PlanProblem("missing", rank, -1, action, text, fix)


def _collectives(rank: int, plan: PipelinePlan, book: PlanRules) -> Iterator[PlanProblem]:
    """Yield collectives that replicas with different plans would run in different orders.

    The order is that of the stages. For reductions, it is the order of their turns.
    """
    program = plan.actions[rank]
    collectives = [(i, a) for i, a in enumerate(program) if a.type in COLLECTIVES]
    if not collectives:
        return
    count = len(program)
    first_busy = next((i for i, a in enumerate(program) if a.type in COMPUTE + WAITS), count)
    last_compute = next((i for i in reversed(range(count)) if program[i].type in COMPUTE), -1)
    for position, action in collectives:
        if action.type is ActionType.UNSHARD and position > first_busy:
            text = f"runs after action {first_busy} ({program[first_busy]})"
            fix = "all-gather all stages before the first computation or wait"
            yield PlanProblem("collective", rank, position, action, text, fix)
        if action.type is ActionType.REDUCE_TIED and position < last_compute:
            text = f"runs before action {last_compute} ({program[last_compute]})"
            fix = "exchange gradients of tied weights after all computation"
            yield PlanProblem("collective", rank, position, action, text, fix)
    for (_, before), (position, action) in pairwise(collectives):
        if _turn(before, book) > _turn(action, book):
            text = f"runs after {before}, but replicas of this rank run it before"
            fix = (
                "keep UNSHARD and REDUCE_TIED each in the order of the stages, REDUCE_GRAD in that "
                "of `reduction_turns`"
            )
            yield PlanProblem("collective", rank, position, action, text, fix)


def _unsafe_reductions(
    plan: PipelinePlan, book: PlanRules, simulated: ScanResult
) -> Iterator[PlanProblem]:
    """Yield reductions that need an action behind a later reduction on a different rank."""
    stages = {turn: stage for stage, turn in book.turns.items()}
    for rank, (_, _, position), reached in simulated.unsafe_reductions:
        text = (
            "runs after an action that requires a rank that has reduced stage "
            f"{stages[reached - 1]}; two replicas could wait for each other in these "
            "reductions"
        )
        fix = "place reductions with lower_plan"
        action = plan.actions[rank][position]
        yield PlanProblem("collective", rank, position, action, text, fix)


def _mirrors(plan: PipelinePlan) -> Iterator[PlanProblem]:
    """Yield mirrors with different actions.

    Mirrors communicate within their actions, so they need the same actions in the same order.
    """
    layout = plan.graph.layout
    actions_of_pair: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, program in enumerate(plan.actions):
        for position, action in enumerate(program):
            mirrors = layout.mirror_ranks.get((action.stage, rank), ())
            for other in mirrors if action.type in COMPUTE else ():
                same = action._replace(stage=layout.mirror_stages[action.stage][0])
                actions_of_pair[rank, other].append((position, same))
    for first, rank in sorted(
        {(min(mirrors), rank) for (_, rank), mirrors in layout.mirror_ranks.items()}
    ):
        if first == rank:
            continue
        expected = [action for _, action in actions_of_pair[first, rank]]
        local = actions_of_pair[rank, first]
        if [action for _, action in local] != expected:
            pairs = enumerate(zip(local, expected, strict=False))
            at = next((i for i, ((_, a), b) in pairs if a != b), -1)
            position = local[at][0] if at >= 0 else -1
            actual = plan.actions[rank][position] if at >= 0 else None
            text = f"rank {first} runs the same layers, but different actions or another order"
            fix = "use the actions of the first replica for all replicas"
            yield PlanProblem("collective", rank, position, actual, text, fix)


def _turn(action: Action, book: PlanRules) -> tuple[int, int, int]:
    if action.type is ActionType.REDUCE_TIED:
        return 2, min(action.stage, action.other), max(action.stage, action.other)
    reduces = action.type is ActionType.REDUCE_GRAD
    turn = book.turns.get(action.stage, -1) if reduces else action.stage
    return COLLECTIVES.index(action.type), turn, 0


def _channels(plan: PipelinePlan, book: PlanRules, scan: ProgramScan) -> Iterator[PlanProblem]:
    """Yield the first receive of each channel that does not match its send."""
    for counter in range(0, len(book.counters), 2):
        sender, receiver = book.counters[counter]
        pairs = zip(scan.posts[counter], scan.posts[counter + 1], strict=False)
        for index, (sent, received) in enumerate(pairs):
            if sent != received:
                position = scan.position(receiver, counter + 1, index)
                other = scan.position(sender, counter, index)
                text = (
                    f"this is receive {index} from rank {sender}, whose send {index} is action "
                    f"{other} ({plan.actions[sender][other]})"
                )
                fix = "post the receives of a channel in the order of its sends"
                action = plan.actions[receiver][position]
                yield PlanProblem("channel", receiver, position, action, text, fix)
                break


def _deadlocks(
    plan: PipelinePlan, book: PlanRules, scan: ProgramScan, simulated: ScanResult
) -> Iterator[PlanProblem]:
    blocked = simulated.blocked
    for rank, (counter, needed, position) in blocked.items():
        peer = book.counters[counter][0]
        posts = scan.posts[counter]
        text = f"waits for rank {peer} and never continues, because rank {peer} "
        if len(posts) < needed:
            text += f"posts {len(posts)} of {needed} required tensors"
        else:
            at = scan.position(peer, counter, needed - 1)
            text += f"does not reach action {at} ({plan.actions[peer][at]})"
        if peer in blocked:
            _, _, at = blocked[peer]
            text += f" but is blocked in action {at} ({plan.actions[peer][at]})"
        fix = "change the order of these actions so that one rank can continue"
        action = plan.actions[rank][position]
        yield PlanProblem("deadlock", rank, position, action, text, fix)


def _recompute(plan: PipelinePlan) -> Iterator[PlanProblem]:
    """Yield recomputation modes of tasks without a backward pass, or with a wrong layer count."""
    layout = plan.graph.layout
    fix = "tune the layers of the plan that will run"
    tasks = set(plan.graph.tasks()) if plan.recompute else set()
    for task, modes in plan.recompute.items():
        if task not in tasks:
            yield PlanProblem(
                "recompute", 0, -1, None, f"{task} has a choice but is not a task", fix
            )
            continue
        stage = layout.stages[task.stage]
        text = ""
        if not plan.training or not plan.graph.needs_backward(task.stage, task.microbatch):
            text = "has no backward pass for recomputation"
        elif len(modes) != stage.stop - stage.start:
            text = f"{len(modes)} recomputation modes for {stage.stop - stage.start} layers"
        elif unknown := set(modes) - set(get_args(RecomputeMode)):
            text = f"unknown recomputation modes: {sorted(unknown)}"
        if text:
            rank = plan.graph.rank(task)
            action = Action(ActionType.F, *task)
            position = _position(plan, rank, action)
            yield PlanProblem("recompute", rank, position, action, text, fix)
