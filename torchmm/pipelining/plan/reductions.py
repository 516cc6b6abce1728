"""Positions of gradient reductions in a plan.

Gradients of a stage are reduced after its last backward pass. The reduction is a collective among
data-parallel replicas with different plans, so all ranks of a communicator must call their
collectives in the same order. This order is the reverse stage order, in which backward passes end.
Later backward passes of the rank, such as those of encoders, overlap with the reduction (MegaScale;
Optimus section 2.2: only the reduction of the first model chunk is exposed).

The same order is not sufficient. A reduction can block until all replicas call it, and a replica
can depend on a tensor from a rank that is blocked in another reduction, which is a deadlock:

    replica A, rank 0   reduce s, send to rank 1        replica B, rank 0   ... B of s, reduce s
    replica A, rank 1   receive, reduce t               replica B, rank 1   reduce t, send to rank 0

Therefore each reduction has a *turn*. All actions that any action before turn n depends on, on any
rank, precede turn n on their own ranks. No rank on its way to a turn depends on a rank that is
blocked in this turn, so all replicas reach every turn, whatever their plans are.
`reduction_positions` delays reductions until this holds, and `torchmm.pipelining.checks.scan`
checks it. Reducing after all computation would be simpler, but would expose every reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchmm.pipelining.plan.actions import COMPUTE, Action
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import ComputeOrder

ActionIndex = tuple[int, int]
"""Rank and index of a compute action of this rank."""


def reduction_turns(layout: StageLayout) -> dict[int, int]:
    """Return the turn of the reduction of each stage. All plans of a layout have the same turns.

    Stages that mirror each other, whose actions run together, have consecutive turns.
    """
    stages = range(len(layout.stages))
    ordered = sorted(stages, key=lambda stage: (-layout.mirror_stages[stage][0], stage))
    return {stage: turn for turn, stage in enumerate(ordered)}


def reduction_positions(
    order: ComputeOrder, graph: StageGraph, needs: Callable[[Action], Iterable[ActionIndex]]
) -> list[dict[int, list[int]]]:
    """Return the stages to reduce, per rank, by the number of preceding compute actions.

    Args:
        order: F, B, I and W actions of each rank.
        needs: Returns the actions of other ranks whose results an action uses.
    """
    layout = graph.layout
    backward_ends = [
        {action.stage: index + 1 for index, action in enumerate(program)} for program in order
    ]
    mirror_actions = _mirrors(order, layout)
    positions: list[dict[int, list[int]]] = [{} for _ in order]
    preceding = [0] * len(order)
    """Number of actions of each rank that precede the current turn."""
    for stage in reduction_turns(layout):
        # Frozen stages have turns, too. Otherwise, a replica without images would block in the
        # reductions of the encoders before it computes any layer of a frozen LLM.
        ranks = layout.stages[stage].ranks
        unvisited = [(rank, backward_ends[rank].get(stage, 0)) for rank in ranks]
        while unvisited:
            rank, count = unvisited.pop()
            for action in order[rank][preceding[rank] : count]:
                dependencies = (*needs(action), *mirror_actions.get(action, ()))
                unvisited += ((other, index + 1) for other, index in dependencies)
            preceding[rank] = max(preceding[rank], count)
        for rank in ranks if layout.stages[stage].trainable else ():
            positions[rank].setdefault(preceding[rank], []).append(stage)
    return positions


def _mirrors(order: ComputeOrder, layout: StageLayout) -> dict[Action, list[ActionIndex]]:
    """Return the positions of the simultaneous actions of the mirrors, by action."""
    if layout.mirror_count == 1:
        return {}
    positions = {a: (rank, index) for rank, row in enumerate(order) for index, a in enumerate(row)}
    return {
        action: [
            positions[mirror_action]
            for stage in layout.mirror_stages[action.stage]
            if stage != action.stage
            and (mirror_action := action._replace(stage=stage)) in positions
        ]
        for action in positions
        if action.type in COMPUTE
    }
