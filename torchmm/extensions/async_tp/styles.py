"""Async tensor parallelism of Hugging Face modules: communication overlaps with matmuls.

A "scope" (attention, MLP) has column-wise linear layers with the same input and a row-wise layer at
its end. Regular tensor parallelism all-gathers the input at the start of the scope and waits. With
async tensor parallelism, the pre-hook of the scope computes all column-wise layers at once, during
the all-gather of their shared input. It replaces the input of the scope by a `ScopeInput`, which
has the gathered shape and the results. Each linear layer returns its result when called with the
`ScopeInput`. The row-wise layer multiplies in blocks that are reduced and scattered during the
matmul.

A scope that uses its input for other purposes than its shape and these linear layers fails with an
error. Alternatives do not work: an all-gather in the first called layer would serialize the
all-gathers of q, k and v in backward. The slice as input has a different shape, which the attention
of Hugging Face reads. Results that are stored in the linear layers are not supported by
torch.compile with recomputation.

Batches of several sequences (images of one size) are stored with the sequence dimension first
(`sequence_first`). Every slice is then a range of rows and is sent without a copy. Only views
change before and after the linear layers. Attention and activation functions support any memory
layout.

Shape legend: B sequences of a batch, T tokens, S tokens of one slice, D and F features.
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
    convert_input,
    distribute_parameters,
    sequence_first,
)


class ScopeInput:
    """Placeholder for the gathered input of a scope."""

    def __init__(self, shape: torch.Size, products: list[Tensor]) -> None:
        self.shape = shape
        self.products = products

    def size(self) -> torch.Size:
        """Return the shape, which some attention classes read with this method."""
        return self.shape


class PrecomputedColumn:
    """Forward method of a column-wise linear layer whose result the scope has computed.

    Args:
        linear: Linear layer with DTensor parameters.
        local_rows: Function that returns the local rows of its weight and bias.
    """

    def __init__(self, linear: nn.Module, local_rows: LocalRows) -> None:
        self._linear: Any = linear
        self._local_rows = local_rows
        self.index = 0
        """Index of the layer among the column-wise layers of the scope."""

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return the local rows of weight and bias."""
        bias = self._linear.bias
        local_bias = None if bias is None else self._local_rows(bias)
        return self._local_rows(self._linear.weight), local_bias

    def __call__(self, x: ScopeInput) -> Tensor:
        """Return the result of the layer.

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
    """Parallel styles whose linear layers communicate with the settings in `overlap`."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap

    def column(self, linear: nn.Module, local_rows: LocalRows) -> PrecomputedColumn:
        return PrecomputedColumn(linear, local_rows)

    def row(self, slices: SequenceSlices) -> AsyncRow:
        return AsyncRow(slices, self._overlap)

    def scope(self, slices: SequenceSlices) -> AsyncScope:
        return AsyncScope(slices, self._overlap)

    def take_slice(self, x_TD: Tensor, slice_rows: int) -> Tensor:
        return take_slice(x_TD, slice_rows, self._overlap)

    def gather_slices(self, x_SD: Tensor, rows: int) -> Tensor:
        return gather_slices(x_SD, rows, self._overlap)


class _Overlapping(ParallelStyle):
    """Parallel style with communication that overlaps with its matmuls."""

    def __init__(self, slices: SequenceSlices, overlap: Overlap) -> None:
        super().__init__()
        self._slices = slices
        self._overlap = overlap


class AsyncScope(_Overlapping):
    """Style of attention or an MLP: all-gathers its input during its column-wise layers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        columns = [m.forward for m in module.modules() if isinstance(m.forward, PrecomputedColumn)]
        for index, column in enumerate(columns):
            column.index = index

        convert_input(module, lambda hidden: self._multiply(hidden, columns))
        return module

    def _multiply(self, x_BSD: Tensor, columns: list[PrecomputedColumn]) -> ScopeInput:
        """All-gather the input and compute all column-wise layers."""
        length = self._slices.length
        rows, batch = sequence_first(x_BSD)
        weights, biases = zip(*[column.parameters() for column in columns], strict=True)
        products = gather_linear(rows, weights, biases, length * batch.numel(), self._overlap)
        shape = torch.Size((*batch, length, x_BSD.shape[-1]))
        return ScopeInput(shape, [batch_first(product, batch) for product in products])


class AsyncRow(_Overlapping):
    """Style of a row-wise linear layer, which returns a slice of the summed output."""

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
