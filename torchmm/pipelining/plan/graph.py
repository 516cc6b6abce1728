"""Stages of a model, and the task graph of a step.

`StageLayout` is constant during a run. It defines how modules are split into stages, the ranks of
each stage, and the edges between stages. `StageGraph` adds the properties of one step: the number
of microbatches, and the number of sub-microbatches per module and microbatch, which can be 0. Both
contain neither tensors nor process groups, so planners, simulator and viewer share them.

    encoder 0 -> encoder 1 -> LLM 0 -> LLM 1 -> generator
                           ^                 ^
                 gather: 0..M tasks      scatter: one task
                 feed one task           feeds 0..M tasks

A gather edge connects a module with sub-microbatches to a module without them. A scatter edge is
the reverse. See PipeWeaver, section 5, for segments and sub-microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchmm.pipelining.plan.slices import MessageSlices, Slices, TensorParallelism


class Task(NamedTuple):
    """Unit of computation: a stage applied to a microbatch or sub-microbatch."""

    stage: int
    microbatch: int
    sub_microbatch: int = 0


class Message(NamedTuple):
    """Output of a task that is an input of a task of another stage.

    Gradients are sent in the opposite direction. If only one end has sub-microbatches,
    `sub_microbatch` is the index at this end. If both ends have them, they have the same index.
    """

    source: int
    destination: int
    microbatch: int
    sub_microbatch: int = 0


@dataclass(frozen=True)
class StageSpec:
    """Consecutive layers [start, stop) of a module.

    `ranks` has one entry per replica of the stage within the plan. A stage has several replicas
    only if its module has more data parallelism than the other modules (Optimus, DistTrain).
    """

    index: int
    module: str
    start: int
    stop: int
    ranks: tuple[int, ...]
    segment: int = 0
    """Index of the pass over the ranks of the module that contains this stage."""
    virtual_stage: int = -1
    """Classic schedules merge stages with the same number. -1 stands for the stage index."""
    trainable: bool = True
    """Whether the stage has trainable parameters."""
    tied_to: int = -1
    """Stage with a replica of a weight of this stage (tied embeddings). -1 if there is none."""
    mirror: int = 0
    """Index of the mirror. If the tensor-parallel ranks of a module span several ranks of the plan,
    each of these ranks has a stage with the same layers, which are called mirrors. An encoder can
    have fewer mirrors than the LLM."""


@dataclass(frozen=True)
class StageLayout:
    """Stages of a run.

    Attributes:
        stages: Stages, sorted by index.
        edges: (source, destination) pairs of stages, with source < destination.
        sub_microbatched: Modules with sub-microbatches.
        tensor_parallel: Tensor parallelism of each module. The tensor-parallel ranks of a module
            are one rank of the plan, or several (mirrors). Modules that are missing have size 1.

    Raises:
        ValueError: Stage indices or edges are invalid.
    """

    stages: tuple[StageSpec, ...]
    edges: tuple[tuple[int, int], ...]
    sub_microbatched: frozenset[str] = frozenset()
    tensor_parallel: Mapping[str, TensorParallelism] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        count = len(self.stages)
        if [s.index for s in self.stages] != list(range(count)):
            raise ValueError(f"stage indices must be 0..{count - 1} in order")
        for source, destination in self.edges:
            if not 0 <= source < destination < count:
                raise ValueError(
                    f"edge {source} -> {destination}: the destination must be a later one of "
                    f"{count} stages"
                )
            sub_microbatched = {
                self.stages[s].module in self.sub_microbatched for s in (source, destination)
            }
            modules = {self.stages[s].module for s in (source, destination)}
            if sub_microbatched == {True} and len(modules) == 2:
                raise ValueError(
                    f"edge {source} -> {destination}: connects {sorted(modules)}, which both "
                    "have sub-microbatches; put a module without sub-microbatches between "
                    "them"
                )

    @cached_property
    def rank_count(self) -> int:
        """Number of ranks of the plan."""
        return 1 + max(rank for stage in self.stages for rank in stage.ranks)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Source stages of each stage, in ascending order."""
        return tuple(tuple(s for s, d in self.edges if d == i) for i in range(len(self.stages)))

    @cached_property
    def destinations(self) -> tuple[tuple[int, ...], ...]:
        """Destination stages of each stage, in ascending order."""
        return tuple(tuple(d for s, d in self.edges if s == i) for i in range(len(self.stages)))

    @cached_property
    def virtual_stages(self) -> tuple[tuple[int, ...], ...]:
        """Groups of stages that classic schedules merge, in pipeline order."""
        groups: dict[int, list[int]] = {}
        for stage in self.stages:
            key = stage.index if stage.virtual_stage < 0 else stage.virtual_stage
            groups.setdefault(key, []).append(stage.index)
        return tuple(tuple(groups[key]) for key in sorted(groups))

    @cached_property
    def mirror_count(self) -> int:
        """Number of ranks of the plan that share a stage of the LLM. 1 without mirrors."""
        return 1 + max(stage.mirror for stage in self.stages)

    @cached_property
    def mirror_stages(self) -> tuple[tuple[int, ...], ...]:
        """Mirrors of each stage, including the stage itself."""
        if self.mirror_count == 1:
            return tuple((stage.index,) for stage in self.stages)
        groups: dict[tuple[str, int, int], list[int]] = {}
        for stage in self.stages:
            groups.setdefault((stage.module, stage.start, stage.stop), []).append(stage.index)
        return tuple(tuple(groups[s.module, s.start, s.stop]) for s in self.stages)

    @cached_property
    def mirror_ranks(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Ranks that run the tasks of a mirrored stage together, by stage and rank of the plan."""
        ranks = {}
        for stage, mirrors in enumerate(self.mirror_stages):
            for replica, rank in enumerate(self.stages[stage].ranks) if len(mirrors) > 1 else ():
                ranks[stage, rank] = tuple(self.stages[m].ranks[replica] for m in mirrors)
        return ranks

    def tensor_parallelism(self, stage: int) -> TensorParallelism:
        """Return the tensor parallelism of the module of a stage."""
        return self.tensor_parallel.get(self.stages[stage].module, TensorParallelism())

    def tensor_group_size(self, stage: int) -> int:
        """Return the number of tensor-parallel ranks per rank of the plan."""
        return max(1, self.tensor_parallelism(stage).size // len(self.mirror_stages[stage]))

    def slices(self, source: int, destination: int, *, same_rank: bool) -> MessageSlices:
        """Return the token slices of a message that tensor-parallel ranks send and receive.

        Args:
            source: Source stage.
            destination: Destination stage.
            same_rank: Whether the message stays on a rank of the plan.
        """
        source_ranks = self.tensor_parallelism(source)
        destination_ranks = self.tensor_parallelism(destination)
        if (
            not source_ranks.sends_token_slices
            or max(source_ranks.size, destination_ranks.size) == 1
        ):
            return MessageSlices(None, None)
        same_module = self.stages[source].module == self.stages[destination].module
        sharded: Slices | None = None
        if self.splits_among_mirrors(source, destination):
            sharded = Slices(destination_ranks.size, destination_ranks.size)
        elif not same_rank:
            sharded = Slices(source_ranks.size, destination_ranks.size)
        if same_module and source_ranks.is_sequence_sharded:
            return MessageSlices(
                Slices(source_ranks.size, destination_ranks.size, gathered=False), sharded
            )
        return MessageSlices(sharded, sharded)

    def splits_among_mirrors(self, source: int, destination: int) -> bool:
        """Return True if each mirror of the destination receives different tokens."""
        return (
            self.tensor_parallelism(source).sends_token_slices
            and self.mirrors_per_source(source, destination) > 1
        )

    def mirrors_per_source(self, source: int, destination: int) -> int:
        """Return the number of consecutive destination mirrors that a source mirror sends to."""
        return len(self.mirror_stages[destination]) // len(self.mirror_stages[source])

    def stages_on_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages with a replica on a rank of the plan."""
        return tuple(s.index for s in self.stages if rank in s.ranks)

    def has_sub_microbatches(self, stage: int) -> bool:
        """Return True if the module of a stage has sub-microbatches."""
        return self.stages[stage].module in self.sub_microbatched


@dataclass(frozen=True)
class StageGraph:
    """Tasks of a step and their dependencies.

    Attributes:
        layout: Stages of the run.
        microbatches: Number of microbatches.
        sub_microbatches: Number of sub-microbatches per microbatch, for each module with
            sub-microbatches.
        replica: Index into `StageSpec.ranks` of the replica that runs a task, by (module,
            microbatch, sub_microbatch). Missing tasks run on replica 0.
        context: Context-parallel size of the LLM. Context-parallel ranks are one rank of the plan,
            and each of them computes its tokens of every task.

    Raises:
        ValueError: The counts do not match the layout.
    """

    layout: StageLayout
    microbatches: int
    sub_microbatches: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    replica: Mapping[tuple[str, int, int], int] = field(default_factory=dict)
    context: int = 1

    def __post_init__(self) -> None:
        if set(self.sub_microbatches) != set(self.layout.sub_microbatched):
            raise ValueError(
                f"sub-microbatch counts were passed for {sorted(self.sub_microbatches)}, but "
                f"are required for {sorted(self.layout.sub_microbatched)}"
            )
        for module, counts in self.sub_microbatches.items():
            if len(counts) != self.microbatches or min(counts, default=0) < 0:
                raise ValueError(
                    f"{module}: sub-microbatch counts {list(counts)} for {self.microbatches} "
                    "microbatches; pass one count >= 0 per microbatch"
                )

    def task_count(self, stage: int, microbatch: int) -> int:
        """Return the number of tasks of a stage for a microbatch."""
        counts = self.sub_microbatches.get(self.layout.stages[stage].module)
        return 1 if counts is None else counts[microbatch]

    def rank(self, task: Task) -> int:
        """Return the rank of the plan that runs a task."""
        stage = self.layout.stages[task.stage]
        if len(stage.ranks) == 1:
            return stage.ranks[0]
        key = (stage.module, task.microbatch, task.sub_microbatch)
        return stage.ranks[self.replica.get(key, 0)]

    def tasks(self) -> Iterator[Task]:
        """Yield all tasks by microbatch and stage, which is a valid execution order."""
        for microbatch in range(self.microbatches):
            for stage in range(len(self.layout.stages)):
                for sub_microbatch in range(self.task_count(stage, microbatch)):
                    yield Task(stage, microbatch, sub_microbatch)

    def incoming(self, task: Task) -> tuple[Message, ...]:
        """Return the inputs of the forward pass of a task, by edge and sub-microbatch."""
        messages = self._incoming.get(task)
        if messages is None:
            stage, microbatch, sub_microbatch = task
            has_sub = self.layout.has_sub_microbatches(stage)
            messages = self._incoming[task] = tuple(
                Message(source, stage, microbatch, index)
                for source in self.layout.sources[stage]
                for index in (
                    (sub_microbatch,) if has_sub else range(self.task_count(source, microbatch))
                )
            )
        return messages

    def outgoing(self, task: Task) -> tuple[Message, ...]:
        """Return the outputs of the forward pass of a task, by edge and sub-microbatch."""
        messages = self._outgoing.get(task)
        if messages is None:
            stage, microbatch, sub_microbatch = task
            has_sub = self.layout.has_sub_microbatches(stage)
            messages = self._outgoing[task] = tuple(
                Message(stage, destination, microbatch, index)
                for destination in self.layout.destinations[stage]
                for index in (
                    (sub_microbatch,)
                    if has_sub
                    else range(self.task_count(destination, microbatch))
                )
            )
        return messages

    # Cached, because planner, lowering, validation and runtime all need the messages of each task.

    @cached_property
    def _incoming(self) -> dict[Task, tuple[Message, ...]]:
        return {}

    @cached_property
    def _outgoing(self) -> dict[Task, tuple[Message, ...]]:
        return {}

    def messages(self) -> Iterator[Message]:
        """Yield all messages by edge, microbatch and sub-microbatch."""
        for source, destination in self.layout.edges:
            divided_stage = source if self.layout.has_sub_microbatches(source) else destination
            for microbatch in range(self.microbatches):
                for sub_microbatch in range(self.task_count(divided_stage, microbatch)):
                    yield Message(source, destination, microbatch, sub_microbatch)

    def producer(self, message: Message) -> Task:
        """Return the task that produces a message."""
        sub_microbatch = (
            message.sub_microbatch if self.layout.has_sub_microbatches(message.source) else 0
        )
        return Task(message.source, message.microbatch, sub_microbatch)

    def consumer(self, message: Message) -> Task:
        """Return the task that consumes a message."""
        sub_microbatch = (
            message.sub_microbatch if self.layout.has_sub_microbatches(message.destination) else 0
        )
        return Task(message.destination, message.microbatch, sub_microbatch)

    @cached_property
    def _backward_pairs(self) -> frozenset[tuple[int, int]]:
        """Pairs (stage, microbatch) with a backward pass: the stage or a source is trainable."""
        pairs = set()
        for microbatch in range(self.microbatches):
            for stage in self.layout.stages:
                reached = any(
                    (source, microbatch) in pairs and self.task_count(source, microbatch)
                    for source in self.layout.sources[stage.index]
                )
                if stage.trainable or reached:
                    pairs.add((stage.index, microbatch))
        return frozenset(pairs)

    def needs_backward(self, stage: int, microbatch: int) -> bool:
        """Return True if the tasks of a stage have a backward pass for a microbatch.

        Frozen stages without trainable sources have no backward pass, such as a frozen encoder, or
        a frozen LLM in a microbatch without images.
        """
        return (stage, microbatch) in self._backward_pairs

    def sends_gradient(self, message: Message) -> bool:
        """Return True if the consumer of a message sends a gradient to the producer.

        Mirrors that received the same message all compute its full gradient. Only the first mirror
        sends it. Mirrors that received different tokens each send the gradient of their tokens.
        """
        if not self.computes_gradient(message):
            return False
        stages = self.layout.stages
        mirror = stages[message.destination].mirror
        is_other_mirror = mirror > 0 and stages[message.source].mirror != mirror
        return not is_other_mirror or self.splits_among_mirrors(message)

    def computes_gradient(self, message: Message) -> bool:
        """Return True if the consumer computes a gradient for a message."""
        return (message.source, message.microbatch) in self._backward_pairs

    def slices(self, message: Message) -> MessageSlices:
        """Return the token slices of a message that tensor-parallel ranks send and receive."""
        if not self.layout.tensor_parallel:
            return MessageSlices(None, None)
        same_rank = self.rank(self.producer(message)) == self.rank(self.consumer(message))
        return self.layout.slices(message.source, message.destination, same_rank=same_rank)

    def splits_among_mirrors(self, message: Message) -> bool:
        """Return True if mirrors of the destination receive different tokens of a message."""
        return self.layout.splits_among_mirrors(message.source, message.destination)
