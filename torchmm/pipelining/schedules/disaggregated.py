"""Disaggregated placement: separate ranks for encoders, LLM and generator (DistTrain 4.1, 5.1, 7).

Each module is a *unit* with its own pipeline, data and tensor parallelism. The modules have
different numbers of replicas, so a plan covers a *replica group*. With G the greatest common
divisor of all replica counts, there are G groups. Each group has 1/G of the replicas of each module
and 1/G of the global batch:

    3 encoder and 2 LLM replicas    1 group     {encoder 0 1 2, LLM 0 1}
    4 encoder and 2 LLM replicas    2 groups    {encoder 0 1, LLM 0} {encoder 2 3, LLM 1}

`StageSpec.ranks` lists the replicas of a group. The graph of a step defines the replica of each
task.

The communication brokers of the paper, gcd(DP of encoder, DP of LLM) of them, are the edges of a
group. Each encoder replica sends its outputs directly to the LLM replica that needs them, in the
order of the plan. Outputs of a microbatch keep their order, sends do not block, and there are no
collectives across units. Separate broker processes would add a second hop and a queue.

The compute order is that of a single pipeline over encoder, LLM and generator stages, with one
replica of each. A *wave* replaces a microbatch. It contains one microbatch per LLM replica, and its
encoder tasks are distributed among the encoder replicas. The order is valid, because tasks of a
wave depend only on tasks of the same wave at adjacent stages. If the LLM has several stages per
rank, or other modules have more replicas than the LLM, the LLM is scheduled first, and the orders
of the other modules follow from the LLM order.
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
from torchmm.pipelining.plan.orders import action_in_step
from torchmm.pipelining.plan.plan import ComputeOrder, Durations
from torchmm.pipelining.schedules.layouts import (
    ModuleLayers,
    StageSplit,
    balanced_split,
    build_layout,
)


class ModuleGroupSize(NamedTuple):
    """Size of a module within a replica group."""

    pipeline: int
    """Number of pipeline ranks of each replica."""
    replicas: int
    """Number of replicas of the pipeline."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the plan."""
        return self.pipeline * self.replicas


def disaggregated_layout(
    modules: Sequence[ModuleLayers],
    sizes: Mapping[str, ModuleGroupSize],
    segments: Mapping[str, int] | None = None,
) -> StageLayout:
    """Return a layout with dedicated ranks for each module, ordered by module and replica.

    Args:
        modules: Encoders, LLM, and generators.
        sizes: Size of each module.
        segments: Number of stages per rank of each module. Defaults to 1.

    Raises:
        ValueError: Sizes are missing or below 1, or a module has fewer layers than stages. See also
            `build_layout`.
    """
    if sorted(sizes) != sorted(module.name for module in modules):
        raise ValueError(
            f"degrees of {sorted(sizes)}, but the modules are {sorted(m.name for m in modules)}"
        )
    splits: dict[str, list[StageSplit]] = {}
    first = 0
    for module in modules:
        size = sizes[module.name]
        count = (segments or {}).get(module.name, 1)
        stages = size.pipeline * count
        if size.replicas < 1 or not 1 <= stages <= len(module.costs):
            raise ValueError(
                f"{module.name}: {len(module.costs)} layers for {size.pipeline} ranks x "
                f"{count} stages per rank in {size.replicas} replicas; use fewer ranks or "
                "stages, and at least one replica"
            )
        starts = [first + replica * size.pipeline for replica in range(size.replicas)]
        splits[module.name] = [
            StageSplit(
                layers, tuple(s + i % size.pipeline for s in starts), segment=i // size.pipeline
            )
            for i, layers in enumerate(balanced_split(module.costs_with_ends, stages))
        ]
        first += size.ranks
    return build_layout(modules, splits)


def assign_replicas(graph: StageGraph, durations: Durations | None = None) -> StageGraph:
    """Assign the tasks of replicated modules to replicas.

    LLM replicas receive microbatches in round-robin order. Tasks of other modules are assigned in
    the same order to the replica with the lowest load. With 3 encoder and 2 LLM replicas, each
    encoder replica processes two thirds of the images of an LLM replica.

    Args:
        durations: of F and B actions; None: every task takes the same.
    """
    first = {stage.module: stage for stage in reversed(graph.layout.stages)}
    replica: dict[tuple[str, int, int], int] = {}
    for name, stage in first.items():
        count = len(stage.ranks)
        loads = [(0.0, number) for number in range(count)]  # a heap: the least loaded is first
        for microbatch in range(graph.microbatches) if count > 1 else ():
            for part in range(graph.task_count(stage.index, microbatch)):
                if name == LLM:
                    replica[name, microbatch, part] = microbatch % count
                    continue
                load, chosen = loads[0]
                replica[name, microbatch, part] = chosen
                cost = _task_cost(graph, Task(stage.index, microbatch, part), durations)
                heapreplace(loads, (load + cost, chosen))
    return replace(graph, replica=replica)


def _task_cost(graph: StageGraph, task: Task, durations: Durations | None) -> float:
    """Return the duration of a task of the first stage, including its backward pass."""
    if durations is None:
        return 1.0
    forward = durations(Action(ActionType.F, *task))
    if not graph.needs_backward(task.stage, task.microbatch):
        return forward
    return forward + durations(Action(ActionType.B, *task))


def disaggregated_order(
    graph: StageGraph, schedule: Callable[[StageGraph], ComputeOrder]
) -> ComputeOrder:
    """Return the order of a classic schedule for all replicas of a group.

    With 1F1B, a rank saves activations of at most one wave plus one per following pipeline rank. A
    replica of a module with more replicas than the LLM saves the same number of its own tasks.

    Args:
        graph: with a replica for every task (`assign_replicas`).
        schedule: of a chain; where the LLM has several stages per rank, or another module more
            replicas, of the LLM alone.

    Raises:
        ValueError: a module but the LLM has several stages per rank; what `schedule` raises.
    """
    llm = [stage for stage in graph.layout.stages if stage.module == LLM]
    replicas = len(llm[0].ranks)
    has_several_stages = len(llm) > len({stage.ranks for stage in llm})
    has_more_replicas = any(len(stage.ranks) > replicas for stage in graph.layout.stages)
    if has_several_stages or has_more_replicas:
        order: Sequence[Sequence[Action]] = _order_from_llm(graph, llm, schedule)
    else:
        order = schedule(_single_replica_graph(graph, replicas))
    rows: list[list[Action]] = [[] for _ in range(graph.layout.rank_count)]
    for row in order:
        for action in row:
            for task in _tasks(graph, action, replicas):
                needed = action_in_step(graph, Action(action.type, *task))
                if needed is not None:
                    rows[graph.rank(task)].append(needed)
    return tuple(map(tuple, rows))


def _single_replica_graph(
    graph: StageGraph, replicas: int, module: str | None = None
) -> StageGraph:
    """Return the graph of one replica of each module or of one module. Microbatches are waves."""
    kept_stages = [stage for stage in graph.layout.stages if module in (None, stage.module)]
    position: dict[tuple[int, ...], int] = {}
    for stage in kept_stages:
        position.setdefault(stage.ranks, len(position))
    first = kept_stages[0].index
    stages = tuple(
        replace(
            stage,
            index=stage.index - first,
            ranks=(position[stage.ranks],),
            tied_to=-1,
            trainable=True,  # keeps backward passes that only preceding modules need
        )
        for stage in kept_stages
    )
    indices = range(first, first + len(kept_stages))
    edges = ((s - first, d - first) for s, d in graph.layout.edges if s in indices and d in indices)
    layout = StageLayout(stages, tuple(edges))
    return StageGraph(layout, -(-graph.microbatches // replicas))


def _order_from_llm(
    graph: StageGraph, llm: Sequence[StageSpec], schedule: Callable[[StageGraph], ComputeOrder]
) -> list[list[Action]]:
    """Return orders for LLMs with several stages per rank, or modules with more replicas.

    The LLM has the order of a step without other modules, with additional forward passes in advance
    if there is a generator. Encoders follow the order of the first LLM stage, and generators that
    of the last LLM stage, shifted by a number of positions: one per LLM-relative replica of each
    stage in between. Before a generator, the shift is multiplied by the LLM stages per rank.
    Interleaved 1F1B processes microbatches in bursts of P (the number of LLM ranks), which adds
    another P - 1 positions.

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

    def relative_replicas(stages: Iterable[StageSpec]) -> int:
        return sum(-(-len(stage.ranks) // replicas) for stage in stages)

    ahead = per_rank * relative_replicas(after) + burst if after else 0
    llm_rows = schedule(_single_replica_graph(graph, replicas, LLM))
    rows = [
        _move_forwards_ahead([a._replace(stage=a.stage + first.index) for a in row], ahead)
        for row in llm_rows
    ]
    first_stage_actions = [action for row in rows for action in row if action.stage == first.index]
    last_stage_actions = [action for row in rows for action in row if action.stage == last.index]
    for stage in before:
        remaining = [s for s in before if s.module == stage.module and s.index >= stage.index]
        row = _actions_for_stage(stage, first_stage_actions)
        rows.append(_move_forwards_ahead(row, relative_replicas(remaining) + burst))
    for stage in after:
        following = [s for s in after if s.module == stage.module and s.index > stage.index]
        rows.append(
            _move_backwards_ahead(
                _actions_for_stage(stage, last_stage_actions), relative_replicas(following)
            )
        )
    return rows


def _actions_for_stage(stage: StageSpec, row: Sequence[Action]) -> list[Action]:
    """Return the passes of an order as those of another stage, without split backward passes."""
    actions: list[Action] = []
    for action in row:
        if action.type is ActionType.F:
            actions.append(Action(ActionType.F, stage.index, action.microbatch))
        elif action.type is not ActionType.W:  # the B action replaced I and W
            actions.append(Action(ActionType.B, stage.index, action.microbatch))
    return actions


def _move_forwards_ahead(row: Sequence[Action], count: int) -> list[Action]:
    """Move forward passes ahead by a number of forward passes."""
    forwards = [action for action in row if action.type is ActionType.F]
    moved = forwards[:count]
    later = iter(forwards[count:])
    for action in row:
        if action.type is not ActionType.F:
            moved.append(action)
        else:
            moved += islice(later, 1)  # none is left at the end of the row
    return moved


def _move_backwards_ahead(row: Sequence[Action], delay: int) -> list[Action]:
    """Move every backward pass to a position that many forward passes after its forward pass.

    A backward pass keeps its position if this is earlier.
    """
    moved: list[Action] = []
    pending: list[int] = []
    """Microbatches whose backward pass has not been appended."""

    def append_backwards(count: int) -> None:
        moved.extend(Action(ActionType.B, row[0].stage, m) for m in pending[:count])
        del pending[:count]

    for action in row:
        if action.type is ActionType.F:
            moved.append(action)
            pending.append(action.microbatch)
            append_backwards(max(0, len(pending) - delay))
        elif action.microbatch in pending:
            append_backwards(pending.index(action.microbatch) + 1)
    append_backwards(len(pending))
    return moved


def _tasks(graph: StageGraph, action: Action, replicas: int) -> list[Task]:
    """Return the tasks of a wave at a stage, by microbatch."""
    start = action.microbatch * replicas
    step = 1 if action.type is ActionType.F else -1
    return [
        Task(action.stage, microbatch, part)
        for microbatch in range(start, min(start + replicas, graph.microbatches))
        for part in range(graph.task_count(action.stage, microbatch))[::step]
    ]
