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
from itertools import accumulate, chain, islice
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
    """Encode a training plan without the tasks and specs of its graph.

    The numbers are: the number of actions of each rank; the actions; the replica that runs each
    task of replicated modules; the launches; each task that recomputes, with the modes of its
    layers. A launch is its rank and position, the number of actions that begin and of collectives,
    the positions of these actions, and the pieces by collective.
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
    launches: list[list[int]] = []
    for rank, program in enumerate(plan.actions if plan.launches else ()):
        at = {action: position for position, action in enumerate(program)}
        for action in program:
            if (launch := plan.launches.get(action)) is not None:
                sizes = [rank, at[action], len(launch.begins), len(launch.pieces)]
                begins = [at[begun] for begun in launch.begins]
                launches.append([*sizes, *begins, *launch.pieces])
    numbers += (len(launches), *chain(*launches))
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
    values = iter(numbers[end:].tolist())
    modules = _modules(graph)
    replica: dict[tuple[str, int, int], int] = {}
    for _ in range(next(values)):
        module, microbatch, part, number = islice(values, 4)
        replica[modules[module], microbatch, part] = number
    graph = replace(graph, replica=replica) if replica or graph.replica else graph
    launches: dict[Action, Launch] = {}
    for _ in range(next(values)):
        rank, position, begins, collectives = islice(values, 4)
        begun = tuple(rows[rank][place] for place in islice(values, begins))
        launches[rows[rank][position]] = Launch(begun, tuple(islice(values, collectives)))
    recompute: dict[Task, tuple[LayerMode, ...]] = {}
    for index in values:  # the stage of a task, until no numbers are left
        stage = graph.layout.stages[index]
        task = Task(index, *islice(values, 2))
        recompute[task] = tuple(_MODES[n] for n in islice(values, stage.stop - stage.start))
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


def _modules(graph: StageGraph) -> list[str]:
    return [*dict.fromkeys(stage.module for stage in graph.layout.stages)]
