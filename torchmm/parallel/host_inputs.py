"""Inputs of layers that wait in the host's memory until backward runs the layers again.

On CUDA, nothing but the link is in the way: copies have streams of their own, one each way.

    forward    layer i runs   | its input goes | layer i+1 waits until that has gone, so that the
                                                 device never holds more than what a layer reads
    backward   layer i again  | the input of the layer before comes meanwhile

The first input of a backward comes while the action before it runs, of a backward behind its last
input: the plan says which backward is next, and `StepState` tells. So a device holds at most one
input ahead of its use; tuning counts that one (`torchmm.balance.pipeweaver.recomputation.costs`).
The host waits for nothing.

Memory of the device is that of the stream that computes, for both ways: an input is let go of once
that stream has waited for the copy, and the place of one that comes is allocated there, behind
whatever used it before. So what is in use at a time follows from the order of actions alone, as
elsewhere. Buffers of the host are page-locked and come from torch's cache of them, which hands a
buffer out again when copies from and to it are over.

On a CPU there is no other memory: the input stays what it is.

Rejected: `torch.autograd.graph.save_on_cpu`, whose copies stand between the kernels, in order;
`record_stream`, with which memory is free at a time that depends on how far the host has run ahead;
a fixed number of places on the device, as for optimizer states: inputs differ in size from task to
task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Guest:
    """An input in the host's memory.

    Attributes:
        host: its copy there, page-locked.
        device: where it came from.
        home: the stream that computes with it.
        gone: when it is complete on the host.
        copy: its copy on the device, from when it begins to come until it is used.
        arrived: when that is complete.
    """

    host: Tensor
    device: torch.device
    home: torch.cuda.Stream
    gone: torch.cuda.Event
    copy: Tensor | None = None
    arrived: torch.cuda.Event | None = None


class InputStreams:
    """Where inputs are copied, and what waits for what."""

    def __init__(self, device: torch.device) -> None:
        self._going = torch.cuda.Stream(device)
        self._coming = torch.cuda.Stream(device)

    def send(self, tensor: Tensor) -> Guest:
        """To the host, once it is computed."""
        home = torch.cuda.current_stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._going.wait_stream(home)
        with torch.cuda.stream(self._going):
            host.copy_(tensor, non_blocking=True)
        return Guest(host, tensor.device, home, self._going.record_event())

    def let_go(self, guest: Guest) -> None:
        """Before the memory of what was sent is used for something else."""
        guest.home.wait_event(guest.gone)

    def bring(self, guest: Guest) -> None:
        """Back, once it is there and there is room."""
        with torch.cuda.stream(guest.home):
            guest.copy = torch.empty_like(guest.host, device=guest.device)
        self._coming.wait_stream(guest.home)
        self._coming.wait_event(guest.gone)
        with torch.cuda.stream(self._coming):
            guest.copy.copy_(guest.host, non_blocking=True)
        guest.arrived = self._coming.record_event()

    def await_arrival(self, guest: Guest) -> None:
        """Before computing with it."""
        assert guest.arrived is not None
        guest.home.wait_event(guest.arrived)


def streams_of(device: torch.device) -> InputStreams | None:
    """Of a device with memory of its own."""
    return InputStreams(device) if device.type == "cuda" else None


class Waiting:
    """The inputs of one task that wait for its backward, in the order of its layers.

    Attributes:
        following: those that the next backward needs; None: not known, or there are none.
    """

    def __init__(self) -> None:
        self.following: Waiting | None = None
        self._guests: list[Guest] = []
        self._streams: InputStreams | None = None

    def add(self, guest: Guest, streams: InputStreams) -> int:
        """Its number."""
        self._streams = streams
        self._guests.append(guest)
        return len(self._guests) - 1

    def bring(self, index: int = -1) -> None:
        """Lets one begin to come, unless it has: the last, which backward needs first."""
        if self._guests and self._guests[index].copy is None:
            assert self._streams is not None
            self._streams.bring(self._guests[index])

    def take(self, index: int) -> Tensor:
        """An input, with which its stream may compute; the next one begins to come."""
        self.bring(index)
        guest = self._guests[index]
        found, guest.copy = guest.copy, None
        assert self._streams is not None and found is not None
        self._streams.await_arrival(guest)
        if index > 0:
            self.bring(index - 1)
        elif self.following is not None:
            self.following.bring()
        return found


class HostInputs:
    """Sends the inputs of a module's layers to the host, and gets them back.

    Args:
        streams: makes those of a device; None: an input stays what it is there.
    """

    def __init__(self, streams: Callable[[torch.device], InputStreams | None] = streams_of) -> None:
        self._make_streams = streams
        self._streams: InputStreams | None = None
        self._waiting = Waiting()
        self._sent: list[tuple[Tensor, Guest]] = []

    def begin(self) -> Waiting:
        """A task's forward begins; what will wait for its backward."""
        self._waiting = Waiting()
        return self._waiting

    def settle(self) -> None:
        """Lets go of what was sent: whoever computes next waits until it has gone."""
        for _, guest in self._sent:
            assert self._streams is not None
            self._streams.let_go(guest)
        self._sent.clear()

    def pack(self, tensor: Tensor) -> Tensor | tuple[Waiting, int]:
        """What stands for an input until backward."""
        self._streams = self._streams or self._make_streams(tensor.device)
        if self._streams is None:
            return tensor
        self.settle()
        guest = self._streams.send(tensor)
        self._sent.append((tensor, guest))
        return self._waiting, self._waiting.add(guest, self._streams)

    def unpack(self, packed: Tensor | tuple[Waiting, int]) -> Tensor:
        """The input again."""
        if isinstance(packed, Tensor):
            return packed
        waiting, index = packed
        return waiting.take(index)
