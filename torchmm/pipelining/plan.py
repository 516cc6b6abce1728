"""A training step as data: what every rank does in which order, and what is sent.

Planners write plans (`torchmm.pipelining.schedules` gives the compute order, `lowering` adds
communication), the runtime executes them, the simulator times them, the viewer draws them. A
simulated and a measured step both are lists of `ActionRecord`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch

from torchmm.pipelining.actions import Action
from torchmm.pipelining.graph import Message, StageGraph

ComputeOrder = tuple[tuple[Action, ...], ...]
"""By rank of the plan: its F, B, I and W actions in order. What planners return."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    """Whether this tensor gets a gradient, where its message carries one."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


MessageSpecs = Mapping[Message, tuple[TensorSpec, ...]]
"""Tensors of each message of a step."""


@dataclass(frozen=True)
class PipelinePlan:
    """One step.

    Attributes:
        graph: tasks and their dependencies.
        actions: by rank of the plan.
        specs: of every message, those that stay on a rank included; empty in a plan that is only
            to be simulated or drawn.
        training: whether there are backwards; False when validating the model.
    """

    graph: StageGraph
    actions: tuple[tuple[Action, ...], ...]
    specs: MessageSpecs = field(default_factory=dict)
    training: bool = True


class ActionRecord(NamedTuple):
    """When an action ran; times count from the start of the step."""

    rank: int
    action: Action
    start_ms: float
    end_ms: float
