"""Actions of a rank in a training step.

The action types follow torch.distributed.pipelining (F, B, I, W, SEND_F, ..., REDUCE_GRAD). Three
additions are needed for multimodal models:

- A sub-microbatch index. An encoder processes a microbatch in 0, 1 or several groups of images.
- The stage at the other end of a transfer. A stage can have several adjacent stages.
- Separate wait actions. They define when the buffer of a sent tensor can be freed.

The private `_Action` class of torch has one microbatch index and cannot be extended.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torchmm.pipelining.plan.graph import Task


class ActionType(Enum):
    """Action types. The value is the name in CSV files and timelines."""

    F = "F"
    """Forward pass of a stage."""
    B = "B"
    """Full backward pass: gradients of inputs and weights."""
    I = "I"  # noqa: E741 - torch's name
    """Backward pass for inputs only."""
    W = "W"
    """Backward pass for weights only. Runs after the I action of the same task."""
    SEND_F = "SEND_F"
    """Post the send of a forward output."""
    RECV_F = "RECV_F"
    """Post the receive of a forward input."""
    WAIT_F = "WAIT_F"
    """Block until a forward input has arrived."""
    SEND_B = "SEND_B"
    """Post the send of an input gradient."""
    RECV_B = "RECV_B"
    """Post the receive of an output gradient."""
    WAIT_B = "WAIT_B"
    """Block until an output gradient has arrived."""
    WAIT_SEND_F = "WAIT_SEND_F"
    """Block until a SEND_F is complete, then free the sent tensors."""
    WAIT_SEND_B = "WAIT_SEND_B"
    """Block until a SEND_B is complete, then free the sent tensors."""
    UNSHARD = "UNSHARD"
    """All-gather the parameters of a stage over its data-parallel ranks."""
    RESHARD = "RESHARD"
    """Free the unsharded parameters of a stage without reducing gradients."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduce gradients of a stage over its data-parallel ranks and free unsharded parameters."""
    REDUCE_TIED = "REDUCE_TIED"
    """Sum the gradients of a tied weight that is replicated on this stage and on `other`."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


COMPUTE = (ActionType.F, ActionType.B, ActionType.I, ActionType.W)
"""Action types that run layers. All other types move data or wait."""


class Action(NamedTuple):
    """An action of one rank. Fields that do not apply to a type have their default values."""

    type: ActionType
    stage: int
    microbatch: int = -1
    sub_microbatch: int = 0
    other: int = -1
    """Stage at the other end of a transfer. For REDUCE_TIED, the stage with the other replica."""
    peer: int = -1
    """Rank of `other` within the plan. Applies to transfers and REDUCE_TIED."""

    @property
    def task(self) -> Task:
        """Task of an F, B, I or W action."""
        return Task(self.stage, self.microbatch, self.sub_microbatch)

    def __str__(self) -> str:
        """Return the CSV form: "2F3" as in torch, "0F3.1" with a sub-microbatch, "2SEND_F3>4@1"."""
        text = f"{self.stage}{self.type.value}"
        if self.microbatch >= 0:
            text += str(self.microbatch)
        if self.sub_microbatch:
            text += f".{self.sub_microbatch}"
        if self.other >= 0:
            text += f">{self.other}@{self.peer}"
        return text
