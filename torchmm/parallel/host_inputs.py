"""Activation offloading: layer inputs are stored in host memory until recomputation needs them.

On CUDA, copies use two separate streams, one per direction, so they overlap with computation:

    forward    compute   layer 0     | layer 1     | layer 2        layer i + 1 waits until
               to host   input 0     | input 1     | input 2        input i is on the host
    backward   compute   layer 2     | layer 1     | layer 0        recomputation and gradients
               to GPU    input 1     | input 0     |                one input is prefetched

The first input of a backward pass is prefetched during the preceding action. `StepState` gets this
action from the plan. The device has at most one prefetched input, which memory estimates include
(`torchmm.balance.pipeweaver.recomputation.costs`). The host does not block.

Invariant: memory use depends only on the order of actions. The caching allocator assigns device
memory of both directions to the compute stream. An offloaded input is released after this stream
has waited for its copy, and the buffer of a prefetched input is allocated on this stream. With
`record_stream`, the release would depend on how far the host is ahead. Host buffers are pinned, and
come from the host cache of torch, which reuses a buffer when its copies are complete.

On a CPU device, inputs are not copied. `torch.autograd.graph.save_on_cpu` is not used, because its
copies run between kernels on the compute stream. Unlike optimizer states, inputs differ in size
between tasks, so device buffers are not fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Guest:
    """A layer input in host memory.

    Attributes:
        host: Copy in pinned host memory.
        device: Device of the input.
        home: Stream that computes with the input.
        gone: Event at the end of the copy to the host.
        copy: Copy on the device, from the start of the prefetch until its use.
        arrived: Event at the end of the copy to the device.
    """

    host: Tensor
    device: torch.device
    home: torch.cuda.Stream
    gone: torch.cuda.Event
    copy: Tensor | None = None
    arrived: torch.cuda.Event | None = None


class InputStreams:
    """Copy streams of a device, and synchronization with the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._going = torch.cuda.Stream(device)
        self._coming = torch.cuda.Stream(device)

    def send(self, tensor: Tensor) -> Guest:
        """Copy an input to the host after it has been computed."""
        home = torch.cuda.current_stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._going.wait_stream(home)
        with torch.cuda.stream(self._going):
            host.copy_(tensor, non_blocking=True)
        return Guest(host, tensor.device, home, self._going.record_event())

    def let_go(self, guest: Guest) -> None:
        """Make the compute stream wait for the copy, so that device memory can be reused."""
        guest.home.wait_event(guest.gone)

    def bring(self, guest: Guest) -> None:
        """Start the copy to the device, into a buffer of the compute stream."""
        with torch.cuda.stream(guest.home):
            guest.copy = torch.empty_like(guest.host, device=guest.device)
        self._coming.wait_stream(guest.home)
        self._coming.wait_event(guest.gone)
        with torch.cuda.stream(self._coming):
            guest.copy.copy_(guest.host, non_blocking=True)
        guest.arrived = self._coming.record_event()

    def await_arrival(self, guest: Guest) -> None:
        """Make the compute stream wait for the copy to the device."""
        assert guest.arrived is not None
        guest.home.wait_event(guest.arrived)


def streams_of(device: torch.device) -> InputStreams | None:
    """Return the copy streams of a CUDA device, or None for a CPU."""
    return InputStreams(device) if device.type == "cuda" else None


class Waiting:
    """Offloaded inputs of one task until its backward pass, in layer order.

    Attributes:
        following: Inputs of the next backward pass. None if unknown or not offloaded.
    """

    def __init__(self) -> None:
        self.following: Waiting | None = None
        self._guests: list[Guest] = []
        self._streams: InputStreams | None = None

    def add(self, guest: Guest, streams: InputStreams) -> int:
        """Add an input and return its index."""
        self._streams = streams
        self._guests.append(guest)
        return len(self._guests) - 1

    def bring(self, index: int = -1) -> None:
        """Start to prefetch an input, if not started. The last input is needed first."""
        if self._guests and self._guests[index].copy is None:
            assert self._streams is not None
            self._streams.bring(self._guests[index])

    def take(self, index: int) -> Tensor:
        """Return an input for computation on its stream, and start to prefetch the next input."""
        self.bring(index)
        guest = self._guests[index]
        tensor, guest.copy = guest.copy, None
        assert self._streams is not None and tensor is not None
        self._streams.await_arrival(guest)
        if index > 0:
            self.bring(index - 1)
        elif self.following is not None:
            self.following.bring()
        return tensor


class HostInputs:
    """Saved-tensor hooks that offload the inputs of the layers of a module.

    Args:
        streams: Returns the streams of a device. None disables offloading on this device.
    """

    def __init__(self, streams: Callable[[torch.device], InputStreams | None] = streams_of) -> None:
        self._make_streams = streams
        self._streams: InputStreams | None = None
        self._waiting = Waiting()
        self._sent: list[tuple[Tensor, Guest]] = []

    def begin(self) -> Waiting:
        """Start the forward pass of a task, and return its offloaded inputs."""
        self._waiting = Waiting()
        return self._waiting

    def settle(self) -> None:
        """Release the device memory of offloaded inputs. Later computation waits for the copies."""
        for _, guest in self._sent:
            assert self._streams is not None
            self._streams.let_go(guest)
        self._sent.clear()

    def pack(self, tensor: Tensor) -> Tensor | tuple[Waiting, int]:
        """Offload an input, and return its handle, or the input itself without offloading."""
        self._streams = self._streams or self._make_streams(tensor.device)
        if self._streams is None:
            return tensor
        self.settle()
        guest = self._streams.send(tensor)
        self._sent.append((tensor, guest))
        return self._waiting, self._waiting.add(guest, self._streams)

    def unpack(self, packed: Tensor | tuple[Waiting, int]) -> Tensor:
        """Return the input of a handle."""
        if isinstance(packed, Tensor):
            return packed
        waiting, index = packed
        return waiting.take(index)
