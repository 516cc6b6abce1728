"""A schedule as flat arrays from which the makespan follows, for any order of the microbatches.

A classic schedule fixes what each rank does with the first, second, ... microbatch; which
microbatch has which place, a *slot*, is open. So a schedule is compiled once per run, and what
changes from step to step are durations: an action starts when the one before it on its rank and
those whose results it needs have ended, as in `torchmm.pipelining.view.timeline.uniform_timeline`,
whose times follow to the last bit.

Actions are sorted by the last slot that they depend on, so what precedes the first action of a
slot does not change when that slot and later ones do: a search need not look at it again.

Rejected: a recurrence written for 1F1B alone, with less to look up but another one for
interleaved schedules, frozen modules and ranks with several stages; the event-driven dispatcher,
which decides orders itself and is an order of magnitude slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s, Words
from torchmm.balance.disttrain.reordering.program_kernels import ProgramTables
from torchmm.balance.simulation.operator_graph import CompiledGraph, OperatorGraph
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.plan.transfers import Input, action_inputs


@dataclass(frozen=True, eq=False)
class StepProgram:
    """The actions of a step in an order in which each comes after all it waits for.

    Durations are given as K = 2 * S rows of M slots: forwards of all stages, then backwards.

    Attributes:
        tables: for the kernels.
        stages: S.
        microbatches: M.
        ranks: pipeline ranks.
        rank_S: rank of each stage.
        lag: if the first rank's order is 1F1B's: the slots by which its forwards run ahead of its
            backwards, as many as there are ranks; otherwise 0.
    """

    tables: ProgramTables
    stages: int
    microbatches: int
    ranks: int
    rank_S: Int64s
    lag: int

    def checked(self, forward_ms_GSM: Float64s, backward_ms_GSM: Float64s) -> Float64s:
        """Durations of G groups as (G, K, M).

        Raises:
            ValueError: shapes differ from the program's, or a duration is negative or not finite.
        """
        shapes = np.shape(forward_ms_GSM), np.shape(backward_ms_GSM)
        wanted = (self.stages, self.microbatches)
        if shapes[0] != shapes[1] or shapes[0][-2:] != wanted or len(shapes[0]) != 3:
            raise ValueError(
                f"durations of shapes {shapes[0][-2:]} and {shapes[1][-2:]} for {wanted[0]} stages "
                f"x {wanted[1]} microbatches"
            )
        costs = np.concatenate([forward_ms_GSM, backward_ms_GSM], axis=1, dtype=np.float64)
        if costs.size and not (costs.min() >= 0 and costs.max() < np.inf):
            raise ValueError(
                f"durations from {costs.min()} to {costs.max()} ms: must be finite and >= 0"
            )
        return costs


def compile_order(order: ComputeOrder, graph: StageGraph) -> StepProgram:
    """Compile a schedule.

    Args:
        order: by rank, of forwards and whole backwards, such as of `one_f_one_b(graph)`.
        graph: all stages trained, or frozen ones, but without sub-microbatches: their number
            differs between microbatches, and a slot's actions would depend on what is in it.
            An encoder's sub-microbatches are one task here, as long as all of them.

    Raises:
        ValueError: the order cannot be executed, splits backwards, or has sub-microbatches.
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
    waits: list[tuple[int, Input]] = []
    slot_of: list[int] = []  # by operator
    row_of: list[int] = []
    for rank, row in enumerate(rows):
        for action in row:
            inputs = [each for each in action_inputs(action, graph) if each.message is not None]
            own = (action.type is ActionType.B) * count + action.stage
            # Kernels time operators that wait for one result, besides the operator before them on
            # the rank. Each further result has an operator before the action that takes no time.
            for index in range(max(1, len(inputs))):
                is_action = index >= len(inputs) - 1
                node = operators.add(rank, 0.0, name=str(action))
                waits += [(node, each) for each in inputs[index : index + 1]]
                slot_of.append(action.microbatch)
                row_of.append(
                    own * graph.microbatches + action.microbatch if is_action else zero_row
                )
            nodes[action.type, action.task] = node
    for node, (kind, task, _) in waits:
        if (kind, task) not in nodes:
            raise ValueError(f"{Action(kind, *task)} is missing from the order")
        operators.add_edge(nodes[kind, task], node)
    compiled = operators.compile()
    slots, by_slot, before, need = _sort_by_slot(compiled, np.array(slot_of, np.int64))
    place_of = np.empty_like(by_slot)
    place_of[by_slot] = np.arange(len(by_slot))
    at = place_of[compiled.place]  # by operator
    idle_from, idle_to = _intervals(rows, graph, nodes, at)
    return StepProgram(
        ProgramTables(
            before,
            need,
            np.array(row_of, np.uint64)[compiled.node_at[by_slot]],
            np.searchsorted(slots[by_slot], np.arange(graph.microbatches + 1)),
            np.array([at[nodes[row[-1].type, row[-1].task]] for row in rows if row], np.uint64),
            idle_from,
            idle_to,
        ),
        stages=count,
        microbatches=graph.microbatches,
        ranks=len(rows),
        rank_S=np.array([stage.ranks[0] for stage in graph.layout.stages]),
        lag=_lag(rows, graph),
    )


def _sort_by_slot(graph: CompiledGraph, slot_of: Int64s) -> tuple[Int64s, Int64s, Words, Words]:
    """Sort operators by the last slot that they depend on.

    Returns:
        The last slot of each place; the places in the new order; and, in that order, the two
        operators before each operator: the same one twice if there is one, the number of operators
        if there is none.
    """
    slots = slot_of[graph.node_at]
    for place in range(len(slots)):
        sources = graph.sources[graph.pointers[place] : graph.pointers[place + 1]]
        slots[place] = max(slots[place], slots[sources].max(initial=0))
    by_slot = np.argsort(slots, kind="stable")
    place_of = np.empty_like(by_slot)
    place_of[by_slot] = np.arange(len(by_slot))
    begins = graph.pointers[:-1]
    ends = graph.pointers[1:]
    sources = np.append(place_of[graph.sources], len(slots))
    first = np.where(ends > begins, sources[begins], len(slots))[by_slot]
    last = np.where(ends > begins, sources[ends - 1], len(slots))[by_slot]
    return slots, by_slot, first.astype(np.uint64), last.astype(np.uint64)


def _intervals(
    rows: Sequence[Sequence[Action]],
    graph: StageGraph,
    nodes: dict[tuple[ActionType, Task], int],
    at: Int64s,
) -> tuple[Int64s, Int64s]:
    """Return the operators around the interval of the first rank that each first forward fills.

    By slot, the operators that end before the interval and before the backward after it may start;
    -1 if the next action is another forward.
    """
    idle_from = np.full(graph.microbatches, -1)
    idle_to = np.full(graph.microbatches, -1)
    row = rows[graph.layout.stages[0].ranks[0]]
    for before, entry, after in zip(row, row[1:], row[2:], strict=False):
        if entry.stage == 0 and entry.type is ActionType.F and after.type is ActionType.B:
            inputs = [each for each in action_inputs(after, graph) if each.message is not None]
            if inputs:
                idle_from[entry.microbatch] = at[nodes[before.type, before.task]]
                idle_to[entry.microbatch] = at[nodes[inputs[-1].type, inputs[-1].task]]
    return idle_from, idle_to


def _lag(rows: Sequence[Sequence[Action]], graph: StageGraph) -> int:
    """Ranks, if the first one alternates between forwards and backwards as in 1F1B; else 0."""
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
    found = [kind for kind, _ in groupby((a.type, a.microbatch) for a in row)]
    return ahead if found == expected else 0
