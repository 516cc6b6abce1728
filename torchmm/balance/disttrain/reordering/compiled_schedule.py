"""Compiled schedule: flat arrays that determine the makespan for any microbatch order.

A classic schedule fixes the actions of each rank for the first, second, ... microbatch. These
indices are *slots*. The assignment of microbatches to slots is free. A schedule is therefore
compiled once per run, and only the durations change from step to step:

    program (once)    rank 0: F slot 0, F slot 1, B slot 0, ...     order (per step)
    durations (step)  F of microbatch 5, F of microbatch 2, ...     slot 0 = 5, slot 1 = 2, ...

An action starts when the previous action on its rank and all actions whose results it needs have
ended. The times are bitwise identical to those of
`torchmm.pipelining.view.timeline.simulate_order`.

Actions are sorted by the last slot on which they depend. If slot s and later slots change, actions
before the first action of slot s are unchanged, and a search does not evaluate them again.

A recurrence for 1F1B only would need fewer indices, but separate versions for interleaved
schedules, frozen modules and ranks with several stages. The event-driven dispatcher chooses orders
itself and is ten times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from torchmm.balance.disttrain.reordering.compiled_schedule_kernels import ScheduleTables
from torchmm.balance.numba_utils import Float64s, Int64s, Uint64s
from torchmm.balance.simulation.operator_graph import CompiledOperatorGraph, OperatorGraph
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.plan.transfers import ActionInput, action_inputs


@dataclass(frozen=True, eq=False)
class CompiledSchedule:
    """Actions of a step in topological order.

    Durations have K = 2 * S rows of M slots: forward passes of all stages, then backward passes.

    Attributes:
        tables: Arrays for the kernels.
        stages: Number S of stages.
        microbatches: Number M of microbatches.
        ranks: Number of pipeline ranks.
        rank_S: Rank of each stage.
        lead_slots: Number of slots by which forward passes run ahead of backward passes on the
            first rank, if its order is that of 1F1B. This equals the number of ranks. Otherwise 0.
    """

    tables: ScheduleTables
    stages: int
    microbatches: int
    ranks: int
    rank_S: Int64s
    lead_slots: int

    def stack_durations(self, forward_ms_GSM: Float64s, backward_ms_GSM: Float64s) -> Float64s:
        """Return the durations of G groups as (G, K, M).

        Raises:
            ValueError: Shapes do not match the program, or a duration is negative or not finite.
        """
        shapes = np.shape(forward_ms_GSM), np.shape(backward_ms_GSM)
        expected = (self.stages, self.microbatches)
        if shapes[0] != shapes[1] or shapes[0][-2:] != expected or len(shapes[0]) != 3:
            raise ValueError(
                f"durations of shapes {shapes[0][-2:]} and {shapes[1][-2:]} for {expected[0]} "
                f"stages x {expected[1]} microbatches"
            )
        costs = np.concatenate([forward_ms_GSM, backward_ms_GSM], axis=1, dtype=np.float64)
        costs = np.ascontiguousarray(costs)  # each memory layout would compile the kernels again
        if costs.size and not (costs.min() >= 0 and costs.max() < np.inf):
            raise ValueError(
                f"durations from {costs.min()} to {costs.max()} ms: must be finite and >= 0"
            )
        return costs


def compile_schedule(order: ComputeOrder, graph: StageGraph) -> CompiledSchedule:
    """Compile a schedule.

    Args:
        order: Forward and unsplit backward actions of each rank, such as of `one_f_one_b(graph)`.
        graph: Tasks without sub-microbatches. Their number differs between microbatches, so the
            actions of a slot would depend on its microbatch. All sub-microbatches of an encoder are
            one task with their total duration.

    Raises:
        ValueError: The order cannot run, splits backward passes, or has sub-microbatches.
    """
    if graph.layout.sub_microbatched:
        raise ValueError(
            f"{sorted(graph.layout.sub_microbatched)} have sub-microbatches; build the graph of a "
            "layout in which each microbatch is one task"
        )
    rows = [[action for action in actions if action.type in COMPUTE] for actions in order]
    split = {a.type for row in rows for a in row} - {ActionType.F, ActionType.B}
    if split:
        names = ", ".join(sorted(kind.value for kind in split))
        raise ValueError(f"actions of type {names} are not supported; only F and B have durations")
    count = len(graph.layout.stages)
    zero_row = 2 * count * graph.microbatches
    operators = OperatorGraph()
    nodes: dict[tuple[ActionType, Task], int] = {}
    waits: list[tuple[int, ActionInput]] = []
    slot_of: list[int] = []  # by operator
    row_of: list[int] = []
    for rank, row in enumerate(rows):
        for action in row:
            inputs = [
                action_input
                for action_input in action_inputs(action, graph)
                if action_input.message is not None
            ]
            duration_row = (action.type is ActionType.B) * count + action.stage
            # In kernels, an operator has the previous operator on its rank and one other input.
            # Each further input adds an operator without duration before the action.
            for index in range(max(1, len(inputs))):
                is_action = index >= len(inputs) - 1
                node = operators.add(rank, 0.0, name=str(action))
                waits += [(node, action_input) for action_input in inputs[index : index + 1]]
                slot_of.append(action.microbatch)
                row_of.append(
                    duration_row * graph.microbatches + action.microbatch if is_action else zero_row
                )
            nodes[action.type, action.task] = node
    for node, (kind, task, _) in waits:
        if (kind, task) not in nodes:
            raise ValueError(f"{Action(kind, *task)} is missing from the order")
        operators.add_edge(nodes[kind, task], node)
    compiled = operators.compile()
    slots, by_slot, before, need = _sort_by_slot(compiled, np.array(slot_of, np.int64))
    sorted_position = np.empty_like(by_slot)
    sorted_position[by_slot] = np.arange(len(by_slot))
    position_of = sorted_position[compiled.position]  # by operator
    idle_from, idle_to = _idle_intervals(rows, graph, nodes, position_of)
    return CompiledSchedule(
        ScheduleTables(
            before,
            need,
            np.array(row_of, np.uint64)[compiled.operator_at[by_slot]],
            np.searchsorted(slots[by_slot], np.arange(graph.microbatches + 1)),
            np.array(
                [position_of[nodes[row[-1].type, row[-1].task]] for row in rows if row], np.uint64
            ),
            idle_from,
            idle_to,
        ),
        stages=count,
        microbatches=graph.microbatches,
        ranks=len(rows),
        rank_S=np.array([stage.ranks[0] for stage in graph.layout.stages]),
        lead_slots=_lead_slots(rows, graph),
    )


def _sort_by_slot(
    graph: CompiledOperatorGraph, slot_of: Int64s
) -> tuple[Int64s, Int64s, Uint64s, Uint64s]:
    """Sort operators by the last slot on which they depend.

    Returns:
        The last slot of each operator; the sorted operator indices; and, in this order, the two
        predecessors of each operator. A single predecessor is repeated. The number of operators
        marks a missing predecessor.
    """
    slots = slot_of[graph.operator_at]
    for position in range(len(slots)):
        sources = graph.sources[graph.pointers[position] : graph.pointers[position + 1]]
        slots[position] = max(slots[position], slots[sources].max(initial=0))
    by_slot = np.argsort(slots, kind="stable")
    position_of = np.empty_like(by_slot)
    position_of[by_slot] = np.arange(len(by_slot))
    begins = graph.pointers[:-1]
    ends = graph.pointers[1:]
    sources = np.append(position_of[graph.sources], len(slots))
    first = np.where(ends > begins, sources[begins], len(slots))[by_slot]
    last = np.where(ends > begins, sources[ends - 1], len(slots))[by_slot]
    return slots, by_slot, first.astype(np.uint64), last.astype(np.uint64)


def _idle_intervals(
    rows: Sequence[Sequence[Action]],
    graph: StageGraph,
    nodes: dict[tuple[ActionType, Task], int],
    position_of: Int64s,
) -> tuple[Int64s, Int64s]:
    """Return the operators around the interval of the first rank that each first forward fills.

    For each slot, these operators end before the interval and before the backward after it. -1 if
    the next action is another forward.
    """
    idle_from = np.full(graph.microbatches, -1)
    idle_to = np.full(graph.microbatches, -1)
    row = rows[graph.layout.stages[0].ranks[0]]
    for previous, entry, following in zip(row, row[1:], row[2:], strict=False):
        if entry.stage == 0 and entry.type is ActionType.F and following.type is ActionType.B:
            inputs = [
                action_input
                for action_input in action_inputs(following, graph)
                if action_input.message is not None
            ]
            if inputs:
                idle_from[entry.microbatch] = position_of[nodes[previous.type, previous.task]]
                idle_to[entry.microbatch] = position_of[nodes[inputs[-1].type, inputs[-1].task]]
    return idle_from, idle_to


def _lead_slots(rows: Sequence[Sequence[Action]], graph: StageGraph) -> int:
    """Return the number of ranks if the first rank alternates as in 1F1B. Otherwise return 0."""
    if any(len(stage.ranks) != 1 for stage in graph.layout.stages):
        return 0
    ahead = len(rows)
    slots = graph.microbatches
    expected = [(ActionType.F, slot) for slot in range(min(ahead, slots))]
    for slot in range(slots):
        expected.append((ActionType.B, slot))
        if slot + ahead < slots:
            expected.append((ActionType.F, slot + ahead))
    row = rows[graph.layout.stages[0].ranks[0]]
    actual = [kind for kind, _ in groupby((a.type, a.microbatch) for a in row)]
    return ahead if actual == expected else 0
