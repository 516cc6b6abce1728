"""Linears that tensor-parallel ranks divide, multiplied as plain tensors.

    column-wise    rows of the weight     whole input     this rank's outputs
    row-wise       columns                a rank's part   parts of a sum, summed behind the product

Rejected: torch's styles, which multiply DTensors. torch.compile does not end on their backward
where batches of rows have changing lengths (2.13: a view of a DTensor with a symbolic size asks for
itself), and every product of DTensors costs the host more than one of tensors.
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

from torchmm.parallel.tensor.collectives import Exchange, summed
from torchmm.parallel.tensor.sequence import (
    OverlapStyles,
    SequenceSlices,
    change_input,
    distribute_parameters,
)

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Input, weight and bias to the product."""
MULTIPLY = "torchmm_multiply"
"""Attribute of linears whose products are not torch's own (in float8): a `Multiply`."""


def multiply_of(linear: nn.Module) -> Multiply:
    """How a linear multiplies whatever a rank has of its input and weight."""
    found: Multiply = getattr(linear, MULTIPLY, functional.linear)
    return found


def compute_locally(linear: Any, mesh: DeviceMesh, placement: Placement) -> None:
    """Lets a linear multiply with what a rank has of its weight, and return a plain tensor.

    Args:
        placement: of the weight. A bias is divided with the rows, and otherwise replicated; none is
            possible where columns are divided.
    """
    assert placement != Shard(1) or linear.bias is None
    distribute_parameters(linear, mesh, weight=placement, bias=placement)
    summed = [Partial()] if isinstance(placement, Replicate) else None
    multiply = multiply_of(linear)

    def own(parameter: DTensor | None) -> Tensor | None:
        return None if parameter is None else parameter.to_local(grad_placements=summed)

    def forward(x: Tensor) -> Tensor:
        return multiply(_part_of_sum(x), own(linear.weight), own(linear.bias))  # type: ignore[arg-type]

    linear.forward = forward


def _part_of_sum(x: Tensor) -> Tensor:
    """What all ranks have, whose gradients are parts of a sum."""
    return x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x


class LocalColumn(ParallelStyle):
    """A column-wise linear, from the full input of its scope to the outputs of this rank.

    Args:
        overlap: Styles of linears whose communication overlaps with their products, or None.
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
        change_input(module, replicated)
        return module


class LocalRow(ParallelStyle):
    """A row-wise linear: this rank's part of the input to the sum over the ranks, and a bias.

    Args:
        slices: of the sequence, of which the sum becomes one; None: every rank has all of it.
        exchange: how the ranks then add up while something else is done; None: it is waited for.
    """

    def __init__(self, slices: SequenceSlices | None, exchange: Exchange | None = None) -> None:
        super().__init__()
        self._slices = slices
        self._exchange = exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, weight=Shard(1))
        linear: Any = module
        slices = self._slices
        exchange = self._exchange
        multiply = multiply_of(linear)

        def forward(x: Tensor) -> Tensor:
            return multiply(x, linear.weight.to_local(), None)

        def reduce(_: nn.Module, args: tuple, partial: Tensor) -> Tensor:
            if slices is not None:
                out = slices.reduce(module, args, partial)
            elif exchange is not None:
                out = summed(partial, exchange)
            else:
                sums = DTensor.from_local(partial, device_mesh, [Partial()], run_check=False)
                out = sums.redistribute(placements=[Replicate()]).to_local()
            if linear.bias is None:
                return out
            # Slices have parts of the bias's gradient, and padding has none.
            placements = None if slices is None else [Partial()]
            return out + linear.bias.to_local(grad_placements=placements)

        linear.forward = forward
        linear.register_forward_hook(reduce)
        return module
