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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Int32s, Int64s, compiled
from torchmm.balance.optimus.free_time import (
    FreeTime,
    Pieces,
    Spans,
    complement,
    spans_of,
)
from torchmm.balance.picoseconds import SimulationError, to_picoseconds
from torchmm.balance.simulation.graph_kernels import time_nodes
from torchmm.balance.simulation.operator_graph import CompiledGraph, OperatorGraph
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder, Gathering

# [Note: deferred forwards]
#
# The LLM's step is a graph of operators: actions (one queue for each rank, in the order given),
# transfers between ranks (without a queue: they never wait for each other) and, where parameters
# are sharded, gathers (one queue for each rank, encoders' stages first). `CompiledGraph` has them
# in topological order: operator n is at `place[n]`, and what place i waits for is
# `sources[pointers[i] : pointers[i + 1]]`. Two walks along it give all times:
#
#     time_nodes, first to last:  start = latest of its release and the ends of what it waits for
#     _defer, last to first:      movable ones end when the first that waits for them starts
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
        """The timeline as early as possible when some actions may not start before given times."""
        graph = self.compiled
        start_ps = np.zeros(len(graph.duration_ps), np.int64)
        for action, time_ps in released_ps.items():
            start_ps[graph.place[self.nodes[action]]] = time_ps
        end_ps = np.empty_like(start_ps)
        time_nodes(graph.duration_ps, graph.pointers, graph.sources, start_ps, end_ps)
        order = [own.actions for own in self.ranks]
        ranks = tuple(_by_rank(order, self.nodes, graph, start_ps, end_ps))
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
        raise ValueError(f"ranks {idle} run nothing of the LLM; give it a stage on every rank")
    builder = _Builder(graph, order, costs)
    if sharding == "step":
        builder.add_gathers()
    builder.add_actions()
    compiled = builder.compile()
    start_ps = np.zeros_like(compiled.duration_ps)
    end_ps = np.empty_like(start_ps)
    time_nodes(compiled.duration_ps, compiled.pointers, compiled.sources, start_ps, end_ps)
    gathered_ps = builder.gathered(compiled, end_ps)
    if defer:
        movable = np.array(builder.movable, bool)[compiled.node_at]
        _defer(compiled.pointers, compiled.sources, movable, start_ps, end_ps)
    nodes = builder.nodes
    ranks = _by_rank(order, nodes, compiled, start_ps, end_ps)
    needed, returned, entry = _dependency_points(graph, ranks)
    return LlmTimeline(
        graph,
        tuple(ranks),
        entry,
        needed,
        returned,
        gathered_ps,
        *builder.reductions(sharding == "step"),
        reduction_hides,
        pieces,
        compiled,
        nodes,
    )


class _Builder:
    """The LLM's actions, its transfers and gathers as operators."""

    def __init__(self, graph: StageGraph, order: ComputeOrder, costs: PlanCosts) -> None:
        self.graph, self.order, self.costs = graph, order, costs
        self.operators = OperatorGraph()
        self.movable: list[bool] = []  # by operator: whether it may be deferred
        self.nodes: dict[Action, int] = {}
        self.encoder_gathers: list[list[int]] = [[] for _ in order]
        self._gather_of: dict[tuple[int, int], int] = {}
        self._own = {action.stage for program in order for action in program}
        self._problems: list[str] = []

    def _stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank, or of the first of its mirrors."""
        return self.graph.layout.stages_of(rank * self.graph.layout.mirrors)

    def _add(
        self, queue: Hashable, duration_ms: float, after: Sequence[int] = (), *, movable: bool
    ) -> int:
        self.movable.append(movable)
        return self.operators.add(queue, duration_ms, after)

    def add_gathers(self) -> None:
        for rank in range(len(self.order)):
            for stage in self._stages_of(rank):
                duration_ms = self.costs.gather_ms.get(stage, 0.0)
                node = self._add(("gather", rank), duration_ms, movable=False)
                self._gather_of[rank, stage] = node
                if stage not in self._own:
                    self.encoder_gathers[rank].append(node)

    def add_actions(self) -> None:
        for rank, program in enumerate(self.order):
            for action in program:
                if action not in self.costs.compute_ms:
                    self._problems.append(f"{action} on rank {rank} has no duration")
                duration_ms = self.costs.compute_ms.get(action, 0.0)
                gather = self._gather_of.get((rank, action.stage))
                after = [] if gather is None else [gather]
                movable = action.type is ActionType.F
                self.nodes[action] = self._add(("rank", rank), duration_ms, after, movable=movable)
        # I hands gradients on as B does.
        self.gradients = {
            Task(*a[1:4]): node
            for a, node in self.nodes.items()
            if a.type in (ActionType.B, ActionType.I)
        }
        for action in self.nodes:
            self._add_needs(action)

    def _add_needs(self, action: Action) -> None:
        task = Task(*action[1:4])
        node = self.nodes[action]
        if action.type is ActionType.F:
            for message in self.graph.incoming(task):
                producer = self.graph.producer(message)
                if producer.stage in self._own:
                    before = self.nodes.get(Action(ActionType.F, *producer))
                    self._connect(action, before, node, (message, False))
            return
        own = Action(ActionType.F, *task)
        before = self.gradients.get(task) if action.type is ActionType.W else self.nodes.get(own)
        self._connect(action, before, node)
        for message in self.graph.outgoing(task) if action.type is not ActionType.W else ():
            if self.graph.carries_gradient(message):
                before = self.gradients.get(self.graph.consumer(message))
                self._connect(action, before, node, (message, True))

    def _connect(
        self, action: Action, before: int | None, node: int, key: tuple[Message, bool] | None = None
    ) -> None:
        if before is None:
            self._problems.append(f"{action} needs what is not in the order")
            return
        wire_ms = self.costs.transfer_ms.get(key, 0.0) if key else 0.0
        if key and wire_ms:
            ends = (self.graph.producer(key[0]), self.graph.consumer(key[0]))
            if self.graph.rank(ends[0]) != self.graph.rank(ends[1]):
                before = self._add(None, wire_ms, [before], movable=not key[1])
        self.operators.add_edge(before, node)

    def compile(self) -> CompiledGraph:
        if self._problems:
            raise SimulationError(self._problems)
        return self.operators.compile()

    def gathered(self, graph: CompiledGraph, end_ps: Int64s) -> Int64s:
        """By rank: when the parameters of encoders are there."""
        ends = [end_ps[graph.place[nodes]].max(initial=0) for nodes in self.encoder_gathers]
        return np.array(ends, np.int64)

    def reductions(self, sharded: bool) -> tuple[dict[int, int], Int64s]:
        """By stage of the LLM, and by rank of encoders."""
        stages = self.graph.layout.stages
        reduce_ps = {
            stage.index: to_picoseconds(self.costs.reduce_ms.get(stage.index, 0.0))
            for stage in stages
            if stage.trainable and sharded
        }
        of_encoders = [
            sum(
                reduce_ps.get(stage, 0) for stage in self._stages_of(rank) if stage not in self._own
            )
            for rank in range(len(self.order))
        ]
        own = {stage: ps for stage, ps in reduce_ps.items() if stage in self._own}
        return own, np.array(of_encoders, np.int64)


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
    order: Sequence[Sequence[Action]],
    nodes: dict[Action, int],
    graph: CompiledGraph,
    start_ps: Int64s,
    end_ps: Int64s,
) -> list[RankActions]:
    found = []
    for program in order:
        places = graph.place[[nodes[action] for action in program]]
        found.append(RankActions(tuple(program), start_ps[places], end_ps[places]))
    return found


@compiled
def _defer(
    pointers: Int32s, sources: Int32s, movable: np.ndarray, start_ps: Int64s, end_ps: Int64s
) -> None:
    """Lets nodes that may move run as late as those that may not stay where they are."""
    last = end_ps.max()
    latest = np.full(len(movable), last, np.int64)
    for node in range(len(movable) - 1, -1, -1):
        if movable[node]:
            start_ps[node] += latest[node] - end_ps[node]
            end_ps[node] = latest[node]
        for edge in range(pointers[node], pointers[node + 1]):
            latest[sources[edge]] = min(latest[sources[edge]], start_ps[node])
