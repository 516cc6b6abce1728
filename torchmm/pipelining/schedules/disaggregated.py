"""Modules on ranks of their own: encoders, LLM and generator apart (DistTrain §4.1, §5.1, §7).

Every module is a *unit* with pipeline, data- and tensor-parallel sizes of its own. As the numbers
of replicas differ, a plan cannot be that of one replica. It covers a *replica group*: with G the
greatest common divisor of all modules' replicas, there are G groups, each with a G-th of the
replicas of every module and a G-th of the global batch. 3 encoder and 2 LLM replicas form one
group, 4 and 2 form two groups of 2 and 1. In the layout, the replicas of a group are those of
`StageSpec.ranks`; which replica runs a task is part of the step's graph.

What the paper calls a communication broker, of which it has gcd(DP of encoder, DP of LLM), are the
edges of a group: every encoder replica sends what it has made to the LLM replica that needs it, in
the order of the plan. So a microbatch's outputs keep their order, sends are posted without waiting
and there is no collective across units. Rejected: broker processes through which all outputs go (a
second hop, and a queue that would have to be planned for), and as many groups as LLM replicas,
which needs encoder replicas to divide.

Orders are those of a chain: encoders' stages, the LLM's, the generator's, as if there were one
replica of each. A *wave* takes the place of its microbatch: one microbatch of every LLM replica,
whose encoder tasks are dealt to the encoder's replicas. What is legal for the chain is legal here:
tasks of a wave depend on those of the same wave at the next position only, as its microbatch did.
Where the LLM has several stages per rank, which no chain has, or other modules more replicas, its
order comes first and the others' follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapreplace
from itertools import islice
from typing import NamedTuple

from torchmm.common.module_names import LLM
from torchmm.pipelining.plan.actions import Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout, StageSpec, Task
from torchmm.pipelining.plan.orders import needed_action
from torchmm.pipelining.plan.plan import ComputeOrder, Durations
from torchmm.pipelining.schedules.layouts import Cut, ModuleLayers, balanced_cuts, build_layout


class UnitSize(NamedTuple):
    """What a replica group has of a module."""

    pipeline: int
    """Ranks that divide the module's layers among them."""
    replicas: int
    """Copies of that pipeline."""

    @property
    def ranks(self) -> int:
        """Ranks of the plan."""
        return self.pipeline * self.replicas


def disaggregated_layout(
    modules: Sequence[ModuleLayers],
    units: Mapping[str, UnitSize],
    segments: Mapping[str, int] | None = None,
) -> StageLayout:
    """Every module on ranks of its own: replica after replica, module after module.

    Args:
        modules: encoders, LLM, generators.
        units: by module.
        segments: stages per rank, by module; 1 where none is given.

    Raises:
        ValueError: sizes are missing or below 1, a module has fewer layers than stages; what
            `build_layout` raises.
    """
    if sorted(units) != sorted(module.name for module in modules):
        raise ValueError(
            f"degrees of {sorted(units)}, but the modules are {sorted(m.name for m in modules)}"
        )
    cuts: dict[str, list[Cut]] = {}
    first = 0
    for module in modules:
        size = units[module.name]
        count = (segments or {}).get(module.name, 1)
        stages = size.pipeline * count
        if size.replicas < 1 or not 1 <= stages <= len(module.costs):
            raise ValueError(
                f"{module.name}: {len(module.costs)} layers for {size.pipeline} ranks x "
                f"{count} stages per rank in {size.replicas} replicas; use fewer ranks or "
                "stages, and at least one replica"
            )
        starts = [first + replica * size.pipeline for replica in range(size.replicas)]
        cuts[module.name] = [
            Cut(layers, tuple(s + i % size.pipeline for s in starts), segment=i // size.pipeline)
            for i, layers in enumerate(balanced_cuts(module.costs_with_ends, stages))
        ]
        first += size.ranks
    return build_layout(modules, cuts)


def deal_tasks(graph: StageGraph, durations: Durations | None = None) -> StageGraph:
    """The graph with a replica for every task of modules that have several.

    The LLM's replicas take microbatches in turn. Tasks of other modules go, in the order in which
    the LLM's replicas come to them, to the replica that has least to do: with 3 encoder and 2 LLM
    replicas, each encoder replica gets two thirds of what an LLM replica needs.

    Args:
        durations: of F and B actions; None: every task takes the same.
    """
    first = {stage.module: stage for stage in reversed(graph.layout.stages)}
    replica: dict[tuple[str, int, int], int] = {}
    for name, stage in first.items():
        count = len(stage.ranks)
        loads = [(0.0, number) for number in range(count)]  # a heap: the least loaded is first
        for microbatch in range(graph.microbatches) if count > 1 else ():
            for part in range(graph.parts(stage.index, microbatch)):
                if name == LLM:
                    replica[name, microbatch, part] = microbatch % count
                    continue
                load, chosen = loads[0]
                replica[name, microbatch, part] = chosen
                work = _work(graph, Task(stage.index, microbatch, part), durations)
                heapreplace(loads, (load + work, chosen))
    return replace(graph, replica=replica)


def _work(graph: StageGraph, task: Task, durations: Durations | None) -> float:
    """Of a task and its backward; that of a module's first stage stands for all of them."""
    if durations is None:
        return 1.0
    forward = durations(Action(ActionType.F, *task))
    if not graph.needs_backward(task.stage, task.microbatch):
        return forward
    return forward + durations(Action(ActionType.B, *task))


def disaggregated_order(
    graph: StageGraph, schedule: Callable[[StageGraph], ComputeOrder]
) -> ComputeOrder:
    """What a classic schedule says, for all replicas of a group.

    Under 1F1B a rank keeps at most as many waves as there are positions after it in the chain,
    plus one for itself; a replica of a module with more replicas than the LLM keeps as many of its
    own tasks.

    Args:
        graph: with a replica for every task (`deal_tasks`).
        schedule: of a chain; where the LLM has several stages per rank, or another module more
            replicas, of the LLM alone.

    Raises:
        ValueError: a module but the LLM has several stages per rank; what `schedule` raises.
    """
    llm = [stage for stage in graph.layout.stages if stage.module == LLM]
    replicas = len(llm[0].ranks)
    several = len(llm) > len({stage.ranks for stage in llm})
    uneven = any(len(stage.ranks) > replicas for stage in graph.layout.stages)
    if several or uneven:
        found: Sequence[Sequence[Action]] = _around_llm(graph, llm, schedule)
    else:
        found = schedule(_chain(graph, replicas))
    rows: list[list[Action]] = [[] for _ in range(graph.layout.rank_count)]
    for row in found:
        for action in row:
            for task in _tasks(graph, action, replicas):
                needed = needed_action(graph, Action(action.type, *task))
                if needed is not None:
                    rows[graph.rank(task)].append(needed)
    return tuple(map(tuple, rows))


def _chain(graph: StageGraph, replicas: int, only: str | None = None) -> StageGraph:
    """One replica of each module, or of one, waves in the place of microbatches, all trained."""
    kept = [stage for stage in graph.layout.stages if only in (None, stage.module)]
    position: dict[tuple[int, ...], int] = {}
    for stage in kept:
        position.setdefault(stage.ranks, len(position))
    first = kept[0].index
    stages = tuple(
        replace(
            stage,
            index=stage.index - first,
            ranks=(position[stage.ranks],),
            tied_to=-1,
            trainable=True,  # or backwards that only modules before it need would be missing
        )
        for stage in kept
    )
    places = range(first, first + len(kept))
    edges = ((s - first, d - first) for s, d in graph.layout.edges if s in places and d in places)
    layout = StageLayout(stages, tuple(edges))
    return StageGraph(layout, -(-graph.microbatches // replicas))


def _around_llm(
    graph: StageGraph, llm: Sequence[StageSpec], schedule: Callable[[StageGraph], ComputeOrder]
) -> list[list[Action]]:
    """Rows where the chain is none: an LLM of several stages per rank, or other modules with more
    replicas, each of which takes longer for a microbatch.

    The LLM runs as if it were alone, but some forwards ahead where a generator answers. Encoders
    follow its first stage, generators its last: what is next there, some places earlier or later. A
    stage is worth as many places as it has replicas for one of the LLM; in front of a generator
    times the LLM's stages per rank. As interleaved 1F1B takes microbatches in bursts of as many as
    the LLM has ranks, P, another P - 1 places are between it and the others.

    Raises:
        ValueError: see `disaggregated_order`.
    """
    first = llm[0]
    last = llm[-1]
    before = [stage for stage in graph.layout.stages if stage.index < first.index]
    after = [stage for stage in graph.layout.stages if stage.index > last.index]
    for modules in (before, after):
        if len({stage.ranks for stage in modules}) < len(modules):
            raise ValueError("several stages per rank are supported only for the LLM")
    replicas = len(first.ranks)
    ranks = len({stage.ranks for stage in llm})
    per_rank = len(llm) // ranks
    burst = ranks - 1 if per_rank > 1 else 0

    def worth(stages: Iterable[StageSpec]) -> int:
        return sum(-(-len(stage.ranks) // replicas) for stage in stages)

    ahead = per_rank * worth(after) + burst if after else 0
    alone = schedule(_chain(graph, replicas, LLM))
    rows = [
        _forwards_earlier([a._replace(stage=a.stage + first.index) for a in row], ahead)
        for row in alone
    ]
    of_first = [action for row in rows for action in row if action.stage == first.index]
    of_last = [action for row in rows for action in row if action.stage == last.index]
    for stage in before:
        from_here = [s for s in before if s.module == stage.module and s.index >= stage.index]
        row = _whole_backwards(stage, of_first)
        rows.append(_forwards_earlier(row, worth(from_here) + burst))
    for stage in after:
        beyond = [s for s in after if s.module == stage.module and s.index > stage.index]
        rows.append(_backwards_earlier(_whole_backwards(stage, of_last), worth(beyond)))
    return rows


def _whole_backwards(stage: StageSpec, row: Sequence[Action]) -> list[Action]:
    """The row's forwards and backwards as those of another stage, none of them split."""
    found: list[Action] = []
    for action in row:
        if action.type is ActionType.F:
            found.append(Action(ActionType.F, stage.index, action.microbatch))
        elif action.type is not ActionType.W:  # its I has stood for both
            found.append(Action(ActionType.B, stage.index, action.microbatch))
    return found


def _forwards_earlier(row: Sequence[Action], places: int) -> list[Action]:
    """The row with every forward in the place of the one that is that many forwards before it."""
    forwards = [action for action in row if action.type is ActionType.F]
    moved = forwards[:places]
    later = iter(forwards[places:])
    for action in row:
        if action.type is not ActionType.F:
            moved.append(action)
        else:
            moved += islice(later, 1)  # none is left at the end of the row
    return moved


def _backwards_earlier(row: Sequence[Action], places: int) -> list[Action]:
    """The row with every backward that many forwards after its own, or in its place if that comes
    first."""
    moved: list[Action] = []
    waiting: list[int] = []
    """Microbatches whose backward is still to come."""

    def answer(count: int) -> None:
        moved.extend(Action(ActionType.B, row[0].stage, m) for m in waiting[:count])
        del waiting[:count]

    for action in row:
        if action.type is ActionType.F:
            moved.append(action)
            waiting.append(action.microbatch)
            answer(max(0, len(waiting) - places))
        elif action.microbatch in waiting:
            answer(waiting.index(action.microbatch) + 1)
    answer(len(waiting))
    return moved


def _tasks(graph: StageGraph, action: Action, replicas: int) -> list[Task]:
    """Tasks of a wave at a stage, by microbatch."""
    start = action.microbatch * replicas
    step = 1 if action.type is ActionType.F else -1
    return [
        Task(action.stage, microbatch, part)
        for microbatch in range(start, min(start + replicas, graph.microbatches))
        for part in range(graph.parts(action.stage, microbatch))[::step]
    ]
