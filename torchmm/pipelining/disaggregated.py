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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchmm.pipelining.actions import Action, ActionType
from torchmm.pipelining.colocated import LLM
from torchmm.pipelining.graph import StageGraph, StageLayout, Task
from torchmm.pipelining.layouts import Cut, ModuleLayers, build_layout
from torchmm.pipelining.orders import needed_action
from torchmm.pipelining.partition import balanced_cuts
from torchmm.pipelining.plan import ComputeOrder
from torchmm.pipelining.separated import Durations


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
            f"sizes of {sorted(units)}, the modules are {sorted(m.name for m in modules)}"
        )
    cuts: dict[str, list[Cut]] = {}
    first = 0
    for module in modules:
        size, count = units[module.name], (segments or {}).get(module.name, 1)
        stages = size.pipeline * count
        if size.replicas < 1 or not 1 <= stages <= len(module.costs):
            raise ValueError(
                f"{module.name}: {len(module.costs)} layers for {size.pipeline} ranks x {count} "
                f"stages per rank in {size.replicas} replicas; use fewer ranks or stages, and "
                "replicas from 1 on"
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
        loads = [0.0] * count
        for microbatch in range(graph.microbatches) if count > 1 else ():
            for part in range(graph.parts(stage.index, microbatch)):
                chosen = microbatch % count if name == LLM else loads.index(min(loads))
                replica[name, microbatch, part] = chosen
                loads[chosen] += _work(graph, Task(stage.index, microbatch, part), durations)
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
    """What a classic schedule of the chain says, for all replicas of a group.

    A rank keeps at most as many waves as there are positions in the chain behind it and including
    its own, under 1F1B.

    Args:
        graph: with a replica for every task (`deal_tasks`).
        schedule: of pipelines with one stage per rank.

    Raises:
        ValueError: what `schedule` raises.
    """
    replicas = max(len(stage.ranks) for stage in graph.layout.stages if stage.module == LLM)
    rows: list[tuple[Action, ...]] = [()] * graph.layout.rank_count
    for row in schedule(_chain(graph, replicas)):
        ranks = {rank for action in row for rank in graph.layout.stages[action.stage].ranks}
        for rank in ranks:
            rows[rank] = tuple(
                new
                for action in row
                for task in _tasks(graph, action, replicas)
                if graph.rank(task) == rank
                if (new := needed_action(graph, Action(action.type, *task))) is not None
            )
    return tuple(rows)


def _chain(graph: StageGraph, replicas: int) -> StageGraph:
    """One replica of each module, waves in the place of microbatches, everything trained."""
    position: dict[tuple[int, ...], int] = {}
    for stage in graph.layout.stages:
        position.setdefault(stage.ranks, len(position))
    stages = tuple(
        replace(
            stage,
            ranks=(position[stage.ranks],),
            tied_to=-1,
            trainable=True,  # or backwards that only modules before it need would be missing
        )
        for stage in graph.layout.stages
    )
    return StageGraph(StageLayout(stages, graph.layout.edges), -(-graph.microbatches // replicas))


def _tasks(graph: StageGraph, action: Action, replicas: int) -> list[Task]:
    """Tasks of a wave at a stage, by microbatch."""
    start, step = action.microbatch * replicas, 1 if action.type is ActionType.F else -1
    return [
        Task(action.stage, microbatch, part)
        for microbatch in range(start, min(start + replicas, graph.microbatches))
        for part in range(graph.parts(action.stage, microbatch))[::step]
    ]
