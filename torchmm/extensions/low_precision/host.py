"""Optimizer states in the host's memory, which visit the device for their update.

The update goes through the states a portion at a time. While one portion is computed with, the
next one comes and the one before it goes back, each on a stream of its own, through `_SLOTS` pieces
of device memory that take turns. So the device never holds more than these, whatever the model's
size, and copies hide behind computing as far as the link allows. The host waits for nothing.
Rejected: torchao's CPUOffloadOptimizer, which updates on the CPU, copies gradients as they are
accumulated, microbatch by microbatch, knows no DTensors and waits for its stream in every step.

On a CPU, states are in the host's memory anyway; the same portions then go through the same slots
one after the other, so that what is tested there is what runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_SLOTS = 3  # one comes, one is computed with, one goes
_ALIGNMENT = 256  # bytes, that of CUDA's allocator
Portion = TypeVar("Portion")


class HostVisits:
    """Brings tensors of the host to the device and back, a portion after the other.

    Args:
        device: where updates are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = HostStreams(device) if device.type == "cuda" else None

    def each(
        self, portions: Sequence[Portion], tensors_of: Callable[[Portion], Sequence[Tensor]]
    ) -> Iterator[tuple[Portion, list[Tensor]]]:
        """Every portion with copies of its tensors on the device, which go back once the caller
        asks for the next portion. To be exhausted.

        Args:
            tensors_of: contiguous tensors in the host's memory, page-locked with CUDA.
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

    def _visits(self, hosts: Sequence[Sequence[Tensor]]) -> list[_Visit]:
        room_bytes = max((sum(_room_bytes(t) for t in own) for own in hosts), default=0)
        count = min(_SLOTS, len(hosts))
        slots = [
            _Slot(torch.empty(room_bytes, dtype=torch.uint8, device=self._device))
            for _ in range(count)
        ]
        return [_Visit(own, slots[i % count]) for i, own in enumerate(hosts)]


@dataclass
class _Slot:
    """Memory of the device for one portion."""

    memory: Tensor
    free: torch.cuda.Event | None = None
    """When what was there is back on the host; None: nothing was."""


class _Visit:
    """One portion's tensors, and where they are copied to."""

    def __init__(self, hosts: Sequence[Tensor], slot: _Slot) -> None:
        self.slot = slot
        self.arrived: torch.cuda.Event | None = None
        self.copies: list[Tensor] = []
        self._hosts = hosts
        start = 0
        for host in hosts:
            raw = slot.memory[start : start + host.nbytes]
            self.copies.append(raw.view(host.dtype).view(host.shape))
            start += _room_bytes(host)

    def bring(self) -> None:
        """From the host, in the current stream."""
        for copy, host in zip(self.copies, self._hosts, strict=True):
            copy.copy_(host, non_blocking=True)

    def take_back(self) -> None:
        """To the host, in the current stream."""
        for copy, host in zip(self.copies, self._hosts, strict=True):
            host.copy_(copy, non_blocking=True)


class HostStreams:
    """In which order the two streams and the one that computes wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming = torch.cuda.Stream(device)
        self._going = torch.cuda.Stream(device)

    def begin(self) -> None:
        """Slots may be memory that computing is not done with yet, the host's memory is complete
        since `end`."""
        self._coming.wait_stream(torch.cuda.current_stream(self._device))

    def bring(self, visit: _Visit) -> None:
        """Once the slot is free."""
        if visit.slot.free is not None:
            self._coming.wait_event(visit.slot.free)
        with torch.cuda.stream(self._coming):
            visit.bring()
        visit.arrived = self._coming.record_event()

    def await_arrival(self, visit: _Visit) -> None:
        """Before computing with it."""
        assert visit.arrived is not None
        torch.cuda.current_stream(self._device).wait_event(visit.arrived)

    def take_back(self, visit: _Visit) -> None:
        """Once it is computed with."""
        self._going.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._going):
            visit.take_back()
        visit.slot.free = self._going.record_event()

    def end(self) -> None:
        """Slots are computing's memory again, and whoever waits for it finds all on the host (as
        checkpoints do)."""
        torch.cuda.current_stream(self._device).wait_stream(self._going)


def _room_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
