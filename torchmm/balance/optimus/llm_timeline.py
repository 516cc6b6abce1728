"""LLM timeline of a step, and the bubbles that it leaves for encoders (Optimus §2.2, §4.2-4.3).

The input is any schedule of the LLM actions: 1F1B, interleaved 1F1B, zero bubble or a CSV file.
Earliest times are longest paths in a task graph. Forward passes are then deferred as far as
possible without a change of any backward pass. This moves the bubbles of the warm-up before forward
passes, where encoder forward passes can use them. The result is the adjusted warm-up of Optimus
(Fig. 12), computed as slack for arbitrary schedules.

*Dependency points* follow from the deferred times:

    F_i   time at which the first LLM stage starts microbatch i; encoder outputs are due
    B_i   time at which the gradient of the LLM input of microbatch i is available

Invariants: the duration of the step and all backward times are equal to those of the earliest
timeline, and the action order of every rank is unchanged. Records of a simulated plan cannot
replace this computation, because they contain no slack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchmm.balance.numba_utils import Int64s
from torchmm.balance.optimus.idle_intervals import (
    ActionPieces,
    BusyIntervals,
    IdleIntervals,
    busy_intervals,
    complement_intervals,
)
from torchmm.balance.picoseconds import SimulationError, to_picoseconds
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.simulation.operator_graph import CompiledOperatorGraph, OperatorGraph
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder, UnshardMode
from torchmm.pipelining.plan.transfers import action_inputs

# [Note: deferred forwards]
#
# The LLM step is an `OperatorGraph` with three kinds of operators: actions (one queue per rank),
# transfers between ranks (no queue, because they do not wait for each other) and, if parameters are
# sharded, all-gathers (one queue per rank, encoder stages first).
#
# Forward passes and transfers of their outputs are movable. All other operators have their earliest
# times, so no backward pass moves and the duration of the step is unchanged. Example: 1F1B with
# three microbatches on two ranks:
#
#     time      0  1  2  3  4  5  6  7  8  9 10 11
#     earliest  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2    rank 0
#     deferred  F0 .  .  F1 B0 B0 F2 B1 B1 .  B2 B2    rank 0: F_i = 0, 3, 6; B_i = 6, 9, 12
#               .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .     rank 1: no action can move
#
# The warm-up bubble is now before F1, so the encoder forward pass of microbatch 1 can use it. After
# F1, only encoder forward passes of later microbatches could use it.


class RankActions(NamedTuple):
    """Actions of a rank in execution order, with start and end times."""

    actions: tuple[Action, ...]
    start_ps: Int64s
    end_ps: Int64s


@dataclass(frozen=True, eq=False)
class LlmTimeline:
    """LLM actions of a step without encoders. Times are relative to the start of the step.

    Attributes:
        graph: Tasks of the complete step. Stages without an action belong to encoders.
        ranks: Actions and times of each pipeline rank of the LLM.
        entry_rank: Rank of the first LLM stage.
        deadline_ps: F_i of each microbatch.
        gradient_ready_ps: B_i of each microbatch. -1 without a backward pass.
        unsharded_ps: Time at which the encoder parameters of each rank are unsharded.
        llm_reduce_ps: Gradient reduction time of each LLM stage.
        encoder_reduce_ps: Gradient reduction time of the encoders of each rank, after its last
            action.
        overlaps_reduction: Whether ranks compute during gradient reduction.
        pieces: Returns the communication and computation pieces of an action.
        compiled: Task graph that computes the times.
        nodes: Node of each action in `compiled`.
    """

    graph: StageGraph
    ranks: tuple[RankActions, ...]
    entry_rank: int
    deadline_ps: Int64s
    gradient_ready_ps: Int64s
    unsharded_ps: Int64s
    llm_reduce_ps: Mapping[int, int]
    encoder_reduce_ps: Int64s
    overlaps_reduction: bool
    pieces: ActionPieces
    compiled: CompiledOperatorGraph
    nodes: dict[Action, int]

    @property
    def ends_ps(self) -> list[int]:
        """End time of the last action of each rank."""
        return [int(rank.end_ps[-1]) for rank in self.ranks]

    @cached_property
    def llm_ps(self) -> int:
        """Duration of the step without encoders."""
        return self.step_end_ps([0] * len(self.ranks))

    def step_end_ps(self, encoder_ends_ps: Sequence[int]) -> int:
        """Return the end time of the step.

        Args:
            encoder_ends_ps: End time of the last encoder kernel of each rank.
        """
        rows = zip(self.reduced_ps, self.ends_ps, encoder_ends_ps, strict=True)
        if self.overlaps_reduction:
            # Encoder gradients are reduced on all ranks together, after LLM gradients.
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
        """End time of LLM gradient reduction of each rank if no encoder action delays it.

        If ranks compute during reduction, the reduction of a stage starts after the last action of
        the stage. Its turn (`torchmm.pipelining.plan.reductions`) can be slightly later.
        """
        reduced = []
        for rank in self.ranks:
            last = dict(
                zip((a.stage for a in rank.actions), rank.end_ps.tolist(), strict=True)
            )  # end times increase, so the last action of each stage remains
            end_ps = 0 if self.overlaps_reduction else int(rank.end_ps[-1])
            for stage in sorted(last, reverse=True):
                end_ps = max(end_ps, last[stage]) + self.llm_reduce_ps.get(stage, 0)
            reduced.append(end_ps)
        return reduced

    @cached_property
    def spans(self) -> tuple[BusyIntervals, ...]:
        """Communication and computation intervals inside the actions of each rank."""
        return tuple(busy_intervals(*rank, self.pieces) for rank in self.ranks)

    def idle_compute(self) -> IdleIntervals:
        """Return the intervals in which each rank computes nothing."""
        return complement_intervals([spans.computation_ps for spans in self.spans])

    def idle_links(self) -> IdleIntervals:
        """Return the intervals in which each rank has no tensor-parallel communication."""
        return complement_intervals([spans.communication_ps for spans in self.spans])

    def idle_outside(self) -> IdleIntervals:
        """Return the intervals before the first and after the last LLM action of each rank."""
        first = [[int(rank.start_ps[0]), int(rank.end_ps[-1])] for rank in self.ranks]
        return complement_intervals([np.array(both, np.int64).reshape(2, 1) for both in first])

    def with_release_times(self, released_ps: Mapping[Action, int]) -> LlmTimeline:
        """Return the earliest timeline in which actions do not start before their release times."""
        released = {self.nodes[action]: time_ps for action, time_ps in released_ps.items()}
        order = [rank.actions for rank in self.ranks]
        ranks = _by_rank(order, self.nodes, *self.compiled.times_ps(released))
        needed, returned, _ = _dependency_points(self.graph, ranks)
        return replace(self, ranks=ranks, deadline_ps=needed, gradient_ready_ps=returned)

    def first_stage_forwards(self) -> list[Action]:
        """Return the forward actions of the first LLM stage."""
        actions = self.ranks[self.entry_rank].actions
        first = min(action.stage for action in actions)
        return [a for a in actions if a.stage == first and a.type is ActionType.F]


def build_llm_timeline(
    graph: StageGraph,
    order: ComputeOrder,
    costs: PlanCosts,
    pieces: ActionPieces,
    *,
    sharding: UnshardMode = "none",
    overlaps_reduction: bool = False,
    defer: bool = True,
) -> LlmTimeline:
    """Compute start and end times of all LLM actions.

    Args:
        graph: Tasks of the step.
        order: LLM actions of each rank, in execution order.
        costs: Costs of the graph. Transfers have a duration, but never wait for each other.
        pieces: Returns the communication and computation pieces of an action.
        sharding: "step" if parameters are all-gathered before and gradients reduced after all
            computation. Encoder parameters are all-gathered first, because encoder stages come
            first.
        overlaps_reduction: Whether ranks compute during gradient reduction
            (`PlanCosts.overlaps_communication`). If not, reductions follow all computation.
        defer: Whether to defer forward passes as far as no backward pass moves.

    Raises:
        SimulationError: The schedule cannot run, or a cost is missing or invalid.
        ValueError: A rank has no LLM action.
    """
    if idle := [rank for rank, program in enumerate(order) if not program]:
        raise ValueError(f"ranks {idle} run no LLM action; use an LLM stage on every rank")
    stages = graph.layout.stages
    llm_stages = {action.stage for program in order for action in program}
    # Stages of each pipeline rank. With mirrors, those of the first mirror.
    rank_stages = [
        graph.layout.stages_on_rank(r * graph.layout.mirror_count) for r in range(len(order))
    ]
    operators = OperatorGraph()
    movable: list[bool] = []  # by operator

    gathers: dict[tuple[int, int], int] = {}
    for rank, local_stages in enumerate(rank_stages if sharding == "step" else ()):
        for stage in local_stages:
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

    # Earliest times first. Then movable operators are deferred up to their slack.
    compiled = operators.compile()
    start_ps, end_ps = compiled.times_ps(movable=movable if defer else None)
    ranks = _by_rank(order, nodes, start_ps, end_ps)
    needed, returned, entry = _dependency_points(graph, ranks)
    encoders = [
        [stage for stage in local_stages if stage not in llm_stages] for local_stages in rank_stages
    ]
    gathered = [
        max((int(end_ps[gathers[rank, stage]]) for stage in local_stages if gathers), default=0)
        for rank, local_stages in enumerate(encoders)
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
        np.array(
            [sum(reduce_ps.get(s, 0) for s in local_stages) for local_stages in encoders], np.int64
        ),
        overlaps_reduction,
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
    """Add the inputs of LLM actions as edges of the task graph. Return messages about missing
    inputs."""
    stages = {action.stage for action in nodes}
    results: dict[tuple[ActionType, Task], int] = {
        (ActionType.B if action.type is ActionType.I else action.type, action.task): node
        for action, node in nodes.items()
    }
    problems = []
    for action, node in nodes.items():
        for kind, task, message in action_inputs(action, graph):
            if task.stage not in stages:
                continue  # inputs from encoders are the dependency points
            source = results.get((kind, task))
            if source is None:
                problems.append(f"{action} requires an action that is not in the order")
                continue
            backward = kind is ActionType.B
            # A transfer is an operator without a queue: transfers never delay each other.
            wire_ms = costs.transfer_ms.get((message, backward), 0.0) if message else 0.0
            if wire_ms and graph.rank(task) != graph.rank(action.task):
                source = operators.add(None, wire_ms, [source])
                movable.append(not backward)
            operators.add_edge(source, node)
    return problems


def _dependency_points(
    graph: StageGraph, ranks: Sequence[RankActions]
) -> tuple[Int64s, Int64s, int]:
    """Return F_i and B_i, and the rank of the first LLM stage."""
    stages = {action.stage for rank in ranks for action in rank.actions}
    first = min(stages)
    entry = graph.layout.stages[first].ranks[0] // graph.layout.mirror_count
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
    """Return the actions and times of each rank from the times of all operators."""
    node_of = [[nodes[action] for action in program] for program in order]
    return tuple(
        RankActions(tuple(program), start_ps[rank_nodes], end_ps[rank_nodes])
        for program, rank_nodes in zip(order, node_of, strict=True)
    )
