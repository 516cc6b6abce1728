"""Classic schedules: functions that map the tasks of a step to the compute order of each rank.

These schedules treat a virtual stage (`StageLayout.virtual_stages`) as one unit. The forward pass
of a unit runs its stages sequentially. An encoder stage runs all sub-microbatches of a microbatch.
The backward pass has the reverse order. As units form one pipeline, the published schedules are
valid for any content of a unit: omitted tasks (no images, frozen stages) only remove dependencies.

- GPipe: arXiv 1811.06965
- 1F1B and interleaved 1F1B: arXiv 2104.04473 (Megatron-LM), with the same warm-up lengths
- Zero bubble: ZB-H1 of arXiv 2401.10241

The generators of torch.distributed.pipelining are not used, because they need stages and process
groups and support only one microbatch count for all stages. Tests check that both agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.orders import backward_types, split_by_rank
from torchmm.pipelining.plan.plan import ComputeOrder


def gpipe(graph: StageGraph) -> ComputeOrder:
    """Return the GPipe order: all forward passes, then all backward passes.

    Every rank saves the activations of all microbatches. All layouts are supported.

    Raises:
        ValueError: An edge leads to a preceding virtual stage.
    """
    units = _virtual_stages(graph)
    microbatches = range(graph.microbatches)

    def actions() -> Iterator[Action]:
        for unit in units:
            for microbatch in microbatches:
                yield from _forward(graph, unit, microbatch)
        for unit in reversed(units):
            for microbatch in microbatches:
                yield from _backward(graph, unit, microbatch, split=False)[0]

    return split_by_rank(graph, actions())


def forward_only(graph: StageGraph) -> ComputeOrder:
    """Return an order of forward passes for validation. All layouts are supported.

    Microbatches run in groups of one microbatch per rank. Smaller groups would leave ranks with
    several stages idle, and larger groups would store more outputs.

    Raises:
        ValueError: An edge leads to a preceding virtual stage.
    """
    units = _virtual_stages(graph)
    return split_by_rank(
        graph,
        (
            action
            for unit, microbatch in _passes(graph, units)
            for action in _forward(graph, unit, microbatch)
        ),
    )


def one_f_one_b(graph: StageGraph) -> ComputeOrder:
    """Return the 1F1B order. Rank r of P saves activations of at most P - r microbatches.

    Raises:
        ValueError: A rank does not have exactly one virtual stage.
    """
    chunks = _chunks_by_rank(graph)
    if len(chunks[0]) != 1:
        raise ValueError(
            f"1f1b: {len(chunks[0])} virtual stages per rank; use interleaved_1f1b or a layout "
            "with one"
        )
    return interleaved_1f1b(graph)


def interleaved_1f1b(graph: StageGraph, *, adjusted: bool = False) -> ComputeOrder:
    """Return the interleaved 1F1B order. V virtual stages per rank reduce the bubble to 1/V.

    Microbatches run in floor(microbatches / P) groups of similar size. The largest group has G = P
    microbatches if P divides the number of microbatches. Rank r saves activations of at most
    (V-1) G + 2 (P-r-1) + 1 virtual stages. With at least P microbatches the bubble is the published
    one, even if P does not divide their number. With V = 1 this is 1F1B.

    Args:
        graph: Tasks of the step.
        adjusted: Whether to use the adjusted warm-up of Optimus (figure 12): with several virtual
            stages, rank r runs P-r-1 fewer forward passes before its first backward pass. This
            saves fewer activations. If transfers take no time and stages have equal costs, the step
            time is the same.

    Raises:
        ValueError: Virtual stages are not assigned to ranks in round-robin order.
    """
    chunks = _chunks_by_rank(graph)
    group = len(_microbatch_groups(graph)[0])
    per_rank = len(chunks[0])
    # With several chunks, the first gradient arrives after two passes over the ranks, not one.
    trips = 1 if per_rank == 1 or adjusted else 2
    rows: list[tuple[Action, ...]] = [()] * len(chunks)
    for position, units in enumerate(chunks):
        warm_up = (per_rank - 1) * group + trips * (len(chunks) - 1 - position)
        backwards = [
            _backward(graph, unit, microbatch, split=False)[0]
            for unit, microbatch in _passes(graph, units[::-1])
        ]
        rows[_rank(graph, units)] = _one_f_one_b(_forwards(graph, units), backwards, warm_up)
    return tuple(rows)


def zero_bubble(graph: StageGraph) -> ComputeOrder:
    """Return the ZB-H1 order, which splits B and moves W actions into the bubbles of 1F1B.

    Each rank saves activations of P microbatches, as rank 0 does in 1F1B. Rank r delays its W
    actions by r microbatches. With several virtual stages per rank, the warm-up is that of
    `ScheduleInterleavedZeroBubble` in torch, and activation memory does not exceed that of
    interleaved 1F1B.

    Raises:
        ValueError: Virtual stages are not assigned to ranks in round-robin order.
    """
    chunks = _chunks_by_rank(graph)
    group = len(_microbatch_groups(graph)[0])
    rows: list[tuple[Action, ...]] = [()] * len(chunks)
    for position, units in enumerate(chunks):
        warm_up = (len(chunks[0]) - 1) * group + len(chunks) - 1 - position
        delay = position  # number of I actions by which W actions are delayed
        backwards: list[list[Action]] = []
        waiting: deque[list[Action]] = deque()
        for unit, microbatch in _passes(graph, units[::-1]):
            for_inputs, for_weights = _backward(graph, unit, microbatch, split=True)
            waiting.append(for_weights)
            due = waiting.popleft() if len(waiting) > delay else []
            backwards.append(for_inputs + due)
        row = _one_f_one_b(_forwards(graph, units), backwards, warm_up)
        rows[_rank(graph, units)] = row + tuple(w for for_weights in waiting for w in for_weights)
    return tuple(rows)


VirtualStage = tuple[int, ...]
"""Stages of a virtual stage."""


def _one_f_one_b(
    forwards: Sequence[Sequence[Action]], backwards: Sequence[Sequence[Action]], warm_up: int
) -> tuple[Action, ...]:
    """Return the actions of one rank.

    Args:
        forwards: Actions of each forward pass, in execution order.
        backwards: Actions of each backward pass, in execution order, with the same length.
        warm_up: Number of forward passes before the first pair of forward and backward pass.
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


def _passes(graph: StageGraph, units: Sequence[VirtualStage]) -> Iterator[tuple[VirtualStage, int]]:
    """Yield units and microbatches: each group of microbatches passes all units in order."""
    for group in _microbatch_groups(graph):
        for unit in units:
            for microbatch in group:
                yield unit, microbatch


def _forwards(graph: StageGraph, units: Sequence[VirtualStage]) -> list[list[Action]]:
    return [_forward(graph, unit, microbatch) for unit, microbatch in _passes(graph, units)]


def _rank(graph: StageGraph, units: Sequence[VirtualStage]) -> int:
    """Return the rank of the plan with these units."""
    return graph.layout.stages[units[0][0]].ranks[0]


def _forward(graph: StageGraph, unit: VirtualStage, microbatch: int) -> list[Action]:
    return [
        Action(ActionType.F, stage, microbatch, part)
        for stage in unit
        for part in range(graph.task_count(stage, microbatch))
    ]


def _backward(
    graph: StageGraph, unit: VirtualStage, microbatch: int, *, split: bool
) -> tuple[list[Action], list[Action]]:
    """Return the actions that preceding ranks depend on, and the deferred actions."""
    first: list[Action] = []
    later: list[Action] = []
    for stage in reversed(unit):
        kinds = backward_types(graph, stage, microbatch, split=split)
        for part in reversed(range(graph.task_count(stage, microbatch))):
            if kinds.first:
                first.append(Action(kinds.first, stage, microbatch, part))
            if kinds.deferred:
                later.append(Action(kinds.deferred, stage, microbatch, part))
    return first, later


def _microbatch_groups(graph: StageGraph) -> list[range]:
    """Return groups of microbatches of similar size. Larger groups are first."""
    microbatches = graph.microbatches
    count = max(1, microbatches // graph.layout.rank_count)
    size, larger = divmod(microbatches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _virtual_stages(graph: StageGraph) -> tuple[VirtualStage, ...]:
    units = graph.layout.virtual_stages
    place = {stage: i for i, unit in enumerate(units) for stage in unit}
    for source, destination in graph.layout.edges:
        if place[source] > place[destination]:
            raise ValueError(
                f"stage {source} of virtual stage {place[source]} feeds stage {destination} of "
                f"virtual stage {place[destination]}; number virtual stages along the pipeline"
            )
    return units


def _chunks_by_rank(graph: StageGraph) -> list[list[VirtualStage]]:
    """Return the units of each rank in pipeline order."""
    units = _virtual_stages(graph)
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
