"""Encoder actions that run ahead of their places, in pieces, while LLM actions communicate.

While a tensor-parallel collective is under way, a rank of the LLM computes nothing (a TP bubble,
Optimus §2.2), for less time than a layer of an encoder takes. A plan may therefore say what an LLM
action *launches* at each of its collectives: so many pieces (`torchmm.parallel.tensor.pieces`) of
the encoder actions that come next on its rank (§3.1, decision 3). Nothing else changes: encoder
actions keep their order and their places, at which what is left of them runs, and from which their
results are sent. So a plan with launches is also an order like any other, and one whose launches
are left out is the same plan, a bit slower.

An action begins ahead only if all it needs is there before the LLM action that launches it: waits
for its inputs move in front of that one. Peers notice nothing, as receives stay where they are.

All tensor-parallel ranks of a group are one rank of the plan, so they launch the same pieces at the
same collectives, and those of a split encoder meet in its own collectives.

Other than `fillers`, whole actions on a stream of their own, which the device mixes with the LLM's
as it likes. A plan has the one or the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchmm.pipelining.checks.problems import PlanProblem
from torchmm.pipelining.checks.rules import RuleBook
from torchmm.pipelining.plan.actions import COMPUTE, Action
from torchmm.pipelining.plan.plan import Launch, PipelinePlan
from torchmm.pipelining.plan.transfers import RECV, WAIT
from torchmm.pipelining.schedules.fillers import encoder_stages


def with_launches(plan: PipelinePlan, launches: Mapping[Action, Launch]) -> PipelinePlan:
    """The plan with these launches, as far as what they begin can begin there.

    Args:
        plan: without any.
        launches: by LLM action.
    """
    book = RuleBook(plan)
    programs = []
    kept: dict[Action, Launch] = {}
    for rank, program in enumerate(plan.actions):
        row = list(program)
        held = -1  # an action's place, until which none behind it may begin ahead
        for llm in program:
            if llm not in launches:
                continue
            begins, pieces = launches[llm]
            begun: list[Action] = []
            for action in begins:
                at = row.index(llm)
                if at < held or not _moves_waits(row, at, action, book, rank):
                    held = max(held, row.index(action))
                    break
                begun.append(action)
            kept[llm] = Launch(tuple(begun), pieces)
        programs.append(tuple(row))
    return replace(plan, actions=tuple(programs), launches=kept)


def _moves_waits(row: list[Action], at: int, action: Action, book: RuleBook, rank: int) -> bool:
    """Moves the waits for an action's inputs in front of a place, if they are received by then."""
    waits = [a for a in row[at:] if a.type in WAIT and _gives_to(a, action, book, rank)]
    received = set(row[:at])
    if any(wait._replace(type=RECV[WAIT.index(wait.type)]) not in received for wait in waits):
        return False
    for wait in waits:
        row.remove(wait)
    row[at:at] = waits
    return True


def _gives_to(wait: Action, action: Action, book: RuleBook, rank: int) -> bool:
    rules = book.rules[rank]
    return not set(rules[wait].gives).isdisjoint(rules[action].needs)


def launch_problems(plan: PipelinePlan, book: RuleBook) -> Iterator[PlanProblem]:
    """Launches of what is not there yet, out of turn, or of and by the wrong actions."""
    if not plan.launches:
        return
    encoders = encoder_stages(plan.graph)
    left = set(plan.launches)
    for rank, program in enumerate(plan.actions):
        at = {action: i for i, action in enumerate(program)}
        order = [a for a in program if a.type in COMPUTE and a.stage in encoders]
        begun: set[Action] = set()
        for position, llm in enumerate(program):
            if llm not in left:
                continue
            left.discard(llm)
            text = ""
            if llm.stage in encoders or llm.type not in COMPUTE or plan.fillers:
                text = "only LLM actions launch, and only in plans without fillers"
            elif min(plan.launches[llm].pieces, default=0) < 0:
                text = f"launches {list(plan.launches[llm].pieces)} pieces"
            for action in () if text else plan.launches[llm].begins:
                due = next((a for a in order if at[a] > position and a not in begun), None)
                text = text or _problem(plan, book, rank, position, action, due, begun)
                begun.add(action)
            if text:
                remedy = "make launches with with_launches"
                yield PlanProblem("dependency", rank, position, llm, text, remedy)
    for action in left:
        text = "launches of an action that is not in the plan"
        yield PlanProblem("dependency", 0, -1, action, text, "make them from this step's plan")


def _problem(
    plan: PipelinePlan,
    book: RuleBook,
    rank: int,
    position: int,
    action: Action,
    due: Action | None,
    begun: set[Action],
) -> str:
    """What is wrong with an action's beginning in an LLM action.

    Args:
        position: of the LLM action.
        due: the next encoder action of the rank.
        begun: encoder actions that have begun before.
    """
    if action != due:
        return f"begins {action}, but {due} is the next one"
    needs = {*book.rules[rank][action].needs}
    for later in plan.actions[rank][position:]:
        rule = book.rules[rank].get(later)
        if rule and needs & {*rule.gives} and later not in begun:
            return f"begins {action}, which needs {later}"
    return ""
