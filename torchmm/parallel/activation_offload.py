"""Activation offloading: layer inputs are stored in host memory until recomputation needs them.

On CUDA, copies use two separate streams, one per direction, so they overlap with computation:

    forward    compute   layer 0     | layer 1     | layer 2        layer i + 1 waits until
               to host   input 0     | input 1     | input 2        input i is on the host
    backward   compute   layer 2     | layer 1     | layer 0        recomputation and gradients
               to GPU    input 1     | input 0     |                one input is prefetched

The first input of a backward pass is prefetched during the preceding action. `StepState` gets this
action from the plan. The device has at most one prefetched input, which memory estimates include
(`torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs`). The host does not block.

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
class OffloadedActivation:
    """A layer input in host memory.

    Attributes:
        host_copy: Copy in pinned host memory.
        device: Device of the input.
        compute_stream: Stream that computes with the input.
        offloaded: Event at the end of the copy to the host.
        device_copy: Copy on the device, from the start of the prefetch until its use.
        prefetched: Event at the end of the copy to the device.
    """

    host_copy: Tensor
    device: torch.device
    compute_stream: torch.cuda.Stream
    offloaded: torch.cuda.Event
    device_copy: Tensor | None = None
    prefetched: torch.cuda.Event | None = None


class OffloadStreams:
    """Copy streams of a device, and synchronization with the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def offload(self, tensor: Tensor) -> OffloadedActivation:
        """Copy an input to the host after it has been computed."""
        compute_stream = torch.cuda.current_stream(tensor.device)
        host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._to_host.wait_stream(compute_stream)
        with torch.cuda.stream(self._to_host):
            host_copy.copy_(tensor, non_blocking=True)
        return OffloadedActivation(
            host_copy, tensor.device, compute_stream, self._to_host.record_event()
        )

    def wait_for_offload(self, activation: OffloadedActivation) -> None:
        """Make the compute stream wait for the copy, so that device memory can be reused."""
        activation.compute_stream.wait_event(activation.offloaded)

    def prefetch(self, activation: OffloadedActivation) -> None:
        """Start the copy to the device, into a buffer of the compute stream."""
        with torch.cuda.stream(activation.compute_stream):
            activation.device_copy = torch.empty_like(
                activation.host_copy, device=activation.device
            )
        self._to_device.wait_stream(activation.compute_stream)
        self._to_device.wait_event(activation.offloaded)
        with torch.cuda.stream(self._to_device):
            activation.device_copy.copy_(activation.host_copy, non_blocking=True)
        activation.prefetched = self._to_device.record_event()

    def wait_for_prefetch(self, activation: OffloadedActivation) -> None:
        """Make the compute stream wait for the copy to the device."""
        assert activation.prefetched is not None
        activation.compute_stream.wait_event(activation.prefetched)


def offload_streams(device: torch.device) -> OffloadStreams | None:
    """Return the copy streams of a CUDA device, or None for a CPU."""
    return OffloadStreams(device) if device.type == "cuda" else None


class PendingInputs:
    """Offloaded inputs of one task until its backward pass, in layer order.

    Attributes:
        next_inputs: Inputs of the next backward pass. None if unknown or not offloaded.
    """

    def __init__(self) -> None:
        self.next_inputs: PendingInputs | None = None
        self._activations: list[OffloadedActivation] = []
        self._streams: OffloadStreams | None = None

    def add(self, activation: OffloadedActivation, streams: OffloadStreams) -> int:
        """Add an input and return its index."""
        self._streams = streams
        self._activations.append(activation)
        return len(self._activations) - 1

    def prefetch(self, index: int = -1) -> None:
        """Start to prefetch an input, if not started. The last input is needed first."""
        if self._activations and self._activations[index].device_copy is None:
            assert self._streams is not None
            self._streams.prefetch(self._activations[index])

    def fetch(self, index: int) -> Tensor:
        """Return an input for computation on its stream, and start to prefetch the next input."""
        self.prefetch(index)
        activation = self._activations[index]
        tensor, activation.device_copy = activation.device_copy, None
        assert self._streams is not None and tensor is not None
        self._streams.wait_for_prefetch(activation)
        if index > 0:
            self.prefetch(index - 1)
        elif self.next_inputs is not None:
            self.next_inputs.prefetch()
        return tensor


class ActivationOffload:
    """Saved-tensor hooks that offload the inputs of the layers of a module.

    Args:
        streams: Returns the streams of a device. None disables offloading on this device.
    """

    def __init__(
        self, streams: Callable[[torch.device], OffloadStreams | None] = offload_streams
    ) -> None:
        self._make_streams = streams
        self._streams: OffloadStreams | None = None
        self._pending = PendingInputs()
        self._sent: list[tuple[Tensor, OffloadedActivation]] = []

    def begin_task(self) -> PendingInputs:
        """Start the forward pass of a task, and return its offloaded inputs."""
        self._pending = PendingInputs()
        return self._pending

    def wait_for_offloads(self) -> None:
        """Release the device memory of offloaded inputs. Later computation waits for the copies."""
        for _, activation in self._sent:
            assert self._streams is not None
            self._streams.wait_for_offload(activation)
        self._sent.clear()

    def pack(self, tensor: Tensor) -> Tensor | tuple[PendingInputs, int]:
        """Offload an input, and return its handle, or the input itself without offloading."""
        self._streams = self._streams or self._make_streams(tensor.device)
        if self._streams is None:
            return tensor
        self.wait_for_offloads()
        activation = self._streams.offload(tensor)
        self._sent.append((tensor, activation))
        return self._pending, self._pending.add(activation, self._streams)

    def unpack(self, packed: Tensor | tuple[PendingInputs, int]) -> Tensor:
        """Return the input of a handle."""
        if isinstance(packed, Tensor):
            return packed
        pending, index = packed
        return pending.fetch(index)
