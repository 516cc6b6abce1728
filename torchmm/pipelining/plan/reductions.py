"""Where gradients are reduced: as soon as a stage's last backward is done, in one order everywhere.

A stage's reduction is a collective among data-parallel replicas whose plans differ, and all ranks
of a communicator have to come to its collectives in one order. The order is the layout's: the last
stage's first, as backwards end in that order. What follows on a rank, encoders' backwards after
those of the LLM or the backwards of earlier stages, then hides the reduction (MegaScale, Optimus
§2.2: only the first model chunk's cannot be hidden).

Reductions right behind a stage's last backward could still lock up, even in one order. A backend
may let a rank wait in a reduction for its replicas, and a replica may not come to its own before it
gets a tensor from a rank that waits in another one:

    replica A, rank 0   reduce s, send to rank 1        replica B, rank 0   ... B of s, reduce s
    replica A, rank 1   receive, reduce t               replica B, rank 1   reduce t, send to rank 0

So reductions are *turns*: whatever is needed, on any rank, for what comes before a turn, comes
before that turn on every rank. Then nobody who waits in a turn is needed by anyone on the way to
it, all ranks of all replicas get there, turn after turn, whatever plans the others run.
`reduction_places` moves reductions back as far as that takes; `torchmm.pipelining.checks.scan`
checks it.

Rejected: all reductions behind all computation, which hides none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchmm.pipelining.plan.actions import COMPUTE, Action
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import ComputeOrder

Place = tuple[int, int]
"""A rank, and the index of one of its compute actions."""


def reduction_turns(layout: StageLayout) -> dict[int, int]:
    """By stage: the turn of its reduction, the same in all plans of a layout.

    Mirrors, whose actions belong together, follow each other.
    """
    stages = range(len(layout.stages))
    ordered = sorted(stages, key=lambda stage: (-layout.mirrored[stage][0], stage))
    return {stage: turn for turn, stage in enumerate(ordered)}


def reduction_places(
    order: ComputeOrder, graph: StageGraph, needs: Callable[[Action], Iterable[Place]]
) -> list[dict[int, list[int]]]:
    """By rank: by number of compute actions before them: the stages that are reduced there.

    Args:
        order: F, B, I and W of every rank.
        needs: the actions of other ranks whose results an action uses.
    """
    layout = graph.layout
    last = [{action.stage: index + 1 for index, action in enumerate(program)} for program in order]
    together = _mirrors(order, layout)
    places: list[dict[int, list[int]]] = [{} for _ in order]
    begun = [0] * len(order)
    """By rank: how many of its actions come before the present turn."""
    for stage in reduction_turns(layout):
        # Also of those that are not trained: a replica without images would otherwise wait in
        # encoders' reductions before it computes anything of a frozen LLM.
        ranks = layout.stages[stage].ranks
        wanted = [(rank, last[rank].get(stage, 0)) for rank in ranks]
        while wanted:
            rank, count = wanted.pop()
            for action in order[rank][begun[rank] : count]:
                others = (*needs(action), *together.get(action, ()))
                wanted += ((other, index + 1) for other, index in others)
            begun[rank] = max(begun[rank], count)
        for rank in ranks if layout.stages[stage].trainable else ():
            places[rank].setdefault(begun[rank], []).append(stage)
    return places


def _mirrors(order: ComputeOrder, layout: StageLayout) -> dict[Action, list[Place]]:
    """By action of a mirrored stage: where the other mirrors run it, at the same time."""
    if layout.mirrors == 1:
        return {}
    at = {a: (rank, index) for rank, row in enumerate(order) for index, a in enumerate(row)}
    return {
        action: [
            at[twin]
            for stage in layout.mirrored[action.stage]
            if stage != action.stage and (twin := action._replace(stage=stage)) in at
        ]
        for action in at
        if action.type in COMPUTE
    }
