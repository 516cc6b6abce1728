"""Point-to-point transfers between pipeline ranks, without deadlocks on gloo and NCCL.

A *channel* is an ordered pair of ranks. Tensors arrive in the order in which they were sent:

    group "p2p_up"      0 -> 1   0 -> 2   1 -> 2     channels to higher ranks
    group "p2p_down"    1 -> 0   2 -> 0   2 -> 1     channels to lower ranks

Two groups are needed, because NCCL has one communicator and stream per group and pair of ranks. A
pending receive would block transfers in the opposite direction. Operations are posted separately,
because NCCL executes a batch as one operation. No collectives run in these groups.

The receiver allocates buffers from the specs of the plan. The sender checks its tensors against the
specs, because gloo accepts shorter messages silently, and aborts the process for longer ones.
Sending shapes would need an additional round trip per tensor.

On CUDA, receives are posted early. Each is a kernel that waits for its peer on a separate stream.
This has two requirements:

- One communicator per pair of ranks. NCCL creates them at the first transfer of a pair. A group
  that is bound to a device (`init_process_group(device_id=...)`) has one communicator for all
  pairs, in which a receive would wait for receives of different peers. No group is bound.
- One hardware queue per stream. Streams that share a queue run in launch order, so a waiting kernel
  would block the kernels behind it, possibly those that its peer needs. `reserve_hardware_queues`
  requests all 32 queues, and `check_hardware_queues` rejects fewer queues than streams. The usual
  setting of Megatron, CUDA_DEVICE_MAX_CONNECTIONS=1, would block every pipeline. Posting receives
  at the position of their sends in a global order would work with one queue, but the receiver would
  have to store early encoder outputs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from math import lcm
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchmm.common.errors import ConfigError, PeerError
from torchmm.parallel.health.peers import is_peer_failure

HARDWARE_QUEUES = 32
"""Number of hardware queues of CUDA."""
_OTHER_STREAMS = 8
"""Streams of a rank besides channels: computation, FSDP2, other communicators."""
_QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def reserve_hardware_queues() -> None:
    """Request all hardware queues of CUDA, unless the environment sets their number.

    Call before CUDA is initialized.
    """
    os.environ.setdefault(_QUEUES_VARIABLE, str(HARDWARE_QUEUES))


def check_hardware_queues(channels: Collection[tuple[int, int]]) -> None:
    """Check that each stream of a rank can have a separate hardware queue.

    Args:
        channels: (source, destination) pairs of a plan, one per stream (`channel_streams`).

    Raises:
        ConfigError: The environment sets too few queues.
    """
    if not channels:
        return
    streams = Counter(rank for channel in channels for rank in channel)
    needed = min(HARDWARE_QUEUES, max(streams.values()) + _OTHER_STREAMS)
    value = os.environ.get(_QUEUES_VARIABLE, "")
    if value.isdigit() and int(value) < needed:
        raise ConfigError(
            f"{_QUEUES_VARIABLE} = {value} in the environment: point-to-point communication "
            f"requires {needed} hardware queues, otherwise pending receives block all other "
            f"work; unset the variable to use {HARDWARE_QUEUES}"
        )


class ShapeAndDtype(Protocol):
    """Shape and dtype that a receiver needs to allocate a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


SliceCounts = tuple[int, int]
"""(source, destination): numbers of slices along the first dimension. Each rank of the source group
and of the destination group has one slice. If both are 1, all ranks have the full tensor."""


class PendingTransfer:
    """Tensors in flight. It references them until `wait`."""

    def __init__(
        self, tensors: tuple[Tensor, ...], works: list[tuple[int, dist.Work]], rank: int
    ) -> None:
        self._tensors = tensors
        self._works = works
        self._rank = rank

    def wait(self, action: object) -> tuple[Tensor, ...]:
        """Wait for all transfers, and return the tensors. On CUDA, only the current stream waits.

        Args:
            action: Waiting action, for error messages.

        Raises:
            PeerError: The peer was lost, or did not respond in time.
        """
        for peer, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                if not is_peer_failure(error):
                    raise
                raise _lost_peer_error(error, self._rank, peer, action) from error
        return self._tensors


class P2PChannels:
    """Channels of one rank. The constructor is collective over all ranks.

    A rank of the plan can be a group of tensor-parallel ranks. All of them have the full tensors,
    or each rank has a slice. If the groups of a transfer differ in size, consecutive ranks of the
    larger group belong to one rank of the smaller group:

    - Full tensors: each rank receives one copy, from the rank it belongs to.
    - Slices: each pair of ranks transfers the intersection of their slices.

    No row and no gradient arrives twice, so no reduction is needed.

    Args:
        device: Device of the tensors.
        ranks: Global rank, or ranks, of each rank of the plan. Data-parallel replicas have separate
            plans. If all tensor-parallel groups have the same size, tensor-parallel ranks can have
            separate copies of a plan.
        timeout_s: Timeout of gloo. NCCL waits on the device, and its watchdog aborts the process
            after this time.
    """

    def __init__(
        self, device: torch.device, ranks: Sequence[int | Sequence[int]], timeout_s: float
    ) -> None:
        self.device = device
        self._ranks = [[r] if isinstance(r, int) else list(r) for r in ranks]
        self._rank = dist.get_rank()
        positions = [(i, g.index(self._rank)) for i, g in enumerate(self._ranks) if self._rank in g]
        if not positions:
            raise ValueError(f"rank {self._rank} is not one of the ranks of the plan, {[*ranks]}")
        self._plan_rank, self._group_rank = positions[0]
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        self._up = dist.new_group(backend=backend, timeout=timeout, group_desc="p2p_up")
        self._down = dist.new_group(backend=backend, timeout=timeout, group_desc="p2p_down")

    @property
    def plan_rank(self) -> int:
        """Rank within the plan."""
        return self._plan_rank

    def warm_up(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Use each channel once, in an order that all ranks share.

        The first use of a channel creates the connection and blocks until both ends have joined. It
        must not happen during a step.

        Args:
            pairs: (source, destination) ranks of the plan, equal on all ranks.

        Raises:
            PeerError: A rank did not join.
        """
        rank = self.plan_rank
        for source, destination in sorted(set(pairs)):
            sizes = len(self._ranks[source]), len(self._ranks[destination])
            # Full tensors and slices use different pairs of ranks if group sizes differ.
            for slice_counts in [(1, 1), sizes] if sizes[0] != sizes[1] else [(1, 1)]:
                rows = lcm(sizes[0], sizes[1]) // slice_counts[source != rank]
                probe = torch.zeros(rows, device=self.device)
                if source == rank:
                    self.send((probe,), (probe,), destination, "warm-up", [slice_counts]).wait(
                        "warm-up"
                    )
                elif destination == rank:
                    self.receive((probe,), source, "warm-up", [slice_counts]).wait("warm-up")

    def send(
        self,
        tensors: Sequence[Tensor],
        specs: Sequence[ShapeAndDtype],
        peer: int,
        action: object,
        slice_counts: Sequence[SliceCounts] = (),
    ) -> PendingTransfer:
        """Post the sends of the tensors of an action.

        Args:
            tensors: Tensors on this rank.
            specs: Specs of these tensors on this rank, from the plan.
            peer: Destination rank of the plan.
            action: Name of the action in error messages.
            slice_counts: One per tensor. By default, all ranks have full tensors.

        Raises:
            ValueError: The tensors do not match the specs.
            PeerError: The peer was lost.
        """
        _check(tensors, specs, action)
        sent = tuple(t.detach().contiguous() for t in tensors)
        parts = [
            part
            for tensor, counts in zip(sent, slice_counts or [(1, 1)] * len(sent), strict=True)
            for part in self._transfer_parts(tensor, counts, self._ranks[peer], sends=True)
        ]
        return self._post(dist.isend, sent, parts, action)

    def receive(
        self,
        specs: Sequence[ShapeAndDtype],
        peer: int,
        action: object,
        slice_counts: Sequence[SliceCounts] = (),
    ) -> PendingTransfer:
        """Allocate buffers and post receives. See `send` for the arguments.

        Raises:
            PeerError: The peer was lost.
        """
        buffers = tuple(torch.empty(s.shape, dtype=s.dtype, device=self.device) for s in specs)
        parts = [
            part
            for buffer, counts in zip(buffers, slice_counts or [(1, 1)] * len(buffers), strict=True)
            for part in self._transfer_parts(buffer, counts, self._ranks[peer], sends=False)
        ]
        return self._post(dist.irecv, buffers, parts, action)

    def _transfer_parts(
        self, tensor: Tensor, slice_counts: SliceCounts, peers: Sequence[int], *, sends: bool
    ) -> list[tuple[Tensor, int]]:
        """Return (part of the tensor, global rank of the peer) for each transfer."""
        group_size = len(self._ranks[self._plan_rank])
        peer_count = len(peers)
        if slice_counts[0] == slice_counts[1]:
            if not sends:
                return [(tensor, peers[self._group_rank * peer_count // group_size])]
            positions = (
                place
                for place in range(peer_count)
                if place * group_size // peer_count == self._group_rank
            )
            return [(tensor, peers[place]) for place in positions]
        assert slice_counts == ((group_size, peer_count) if sends else (peer_count, group_size)), (
            "slices of other ranks"
        )
        assert tensor.ndim <= 2, "rows of other ranks are not next to each other"
        rows = len(tensor)
        first = self._group_rank * rows
        size = rows * group_size // peer_count  # rows of a peer's slice
        parts = []
        for place, peer in enumerate(peers):
            begin = max(first, place * size)
            end = min(first + rows, (place + 1) * size)
            if begin < end:
                parts.append((tensor[begin - first : end - first], peer))
        return parts

    def _post(
        self,
        operation: Callable[..., dist.Work | None],
        tensors: tuple[Tensor, ...],
        parts: Iterable[tuple[Tensor, int]],
        action: object,
    ) -> PendingTransfer:
        works: list[tuple[int, dist.Work]] = []
        for part, rank in parts:
            if not part.numel():
                continue  # both ends skip empty parts
            # The message defines the direction: receives from a higher rank use the "down" group.
            upwards = (self._rank < rank) == (operation is dist.isend)
            group = self._up if upwards else self._down
            try:
                work = operation(part, rank, group=group)
            except RuntimeError as error:
                if not is_peer_failure(error):
                    raise
                raise _lost_peer_error(error, self._rank, rank, action) from error
            if work is not None:
                works.append((rank, work))
        return PendingTransfer(tensors, works, self._rank)


def _lost_peer_error(error: RuntimeError, rank: int, peer: int, action: object) -> PeerError:
    # Without the source location in gloo.
    reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).partition(". ")[0]
    return PeerError(
        f"rank {rank} lost rank {peer} in action {action}: {reason}. Rank {peer} exited, "
        "hangs, or waits for another rank; see its log. parallel.timeout_s sets the timeout"
    )


def _check(tensors: Sequence[Tensor], specs: Sequence[ShapeAndDtype], action: object) -> None:
    if len(tensors) == len(specs) and all(
        t.shape == s.shape and t.dtype == s.dtype for t, s in zip(tensors, specs, strict=True)
    ):
        return
    actual = [f"{tuple(t.shape)} {t.dtype}" for t in tensors]
    planned = [f"{tuple(s.shape)} {s.dtype}" for s in specs]
    raise ValueError(
        f"action {action} would send {actual}, but the plan requires {planned}; compute the "
        "specs of the plan from the metadata of the same microbatches"
    )
