"""Pipeline plans: the actions of every rank in a training step, and the tensors that are sent.

Planners write plans: a schedule defines the compute order
(`torchmm.pipelining.schedules.registry`), and lowering adds communication
(`torchmm.pipelining.plan.lowering`). The runtime executes plans, the simulator estimates their
time, and the viewer plots them. Simulated and measured steps are both lists of `ActionRecord`.
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
"""F, B, I and W actions of each rank in execution order. The result of a planner."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor of a pipeline message."""

    shape: tuple[int, ...]
    """Unsharded shape, with the tokens of all tensor-parallel ranks and without padding."""
    dtype: torch.dtype
    requires_grad: bool = True
    """Whether the tensor has a gradient, if gradients of its message are sent."""
    slices: Slices | None = None
    """Division of the tokens among tensor-parallel ranks. If None, the tensor is replicated."""

    @property
    def needs_all_gather(self) -> bool:
        """True if tasks use all tokens, while each rank sends only its slice."""
        return self.slices is not None and self.slices.gathered

    @property
    def padded_tokens(self) -> int:
        """Number of tokens of all slices, with padding."""
        assert self.slices is not None
        return self.slices.padded(self.shape[-2])

    def local_spec(self, *, source: bool) -> TensorSpec:
        """Return the local tensor that a rank sends (`source`) or receives."""
        if self.slices is None:
            return self
        local_tokens = self.padded_tokens // (
            self.slices.source if source else self.slices.destination
        )
        return self._replace(shape=(*self.shape[:-2], local_tokens, self.shape[-1]), slices=None)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return prod(self.shape) * self.dtype.itemsize


MessageSpecs = Mapping[Message, tuple[TensorSpec, ...]]
"""Tensors of each pipeline message of a step."""

UnshardMode = Literal["none", "layer", "step"]
"""When FSDP2 unshards the parameters of a stage: never (parameters are replicated), per layer, or
once per step."""

RecomputeMode = Literal["none", "selective", "full", "offload"]
"""Recomputation of a layer in its backward pass.

"selective" recomputes everything except matmuls and attention. "full" recomputes the layer from its
input. "offload" does the same with an input that is offloaded to host memory.
"""


class EncoderLaunch(NamedTuple):
    """Encoder kernels that run during the collectives of an LLM action."""

    encoder_actions: tuple[Action, ...]
    """Encoder actions that can start in the LLM action, in execution order."""
    pieces_per_collective: tuple[int, ...]
    """Number of encoder pieces per tensor-parallel collective of the LLM action."""


@dataclass(frozen=True)
class PipelinePlan:
    """Plan of a training or validation step.

    Attributes:
        graph: Tasks and their dependencies.
        actions: Actions of each rank.
        specs: Tensors of each message, including messages within a rank. Empty if the plan is only
            simulated or plotted.
        training: Whether the step has backward passes. False for validation.
        recompute: Recomputation mode of each layer of the stage, by task. Other tasks use the mode
            of their module. Requires modules with `activation_checkpoint.mode = "auto"`.
        launches: Encoder pieces that run during the tensor-parallel collectives of an LLM action.
            The remaining pieces of the encoder action run at its position in `actions`.
    """

    graph: StageGraph
    actions: Sequence[tuple[Action, ...]]
    specs: MessageSpecs = field(default_factory=dict)
    training: bool = True
    recompute: Mapping[Task, tuple[RecomputeMode, ...]] = field(default_factory=dict)
    launches: Mapping[Action, EncoderLaunch] = field(default_factory=dict)

    def recomputes(self, task: Task) -> bool:
        """Return True if a task recomputes layers, so that its backward pass cannot be split."""
        return any(mode != "none" for mode in self.recompute.get(task, ()))


class ActionRecord(NamedTuple):
    """Execution of an action. Times are relative to the start of the step."""

    rank: int
    action: Action
    start_ms: float
    end_ms: float


Durations = Callable[[Action], float]
"""Returns the duration of an action, in any unit."""
