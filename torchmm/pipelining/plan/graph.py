"""Which stages there are, and which tasks of a step depend on which.

`StageLayout` is fixed for a run: how the modality modules are cut into stages, on which ranks they
are and which stages feed which. `StageGraph` adds what one step brings: the number of microbatches
and, per module and microbatch, the number of sub-microbatches, which may be 0. Both are plain data
without tensors or torch.distributed, so that planners, simulator and viewer share them.

A *gather edge* leads from a module with sub-microbatches to one without (encoder to LLM): one task
consumes the outputs of 0..M tasks. A *scatter edge* is the reverse (LLM to generator). PipeWeaver
§5 (segments, sub-microbatches), design of the stage graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchmm.pipelining.plan.slices import MessageSlices, Slices, TensorRanks


class Task(NamedTuple):
    """What F, B, I and W apply to."""

    stage: int
    microbatch: int
    sub_microbatch: int = 0


class Message(NamedTuple):
    """What a task hands to the task of another stage; gradients take the way back.

    At most one end has sub-microbatches, or both have the same; `sub_microbatch` is that end's.
    """

    source: int
    destination: int
    microbatch: int
    sub_microbatch: int = 0


@dataclass(frozen=True)
class StageSpec:
    """Consecutive layers [start, stop) of one module.

    `ranks` has one entry per replica of the stage *within the plan*: one, unless a module is
    replicated over ranks that other modules are not (Optimus, DistTrain).
    """

    index: int
    module: str
    start: int
    stop: int
    ranks: tuple[int, ...]
    segment: int = 0
    """Which pass over the module's ranks this stage belongs to."""
    virtual_stage: int = -1
    """Classic schedules treat stages of the same number as one; -1: its own index."""
    trainable: bool = True
    """Whether any parameter of the stage is trained."""
    tied_to: int = -1
    """Stage that holds a copy of one of this stage's weights (tied embeddings); -1: none."""
    mirror: int = 0
    """Tensor-parallel ranks that are several ranks of the plan run the same tasks together; each
    has a stage for them: its mirrors, numbered from 0. Those of an encoder may be fewer than those
    of the LLM."""


@dataclass(frozen=True)
class StageLayout:
    """The stages of a run.

    Attributes:
        stages: by index.
        edges: (source, destination) stages; a stage comes after all that feed it.
        sub_microbatched: modules that may process a microbatch in any number of parts.
        tensor: by module: its tensor-parallel ranks, which together are a rank of the plan, or
            several (mirrors); a module that is not in it has one.

    Raises:
        ValueError: indices, edges or ranks do not make a graph that can be executed.
    """

    stages: tuple[StageSpec, ...]
    edges: tuple[tuple[int, int], ...]
    sub_microbatched: frozenset[str] = frozenset()
    tensor: Mapping[str, TensorRanks] = field(default_factory=dict, hash=False)

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
            parts = {self.stages[s].module in self.sub_microbatched for s in (source, destination)}
            modules = {self.stages[s].module for s in (source, destination)}
            if parts == {True} and len(modules) == 2:
                raise ValueError(
                    f"edge {source} -> {destination}: connects {sorted(modules)}, which both "
                    "have sub-microbatches; put a module without sub-microbatches between "
                    "them"
                )

    @cached_property
    def rank_count(self) -> int:
        """Ranks of the plan."""
        return 1 + max(rank for stage in self.stages for rank in stage.ranks)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """By stage: the stages that feed it, in order."""
        return tuple(tuple(s for s, d in self.edges if d == i) for i in range(len(self.stages)))

    @cached_property
    def destinations(self) -> tuple[tuple[int, ...], ...]:
        """By stage: the stages it feeds, in order."""
        return tuple(tuple(d for s, d in self.edges if s == i) for i in range(len(self.stages)))

    @cached_property
    def virtual_stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages that classic schedules treat as one, in pipeline order."""
        groups: dict[int, list[int]] = {}
        for stage in self.stages:
            key = stage.index if stage.virtual_stage < 0 else stage.virtual_stage
            groups.setdefault(key, []).append(stage.index)
        return tuple(tuple(groups[key]) for key in sorted(groups))

    @cached_property
    def mirrors(self) -> int:
        """Ranks of the plan that have a stage of the LLM together; 1 where none are mirrored."""
        return 1 + max(stage.mirror for stage in self.stages)

    @cached_property
    def mirrored(self) -> tuple[tuple[int, ...], ...]:
        """By stage: the stages that run its tasks together with it, itself included."""
        if self.mirrors == 1:
            return tuple((stage.index,) for stage in self.stages)
        groups: dict[tuple[str, int, int], list[int]] = {}
        for stage in self.stages:
            groups.setdefault((stage.module, stage.start, stage.stop), []).append(stage.index)
        return tuple(tuple(groups[s.module, s.start, s.stop]) for s in self.stages)

    @cached_property
    def together(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """By mirrored stage and rank of the plan: the ranks that run its tasks together, this one
        among them."""
        found = {}
        for stage, alike in enumerate(self.mirrored):
            for replica, rank in enumerate(self.stages[stage].ranks) if len(alike) > 1 else ():
                found[stage, rank] = tuple(self.stages[twin].ranks[replica] for twin in alike)
        return found

    def tensor_ranks(self, stage: int) -> TensorRanks:
        """Of a stage."""
        return self.tensor.get(self.stages[stage].module, TensorRanks())

    def group_size(self, stage: int) -> int:
        """Tensor-parallel ranks that are one rank of the plan."""
        return max(1, self.tensor_ranks(stage).size // len(self.mirrored[stage]))

    def slices(self, source: int, destination: int, *, stays: bool) -> MessageSlices:
        """Which part of a message every tensor-parallel rank sends and gets.

        Args:
            source, destination: stages.
            stays: whether it is handed over on a rank of the plan.
        """
        here = self.tensor_ranks(source)
        there = self.tensor_ranks(destination)
        if not here.sends_slices or max(here.size, there.size) == 1:
            return MessageSlices(None, None)
        inside = self.stages[source].module == self.stages[destination].module
        cut: Slices | None = None
        if self.parts_mirrors(source, destination):
            cut = Slices(there.size, there.size)
        elif not stays:
            cut = Slices(here.size, there.size)
        if inside and here.keeps_slices:
            return MessageSlices(Slices(here.size, there.size, gathered=False), cut)
        return MessageSlices(cut, cut)

    def parts_mirrors(self, source: int, destination: int) -> bool:
        """Whether a stage hands each of the mirrors of another one a part of the rows."""
        return (
            self.tensor_ranks(source).sends_slices and self.mirrors_handed(source, destination) > 1
        )

    def mirrors_handed(self, source: int, destination: int) -> int:
        """To how many mirrors of another stage a mirror of a stage hands what it makes: all of the
        source to as many of the destination, which follow each other, in turns."""
        return len(self.mirrored[destination]) // len(self.mirrored[source])

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages with a replica on a rank of the plan."""
        return tuple(s.index for s in self.stages if rank in s.ranks)

    def has_parts(self, stage: int) -> bool:
        """Whether the stage's module has sub-microbatches."""
        return self.stages[stage].module in self.sub_microbatched


@dataclass(frozen=True)
class StageGraph:
    """The tasks of one step.

    Attributes:
        microbatches: number of microbatches.
        sub_microbatches: by module with sub-microbatches: how many, per microbatch.
        replica: by (module, microbatch, sub_microbatch): which of `StageSpec.ranks` runs it,
            where that is not 0.
        context: ranks that share the LLM's rows and are one rank of the plan; each runs a share
            of every task.

    Raises:
        ValueError: the counts do not fit the layout.
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

    def parts(self, stage: int, microbatch: int) -> int:
        """Tasks of a stage for a microbatch: 1, or its number of sub-microbatches."""
        counts = self.sub_microbatches.get(self.layout.stages[stage].module)
        return 1 if counts is None else counts[microbatch]

    def rank(self, task: Task) -> int:
        """Rank of the plan that runs a task."""
        stage = self.layout.stages[task.stage]
        if len(stage.ranks) == 1:
            return stage.ranks[0]
        key = (stage.module, task.microbatch, task.sub_microbatch)
        return stage.ranks[self.replica.get(key, 0)]

    def tasks(self) -> Iterator[Task]:
        """All tasks, by microbatch and stage: an order in which they can be run."""
        for microbatch in range(self.microbatches):
            for stage in range(len(self.layout.stages)):
                for part in range(self.parts(stage, microbatch)):
                    yield Task(stage, microbatch, part)

    def incoming(self, task: Task) -> tuple[Message, ...]:
        """What a task consumes in its forward, in the order of edges and sub-microbatches."""
        found = self._incoming.get(task)
        if found is None:
            stage, microbatch, part = task
            own = self.layout.has_parts(stage)
            found = self._incoming[task] = tuple(
                Message(source, stage, microbatch, p)
                for source in self.layout.sources[stage]
                for p in ((part,) if own else range(self.parts(source, microbatch)))
            )
        return found

    def outgoing(self, task: Task) -> tuple[Message, ...]:
        """What a task produces in its forward, in the order of edges and sub-microbatches."""
        found = self._outgoing.get(task)
        if found is None:
            stage, microbatch, part = task
            own = self.layout.has_parts(stage)
            found = self._outgoing[task] = tuple(
                Message(stage, destination, microbatch, p)
                for destination in self.layout.destinations[stage]
                for p in ((part,) if own else range(self.parts(destination, microbatch)))
            )
        return found

    # Planner, lowering, validation and runtime ask for each task's messages in turn.

    @cached_property
    def _incoming(self) -> dict[Task, tuple[Message, ...]]:
        return {}

    @cached_property
    def _outgoing(self) -> dict[Task, tuple[Message, ...]]:
        return {}

    def messages(self) -> Iterator[Message]:
        """All messages, edge by edge."""
        for source, destination in self.layout.edges:
            divided = source if self.layout.has_parts(source) else destination
            for microbatch in range(self.microbatches):
                for part in range(self.parts(divided, microbatch)):
                    yield Message(source, destination, microbatch, part)

    def producer(self, message: Message) -> Task:
        """The task that produces a message."""
        part = message.sub_microbatch if self.layout.has_parts(message.source) else 0
        return Task(message.source, message.microbatch, part)

    def consumer(self, message: Message) -> Task:
        """The task that consumes a message."""
        part = message.sub_microbatch if self.layout.has_parts(message.destination) else 0
        return Task(message.destination, message.microbatch, part)

    @cached_property
    def _backward(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) pairs with a backward: something trained lies at or before them."""
        found = set()
        for microbatch in range(self.microbatches):
            for stage in self.layout.stages:
                reached = any(
                    (source, microbatch) in found and self.parts(source, microbatch)
                    for source in self.layout.sources[stage.index]
                )
                if stage.trainable or reached:
                    found.add((stage.index, microbatch))
        return frozenset(found)

    def needs_backward(self, stage: int, microbatch: int) -> bool:
        """Whether the stage's tasks of a microbatch have a backward.

        Not if neither the stage nor anything that feeds it is trained: a frozen encoder, or a
        frozen LLM in a microbatch without images.
        """
        return (stage, microbatch) in self._backward

    def carries_gradient(self, message: Message) -> bool:
        """Whether a gradient comes back for a message.

        Mirrors all have the whole gradient of what all of them were handed; the first gives it,
        or each its slice.
        """
        if not self.differentiates(message):
            return False
        stages = self.layout.stages
        mirror = stages[message.destination].mirror
        ends_in_another = mirror > 0 and stages[message.source].mirror != mirror
        return not ends_in_another or self.parts_mirrors(message)

    def differentiates(self, message: Message) -> bool:
        """Whether the consumer computes a gradient for a message."""
        return (message.source, message.microbatch) in self._backward

    def slices(self, message: Message) -> MessageSlices:
        """Which part of a message every tensor-parallel rank sends and gets."""
        if not self.layout.tensor:
            return MessageSlices(None, None)
        stays = self.rank(self.producer(message)) == self.rank(self.consumer(message))
        return self.layout.slices(message.source, message.destination, stays=stays)

    def parts_mirrors(self, message: Message) -> bool:
        """Whether a message is one of those that divide the rows of what they hand to mirrors."""
        return self.layout.parts_mirrors(message.source, message.destination)
