"""Encoder actions inside the LLM's actions, below their tensor-parallel communication.

While a tensor-parallel collective is under way, a rank of the LLM computes nothing (a TP bubble,
Optimus §2.2). An LLM action may therefore have *fillers*: encoder actions, layers for some images,
that run beside it. In a rank's order they stand directly in front of it, so a plan with fillers is
also an order like any other: where there is one stream, as on the CPU, they run before it. On CUDA
they run on a stream of their own (`side_stream`), and the device runs their kernels where those of
the LLM leave room.

An LLM action's fillers take no longer than its communication does, all bubbles inside of it
together. Rejected: assigning each kernel to one collective on the host, which would have to be
called back inside of every layer; the device does that by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torchmm.pipelining.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.colocated import encoder_names
from torchmm.pipelining.graph import StageGraph, Task
from torchmm.pipelining.plan import PipelinePlan
from torchmm.pipelining.problems import PlanProblem

Durations = Callable[[Action], float]


def fill_tensor_bubbles(plan: PipelinePlan, durations: Durations, share: float) -> PipelinePlan:
    """The plan in which encoder actions that stand in front of an LLM action fill it.

    Args:
        durations: of F, B, I and W, in any unit.
        share: of an LLM action: what tensor-parallel communication takes of it, 0..1.
    """
    encoders = encoder_stages(plan.graph)
    fillers: dict[Action, tuple[Action, ...]] = {}
    for program in plan.actions:
        row = [action for action in program if action.type in COMPUTE]
        for place, action in enumerate(row):
            if action.stage in encoders:
                continue
            room, first = share * durations(action), place
            while first and row[first - 1].stage in encoders:
                room -= durations(row[first - 1])
                if room < 0 or feeds(plan.graph, row[first - 1], action):
                    break
                first -= 1
            if first < place:
                fillers[action] = tuple(row[first:place])
    return replace(plan, fillers=fillers)


def encoder_stages(graph: StageGraph) -> frozenset[int]:
    """Stages before the LLM."""
    encoders = set(encoder_names(graph.layout))
    return frozenset(stage.index for stage in graph.layout.stages if stage.module in encoders)


def feeds(graph: StageGraph, filler: Action, action: Action) -> bool:
    """Whether an encoder action gives what an LLM action takes."""
    if filler.type is not ActionType.F or action.type is not ActionType.F:
        return False
    task = Task(*filler[1:4])
    return any(graph.producer(m) == task for m in graph.incoming(Task(*action[1:4])))


def filler_problems(plan: PipelinePlan) -> Iterator[PlanProblem]:
    """Fillers that are not directly in front of their action, no encoder's, or feed it."""
    if not plan.fillers:
        return
    encoders, left = encoder_stages(plan.graph), dict(plan.fillers)
    for rank, program in enumerate(plan.actions):
        places = [i for i, action in enumerate(program) if action.type in COMPUTE]
        row = [program[i] for i in places]
        for index, action in enumerate(row):
            fillers = left.pop(action, ())
            text = _problem(plan.graph, encoders, row[:index], action, fillers)
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
) -> str:
    if not fillers:
        return ""
    if tuple(before[-len(fillers) :]) != fillers:
        return f"its fillers {[str(f) for f in fillers]} are not directly in front of it"
    if action.stage in encoders or any(f.stage not in encoders for f in fillers):
        return "only encoders' actions may fill, and only the LLM's be filled"
    return "a filler feeds it" if any(feeds(graph, f, action) for f in fillers) else ""
