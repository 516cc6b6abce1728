"""Optimizer states in host memory, which are copied to the device for their update.

The update processes the states in chunks. While one chunk is updated, the next chunk is copied to
the device and the previous chunk is copied back, each on a separate stream, through `_NUM_BUFFERS`
buffers in device memory. The device therefore never stores more than these buffers, regardless of
the model size, and copies overlap with the computation. The host does not block.

CPUOffloadOptimizer of torchao is not used. It updates on the CPU, copies gradients as they are
accumulated in each microbatch, does not support DTensors and synchronizes its stream in every step.

On a CPU, states are in host memory anyway. The same chunks then use the same buffers sequentially,
so that CPU tests cover the code for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_NUM_BUFFERS = 3  # one is copied to the device, one is updated, one is copied back
_ALIGNMENT = 256  # bytes, as in the CUDA allocator
Chunk = TypeVar("Chunk")


class OffloadTransfer:
    """Copies of host tensors to the device and back, in chunks.

    Args:
        device: Device of the update.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = TransferStreams(device) if device.type == "cuda" else None

    def each(
        self, portions: Sequence[Chunk], tensors_of: Callable[[Chunk], Sequence[Tensor]]
    ) -> Iterator[tuple[Chunk, list[Tensor]]]:
        """Yield every chunk with copies of its tensors on the device.

        The copies are written back when the caller requests the next chunk. The caller must exhaust
        the iterator.

        Args:
            portions: Chunks.
            tensors_of: Function that returns contiguous tensors in host memory, pinned with CUDA.
        """
        visits = self._visits([tensors_of(portion) for portion in portions])
        streams = self._streams
        if streams is None:
            for portion, visit in zip(portions, visits, strict=True):
                visit.bring()
                yield portion, visit.copies
                visit.take_back()
            return
        streams.begin()
        for portion, visit, following in zip(portions, visits, [*visits[1:], None], strict=True):
            if visit is visits[0]:
                streams.bring(visit)
            if following is not None:
                streams.bring(following)
            streams.await_arrival(visit)
            yield portion, visit.copies
            streams.take_back(visit)
        streams.end()

    def _visits(self, hosts: Sequence[Sequence[Tensor]]) -> list[_ChunkTransfer]:
        room_bytes = max((sum(_aligned_bytes(t) for t in tensors) for tensors in hosts), default=0)
        count = min(_NUM_BUFFERS, len(hosts))
        slots = [
            _DeviceBuffer(torch.empty(room_bytes, dtype=torch.uint8, device=self._device))
            for _ in range(count)
        ]
        return [_ChunkTransfer(tensors, slots[i % count]) for i, tensors in enumerate(hosts)]


@dataclass
class _DeviceBuffer:
    """Device buffer for one chunk."""

    memory: Tensor
    free: torch.cuda.Event | None = None
    """Event after the copy of the previous chunk to the host. None before the first chunk."""


class _ChunkTransfer:
    """Tensors of one chunk, and their device buffers."""

    def __init__(self, hosts: Sequence[Tensor], slot: _DeviceBuffer) -> None:
        self.slot = slot
        self.arrived: torch.cuda.Event | None = None
        self.copies: list[Tensor] = []
        self._hosts = hosts
        start = 0
        for host in hosts:
            raw = slot.memory[start : start + host.nbytes]
            self.copies.append(raw.view(host.dtype).view(host.shape))
            start += _aligned_bytes(host)

    def bring(self) -> None:
        """Copy the tensors to the device on the current stream."""
        for copy, host in zip(self.copies, self._hosts, strict=True):
            copy.copy_(host, non_blocking=True)

    def take_back(self) -> None:
        """Copy the tensors to the host on the current stream."""
        for copy, host in zip(self.copies, self._hosts, strict=True):
            host.copy_(copy, non_blocking=True)


class TransferStreams:
    """Synchronization of the two copy streams and the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming = torch.cuda.Stream(device)
        self._going = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Wait until the compute stream has released the memory of the buffers.

        Host tensors are complete since `end`.
        """
        self._coming.wait_stream(torch.cuda.current_stream(self._device))

    def bring(self, visit: _ChunkTransfer) -> None:
        """Copy a chunk to the device as soon as its buffer is free."""
        if visit.slot.free is not None:
            self._coming.wait_event(visit.slot.free)
        with torch.cuda.stream(self._coming):
            visit.bring()
        visit.arrived = self._coming.record_event()

    def await_arrival(self, visit: _ChunkTransfer) -> None:
        """Make the compute stream wait for the copy of a chunk."""
        assert visit.arrived is not None
        torch.cuda.current_stream(self._device).wait_event(visit.arrived)

    def take_back(self, visit: _ChunkTransfer) -> None:
        """Copy a chunk to the host after its update."""
        self._going.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._going):
            visit.take_back()
        visit.slot.free = self._going.record_event()

    def end(self) -> None:
        """Make the compute stream wait for all copies.

        The buffers can then be reused, and readers that wait for this stream have all states on the
        host, as checkpoints require.
        """
        torch.cuda.current_stream(self._device).wait_stream(self._going)


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
