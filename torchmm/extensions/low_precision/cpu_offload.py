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

    def chunks_on_device(
        self, chunks: Sequence[Chunk], tensors_of: Callable[[Chunk], Sequence[Tensor]]
    ) -> Iterator[tuple[Chunk, list[Tensor]]]:
        """Yield every chunk with copies of its tensors on the device.

        The copies are written back when the caller requests the next chunk. The caller must exhaust
        the iterator.

        Args:
            chunks: Chunks.
            tensors_of: Function that returns contiguous tensors in host memory, pinned with CUDA.
        """
        transfers = self._plan_transfers([tensors_of(chunk) for chunk in chunks])
        streams = self._streams
        if streams is None:
            for chunk, transfer in zip(chunks, transfers, strict=True):
                transfer.copy_to_device()
                yield chunk, transfer.copies
                transfer.copy_to_host()
            return
        streams.begin()
        for chunk, transfer, next_transfer in zip(
            chunks, transfers, [*transfers[1:], None], strict=True
        ):
            if transfer is transfers[0]:
                streams.copy_to_device(transfer)
            if next_transfer is not None:
                streams.copy_to_device(next_transfer)
            streams.wait_for_copy(transfer)
            yield chunk, transfer.copies
            streams.copy_to_host(transfer)
        streams.end()

    def _plan_transfers(self, host_tensors: Sequence[Sequence[Tensor]]) -> list[_ChunkTransfer]:
        buffer_bytes = max(
            (sum(_aligned_bytes(t) for t in tensors) for tensors in host_tensors), default=0
        )
        count = min(_NUM_BUFFERS, len(host_tensors))
        buffers = [
            _DeviceBuffer(torch.empty(buffer_bytes, dtype=torch.uint8, device=self._device))
            for _ in range(count)
        ]
        return [
            _ChunkTransfer(tensors, buffers[i % count]) for i, tensors in enumerate(host_tensors)
        ]


@dataclass
class _DeviceBuffer:
    """Device buffer for one chunk."""

    memory: Tensor
    released: torch.cuda.Event | None = None
    """Event after the copy of the previous chunk to the host. None before the first chunk."""


class _ChunkTransfer:
    """Tensors of one chunk, and their device buffers."""

    def __init__(self, host_tensors: Sequence[Tensor], buffer: _DeviceBuffer) -> None:
        self.buffer = buffer
        self.copied: torch.cuda.Event | None = None
        self.copies: list[Tensor] = []
        self._host_tensors = host_tensors
        start = 0
        for host in host_tensors:
            raw = buffer.memory[start : start + host.nbytes]
            self.copies.append(raw.view(host.dtype).view(host.shape))
            start += _aligned_bytes(host)

    def copy_to_device(self) -> None:
        """Copy the tensors to the device on the current stream."""
        for copy, host in zip(self.copies, self._host_tensors, strict=True):
            copy.copy_(host, non_blocking=True)

    def copy_to_host(self) -> None:
        """Copy the tensors to the host on the current stream."""
        for copy, host in zip(self.copies, self._host_tensors, strict=True):
            host.copy_(copy, non_blocking=True)


class TransferStreams:
    """Synchronization of the two copy streams and the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._device_stream = torch.cuda.Stream(device)
        self._host_stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Wait until the compute stream has released the memory of the buffers.

        Host tensors are complete since `end`.
        """
        self._device_stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy_to_device(self, transfer: _ChunkTransfer) -> None:
        """Copy a chunk to the device as soon as its buffer is free."""
        if transfer.buffer.released is not None:
            self._device_stream.wait_event(transfer.buffer.released)
        with torch.cuda.stream(self._device_stream):
            transfer.copy_to_device()
        transfer.copied = self._device_stream.record_event()

    def wait_for_copy(self, transfer: _ChunkTransfer) -> None:
        """Make the compute stream wait for the copy of a chunk."""
        assert transfer.copied is not None
        torch.cuda.current_stream(self._device).wait_event(transfer.copied)

    def copy_to_host(self, transfer: _ChunkTransfer) -> None:
        """Copy a chunk to the host after its update."""
        self._host_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._host_stream):
            transfer.copy_to_host()
        transfer.buffer.released = self._host_stream.record_event()

    def end(self) -> None:
        """Make the compute stream wait for all copies.

        The buffers can then be reused, and readers that wait for this stream have all states on the
        host, as checkpoints require.
        """
        torch.cuda.current_stream(self._device).wait_stream(self._host_stream)


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
