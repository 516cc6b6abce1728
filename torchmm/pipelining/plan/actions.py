"""What a rank does in a step: one `Action` after the other.

The vocabulary is torch.distributed.pipelining's (F, B, I, W, SEND_F, ..., REDUCE_GRAD) with what a
multimodal step needs besides: a sub-microbatch index, because an encoder may process a
microbatch in 0, 1 or several groups of images; the stage at the other end of a transfer, because
a stage may have several neighbours; and waits as actions of their own, so that a plan says when a
sent tensor may be freed. Rejected: torch's `_Action`, whose enumeration is closed and which has
one microbatch index.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torchmm.pipelining.plan.graph import Task


class ActionType(Enum):
    """Kinds of actions; the value is the name in files and pictures."""

    F = "F"
    """Forward of a stage."""
    B = "B"
    """Whole backward: gradients of inputs and weights."""
    I = "I"  # noqa: E741 - torch's name
    """Backward for inputs only."""
    W = "W"
    """Backward for weights only; after the I of the same task."""
    SEND_F = "SEND_F"
    """Post the send of a forward output."""
    RECV_F = "RECV_F"
    """Post the receive of a forward input."""
    WAIT_F = "WAIT_F"
    """Block until a forward input has arrived."""
    SEND_B = "SEND_B"
    """Post the send of an input's gradient."""
    RECV_B = "RECV_B"
    """Post the receive of an output's gradient."""
    WAIT_B = "WAIT_B"
    """Block until an output's gradient has arrived."""
    WAIT_SEND_F = "WAIT_SEND_F"
    """Block until a SEND_F is complete, and release what was sent."""
    WAIT_SEND_B = "WAIT_SEND_B"
    """Block until a SEND_B is complete, and release what was sent."""
    UNSHARD = "UNSHARD"
    """Gather a stage's parameters over its data-parallel ranks."""
    RESHARD = "RESHARD"
    """Free a stage's gathered parameters without a reduction."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduce a stage's gradients over its data-parallel ranks; frees gathered parameters."""
    REDUCE_TIED = "REDUCE_TIED"
    """Add up the gradients of a weight that this stage and `other` hold copies of."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


COMPUTE = (ActionType.F, ActionType.B, ActionType.I, ActionType.W)
"""Actions that run layers; all others move data or wait."""


class Action(NamedTuple):
    """One action of one rank. Fields that do not apply are at their defaults."""

    type: ActionType
    stage: int
    microbatch: int = -1
    sub_microbatch: int = 0
    other: int = -1
    """Transfers: the stage at the other end. REDUCE_TIED: the stage with the other copy."""
    peer: int = -1
    """Transfers and REDUCE_TIED: the rank at the other end, counted within the plan."""

    @property
    def task(self) -> Task:
        """What an F, B, I or W applies to."""
        return Task(self.stage, self.microbatch, self.sub_microbatch)

    def __str__(self) -> str:
        """As in torch: "2F3"; with sub-microbatch "0F3.1"; transfers "2SEND_F3>4@1"."""
        text = f"{self.stage}{self.type.value}"
        if self.microbatch >= 0:
            text += str(self.microbatch)
        if self.sub_microbatch:
            text += f".{self.sub_microbatch}"
        if self.other >= 0:
            text += f">{self.other}@{self.peer}"
        return text
