"""When an LLM's pipeline computes, and the bubbles it leaves for encoders (Optimus §2.2, §4.2-4.3).

Input is any order of the LLM's actions: 1F1B, interleaved, zero bubble, from a file. Their earliest
times are one longest path. Then every forward is deferred as far as no backward moves: the bubbles
of the warm-up come to stand before forwards, where encoder forwards still help. That is Optimus'
adjusted warm-up (Fig. 12), found as slack instead of by a formula for one schedule. The *dependency
points* are those times: F_i, when the LLM's first stage takes microbatch i, and B_i, when its
gradient is there.

Rejected: reading bubbles off a simulated plan's records. They say when actions ran, not how late
they could have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Int64s
from torchmm.balance.optimus.free_time import (
    FreeTime,
    Pieces,
    Spans,
    complement,
    spans_of,
)
from torchmm.balance.picoseconds import SimulationError, to_picoseconds
from torchmm.balance.simulation.operator_graph import CompiledGraph, OperatorGraph
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder, Gathering
from torchmm.pipelining.plan.transfers import action_inputs

# [Note: deferred forwards]
#
# The step of the LLM is an `OperatorGraph`: actions (a queue for each rank), transfers between
# ranks (without a queue, because they do not wait for each other) and, if parameters are sharded,
# gathers (a queue for each rank, stages of encoders first).
#
# Movable are forwards and transfers of their outputs. All others keep their earliest times, so no
# backward moves and the step stays as long as it was. 1F1B of three microbatches on two ranks:
#
#     time      0  1  2  3  4  5  6  7  8  9 10 11
#     earliest  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2    rank 0
#     deferred  F0 .  .  F1 B0 B0 F2 B1 B1 .  B2 B2    rank 0: F_i = 0, 3, 6; B_i = 6, 9, 12
#               .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .     rank 1: nothing can move
#
# The bubble of the warm-up now stands before F1, where the encoder's forward of microbatch 1 can
# use it; after F1 it would have been of no use to any forward but later ones.


class RankActions(NamedTuple):
    """One rank's actions in their order."""

    actions: tuple[Action, ...]
    start_ps: Int64s
    end_ps: Int64s


@dataclass(frozen=True, eq=False)
class LlmTimeline:
    """A step's LLM without encoders. Times count from the begin of the step.

    Attributes:
        graph: of the whole step; stages without an action are encoders'.
        ranks: by rank: actions and when they run.
        entry_rank: of the LLM's first stage.
        needed_ps: by microbatch: F_i.
        returned_ps: by microbatch: B_i; -1 without one.
        gathered_ps: by rank: when the encoders' parameters are there.
        own_reduce_ps: by LLM stage: reduction of its gradients.
        encoder_reduce_ps: by rank: of encoders' gradients, after the last action.
        reduction_hides: whether ranks compute while gradients are reduced.
        pieces: what actions consist of.
    """

    graph: StageGraph
    ranks: tuple[RankActions, ...]
    entry_rank: int
    needed_ps: Int64s
    returned_ps: Int64s
    gathered_ps: Int64s
    own_reduce_ps: Mapping[int, int]
    encoder_reduce_ps: Int64s
    reduction_hides: bool
    pieces: Pieces
    compiled: CompiledGraph
    nodes: dict[Action, int]

    @property
    def ends_ps(self) -> list[int]:
        """By rank: when its last action ends."""
        return [int(own.end_ps[-1]) for own in self.ranks]

    @cached_property
    def llm_ps(self) -> int:
        """Duration of the step without encoders."""
        return self.step_end_ps([0] * len(self.ranks))

    def step_end_ps(self, encoder_ends_ps: Sequence[int]) -> int:
        """End of the step.

        Args:
            encoder_ends_ps: by rank: of its last encoder kernel.
        """
        rows = zip(self.reduced_ps, self.ends_ps, encoder_ends_ps, strict=True)
        if self.reduction_hides:
            # Those of encoders come together on all ranks, after those of the LLM.
            ends = max(max(reduced, encoder) for reduced, _, encoder in rows)
            return ends + int(self.encoder_reduce_ps.max(initial=0))
        return max(
            max(llm, encoder) + reduced - llm + of_encoders
            for (reduced, llm, encoder), of_encoders in zip(
                rows, self.encoder_reduce_ps.tolist(), strict=True
            )
        )

    @cached_property
    def reduced_ps(self) -> list[int]:
        """By rank: when the LLM's gradients are reduced, if nothing of encoders comes between.

        A stage's reduction begins after its last action, where ranks compute beside it; its turn
        (`torchmm.pipelining.plan.reductions`) may be a little later.
        """
        found = []
        for own in self.ranks:
            last = dict(
                zip((a.stage for a in own.actions), own.end_ps.tolist(), strict=True)
            )  # of each stage, as times rise
            end_ps = 0 if self.reduction_hides else int(own.end_ps[-1])
            for stage in sorted(last, reverse=True):
                end_ps = max(end_ps, last[stage]) + self.own_reduce_ps.get(stage, 0)
            found.append(end_ps)
        return found

    @cached_property
    def spans(self) -> tuple[Spans, ...]:
        """By rank: communication and computation inside its actions."""
        return tuple(spans_of(*own, self.pieces) for own in self.ranks)

    def free_compute(self) -> FreeTime:
        """By rank: when it computes nothing."""
        return complement([own.computation_ps for own in self.spans])

    def free_links(self) -> FreeTime:
        """By rank: when no tensor-parallel communication runs."""
        return complement([own.communication_ps for own in self.spans])

    def free_outside(self) -> FreeTime:
        """By rank: the time before all its computation, and that after it."""
        first = [[int(own.start_ps[0]), int(own.end_ps[-1])] for own in self.ranks]
        return complement([np.array(both, np.int64).reshape(2, 1) for both in first])

    def waiting(self, released_ps: Mapping[Action, int]) -> LlmTimeline:
        """Return the earliest timeline in which some actions do not start before given times."""
        released = {self.nodes[action]: time_ps for action, time_ps in released_ps.items()}
        order = [own.actions for own in self.ranks]
        ranks = _by_rank(order, self.nodes, *self.compiled.times_ps(released))
        needed, returned, _ = _dependency_points(self.graph, ranks)
        return replace(self, ranks=ranks, needed_ps=needed, returned_ps=returned)

    def entries(self) -> list[Action]:
        """Forwards of the LLM's first stage."""
        own = self.ranks[self.entry_rank].actions
        first = min(action.stage for action in own)
        return [a for a in own if a.stage == first and a.type is ActionType.F]


def llm_timeline(
    graph: StageGraph,
    order: ComputeOrder,
    costs: PlanCosts,
    pieces: Pieces,
    *,
    sharding: Gathering = "none",
    reduction_hides: bool = False,
    defer: bool = True,
) -> LlmTimeline:
    """Times of an LLM's actions.

    Args:
        graph: of the step.
        order: by rank: of all stages but the encoders'.
        costs: of the graph. Transfers take their time, and never wait for each other.
        pieces: what actions consist of.
        sharding: "step" if parameters are gathered before and gradients reduced after all
            computation; encoders' parameters come first, as their stages do.
        reduction_hides: whether ranks compute while gradients are reduced
            (`PlanCosts.runs_beside`); if not, reductions come after all computation.
        defer: whether forwards run as late as no backward moves, or as early as possible.

    Raises:
        SimulationError: the order cannot run, or a cost is missing or no duration.
        ValueError: a rank has no LLM action.
    """
    if idle := [rank for rank, program in enumerate(order) if not program]:
        raise ValueError(f"ranks {idle} run no LLM action; use an LLM stage on every rank")
    stages = graph.layout.stages
    llm_stages = {action.stage for program in order for action in program}
    # Stages of a pipeline rank, or of the first of its mirrors.
    rank_stages = [graph.layout.stages_of(r * graph.layout.mirrors) for r in range(len(order))]
    operators = OperatorGraph()
    movable: list[bool] = []  # by operator

    gathers: dict[tuple[int, int], int] = {}
    for rank, own in enumerate(rank_stages if sharding == "step" else ()):
        for stage in own:
            gathers[rank, stage] = operators.add(("gather", rank), costs.gather_ms.get(stage, 0.0))
            movable.append(False)

    problems: list[str] = []
    nodes: dict[Action, int] = {}
    for rank, program in enumerate(order):
        for action in program:
            if action not in costs.compute_ms:
                problems.append(f"{action} on rank {rank} has no duration")
            gather = gathers.get((rank, action.stage))
            after = [] if gather is None else [gather]
            duration_ms = costs.compute_ms.get(action, 0.0)
            nodes[action] = operators.add(("rank", rank), duration_ms, after)
            movable.append(action.type is ActionType.F)
    problems += _add_inputs(graph, costs, operators, nodes, movable)
    if problems:
        raise SimulationError(problems)

    compiled = operators.compile()
    start_ps, end_ps = compiled.times_ps(movable=movable if defer else None)
    ranks = _by_rank(order, nodes, start_ps, end_ps)
    needed, returned, entry = _dependency_points(graph, ranks)
    encoders = [[stage for stage in own if stage not in llm_stages] for own in rank_stages]
    gathered = [
        max((int(end_ps[gathers[rank, stage]]) for stage in own if gathers), default=0)
        for rank, own in enumerate(encoders)
    ]
    reduce_ps = {
        stage.index: to_picoseconds(costs.reduce_ms.get(stage.index, 0.0))
        for stage in stages
        if stage.trainable and sharding == "step"
    }
    return LlmTimeline(
        graph,
        ranks,
        entry,
        needed,
        returned,
        np.array(gathered, np.int64),
        {stage: ps for stage, ps in reduce_ps.items() if stage in llm_stages},
        np.array([sum(reduce_ps.get(s, 0) for s in own) for own in encoders], np.int64),
        reduction_hides,
        pieces,
        compiled,
        nodes,
    )


def _add_inputs(
    graph: StageGraph,
    costs: PlanCosts,
    operators: OperatorGraph,
    nodes: Mapping[Action, int],
    movable: list[bool],
) -> list[str]:
    """Let actions wait for their inputs from other actions of the LLM; return what is missing."""
    stages = {action.stage for action in nodes}
    results: dict[tuple[ActionType, Task], int] = {
        (ActionType.B if action.type is ActionType.I else action.type, action.task): node
        for action, node in nodes.items()
    }
    problems = []
    for action, node in nodes.items():
        for kind, task, message in action_inputs(action, graph):
            if task.stage not in stages:
                continue  # an encoder
            before = results.get((kind, task))
            if before is None:
                problems.append(f"{action} requires an action that is not in the order")
                continue
            backward = kind is ActionType.B
            wire_ms = costs.transfer_ms.get((message, backward), 0.0) if message else 0.0
            if wire_ms and graph.rank(task) != graph.rank(action.task):
                before = operators.add(None, wire_ms, [before])
                movable.append(not backward)
            operators.add_edge(before, node)
    return problems


def _dependency_points(
    graph: StageGraph, ranks: Sequence[RankActions]
) -> tuple[Int64s, Int64s, int]:
    """F_i and B_i, and the rank they are on."""
    stages = {action.stage for own in ranks for action in own.actions}
    first = min(stages)
    entry = graph.layout.stages[first].ranks[0] // graph.layout.mirrors
    needed = np.zeros(graph.microbatches, np.int64)
    returned = np.full(graph.microbatches, -1, np.int64)
    actions, starts, ends = ranks[entry]
    for action, start, end in zip(actions, starts.tolist(), ends.tolist(), strict=True):
        if action.stage == first and action.type is ActionType.F:
            needed[action.microbatch] = start
        elif action.stage == first and action.type is not ActionType.W:
            returned[action.microbatch] = end
    return needed, returned, entry


def _by_rank(
    order: Sequence[Sequence[Action]], nodes: dict[Action, int], start_ps: Int64s, end_ps: Int64s
) -> tuple[RankActions, ...]:
    """Return the times of the actions of each rank from those of all operators."""
    at = [[nodes[action] for action in program] for program in order]
    return tuple(
        RankActions(tuple(program), start_ps[own], end_ps[own])
        for program, own in zip(order, at, strict=True)
    )
