"""Encoder actions that run in pieces during the LLM's tensor-parallel collectives (Optimus §4.2).

During such a collective, a rank computes nothing, but for less time than an encoder layer takes. A
plan may therefore give each LLM action an `EncoderLaunch`: the encoder actions that may start in
it, and the number of pieces (`torchmm.balance.optimus.yield_points`) that run during each of its
collectives.

The compute order stays the same. The rest of an encoder action runs at its position in the program,
and its results are sent from there. An action may start in an LLM action only if all its inputs
have arrived. `add_launches` therefore moves the waits for these inputs before the LLM action.
Receives stay where they are, so other ranks are not affected.

The tensor-parallel ranks of a group are one rank of the plan. They run the same pieces during the
same collectives, so collectives of the encoder match too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchmm.pipelining.checks.problems import PlanProblem
from torchmm.pipelining.checks.rules import PlanRules
from torchmm.pipelining.plan.actions import COMPUTE, Action
from torchmm.pipelining.plan.plan import EncoderLaunch, PipelinePlan
from torchmm.pipelining.plan.transfers import RECV, WAIT
from torchmm.pipelining.schedules.colocated import encoder_stages


def add_launches(plan: PipelinePlan, launches: Mapping[Action, EncoderLaunch]) -> PipelinePlan:
    """Return a plan with launches added to it.

    An action whose inputs are received too late does not start early, and neither do the encoder
    actions between the LLM action and its position.

    Args:
        plan: Plan without launches.
        launches: Launch of each LLM action.
    """
    if not launches:
        return plan
    book = PlanRules(plan)
    programs = []
    possible: dict[Action, EncoderLaunch] = {}
    for rank, program in enumerate(plan.actions):
        moved = list(program)
        blocked_until = -1  # index of an action that cannot start early
        for llm in program:
            if llm not in launches:
                continue
            starting: list[Action] = []
            for action in launches[llm].encoder_actions:
                position = moved.index(llm)
                if position < blocked_until or not _move_waits(moved, position, action, book, rank):
                    blocked_until = max(blocked_until, moved.index(action))
                    break
                starting.append(action)
            possible[llm] = EncoderLaunch(tuple(starting), launches[llm].pieces_per_collective)
        programs.append(tuple(moved))
    return replace(plan, actions=tuple(programs), launches=possible)


def _move_waits(
    program: list[Action], position: int, action: Action, book: PlanRules, rank: int
) -> bool:
    """Move the waits for the inputs of an action to a position.

    Returns:
        False if a receive is not posted before the position.
    """
    rules = book.rules[rank]
    needs = set(rules[action].requires)
    waits = [a for a in program[position:] if a.type in WAIT and needs & set(rules[a].establishes)]
    received = set(program[:position])
    if any(wait._replace(type=RECV[WAIT.index(wait.type)]) not in received for wait in waits):
        return False
    for wait in waits:
        program.remove(wait)
    program[position:position] = waits
    return True


def launch_problems(plan: PipelinePlan, book: PlanRules) -> Iterator[PlanProblem]:
    """Yield problems of launches: not from LLM actions, of the wrong actions, or too early."""
    if not plan.launches:
        return
    encoders = encoder_stages(plan.graph)
    unknown = set(plan.launches)
    for rank, program in enumerate(plan.actions):
        waiting = [a for a in reversed(program) if a.type in COMPUTE and a.stage in encoders]
        started: set[Action] = set()
        for position, llm in enumerate(program):
            if waiting and llm == waiting[-1]:
                waiting.pop()
            if llm not in unknown:
                continue
            unknown.discard(llm)
            if llm.stage in encoders or llm.type not in COMPUTE:
                text = "only actions of the LLM can launch encoder layers"
            else:
                text = _launch_problem(plan, book, rank, position, waiting, started)
            if text:
                fix = "create launches with add_launches"
                yield PlanProblem("dependency", rank, position, llm, text, fix)
    for action in unknown:
        text = "launches belong to an action that is not in the plan"
        yield PlanProblem(
            "dependency", 0, -1, action, text, "create them from the plan of this step"
        )


def _launch_problem(
    plan: PipelinePlan,
    book: PlanRules,
    rank: int,
    position: int,
    waiting: list[Action],
    started: set[Action],
) -> str:
    """Return the problem of the launch at a position, or "".

    Args:
        plan: Plan with launches.
        book: Rules of the plan.
        rank: Rank of the launch.
        position: Index of the LLM action in the program of the rank.
        waiting: Encoder actions that have not started, last one first; updated.
        started: Encoder actions that have started early; updated.
    """
    launch = plan.launches[plan.actions[rank][position]]
    if min(launch.pieces_per_collective, default=0) < 0:
        return f"launches {list(launch.pieces_per_collective)} pieces"
    later = set(plan.actions[rank][position:])
    for action in launch.encoder_actions:
        following = waiting.pop() if waiting else None
        if action != following:
            return f"starts {action}, but {following} is next"
        givers = {book.fact_actions[fact] for fact in book.rules[rank][action].requires}
        if late := givers & later - started:
            return f"starts {action}, which requires {', '.join(map(str, late))}"
        started.add(action)
    return ""
