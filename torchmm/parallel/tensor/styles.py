"""Tensor parallelism of linears that hold several matrices behind each other.

Queries, keys and values in one linear, or a gate and what it is for: every rank computes its own
rows of each. The weights stay replicated, because no plain sharding of their rows gives a rank its
part of all of them; their gradients, zero for other ranks' rows, are summed.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from torchmm.common.batch import LayerDescription
from torchmm.parallel.tensor.overlap_styles import Column
from torchmm.parallel.tensor.sequence import distribute_parameters


class _Rows(NamedTuple):
    """One of the matrices in a linear: `units` equal groups of rows that stay together."""

    units: int
    unit_size: int

    def own(self, rows: Tensor, ranks: int, rank: int) -> Tensor:
        """A rank's part; ranks share units where there are fewer of them."""
        units = rows.unflatten(0, (self.units, self.unit_size))
        if self.units < ranks:
            return units[rank * self.units // ranks]
        return units.chunk(ranks)[rank].flatten(0, 1)


class PackedLinear(ParallelStyle):
    """A module one of whose linears holds several matrices.

    Args:
        linear: the linear's name.
        matrices: what it holds.
        overlapped: whether the module is an `AsyncScope`, which computes the product.
    """

    def __init__(self, linear: str, matrices: list[_Rows], overlapped: bool) -> None:
        super().__init__()
        self.linear = linear
        self.matrices = matrices
        self.overlapped = overlapped

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear: Any = module.get_submodule(self.linear)
        distribute_parameters(linear, device_mesh)
        ranks, rank = device_mesh.size(), device_mesh.get_local_rank()
        sizes = [m.units * m.unit_size for m in self.matrices]

        def own_rows(parameter: DTensor) -> Tensor:
            every = parameter.to_local(grad_placements=[Partial()]).split(sizes)
            own = (m.own(rows, ranks, rank) for m, rows in zip(self.matrices, every, strict=True))
            return torch.cat(list(own))

        def forward(hidden: DTensor) -> Tensor:
            x = hidden.to_local(grad_placements=[Partial()])
            bias = None if linear.bias is None else own_rows(linear.bias)
            return functional.linear(x, own_rows(linear.weight), bias)

        linear.forward = Column(linear, own_rows) if self.overlapped else forward
        return module


class PackedQkv(PackedLinear):
    """An attention with queries, keys and values in one linear."""

    def __init__(self, sizes: LayerDescription, overlapped: bool) -> None:
        heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        super().__init__("", [_Rows(n, sizes.head_dim) for n in heads], overlapped)
        self.sizes = sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        self.linear = "qkv" if hasattr(module, "qkv") else "qkv_proj"
        super()._apply(module, device_mesh)
        ranks = device_mesh.size()
        heads = self.sizes.heads // ranks
        if hasattr(module, "num_heads"):
            attention.num_heads = heads
            return module
        attention.num_key_value_heads = max(1, self.sizes.kv_heads // ranks)
        attention.config = copy.copy(attention.config)  # all layers share one
        attention.config.num_attention_heads = heads
        return module


class PackedGateUp(PackedLinear):
    """A feed-forward network whose gate is in the same linear as what it is for."""

    def __init__(self, sizes: LayerDescription, overlapped: bool) -> None:
        super().__init__("gate_up_proj", [_Rows(sizes.ffn_size, 1)] * 2, overlapped)
