"""Serialization of lowered plans as int32 arrays, to send them to another process.

    numbers = encode_plan(plan)                          in the process that plans and validates
    plan = decode_plan(numbers, graph, specs)            in the process that runs the plan

Lowering and validation take a few microseconds per action, and decoding takes 0.2 microseconds. A
rank decodes only its own actions; actions of other ranks are decoded on access. Tensor shapes are
not encoded, because the receiving process derives them from its microbatches. Pickled plans would
be five times as large, slower to read, and unsafe to receive over a network.
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
from torchmm.pipelining.plan.plan import EncoderLaunch, MessageSpecs, PipelinePlan, RecomputeMode

Int32s = NDArray[np.int32]
_TYPES = tuple(ActionType)
_TYPE_NUMBERS = {kind: number for number, kind in enumerate(_TYPES)}
_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
_FIELDS = len(Action._fields)


def encode_plan(plan: PipelinePlan) -> Int32s:
    """Encode a training plan without the tasks and specs of its graph.

    The array contains, in this order: the number of actions of each rank; the actions; the replica
    that runs each task of replicated modules; the launches; the tasks with recomputation and the
    modes of their layers. A launch is encoded as its rank and position, the numbers of encoder
    actions and of collectives, the positions of the encoder actions, and the pieces per collective.
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
                sizes = [
                    rank,
                    at[action],
                    len(launch.encoder_actions),
                    len(launch.pieces_per_collective),
                ]
                begins = [at[begun] for begun in launch.encoder_actions]
                launches.append([*sizes, *begins, *launch.pieces_per_collective])
    numbers += (len(launches), *chain(*launches))
    for task, modes in plan.recompute.items():
        numbers += task
        numbers += map(_MODES.index, modes)
    return np.array(numbers, np.int32)


def decode_plan(
    numbers: Int32s, graph: StageGraph, specs: Callable[[StageGraph], MessageSpecs]
) -> PipelinePlan:
    """Decode a plan of `encode_plan`.

    Args:
        numbers: Encoded plan.
        graph: Tasks of the same step. The replicas of the encoded plan replace its replicas.
        specs: Returns the tensors of each message of a graph.

    Raises:
        ValueError: The array does not match the ranks and stages of the graph.
    """
    ranks = int(numbers[0]) if len(numbers) else 0
    if ranks != graph.layout.rank_count:
        raise ValueError(f"a plan of {ranks} ranks for stages on {graph.layout.rank_count}")
    counts, begin = numbers[1 : 1 + ranks].tolist(), 1 + ranks
    end = begin + _FIELDS * sum(counts)
    if end >= len(numbers):
        raise ValueError(f"a plan of {sum(counts)} actions in {len(numbers)} numbers")
    rows = _DecodedPrograms(numbers[begin:end], counts)
    values = iter(numbers[end:].tolist())
    modules = _modules(graph)
    replica: dict[tuple[str, int, int], int] = {}
    for _ in range(next(values)):
        module, microbatch, part, number = islice(values, 4)
        replica[modules[module], microbatch, part] = number
    graph = replace(graph, replica=replica) if replica or graph.replica else graph
    launches: dict[Action, EncoderLaunch] = {}
    for _ in range(next(values)):
        rank, position, begins, collectives = islice(values, 4)
        begun = tuple(rows[rank][place] for place in islice(values, begins))
        launches[rows[rank][position]] = EncoderLaunch(begun, tuple(islice(values, collectives)))
    recompute: dict[Task, tuple[RecomputeMode, ...]] = {}
    for index in values:  # stage of the next task with recomputation
        stage = graph.layout.stages[index]
        task = Task(index, *islice(values, 2))
        recompute[task] = tuple(_MODES[n] for n in islice(values, stage.stop - stage.start))
    return PipelinePlan(graph, rows, specs(graph), True, recompute, launches)


class _DecodedPrograms(Sequence[tuple[Action, ...]]):
    """Actions of each rank, decoded on first access.

    Args:
        numbers: Encoded actions of all ranks.
        counts: Number of actions of each rank.
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
