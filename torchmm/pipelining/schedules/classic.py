"""Classic schedules: pure functions from the tasks of a step to each rank's order of actions.

They treat a *virtual stage* (`StageLayout.virtual_stages`) as one unit: its stages run one after
the other, an encoder among them first runs all sub-microbatches of the microbatch; the backward is
mirrored. With units in one chain, the published orders are legal whatever happens inside a unit:
leaving out tasks (no images, nothing trained) only removes dependencies.

GPipe: arXiv 1811.06965. 1F1B and its interleaved form: arXiv 2104.04473 (Megatron-LM), warm-up
lengths as there. Zero bubble: ZB-H1 of arXiv 2401.10241. Rejected: taking the orders out of
torch.distributed.pipelining, whose generators need stages and process groups and know one
microbatch count for all stages; tests check that both give the same where both apply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.orders import backward_kinds, by_rank
from torchmm.pipelining.plan.plan import ComputeOrder


def gpipe(graph: StageGraph) -> ComputeOrder:
    """All forwards, then all backwards; one virtual stage after the other.

    Every rank keeps the activations of all microbatches. Any layout, replicas too.

    Raises:
        ValueError: a virtual stage feeds one before it.
    """
    units = _units(graph)
    microbatches = range(graph.microbatches)

    def actions() -> Iterator[Action]:
        for unit in units:
            for microbatch in microbatches:
                yield from _forward(graph, unit, microbatch)
        for unit in reversed(units):
            for microbatch in microbatches:
                yield from _backward(graph, unit, microbatch, split=False)[0]

    return by_rank(graph, actions())


def forward_only(graph: StageGraph) -> ComputeOrder:
    """Forwards alone, for validation. Any layout, replicas too.

    As many microbatches as ranks go through all virtual stages before the next ones start: fewer
    would leave ranks idle where a rank has several stages, more would keep more outputs waiting.

    Raises:
        ValueError: a virtual stage feeds one before it.
    """
    units = _units(graph)
    return by_rank(
        graph,
        (
            action
            for unit, microbatch in _turns(graph, units)
            for action in _forward(graph, unit, microbatch)
        ),
    )


def one_f_one_b(graph: StageGraph) -> ComputeOrder:
    """1F1B: rank r keeps at most P - r microbatches.

    Raises:
        ValueError: not exactly one virtual stage per rank.
    """
    chunks = _chunks_by_rank(graph)
    if len(chunks[0]) != 1:
        raise ValueError(
            f"1f1b: {len(chunks[0])} virtual stages per rank; use interleaved_1f1b or a layout "
            "with one"
        )
    return interleaved_1f1b(graph)


def interleaved_1f1b(graph: StageGraph, *, adjusted: bool = False) -> ComputeOrder:
    """Interleaved 1F1B: V virtual stages per rank, the bubble shrinks to 1/V of 1F1B's.

    Microbatches pass the ranks in groups, floor(microbatches / P) of them and similar in size; the
    largest has G = P if P divides the number of microbatches. Rank r keeps at most
    (V-1) G + 2 (P-r-1) + 1 virtual stages' activations. From P microbatches on, the bubble is the
    published one, divisible or not. With V = 1 this is 1F1B.

    Args:
        adjusted: whether rank r has P-r-1 forwards fewer before its first backward, with several
            virtual stages (Optimus' figure 12): where transfers take no time, the step is as long
            with equal stages, later groups are needed later, and fewer activations are kept.

    Raises:
        ValueError: virtual stages are not dealt to the ranks in turn.
    """
    chunks = _chunks_by_rank(graph)
    group = len(_rounds(graph)[0])
    per_rank = len(chunks[0])
    # The backward of a later chunk comes round after two trips along the ranks, not one.
    trips = 1 if per_rank == 1 or adjusted else 2
    rows: list[tuple[Action, ...]] = [()] * len(chunks)
    for position, units in enumerate(chunks):
        warm_up = (per_rank - 1) * group + trips * (len(chunks) - 1 - position)
        backwards = [
            _backward(graph, unit, microbatch, split=False)[0]
            for unit, microbatch in _turns(graph, units[::-1])
        ]
        rows[_rank(graph, units)] = _one_f_one_b(_forwards(graph, units), backwards, warm_up)
    return tuple(rows)


def zero_bubble(graph: StageGraph) -> ComputeOrder:
    """ZB-H1: B is split, its W runs later, where 1F1B has its bubble.

    All ranks keep what rank 0 keeps in 1F1B: P microbatches. Rank r starts its W r microbatches
    late. With several virtual stages per rank the warm-up is that of torch's
    ScheduleInterleavedZeroBubble, and the activations are at most interleaved 1F1B's.

    Raises:
        ValueError: virtual stages are not dealt to the ranks in turn.
    """
    chunks = _chunks_by_rank(graph)
    group = len(_rounds(graph)[0])
    rows: list[tuple[Action, ...]] = [()] * len(chunks)
    for position, units in enumerate(chunks):
        warm_up = (len(chunks[0]) - 1) * group + len(chunks) - 1 - position
        delay = position  # input backwards by which those of the weights lag
        backwards: list[list[Action]] = []
        waiting: deque[list[Action]] = deque()
        for unit, microbatch in _turns(graph, units[::-1]):
            for_inputs, for_weights = _backward(graph, unit, microbatch, split=True)
            waiting.append(for_weights)
            due = waiting.popleft() if len(waiting) > delay else []
            backwards.append(for_inputs + due)
        row = _one_f_one_b(_forwards(graph, units), backwards, warm_up)
        rows[_rank(graph, units)] = row + tuple(w for for_weights in waiting for w in for_weights)
    return tuple(rows)


Unit = tuple[int, ...]
"""Stages of a virtual stage."""


def _one_f_one_b(
    forwards: Sequence[Sequence[Action]], backwards: Sequence[Sequence[Action]], warm_up: int
) -> tuple[Action, ...]:
    """One rank's actions.

    Args:
        forwards, backwards: of each unit and microbatch in turn, as many of one as of the other.
        warm_up: forwards before the first pair of a forward and a backward.
    """
    ahead = min(warm_up, len(forwards))
    pairs = len(forwards) - ahead
    row: list[Action] = []
    for forward in forwards[:ahead]:  # warm-up
        row += forward
    for forward, backward in zip(forwards[ahead:], backwards[:pairs], strict=True):  # steady state
        row += forward
        row += backward
    for backward in backwards[pairs:]:  # cool-down
        row += backward
    return tuple(row)


def _turns(graph: StageGraph, units: Sequence[Unit]) -> Iterator[tuple[Unit, int]]:
    """A group of microbatches goes through one unit after the other, then the next group does."""
    for group in _rounds(graph):
        for unit in units:
            for microbatch in group:
                yield unit, microbatch


def _forwards(graph: StageGraph, units: Sequence[Unit]) -> list[list[Action]]:
    return [_forward(graph, unit, microbatch) for unit, microbatch in _turns(graph, units)]


def _rank(graph: StageGraph, units: Sequence[Unit]) -> int:
    """The rank of the plan that has these units."""
    return graph.layout.stages[units[0][0]].ranks[0]


def _forward(graph: StageGraph, unit: Unit, microbatch: int) -> list[Action]:
    return [
        Action(ActionType.F, stage, microbatch, part)
        for stage in unit
        for part in range(graph.parts(stage, microbatch))
    ]


def _backward(
    graph: StageGraph, unit: Unit, microbatch: int, *, split: bool
) -> tuple[list[Action], list[Action]]:
    """What earlier ranks wait for, and what may come later."""
    first: list[Action] = []
    later: list[Action] = []
    for stage in reversed(unit):
        kinds = backward_kinds(graph, stage, microbatch, split=split)
        for part in reversed(range(graph.parts(stage, microbatch))):
            if kinds.first:
                first.append(Action(kinds.first, stage, microbatch, part))
            if kinds.deferred:
                later.append(Action(kinds.deferred, stage, microbatch, part))
    return first, later


def _rounds(graph: StageGraph) -> list[range]:
    """Microbatches in groups of similar size, the larger ones first; each has P if P divides."""
    microbatches = graph.microbatches
    count = max(1, microbatches // graph.layout.rank_count)
    size, larger = divmod(microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _units(graph: StageGraph) -> tuple[Unit, ...]:
    units = graph.layout.virtual_stages
    place = {stage: i for i, unit in enumerate(units) for stage in unit}
    for source, destination in graph.layout.edges:
        if place[source] > place[destination]:
            raise ValueError(
                f"stage {source} of virtual stage {place[source]} feeds stage {destination} of "
                f"virtual stage {place[destination]}; number virtual stages along the pipeline"
            )
    return units


def _chunks_by_rank(graph: StageGraph) -> list[list[Unit]]:
    """By position in the pipeline: the units of the rank there."""
    units = _units(graph)
    count = graph.layout.rank_count
    ranks: list[int] = []
    for unit in units:
        used = {rank for stage in unit for rank in graph.layout.stages[stage].ranks}
        if len(used) > 1:
            raise ValueError(
                f"stages {list(unit)} of one virtual stage are on ranks {sorted(used)}; put them "
                "on one rank, or use the schedule separated or gpipe"
            )
        ranks += used
    if len(set(ranks[:count])) < count or ranks != ranks[:count] * (len(ranks) // count):
        raise ValueError(
            f"the virtual stages are on ranks {ranks}; assign them to the {count} ranks "
            "round-robin, or use the schedule separated or gpipe"
        )
    return [list(units[position::count]) for position in range(count)]
