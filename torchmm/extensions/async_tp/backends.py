"""Exchange of activations between ranks during matmuls: three backends with one interface.

Tensor parallelism with sequence parallelism all-gathers slices of the sequence before a column-wise
linear layer and reduce-scatters after a row-wise layer. Both are split into blocks of tokens, so
that one block is sent while another is multiplied (StepCCL: DistTrain section 7, figures 13 and
14).

- `RingBackend`: sends and receives on any process group. In step s a rank sends to rank - s (to
  rank + s in a reduce-scatter) and receives from rank + s (rank - s), each slice in `chunks`
  blocks. All blocks are in flight at once, and no rank forwards blocks. In a ring that forwards
  slices between adjacent ranks, every hop requires the host between two matmuls and rounds the
  sums.
- `CollectiveBackend`: unsplit matmuls and the collectives of the group. They overlap only in
  backward passes, in which input and weight gradients are independent.
- `SymmetricMemoryBackend`: fused operators of torch on CUDA. The copy engine performs the copies,
  so that matmuls can use all multiprocessors. Blocks are the slices of the ranks.

Every block is written to its final position, so the layout need not be restored afterwards (the
remap in figure 14), except in batches of several sequences, see
`torchmm.extensions.async_tp.styles`. Backward starts both communications first and overlaps them
with both matmuls.

Shape legend: T tokens of the full sequence, S tokens of one slice (slices of all ranks have equal
length, and the last ones are padded: ranks x S >= T), D and F features. A weight is (out, in), as
in `nn.Linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from torchmm.parallel import torch_compat


class PendingResult(Protocol):
    """Result of a communication in flight."""

    def wait(self) -> Tensor:
        """Return the result. Call it once."""


class OverlapBackend(ABC):
    """Communication between the ranks of a group.

    A new object is created for each operation. All ranks of the group must call the same methods in
    the same order with the same number of rows.

    Args:
        group: Process group.
        chunks: Number of blocks per slice, if the backend supports several.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int) -> None:
        self.group = group
        self.chunks = chunks
        self.rank, self.ranks = group.rank(), group.size()

    @abstractmethod
    def start_gather(self, x_SD: Tensor, rows: int) -> PendingResult:
        """Start to all-gather the slices. The result is (T, D), with T = `rows`."""

    def gather_linear(
        self, x_SD: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: int
    ) -> list[Tensor]:
        """Return the matmuls (T, F) of the full sequence with each (F, D) weight, plus biases."""
        full_TD = self.start_gather(x_SD, rows).wait()
        return [functional.linear(full_TD, w, b) for w, b in zip(weights, biases, strict=True)]

    def gather_linear_and_input(
        self, x_SD: Tensor, weight: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        """Return the matmul (T, F) with one weight, and the full input (T, D)."""
        full_TD = self.start_gather(x_SD, rows).wait()
        return functional.linear(full_TD, weight), full_TD

    @abstractmethod
    def start_linear_scatter(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], slice_rows: int
    ) -> PendingResult:
        """Multiply inputs (T, F) by their weights (D, F), and start to reduce-scatter the sum.

        The sum over pairs and ranks is scattered to (S, D), with S = `slice_rows`. Padding is zero.
        """

    def slice_of(self, rank: int, slice_rows: int, rows: int) -> tuple[int, int]:
        """Return start and stop of the slice of a rank in the sequence, without padding."""
        return min(rank * slice_rows, rows), min((rank + 1) * slice_rows, rows)


class RingBackend(OverlapBackend):
    """Backend with isend and irecv of blocks, on any process group."""

    def start_gather(self, x_SD: Tensor, rows: int) -> _RingAllGather:
        gather = _RingAllGather(x_SD.contiguous(), self.slice_of(self.rank, len(x_SD), rows), rows)
        first, last = gather.local_rows
        for step in range(1, self.ranks):
            to, source = (self.rank - step) % self.ranks, (self.rank + step) % self.ranks
            local_blocks = self._blocks(0, last - first)
            source_blocks = self._blocks(*self.slice_of(source, len(x_SD), rows))
            for (a, b), block in zip(local_blocks, source_blocks, strict=True):
                received = gather.full[slice(*block)]
                works = self._exchange(gather.local[a:b], to, received, source)
                gather.arriving.append((block, works))
        return gather

    def gather_linear(
        self, x_SD: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: int
    ) -> list[Tensor]:
        return self._multiply_blocks(self.start_gather(x_SD, rows), weights, biases)

    def gather_linear_and_input(
        self, x_SD: Tensor, weight: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        gather = self.start_gather(x_SD, rows)
        outputs = self._multiply_blocks(gather, [weight], [None])
        return outputs[0], gather.wait()

    def start_linear_scatter(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], slice_rows: int
    ) -> _RingReduceScatter:
        rows = len(inputs[0])
        partial = inputs[0].new_empty(rows, len(weights[0]))
        local_slice = self.slice_of(self.rank, slice_rows, rows)
        length = local_slice[1] - local_slice[0]
        received = partial.new_empty(self.ranks - 1, length, partial.shape[1])
        scatter = _RingReduceScatter(partial, local_slice, received, slice_rows)
        for step in range(1, self.ranks):
            to, source = (self.rank + step) % self.ranks, (self.rank - step) % self.ranks
            target_blocks = self._blocks(*self.slice_of(to, slice_rows, rows))
            for (a, b), block in zip(self._blocks(0, length), target_blocks, strict=True):
                _multiply_sum(inputs, weights, partial, *block)
                sent = partial[slice(*block)]
                scatter.works += self._exchange(sent, to, received[step - 1, a:b], source)
        _multiply_sum(inputs, weights, partial, *local_slice)  # last, because it is not sent
        return scatter

    def _multiply_blocks(
        self, gather: _RingAllGather, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        full_TD = gather.full
        outputs = [full_TD.new_empty(len(full_TD), len(weight)) for weight in weights]
        for (start, stop), block_ND in gather.blocks():
            for output, weight, bias in zip(outputs, weights, biases, strict=True):
                _multiply(block_ND, weight, bias, output[start:stop])
        gather.finish()
        return outputs

    def _blocks(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split [start, stop) into `chunks` ranges of similar size, which may be empty."""
        bounds = [start + (stop - start) * i // self.chunks for i in range(self.chunks + 1)]
        return list(pairwise(bounds))

    def _exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> list[dist.Work]:
        """Start to send a block and to receive another. Both ranks skip empty blocks."""
        operations = []
        # One batch, because a send may block on NCCL until it is received.
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=to))
        return dist.batch_isend_irecv(operations) if operations else []


class _RingAllGather:
    """All-gather of slices that arrive block by block."""

    def __init__(self, x_SD: Tensor, local_rows: tuple[int, int], rows: int) -> None:
        self.local_rows = local_rows
        self.local = x_SD[: local_rows[1] - local_rows[0]]
        self.full = x_SD.new_empty(rows, x_SD.shape[1])
        self.arriving: list[tuple[tuple[int, int], list[dist.Work]]] = []
        self._sent: list[dist.Work] = []

    def blocks(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yield (start, stop) and tokens: the local slice first, then other slices."""
        if len(self.local):
            yield self.local_rows, self.local
        for (start, stop), works in self.arriving:
            if works:
                works[0].wait()  # the receive, or both on NCCL
                self._sent += works[1:]
            if stop > start:
                yield (start, stop), self.full[start:stop]
        self.arriving = []

    def finish(self) -> None:
        """Wait for the sends, after which the slice may be modified."""
        for work in self._sent:
            work.wait()
        self._sent = []

    def wait(self) -> Tensor:
        for _ in self.blocks():
            pass
        self.finish()
        self.full[slice(*self.local_rows)] = self.local
        return self.full


class _RingReduceScatter:
    """Reduce-scatter of the partial sums of all ranks for the slice of this rank."""

    def __init__(
        self, partial: Tensor, local_rows: tuple[int, int], received: Tensor, slice_rows: int
    ) -> None:
        self.partial = partial  # slices of other ranks are being sent
        self.local_rows = local_rows
        self.received = received
        self.slice_rows = slice_rows
        self.works: list[dist.Work] = []

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        local = self.partial[slice(*self.local_rows)]
        # Summed in float32 and rounded once.
        total = local.to(torch.promote_types(local.dtype, torch.float32))
        for partial in self.received:
            total = total + partial
        return _pad_rows(total.to(local.dtype), self.slice_rows)


class CollectiveBackend(OverlapBackend):
    """Backend with unsplit matmuls and collectives."""

    def start_gather(self, x_SD: Tensor, rows: int) -> _StartedCollective:
        started = torch_compat.start_all_gather(x_SD.contiguous(), self.group)
        return _StartedCollective(started, rows)

    def start_linear_scatter(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], slice_rows: int
    ) -> _StartedCollective:
        partial = self._full_matmul(inputs, weights, slice_rows)
        return _StartedCollective(
            torch_compat.start_reduce_scatter(partial, self.group), slice_rows
        )

    def _full_matmul(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], slice_rows: int
    ) -> Tensor:
        """Return the matmul of all tokens (ranks x S, D), with zeros as padding."""
        rows = len(inputs[0])
        partial = inputs[0].new_empty(slice_rows * self.ranks, len(weights[0]))
        partial[rows:] = 0
        _multiply_sum(inputs, weights, partial, 0, rows)
        return partial


class SymmetricMemoryBackend(CollectiveBackend):
    """Backend with fused operators of torch on CUDA symmetric memory.

    If backward requires weight gradients, matmuls are unsplit and overlap with the copy engine.
    Operations run sequentially, because all these operators share one workspace per group.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int) -> None:
        super().__init__(group, chunks)
        self._gathering: _StartedCollective | None = None

    def start_gather(self, x_SD: Tensor, rows: int) -> _StartedCollective:
        input_SD = x_SD.contiguous()
        started = torch_compat.start_copy_engine_gather(input_SD, self.group)
        self._gathering = _StartedCollective(started, rows, input_SD)
        return self._gathering

    def gather_linear(
        self, x_SD: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: int
    ) -> list[Tensor]:
        matrices = [weight.t() for weight in weights]
        _, outputs = torch_compat.fused_gather_matmul(
            x_SD.contiguous(), matrices, self.group, returns_input=False
        )
        outputs = [output[:rows] for output in outputs]
        return [p if b is None else p.add_(b) for p, b in zip(outputs, biases, strict=True)]

    def gather_linear_and_input(
        self, x_SD: Tensor, weight: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        full_TD, outputs = torch_compat.fused_gather_matmul(
            x_SD.contiguous(), [weight.t()], self.group, returns_input=True
        )
        assert full_TD is not None
        return outputs[0][:rows], full_TD[:rows]

    def start_linear_scatter(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], slice_rows: int
    ) -> _StartedCollective:
        if self._gathering is not None:
            partial = self._full_matmul(inputs, weights, slice_rows)
            self._gathering.wait()  # frees the workspace
            started = torch_compat.start_copy_engine_scatter(partial, self.group)
            return _StartedCollective(started, slice_rows, partial)
        joint_TF = inputs[0] if len(inputs) == 1 else torch.cat(list(inputs), dim=1)
        joint_DF = weights[0] if len(weights) == 1 else torch.cat(list(weights), dim=1)
        x_NF = _pad_rows(joint_TF.contiguous(), slice_rows * self.ranks)
        scattered = torch_compat.fused_matmul_scatter(x_NF, joint_DF.t(), self.group)
        return _StartedCollective(scattered, slice_rows)


class _StartedCollective:
    """Functional collective that has been started. A second `wait` is free.

    Args:
        started: Result of the functional collective.
        rows: Number of rows of the result.
        read: Tensor that a copy engine reads until `wait`, on a stream that the allocator of torch
            does not track. Without a reference, the allocator would reuse its memory.
    """

    def __init__(self, started: Tensor, rows: int, read: Tensor | None = None) -> None:
        self._started = started
        self._rows = rows
        self._read = read

    def wait(self) -> Tensor:
        complete = torch_compat.wait(self._started)[: self._rows]
        self._read = None
        return complete


BACKENDS: dict[str, type[OverlapBackend]] = {
    "symmetric_memory": SymmetricMemoryBackend,
    "ring": RingBackend,
    "collective": CollectiveBackend,
}
"""Backends by their names in recipes."""


def _multiply(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None, out_NF: Tensor) -> None:
    if bias_F is None:
        torch.mm(x_ND, weight_FD.t(), out=out_NF)
    else:
        torch.addmm(bias_F, x_ND, weight_FD.t(), out=out_NF)


def _multiply_sum(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor, start: int, stop: int
) -> None:
    """Write rows [start, stop) of the sum of matmuls to `out`."""
    if start == stop:
        return
    for i, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
        if i == 0:
            torch.mm(x[start:stop], weight.t(), out=out[start:stop])
        else:
            out[start:stop].addmm_(x[start:stop], weight.t())


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return functional.pad(x, (0, 0, 0, rows - len(x))) if len(x) < rows else x
