"""Tensor-parallel linears that multiply plain tensors.

    column-wise    weight rows sharded       full input     local outputs
    row-wise       weight columns sharded    local input    partial sums, reduced after the matmul

Styles of torch multiply DTensors. With torch.compile, their backward pass does not terminate for
batches of changing length (2.13: a view of a DTensor with a symbolic size depends on itself). Each
matmul of DTensors also has a higher host overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from torchmm.parallel.tensor.collectives import HookedCollectives, all_reduce_sum
from torchmm.parallel.tensor.sequence import (
    OverlapStyles,
    SequenceSlices,
    convert_input,
    distribute_parameters,
)

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function from input, weight and bias to the matmul."""
MULTIPLY = "torchmm_multiply"
"""Attribute of linears with a custom matmul (float8): a `Multiply`."""


def find_multiply(linear: nn.Module) -> Multiply:
    """Return the matmul function of a linear."""
    multiply: Multiply = getattr(linear, MULTIPLY, functional.linear)
    return multiply


def compute_locally(linear: Any, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a linear multiply with its local weight and return a plain tensor.

    Args:
        linear: Linear to change in place.
        mesh: Mesh of the tensor-parallel ranks.
        placement: Placement of the weight. A bias is sharded with the rows. It is replicated if the
            weight is replicated, and not supported if columns are sharded.
    """
    assert placement != Shard(1) or linear.bias is None
    distribute_parameters(linear, mesh, weight=placement, bias=placement)
    summed = [Partial()] if isinstance(placement, Replicate) else None
    multiply = find_multiply(linear)

    def local(parameter: DTensor | None) -> Tensor | None:
        return None if parameter is None else parameter.to_local(grad_placements=summed)

    def forward(x: Tensor) -> Tensor:
        return multiply(_to_local(x), local(linear.weight), local(linear.bias))  # type: ignore[arg-type]

    linear.forward = forward


def _to_local(x: Tensor) -> Tensor:
    """Return a replicated tensor as a plain tensor whose gradients are partial sums."""
    return x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x


class LocalColumn(ParallelStyle):
    """A column-wise linear, from the full input of its scope to the outputs of this rank.

    Args:
        overlap: Styles of linears whose communication overlaps with their matmuls, or None.
    """

    def __init__(self, overlap: OverlapStyles | None = None) -> None:
        super().__init__()
        self._overlap = overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self._overlap is not None:
            distribute_parameters(module, device_mesh, weight=Shard(0), bias=Shard(0))
            module.forward = self._overlap.column(module, lambda parameter: parameter.to_local())
            return module

        def replicated(x: Tensor) -> DTensor:
            if isinstance(x, DTensor):
                return x
            return DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)

        compute_locally(module, device_mesh, Shard(0))
        convert_input(module, replicated)
        return module


class LocalRow(ParallelStyle):
    """Row-wise linear: local input to the sum over ranks, plus the bias.

    Args:
        slices: Sequence slices, so that the output is a slice. None if ranks have full outputs.
        exchange: Collectives with a hook. None: ranks wait immediately.
    """

    def __init__(
        self, slices: SequenceSlices | None, exchange: HookedCollectives | None = None
    ) -> None:
        super().__init__()
        self._slices = slices
        self._exchange = exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, weight=Shard(1))
        linear: Any = module
        slices = self._slices
        exchange = self._exchange
        multiply = find_multiply(linear)

        def forward(x: Tensor) -> Tensor:
            return multiply(x, linear.weight.to_local(), None)

        def reduce(_: nn.Module, args: tuple, partial: Tensor) -> Tensor:
            if slices is not None:
                out = slices.reduce(module, args, partial)
            elif exchange is not None:
                out = all_reduce_sum(partial, exchange)
            else:
                sums = DTensor.from_local(partial, device_mesh, [Partial()], run_check=False)
                out = sums.redistribute(placements=[Replicate()]).to_local()
            if linear.bias is None:
                return out
            # With slices, gradients of the bias are partial sums. Padding has no gradient.
            placements = None if slices is None else [Partial()]
            return out + linear.bias.to_local(grad_placements=placements)

        linear.forward = forward
        linear.register_forward_hook(reduce)
        return module
