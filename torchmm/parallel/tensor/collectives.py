"""Collectives around the tensor-parallel regions of a layer, with a hook between start and wait.

Sums, gathers and scatters have the same results as the DTensors in `sequence` and `linears`, in
forward and backward passes. `async_op` of DTensor waits immediately if the gathered dimension is
not the first one, and in the backward pass of a conversion.

Shape legend: S rows of the local slice, N = ranks x S rows of all slices, D features, with any
leading dimensions.
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

from torchmm.parallel import torch_compat

Hook = Callable[[], None]


class LayerHooks:
    """Hooks that the layers of this rank call. A step can set them.

    Attributes:
        on_collective: Called between the start of each collective of the LLM and the wait for it.
        on_yield: Called where an encoder layer can yield.
    """

    on_collective: Hook | None = None
    on_yield: Hook | None = None

    def hook_for(self, kind: str) -> Hook | None:
        """Return the hook of a module kind between the start of a collective and the wait."""
        # A collective of a split encoder ends a piece, and overlaps with computation of the LLM.
        return {"llm": self._collective, "encoder": self._yield}.get(kind)

    def _collective(self) -> None:
        if self.on_collective is not None:
            self.on_collective()

    def _yield(self) -> None:
        if self.on_yield is not None:
            self.on_yield()


class HookedCollectives(NamedTuple):
    """Collectives of one tensor-parallel group."""

    group: ProcessGroup
    overlap_hook: Hook

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return self._wait(torch_compat.start_all_reduce(x.contiguous(), self.group))

    def gather(self, x: Tensor) -> Tensor:
        """All-gather (..., S, D) to (..., N, D)."""
        rows = x.movedim(-2, 0).contiguous()
        return self._wait(torch_compat.start_all_gather(rows, self.group)).movedim(0, -2)

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter (..., N, D) to (..., S, D)."""
        rows = x.movedim(-2, 0).contiguous()
        return self._wait(torch_compat.start_reduce_scatter(rows, self.group)).movedim(0, -2)

    def _wait(self, started: Tensor) -> Tensor:
        self.overlap_hook()
        return torch_compat.wait(started)


def all_reduce_sum(parts: Tensor, exchange: HookedCollectives) -> Tensor:
    """Return the sum over ranks. The gradient is equal on all ranks."""
    return _CollectivePair.apply(parts, exchange.sum, None)


def sum_gradients(x: Tensor, exchange: HookedCollectives) -> Tensor:
    """Return a replicated tensor of which ranks use different parts. Backward sums gradients."""
    return _CollectivePair.apply(x, None, exchange.sum)


def all_gather_rows(x: Tensor, exchange: HookedCollectives) -> Tensor:
    """All-gather (..., S, D) to (..., N, D). Backward reduce-scatters."""
    return _CollectivePair.apply(x, exchange.gather, exchange.scatter)


def reduce_scatter_rows(parts: Tensor, exchange: HookedCollectives) -> Tensor:
    """Reduce-scatter (..., N, D) to (..., S, D). Backward all-gathers."""
    return _CollectivePair.apply(parts, exchange.scatter, exchange.gather)


def as_replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a replicated DTensor whose gradient remains a partial sum.

    Some styles need a DTensor. `sum_gradients` and `all_gather_rows` reduce its gradient.
    """
    return _AsReplicated.apply(x, mesh)


class _CollectivePair(torch.autograd.Function):
    """Exchange with a different exchange, or none, in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[Tensor], Tensor] | None,
        backward: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.back = backward
        return x.view_as(x) if forward is None else forward(x)

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
