"""A process group whose transfers take as long as on a slow link: gloo with a delay per byte.

Every rank has one link for incoming data. Transfers are sequential: a transfer of N bytes that is
posted at t ends at max(t, end of the previous transfer) + N x s_per_byte. A wait sleeps, so the
delay uses no CPU time. Sends, receives, all-gathers and reduce-scatters (of (ranks - 1) / ranks of
the full tensor) are delayed. Other collectives are those of gloo.

Transfers and waiting times are recorded for plots.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor


class Interval(NamedTuple):
    """Seconds of `time.perf_counter`."""

    begin_s: float
    end_s: float


class Records(NamedTuple):
    """Recorded transfers and waits of one rank."""

    transfers: list[Interval]
    waits: list[Interval]
    received_bytes: int


class Link:
    """Simulated incoming link of one rank, with its records."""

    def __init__(self) -> None:
        self.s_per_byte = 0.0
        self._transfers: list[Interval] = []
        self._waits: list[Interval] = []
        self._received_bytes = 0
        self._free_s = 0.0

    def post(self, size_bytes: int) -> float:
        """Post a transfer and return its end in seconds of `time.perf_counter`."""
        begin_s = max(time.perf_counter(), self._free_s)
        self._free_s = begin_s + size_bytes * self.s_per_byte
        self._transfers.append(Interval(begin_s, self._free_s))
        self._received_bytes += size_bytes
        return self._free_s

    def wait(self, work: dist.Work, due_s: float) -> None:
        """Wait for the gloo transfer, then sleep until `due_s`."""
        begin_s = time.perf_counter()
        work.wait()
        time.sleep(max(0.0, due_s - time.perf_counter()))
        self._waits.append(Interval(begin_s, time.perf_counter()))

    def take_records(self) -> Records:
        """Return and clear the records since the last call."""
        records = Records(self._transfers, self._waits, self._received_bytes)
        self._transfers, self._waits, self._received_bytes = [], [], 0
        return records


class _SlowWork(dist.Work):
    def __init__(self, link: Link, work: dist.Work, size_bytes: int) -> None:
        super().__init__()
        self._link, self._work = link, work
        self._due_s = link.post(size_bytes)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._link.wait(self._work, self._due_s)
        return True


class SlowGroup(dist.ProcessGroup):
    """Process group that delays the transfers of a gloo group."""

    def __init__(self, rank: int, ranks: int, inner: dist.ProcessGroup) -> None:
        super().__init__(rank, ranks)
        self.link = Link()
        self._inner = inner
        self._name = ""

    def getGroupName(self) -> str:
        """Return the name of the group for PyTorch."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name of the group for PyTorch."""
        self._name = name

    def getBackendName(self) -> str:
        """Return the name of the backend for PyTorch."""
        return "slow"

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        """Send without a delay. The receiver delays the transfer."""
        return self._inner.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Receive with a delay for the received bytes."""
        return self._slow(self._inner.recv(tensors, source, tag), tensors[0].nbytes)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        """All-reduce without a delay."""
        return dist.all_reduce(tensors[0], group=self._inner, async_op=True)

    allreduce_coalesced = allreduce

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> dist.Work:
        """All-gather with a delay for the bytes of the other ranks.

        Functional collectives of PyTorch pass one tensor per list.
        """
        (output,), (shard,) = outputs, inputs
        shards = list(output.chunk(self.size()))
        work = dist.all_gather(shards, shard, group=self._inner, async_op=True)
        return self._slow(work, output.nbytes - shard.nbytes)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> dist.Work:
        """Reduce-scatter with the same delay as an all-gather."""
        (shard,), (full,) = outputs, inputs
        shards = list(full.chunk(self.size()))
        work = dist.reduce_scatter(shard, shards, group=self._inner, async_op=True)
        return self._slow(work, full.nbytes - shard.nbytes)

    # PyTorch 2.11 and 2.12 call these names.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _slow(self, work: dist.Work, size_bytes: int) -> dist.Work:
        return _SlowWork(self.link, work, size_bytes)


def slow_group() -> tuple[dist.ProcessGroup, Link]:
    """Return a group of all ranks with slow links, and the link of this rank. Collective.

    The speed of the link is unlimited until `s_per_byte` is set.
    """
    inner = dist.new_group(backend="gloo")
    groups: list[SlowGroup] = []

    def create(store: Any, rank: int, ranks: int, timeout: timedelta) -> SlowGroup:
        groups.append(SlowGroup(rank, ranks, inner))
        return groups[-1]

    if "SLOW" not in vars(dist.Backend):
        dist.Backend.register_backend("slow", create, devices=["cpu"])
    group = dist.new_group(backend="slow")
    return group, groups[-1].link
