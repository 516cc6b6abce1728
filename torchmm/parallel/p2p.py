"""Sending tensors between the ranks of a pipeline, without deadlock on gloo and NCCL alike.

A *channel* is an ordered pair of ranks; what is sent through it arrives in the order of sending.
All channels from lower to higher ranks use one process group, all others a second one: NCCL gives
a pair of ranks one communicator and stream per group, in which a receive that waits for its
sender would block what goes the other way. Operations are posted one by one, never batched, for
a batch is one operation to NCCL. Nothing but sends and receives runs in these groups.

The receiver allocates what the plan says, and the sender checks that it sends just that: gloo
takes a shorter message without a word and aborts the process on a longer one. Rejected: sending
shapes along (one more round trip per tensor), and `Work.is_completed`, which gloo never sets.

On CUDA, receives are posted ahead, each a kernel that waits on a stream of its own for what a peer
sends. That takes two things:
- A communicator for each pair of ranks, as NCCL makes them when a pair first meets. A group that is
  bound to a device (`init_process_group(device_id=...)`) has one for all its pairs, in which a
  receive would wait for those of other peers: so no group here is.
- A hardware queue for each stream. Streams that share one run in the order of launching, and what
  stands behind a waiting kernel waits too: perhaps what the peer needs first. So
  `reserve_hardware_queues` asks CUDA for all 32, and fewer than there are streams are refused. What
  Megatron's users set, one queue, stops every pipeline here. Rejected: to post every receive at the
  place of its send in one order of all ranks, which runs with one queue, but makes receivers hold
  what encoders send ahead.
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
from torchmm.parallel.health.peers import is_peer_trouble

HARDWARE_QUEUES = 32
"""As many as CUDA has."""
_OTHER_STREAMS = 8
"""Of a rank, besides those of its channels: computing, FSDP2's, other communicators."""
_QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def reserve_hardware_queues() -> None:
    """Asks CUDA for all its hardware queues, unless the environment says how many; to be called
    before CUDA starts."""
    os.environ.setdefault(_QUEUES_VARIABLE, str(HARDWARE_QUEUES))


def check_hardware_queues(channels: Collection[tuple[int, int]]) -> None:
    """Whether the streams of every rank have queues of their own.

    Args:
        channels: of a plan, as (source, destination), each as often as a rank has peers in it.

    Raises:
        ConfigError: the environment allows fewer.
    """
    if not channels:
        return
    own = Counter(rank for channel in channels for rank in channel)
    needed = min(HARDWARE_QUEUES, max(own.values()) + _OTHER_STREAMS)
    given = os.environ.get(_QUEUES_VARIABLE, "")
    if given.isdigit() and int(given) < needed:
        raise ConfigError(
            f"{_QUEUES_VARIABLE} = {given} in the environment: point-to-point communication "
            f"requires {needed} hardware queues, otherwise pending receives block all other "
            f"work; unset the variable to use {HARDWARE_QUEUES}"
        )


class ShapeAndDtype(Protocol):
    """What a receiver has to know of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


Cut = tuple[int, int]
"""Into how many slices the ranks of a source and of a destination cut a tensor's first dimension;
both 1: all of them have all of it."""


class PendingTransfer:
    """Tensors on their way; holds them until `wait`."""

    def __init__(
        self, tensors: tuple[Tensor, ...], works: list[tuple[int, dist.Work]], rank: int
    ) -> None:
        self._tensors = tensors
        self._works = works
        self._rank = rank

    def wait(self, action: object) -> tuple[Tensor, ...]:
        """Blocks until all tensors are through and returns them (on CUDA: the current stream
        waits, not the process).

        Args:
            action: what waits, for errors.

        Raises:
            PeerError: the peer was lost, or did not answer in time.
        """
        for peer, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                if not is_peer_trouble(error):
                    raise
                raise _lost(error, self._rank, peer, action) from error
        return self._tensors


class P2PChannels:
    """The channels of one rank. Creating them is collective over all ranks of the world.

    A rank of the plan may be a group of tensor-parallel ranks, which all have the same tensors, or
    each a slice of them. In a transfer between groups of different sizes, consecutive ranks of the
    larger one belong to one of the smaller: whole tensors each rank receives once, from its own;
    of slices every rank gets what its slice has in common with others'. So no row and no gradient
    arrives twice, and there is nothing to add up afterwards.

    Args:
        device: where tensors are sent from and received into.
        ranks: global rank, or ranks, of each rank of the plan. Data-parallel replicas and, where
            all tensor-parallel groups are alike, tensor-parallel ranks have plans, or copies of
            one, among ranks of their own.
        timeout_s: how long gloo waits for a peer. NCCL waits on the device and its watchdog ends
            the process after this time.
    """

    def __init__(
        self, device: torch.device, ranks: Sequence[int | Sequence[int]], timeout_s: float
    ) -> None:
        self.device = device
        self._ranks = [[r] if isinstance(r, int) else list(r) for r in ranks]
        self._rank = dist.get_rank()
        places = [(i, g.index(self._rank)) for i, g in enumerate(self._ranks) if self._rank in g]
        if not places:
            raise ValueError(f"rank {self._rank} is not one of the ranks of the plan, {[*ranks]}")
        self._plan_rank, self._place = places[0]
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        self._up = dist.new_group(backend=backend, timeout=timeout, group_desc="p2p_up")
        self._down = dist.new_group(backend=backend, timeout=timeout, group_desc="p2p_down")

    @property
    def plan_rank(self) -> int:
        """This rank, counted within the plan."""
        return self._plan_rank

    def warm_up(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Uses each of these channels once, in an order that all ranks share.

        The first use creates the connection and blocks until both ends are there, so it must not
        happen in the middle of a step.

        Args:
            pairs: (source, destination) in ranks of the plan, the same on all of them.

        Raises:
            PeerError: a rank did not take part.
        """
        own = self.plan_rank
        for source, destination in sorted(set(pairs)):
            sizes = len(self._ranks[source]), len(self._ranks[destination])
            # Whole tensors and slices go different ways between groups of different sizes.
            for cut in [(1, 1), sizes] if sizes[0] != sizes[1] else [(1, 1)]:
                rows = lcm(sizes[0], sizes[1]) // cut[source != own]
                probe = torch.zeros(rows, device=self.device)
                if source == own:
                    self.send((probe,), (probe,), destination, "warm-up", [cut]).wait("warm-up")
                elif destination == own:
                    self.receive((probe,), source, "warm-up", [cut]).wait("warm-up")

    def send(
        self,
        tensors: Sequence[Tensor],
        specs: Sequence[ShapeAndDtype],
        peer: int,
        action: object,
        cuts: Sequence[Cut] = (),
    ) -> PendingTransfer:
        """Posts sends.

        Args:
            specs: what this rank is to send: where slices are of different sizes, its own one.
            peer: rank of the plan.
            action: what to call this in errors.
            cuts: one for each tensor; none: all are whole.

        Raises:
            ValueError: the tensors are not what the plan says.
            PeerError: the peer is gone.
        """
        _check(tensors, specs, action)
        sent = tuple(t.detach().contiguous() for t in tensors)
        parts = [
            part
            for tensor, cut in zip(sent, cuts or [(1, 1)] * len(sent), strict=True)
            for part in self._parts(tensor, cut, self._ranks[peer], sends=True)
        ]
        return self._post(dist.isend, sent, parts, action)

    def receive(
        self,
        specs: Sequence[ShapeAndDtype],
        peer: int,
        action: object,
        cuts: Sequence[Cut] = (),
    ) -> PendingTransfer:
        """Allocates memory and posts receives; arguments as in `send`.

        Raises:
            PeerError: the peer is gone.
        """
        buffers = tuple(torch.empty(s.shape, dtype=s.dtype, device=self.device) for s in specs)
        parts = [
            part
            for buffer, cut in zip(buffers, cuts or [(1, 1)] * len(buffers), strict=True)
            for part in self._parts(buffer, cut, self._ranks[peer], sends=False)
        ]
        return self._post(dist.irecv, buffers, parts, action)

    def _parts(
        self, tensor: Tensor, cut: Cut, peers: Sequence[int], *, sends: bool
    ) -> list[tuple[Tensor, int]]:
        """Which part of a tensor goes to, or comes from, which rank of the other group."""
        own = len(self._ranks[self._plan_rank])
        others = len(peers)
        if cut[0] == cut[1]:
            if not sends:
                return [(tensor, peers[self._place * others // own])]
            here = (place for place in range(others) if place * own // others == self._place)
            return [(tensor, peers[place]) for place in here]
        assert cut == ((own, others) if sends else (others, own)), "slices of other ranks"
        assert tensor.ndim <= 2, "rows of other ranks are not next to each other"
        rows = len(tensor)
        first = self._place * rows
        size = rows * own // others  # rows of a peer's slice
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
                continue  # both ends know which are empty; there is nothing to send
            # The direction is that of the message: what a lower rank receives goes downwards.
            upwards = (self._rank < rank) == (operation is dist.isend)
            group = self._up if upwards else self._down
            try:
                work = operation(part, rank, group=group)
            except RuntimeError as error:
                if not is_peer_trouble(error):
                    raise
                raise _lost(error, self._rank, rank, action) from error
            if work is not None:
                works.append((rank, work))
        return PendingTransfer(tensors, works, self._rank)


def _lost(error: RuntimeError, rank: int, peer: int, action: object) -> PeerError:
    reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error)).partition(". ")[0]  # where in gloo's source
    return PeerError(
        f"rank {rank} lost rank {peer} in action {action}: {reason}. Rank {peer} exited, "
        "hangs, or waits for another rank; see its log. parallel.timeout_s sets the timeout"
    )


def _check(tensors: Sequence[Tensor], specs: Sequence[ShapeAndDtype], action: object) -> None:
    if len(tensors) == len(specs) and all(
        t.shape == s.shape and t.dtype == s.dtype for t, s in zip(tensors, specs, strict=True)
    ):
        return
    found = [f"{tuple(t.shape)} {t.dtype}" for t in tensors]
    planned = [f"{tuple(s.shape)} {s.dtype}" for s in specs]
    raise ValueError(
        f"action {action} would send {found}, but the plan requires {planned}; compute the "
        "specs of the plan from the metadata of the same microbatches"
    )
