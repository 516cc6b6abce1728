"""Async tensor parallelism of Hugging Face modules: communication alongside matrix products.

A "scope" (attention, MLP) has column-wise linears that read the same input and a row-wise one at
its end. Plain tensor parallelism gathers the input on entry and waits. Here the scope's pre-hook
computes all its column-wise linears at once, while their shared input is being gathered, and gives
the scope a `ScopeInput` in its place, which has the gathered shape and the products; each linear,
when called with it, returns its own. The row-wise linear multiplies in blocks that are summed and
scattered on the way.

A scope that does anything else with its input than ask for its shape and call these linears fails
with an error. Rejected: gathering in the first linear that is called (q, k and v would wait for
each other's gathers in backward); giving the scope its slice, whose shape Hugging Face's attention
reads; keeping the products in the linears, which torch.compile refuses below recomputation.

Batches of several rows (images of one size) are laid out sequence first (`sequence_first`): then
every slice is a range of rows, and communication needs no copy of its own. Only views change in
front of and after the linears; attention and activation functions read any layout.

Shape legend: B rows of a batch, T tokens, S tokens of one slice, D and F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchmm.extensions.async_tp.linear import (
    Overlap,
    gather_linear,
    gather_slices,
    linear_scatter,
    take_slice,
)
from torchmm.parallel.tensor.sequence import (
    LocalRows,
    OverlapStyles,
    SequenceSlices,
    batch_first,
    change_input,
    distribute_parameters,
    sequence_first,
)


class ScopeInput:
    """Stands in a scope for its gathered input."""

    def __init__(self, shape: torch.Size, products: list[Tensor]) -> None:
        self.shape = shape
        self.products = products

    def size(self) -> torch.Size:
        """What some attentions ask for instead of the shape."""
        return self.shape


class Column:
    """Forward of a column-wise linear whose product its scope has computed.

    Args:
        linear: With DTensor parameters.
        local_rows: Applied to its weight and bias.
    """

    def __init__(self, linear: nn.Module, local_rows: LocalRows) -> None:
        self._linear: Any = linear
        self._local_rows = local_rows
        self.index = 0
        """Place among the columns of the scope."""

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of weight and bias."""
        bias = self._linear.bias
        local_bias = None if bias is None else self._local_rows(bias)
        return self._local_rows(self._linear.weight), local_bias

    def __call__(self, x: ScopeInput) -> Tensor:
        """The product.

        Raises:
            TypeError: `x` is not the input of the scope.
        """
        if not isinstance(x, ScopeInput):
            raise TypeError(
                "the input of a column-wise linear layer is not the input of its attention "
                "or MLP; set [parallel] async_tensor_parallel = false for this model"
            )
        return x.products[self.index]


class AsyncStyles(OverlapStyles):
    """Styles whose linears communicate as `overlap` describes."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap

    def column(self, linear: nn.Module, local_rows: LocalRows) -> Column:
        return Column(linear, local_rows)

    def row(self, slices: SequenceSlices) -> AsyncRow:
        return AsyncRow(slices, self._overlap)

    def scope(self, slices: SequenceSlices) -> AsyncScope:
        return AsyncScope(slices, self._overlap)

    def take_slice(self, x_TD: Tensor, slice_rows: int) -> Tensor:
        return take_slice(x_TD, slice_rows, self._overlap)

    def gather_slices(self, x_SD: Tensor, rows: int) -> Tensor:
        return gather_slices(x_SD, rows, self._overlap)


class _Overlapping(ParallelStyle):
    """A style with communication that overlaps with its products."""

    def __init__(self, slices: SequenceSlices, overlap: Overlap) -> None:
        super().__init__()
        self._slices = slices
        self._overlap = overlap


class AsyncScope(_Overlapping):
    """Attention or MLP: gathers its input below the products of its column-wise linears."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        columns = [m.forward for m in module.modules() if isinstance(m.forward, Column)]
        for index, column in enumerate(columns):
            column.index = index

        change_input(module, lambda hidden: self._multiply(hidden, columns))
        return module

    def _multiply(self, x_BSD: Tensor, columns: list[Column]) -> ScopeInput:
        """Gathers and computes all products."""
        length = self._slices.length
        rows, batch = sequence_first(x_BSD)
        weights, biases = zip(*[column.parameters() for column in columns], strict=True)
        products = gather_linear(rows, weights, biases, length * batch.numel(), self._overlap)
        shape = torch.Size((*batch, length, x_BSD.shape[-1]))
        return ScopeInput(shape, [batch_first(product, batch) for product in products])


class AsyncRow(_Overlapping):
    """Row-wise linear: columns of the weight are divided; gives slices of the summed output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, weight=Shard(1))
        linear: Any = module

        def forward(x_BTF: Tensor) -> Tensor:
            rows, batch = sequence_first(x_BTF)
            bias = linear.bias
            local_bias = None if bias is None else bias.to_local(grad_placements=[Partial()])
            slice_rows = self._slices.slice_length * batch.numel()
            weight = linear.weight.to_local()
            out = linear_scatter(rows, weight, local_bias, slice_rows, self._overlap)
            return batch_first(out, batch)

        module.forward = forward
        return module
