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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from torchmm.balance.compiled import Float64s, Int64s
from torchmm.balance.disttrain.reordering.program_kernels import ProgramTables
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import ComputeOrder
from torchmm.pipelining.view.timeline import uniform_timeline


class _Result(NamedTuple):
    """What other actions wait for: the forward or the backward of a task."""

    backward: bool
    task: Task


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
        raise ValueError(f"actions of kind {names}: only F and B have durations here")
    numbering = _Numbering(rows, graph)
    # Times of 1 give an order along dependencies, by which neighbouring ranks take turns.
    records = uniform_timeline(rows, graph, lambda action: 1.0)
    for record in sorted(records, key=lambda r: (r.start_ms, r.rank)):
        numbering.add(record.action)
    return StepProgram(
        tables=numbering.tables(),
        stages=len(graph.layout.stages),
        microbatches=graph.microbatches,
        ranks=len(rows),
        rank_S=np.array([stage.ranks[0] for stage in graph.layout.stages]),
        lag=_lag(rows, graph),
    )


def _result(action: Action) -> _Result:
    return _Result(action.type is ActionType.B, Task(*action[1:4]))


def _needs(action: Action, graph: StageGraph) -> Iterator[_Result]:
    """Results of other stages that an action waits for."""
    task = Task(*action[1:4])
    if action.type is ActionType.F:
        for message in graph.incoming(task):
            yield _Result(False, graph.producer(message))
    else:
        for message in graph.outgoing(task):
            if graph.carries_gradient(message):
                yield _Result(True, graph.consumer(message))


class _Numbering:
    """Actions as steps that wait for two others; 0 is the start, the first step is 1.

    An action with n > 1 needs is preceded by n - 1 steps that take no time.
    """

    def __init__(self, rows: Sequence[Sequence[Action]], graph: StageGraph) -> None:
        self._rows = rows
        self._graph = graph
        self._rank = {_result(a): rank for rank, row in enumerate(rows) for a in row}
        self.number: dict[_Result, int] = {}
        self.before = [0]
        self.need = [0]
        self.slot = [-1]
        self.row = [0]
        self._last = [0] * len(rows)

    def add(self, action: Action) -> None:
        """The next action; what it waits for has been added."""
        result = _result(action)
        rank = self._rank[result]
        stages = len(self._graph.layout.stages)
        slots = self._graph.microbatches
        own = (result.backward * stages + action.stage) * slots + action.microbatch
        needs = list(_needs(action, self._graph))
        for index in range(max(1, len(needs))):
            need = needs[index] if needs else None
            self.before.append(self._last[rank])
            self.need.append(self.number[need] if need is not None else 0)
            self.row.append(own if index + 1 >= len(needs) else 2 * stages * slots)
            waits = (self.slot[self.before[-1]], self.slot[self.need[-1]], action.microbatch)
            self.slot.append(max(waits))
            self._last[rank] = len(self.before) - 1
        self.number[result] = self._last[rank]

    def tables(self) -> ProgramTables:
        """All actions, sorted by the last slot they depend on."""
        slots = np.array(self.slot)
        by_slot = np.argsort(slots, kind="stable")  # step 0 stays the first
        place = np.empty_like(by_slot)
        place[by_slot] = np.arange(len(by_slot))
        idle_from, idle_to = self._intervals()
        return ProgramTables(
            before_N=place[np.array(self.before)[by_slot]].astype(np.uint64),
            need_N=place[np.array(self.need)[by_slot]].astype(np.uint64),
            row_N=np.array(self.row)[by_slot].astype(np.uint64),
            begin_M=np.searchsorted(slots[by_slot], np.arange(self._graph.microbatches + 1)),
            last_R=place[self._last].astype(np.uint64),
            idle_from_M=place[idle_from],
            idle_to_M=place[idle_to],
        )

    def _intervals(self) -> tuple[list[int], list[int]]:
        """By slot: what is around the first rank's interval that its first forward fills.

        The steps that end before it and before the backward after it may start; 0 and 0 where
        the next action is another forward.
        """
        slots = self._graph.microbatches
        idle_from = [0] * slots
        idle_to = [0] * slots
        row = self._rows[self._graph.layout.stages[0].ranks[0]]
        for before, entry, after in zip(row, row[1:], row[2:], strict=False):
            if entry.stage == 0 and entry.type is ActionType.F and after.type is ActionType.B:
                idle_from[entry.microbatch] = self.number[_result(before)]
                idle_to[entry.microbatch] = self.need[self.number[_result(after)]]
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
