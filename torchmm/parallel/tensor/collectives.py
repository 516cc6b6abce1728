"""Collectives around a layer's tensor-parallel regions, during which something else may be done.

The same sums, gathers and scatters as those of DTensors in `sequence` and `linears`, forward and
backward, but begun, then left alone, then waited for. DTensor's own `async_op` waits inside where
what is gathered is not the first dimension, and in the backward of a conversion.

Shape legend: S rows of a rank's slice, N = ranks x S rows of all slices, D features; any dimensions
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchmm.parallel import torch_private
from torchmm.parallel.tensor.bubbles import Meanwhile


class Exchange(NamedTuple):
    """How the ranks of one tensor-parallel group communicate."""

    group: ProcessGroup
    meanwhile: Meanwhile

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' tensors."""
        return self._wait(torch_private.start_all_reduce(x.contiguous(), self.group))

    def gather(self, x: Tensor) -> Tensor:
        """(..., S, D) of all ranks, one after the other: (..., N, D)."""
        rows = x.movedim(-2, 0).contiguous()
        return self._wait(torch_private.start_all_gather(rows, self.group)).movedim(0, -2)

    def scatter(self, x: Tensor) -> Tensor:
        """(..., N, D) to this rank's (..., S, D) of the sum."""
        rows = x.movedim(-2, 0).contiguous()
        return self._wait(torch_private.start_reduce_scatter(rows, self.group)).movedim(0, -2)

    def _wait(self, started: Tensor) -> Tensor:
        self.meanwhile()
        return torch_private.wait(started)


def summed(parts: Tensor, exchange: Exchange) -> Tensor:
    """The sum over ranks; its gradient is the same on all of them."""
    return _Exchanged.apply(parts, exchange.sum, None)


def shared(x: Tensor, exchange: Exchange) -> Tensor:
    """What all ranks have and each uses for a part of a sum: backward adds the gradients up."""
    return _Exchanged.apply(x, None, exchange.sum)


def gathered(x: Tensor, exchange: Exchange) -> Tensor:
    """(..., N, D) of (..., S, D), used as `shared`: backward adds up and keeps a slice."""
    return _Exchanged.apply(x, exchange.gather, exchange.scatter)


def scattered(parts: Tensor, exchange: Exchange) -> Tensor:
    """This rank's (..., S, D) of the sum of (..., N, D); backward gathers."""
    return _Exchanged.apply(parts, exchange.scatter, exchange.gather)


def replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """As a DTensor, for styles that ask for one, whose gradient stays a part of a sum: `shared` and
    `gathered` add it up."""
    return _AsReplicated.apply(x, mesh)


class _Exchanged(torch.autograd.Function):
    """Another exchange, or none, on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        there: Callable[[Tensor], Tensor] | None,
        back: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.back = back
        return x.view_as(x) if there is None else there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient if ctx.back is None else ctx.back(gradient), None, None


class _AsReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = cast(DTensor, gradients[0])
        return gradient.redistribute(placements=[Partial()]).to_local(), None
