"""Collectives around a layer's tensor-parallel regions, with a hook between start and wait.

They give the same sums, gathers and scatters as the DTensors in `sequence` and `linears`, forward
and backward. DTensor's own `async_op` waits at once if the gathered dimension is not the first one,
and in the backward of a conversion.

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

Hook = Callable[[], None]


class LayerHooks:
    """Hooks that the layers of this rank call, and that a step may set.

    Attributes:
        on_collective: called between the start of each collective of the LLM and the wait for it.
        on_stop: called where an encoder layer may stop.
    """

    on_collective: Hook | None = None
    on_stop: Hook | None = None

    def between(self, kind: str) -> Hook | None:
        """Return what a kind of module calls between the start of a collective and the wait."""
        # A collective of a split encoder ends a piece, and continues during the LLM's computation.
        return {"llm": self._collective, "encoder": self._stop}.get(kind)

    def _collective(self) -> None:
        if self.on_collective is not None:
            self.on_collective()

    def _stop(self) -> None:
        if self.on_stop is not None:
            self.on_stop()


class Exchange(NamedTuple):
    """Collectives of one tensor-parallel group."""

    group: ProcessGroup
    meanwhile: Hook

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
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
