"""Encoder actions inside the LLM's actions, below their tensor-parallel communication.

While a tensor-parallel collective is under way, a rank of the LLM computes nothing (a TP bubble,
Optimus §2.2). An LLM action may therefore have *fillers*: encoder actions, layers for some images,
that run alongside it. In a rank's order they stand directly in front of it, so a plan with fillers
is also an order like any other: where there is one stream, as on the CPU, they run before it. On
CUDA they run on a stream of their own (`runtime`), and the device runs their kernels where those of
the LLM leave room.

Fillers take no longer than the communication of the LLM action they stand in front of, all bubbles
inside of it together, or of several LLM actions that follow each other: those after the first
have no fillers of their own but run alongside its. So an encoder action may be longer than what
one LLM action leaves free; it is not cut for that. Rejected: assigning each kernel to one
collective on the host, which would have to be called back inside of every layer; the device does
that on its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

from torchmm.pipelining.checks.problems import PlanProblem
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.schedules.colocated import encoder_names

Durations = Callable[[Action], float]


def fill_tensor_bubbles(plan: PipelinePlan, durations: Durations, share: float) -> PipelinePlan:
    """The plan in which encoder actions that stand in front of LLM actions fill them.

    Args:
        durations: of F, B, I and W, in any unit.
        share: of an LLM action: what tensor-parallel communication takes of it, 0..1.
    """
    encoders = encoder_stages(plan.graph)
    fillers: dict[Action, tuple[Action, ...]] = {}
    for program in plan.actions:
        row = [action for action in program if action.type in COMPUTE]
        own: list[Action] = []
        for encodes, run in groupby(row, key=lambda action: action.stage in encoders):
            actions = list(run)
            if not encodes and own:
                count, alongside = _fit(plan.graph, own, actions, durations, share)
                if count:
                    fillers |= dict.fromkeys(actions[:alongside], ())
                    fillers[actions[0]] = tuple(own[-count:])
            own = actions if encodes else []
    return replace(plan, fillers=fillers)


def _fit(
    graph: StageGraph,
    waiting: Sequence[Action],
    llm: Sequence[Action],
    durations: Durations,
    share: float,
) -> tuple[int, int]:
    """How many encoder actions, the last ones, run alongside how many LLM actions after them."""
    room = list(accumulate(share * durations(action) for action in llm))
    found = (0, 0)
    needed = 0.0
    # The last encoder actions fill: the first ones may then run before the LLM's, as they stand.
    for count, filler in enumerate(reversed(waiting), 1):
        needed += durations(filler)
        alongside = bisect_left(room, needed) + 1
        own = waiting[-count:]
        # An LLM action cannot wait for a filler that runs alongside it.
        if alongside > len(llm) or any(feeds(graph, f, a) for a in llm[:alongside] for f in own):
            break
        found = count, alongside
    return found


class Filled(NamedTuple):
    """Encoder actions alongside LLM actions that follow each other on a rank."""

    llm: tuple[Action, ...]
    fillers: tuple[Action, ...]


def filled(plan: PipelinePlan) -> Iterator[Filled]:
    """All of a valid plan's fillers with what they run alongside."""
    for program in plan.actions if plan.fillers else ():
        llm: list[Action] = []
        fillers: tuple[Action, ...] = ()
        for action in program:
            if own := plan.fillers.get(action):
                if llm:
                    yield Filled(tuple(llm), fillers)
                llm = [action]
                fillers = own
            elif action in plan.fillers:
                llm.append(action)
        if llm:
            yield Filled(tuple(llm), fillers)


def encoder_stages(graph: StageGraph) -> frozenset[int]:
    """Stages before the LLM."""
    encoders = set(encoder_names(graph.layout))
    return frozenset(stage.index for stage in graph.layout.stages if stage.module in encoders)


def feeds(graph: StageGraph, filler: Action, action: Action) -> bool:
    """Whether an encoder action gives what an LLM action takes."""
    if filler.type is not ActionType.F or action.type is not ActionType.F:
        return False
    task = filler.task
    return any(graph.producer(m) == task for m in graph.incoming(action.task))


def filler_problems(plan: PipelinePlan) -> Iterator[PlanProblem]:
    """Fillers that are not directly in front of their action, no encoder's, or feed what they run
    alongside; LLM actions that have none to run alongside."""
    if not plan.fillers:
        return
    encoders = encoder_stages(plan.graph)
    left = dict(plan.fillers)
    for rank, program in enumerate(plan.actions):
        places = [i for i, action in enumerate(program) if action.type in COMPUTE]
        row = [program[i] for i in places]
        alongside: tuple[Action, ...] = ()
        for index, action in enumerate(row):
            if action not in left:
                alongside = ()
                continue
            fillers = left.pop(action)
            alongside = fillers or alongside
            text = _problem(plan.graph, encoders, row[:index], action, fillers, alongside)
            if text:
                remedy = "make fillers with fill_tensor_bubbles"
                yield PlanProblem("dependency", rank, places[index], action, text, remedy)
    for action in left:
        text = "fillers for an action that is not in the plan"
        yield PlanProblem("dependency", 0, -1, action, text, "make them from this step's plan")


def _problem(
    graph: StageGraph,
    encoders: frozenset[int],
    before: Sequence[Action],
    action: Action,
    fillers: tuple[Action, ...],
    alongside: tuple[Action, ...],
) -> str:
    if not alongside:
        return "there are no fillers before it to go on beside"
    if fillers and tuple(before[-len(fillers) :]) != fillers:
        return f"its fillers {[str(f) for f in fillers]} are not directly in front of it"
    if action.stage in encoders or any(f.stage not in encoders for f in alongside):
        return "only encoders' actions may fill, and only the LLM's be filled"
    return "a filler feeds it" if any(feeds(graph, f, action) for f in alongside) else ""
