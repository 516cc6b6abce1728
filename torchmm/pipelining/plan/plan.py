"""A training step as data: what every rank does in which order, and what is sent.

Planners write plans (`torchmm.pipelining.schedules.names` gives the compute order, `lowering` adds
communication), the runtime executes them, the simulator times them, the viewer draws them. A
simulated and a measured step both are lists of `ActionRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import torch

from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import Message, StageGraph, Task
from torchmm.pipelining.plan.slices import Slices

ComputeOrder = tuple[tuple[Action, ...], ...]
"""By rank of the plan: its F, B, I and W actions in order. What planners return."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    """With the rows of all tensor-parallel ranks, without padding."""
    dtype: torch.dtype
    requires_grad: bool = True
    """Whether this tensor gets a gradient, where its message carries one."""
    slices: Slices | None = None
    """How tensor-parallel ranks divide its rows among them; None: all have all of it."""

    @property
    def is_cut(self) -> bool:
        """Whether tasks hand on and consume all rows, of which a slice travels."""
        return self.slices is not None and self.slices.gathered

    @property
    def rows(self) -> int:
        """Rows of all slices, padding included."""
        assert self.slices is not None
        return self.slices.padded(self.shape[-2])

    def on_rank(self, *, source: bool) -> TensorSpec:
        """What a rank at one end sends or receives."""
        if self.slices is None:
            return self
        share = self.rows // (self.slices.source if source else self.slices.destination)
        return self._replace(shape=(*self.shape[:-2], share, self.shape[-1]), slices=None)

    @property
    def nbytes(self) -> int:
        """Size of all of it in bytes."""
        return prod(self.shape) * self.dtype.itemsize


MessageSpecs = Mapping[Message, tuple[TensorSpec, ...]]
"""Tensors of each message of a step."""

Gathering = Literal["none", "layer", "step"]
"""When FSDP2 gathers a stage's parameters: never (they are whole on every rank), with every layer,
once per step."""

LayerMode = Literal["none", "selective", "full", "offload"]
"""What a layer's backward runs again: nothing, all but matrix products and attention, everything;
"offload": everything, from an input that waits in the host's memory.
"""


class Launch(NamedTuple):
    """Pieces of encoder actions that run during the collectives of an LLM action."""

    begins: tuple[Action, ...]
    """Encoder actions that may start in it, in the order of the rank."""
    pieces: tuple[int, ...]
    """Number of pieces by tensor-parallel collective of the action."""


@dataclass(frozen=True)
class PipelinePlan:
    """One step.

    Attributes:
        graph: tasks and their dependencies.
        actions: by rank of the plan.
        specs: of every message, those that stay on a rank included; empty in a plan that is only
            to be simulated or drawn.
        training: whether there are backwards; False when validating the model.
        recompute: by task: the mode of each of its stage's layers, in order; tasks that are not in
            it run as their module always does. For modules that are built so that tasks may choose
            (`apply_activation_checkpoint`, "auto").
        launches: by LLM action: pieces of later encoder actions that run during its
            tensor-parallel collectives (`launches`). The rest of such an action runs at its place.
    """

    graph: StageGraph
    actions: Sequence[tuple[Action, ...]]
    specs: MessageSpecs = field(default_factory=dict)
    training: bool = True
    recompute: Mapping[Task, tuple[LayerMode, ...]] = field(default_factory=dict)
    launches: Mapping[Action, Launch] = field(default_factory=dict)

    def recomputes(self, task: Task) -> bool:
        """Whether the plan lets a task run layers again, so that its backward cannot be split."""
        return any(mode != "none" for mode in self.recompute.get(task, ()))


class ActionRecord(NamedTuple):
    """When an action ran; times count from the start of the step."""

    rank: int
    action: Action
    start_ms: float
    end_ms: float


Durations = Callable[[Action], float]
"""How long an action takes, in any unit."""
