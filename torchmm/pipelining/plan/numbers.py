"""A lowered plan as one array of numbers, for those who get it from another process.

    numbers = encode_plan(plan)                          where plans are made and validated
    plan = decode_plan(numbers, graph, specs)            where they are run

Lowering and validating take a few microseconds per action, decoding 0.2, and a rank decodes its own
program: those of others when somebody asks for them. Tensors' shapes are not among the numbers: the
process that runs a plan has the microbatches from which they follow.
Rejected: pickled plans, which are five times as large and slower to read, and must not come over a
network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import get_args, overload

import numpy as np
from numpy.typing import NDArray

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, Task
from torchmm.pipelining.plan.plan import Launch, LayerMode, MessageSpecs, PipelinePlan

Int32s = NDArray[np.int32]
_TYPES = tuple(ActionType)
_TYPE_NUMBERS = {kind: number for number, kind in enumerate(_TYPES)}
_MODES: tuple[LayerMode, ...] = get_args(LayerMode)
_FIELDS = len(Action._fields)


def encode_plan(plan: PipelinePlan) -> Int32s:
    """All of a training plan but its graph's tasks and specs.

    Numbers of actions by rank; the actions; which replica of a module runs which task; the
    launches (`_launches`); for each task that recomputes, its place and the modes of its layers.
    """
    numbers = [len(plan.actions), *map(len, plan.actions)]
    for program in plan.actions:
        for kind, *rest in program:
            numbers.append(_TYPE_NUMBERS[kind])
            numbers += rest
    modules = _modules(plan.graph)
    replicas = [(modules.index(key[0]), *key[1:], n) for key, n in plan.graph.replica.items()]
    numbers.append(len(replicas))
    for replica in replicas:
        numbers += replica
    launches = _launches(plan)
    numbers += (len(launches), *launches)
    for task, modes in plan.recompute.items():
        numbers += task
        numbers += map(_MODES.index, modes)
    return np.array(numbers, np.int32)


def decode_plan(
    numbers: Int32s, graph: StageGraph, specs: Callable[[StageGraph], MessageSpecs]
) -> PipelinePlan:
    """The plan of `encode_plan`.

    Args:
        graph: of the same step, whatever its replicas.
        specs: gives those of the messages of the graph with the plan's replicas.

    Raises:
        ValueError: the numbers are not a plan of this graph's ranks and stages.
    """
    ranks = int(numbers[0]) if len(numbers) else 0
    if ranks != graph.layout.rank_count:
        raise ValueError(f"a plan of {ranks} ranks for stages on {graph.layout.rank_count}")
    counts, begin = numbers[1 : 1 + ranks].tolist(), 1 + ranks
    end = begin + _FIELDS * sum(counts)
    if end >= len(numbers):
        raise ValueError(f"a plan of {sum(counts)} actions in {len(numbers)} numbers")
    rows = _Programs(numbers[begin:end], counts)
    values = numbers[end:].tolist()
    found = _Reader(values, 0)
    modules = _modules(graph)
    replica = {(modules[m], microbatch, part): n for m, microbatch, part, n in found.rows(4)}
    graph = replace(graph, replica=replica) if replica or graph.replica else graph
    launches = _read_launches([n for row in found.rows(1) for n in row], rows)
    recompute = _recompute(values, found.at, graph)
    return PipelinePlan(graph, rows, specs(graph), True, recompute, launches)


class _Programs(Sequence[tuple[Action, ...]]):
    """Programs by rank, each decoded when it is first asked for.

    Args:
        numbers: of all actions, rank after rank.
        counts: actions by rank.
    """

    def __init__(self, numbers: Int32s, counts: Sequence[int]) -> None:
        self._numbers = numbers
        self._ends = [*accumulate((_FIELDS * count for count in counts), initial=0)]
        self._decoded: dict[int, tuple[Action, ...]] = {}

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, rank: int) -> tuple[Action, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[Action, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> tuple[Action, ...] | tuple[tuple[Action, ...], ...]:
        if isinstance(rank, slice):
            return tuple(self[number] for number in range(len(self))[rank])
        rank = range(len(self))[rank]
        if rank not in self._decoded:
            values = self._numbers[self._ends[rank] : self._ends[rank + 1]].tolist()
            kinds, *columns = (values[i::_FIELDS] for i in range(_FIELDS))
            self._decoded[rank] = tuple(map(Action, [_TYPES[n] for n in kinds], *columns))
        return self._decoded[rank]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def _launches(plan: PipelinePlan) -> list[int]:
    """Return for each launch: rank, place, the number of actions that begin and of collectives,
    the places of these actions, and the pieces by collective."""
    numbers: list[int] = []
    for rank, program in enumerate(plan.actions if plan.launches else ()):
        at = {action: position for position, action in enumerate(program)}
        for action in program:
            if (launch := plan.launches.get(action)) is not None:
                numbers += (rank, at[action], len(launch.begins), len(launch.pieces))
                numbers += [at[begun] for begun in launch.begins]
                numbers += launch.pieces
    return numbers


def _read_launches(
    numbers: Sequence[int], rows: Sequence[Sequence[Action]]
) -> dict[Action, Launch]:
    found: dict[Action, Launch] = {}
    at = 0
    while at < len(numbers):
        rank, position, begins, collectives = numbers[at : at + 4]
        first = at + 4 + begins
        end = first + collectives
        begun = tuple(rows[rank][place] for place in numbers[at + 4 : first])
        found[rows[rank][position]] = Launch(begun, tuple(numbers[first:end]))
        at = end
    return found


class _Reader:
    """Rows of numbers, behind how many there are."""

    def __init__(self, values: list[int], at: int) -> None:
        self.values, self.at = values, at

    def rows(self, width: int) -> list[list[int]]:
        count = self.values[self.at]
        begin = self.at + 1
        self.at = begin + count * width
        return [self.values[i : i + width] for i in range(begin, self.at, width)]


def _modules(graph: StageGraph) -> list[str]:
    return [*dict.fromkeys(stage.module for stage in graph.layout.stages)]


def _recompute(values: list[int], at: int, graph: StageGraph) -> dict[Task, tuple[LayerMode, ...]]:
    stages, found = graph.layout.stages, {}
    while at < len(values):
        stage = values[at]
        layers = stages[stage].stop - stages[stage].start
        modes = values[at + 3 : at + 3 + layers]
        found[Task(*values[at : at + 3])] = tuple(_MODES[number] for number in modes)
        at += 3 + layers
    return found
