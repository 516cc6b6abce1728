"""Runs encoders on a CUDA stream of their own, so that fillers overlap with LLM actions.

Everything of encoder stages goes to the side stream, all else stays on the stream of the caller:
autograd runs backwards on the stream of their forwards, and memory of encoders comes from and goes
back to the side stream's pool. The two wait for each other, as if there were one stream, with one
exception: an LLM action with fillers does not wait for them.

- The side stream waits for the main one before each of its actions: what that made, or let go of,
  is complete.
- The main stream waits for the side stream before each of its actions but transfers; if the action
  has fillers, or goes on beside those of one before it, this was before the first of them.

Of what encoders read, only gradients that the LLM's stage on the same rank hands over have main
memory that is let go of in the step; `StepState` records their use.

What is missing: streams of different priority (the encoder's kernels may delay the LLM's), and a
communicator of the encoders' own: their messages queue with the LLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.plan import PipelinePlan
from torchmm.pipelining.schedules.fillers import encoder_stages

TOGETHER = (
    ActionType.UNSHARD, ActionType.RESHARD, ActionType.REDUCE_GRAD, ActionType.REDUCE_TIED,
)  # fmt: skip
"""Collectives before and behind all computation: of the main stream, whoever's they are."""


class Streams(Protocol):
    """A main stream, the current one, and a side stream."""

    def main_waits(self) -> None:
        """The main stream waits for all that is on the side stream."""

    def side_waits(self) -> None:
        """The reverse."""

    def on_side(self) -> AbstractContextManager:
        """What is begun inside goes to the side stream."""


class CudaStreams:
    """Of a device. To be kept: memory belongs to the stream that allocated it."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)

    def main_waits(self) -> None:
        torch.cuda.current_stream().wait_stream(self._side)

    def side_waits(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream())

    def on_side(self) -> AbstractContextManager:
        return torch.cuda.stream(self._side)


class SideStream:
    """One step of one rank."""

    def __init__(self, plan: PipelinePlan, streams: Streams) -> None:
        self._streams = streams
        self._encoders = encoder_stages(plan.graph)
        self._filled: Mapping[Action, tuple[Action, ...]] = plan.fillers
        self._first = {fillers[0] for fillers in plan.fillers.values() if fillers}
        self._pending = False
        """Whether the side stream has work that the main one has not waited for."""

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Chooses the stream of an action, and lets one wait for the other where it must."""
        if action.stage in self._encoders and action.type not in TOGETHER:
            if action in self._first:
                self.join()
            self._streams.side_waits()
            self._pending = True
            with self._streams.on_side():
                yield
            return
        transfer = action.type not in (*COMPUTE, *TOGETHER)
        if not transfer and action not in self._filled:
            self.join()
        yield

    def join(self) -> None:
        """Lets the main stream wait for all encoder work so far."""
        if self._pending:
            self._streams.main_waits()
            self._pending = False
