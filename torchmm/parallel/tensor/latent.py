"""Tensor parallelism of latent attention (DeepSeek's MLA).

Products down to few features are computed whole on every rank, those up to the heads for a rank's
own heads. In between, each rank has the gradient of its own heads only: parts of sums, so weights
of the products down, and of the norms after them, sum theirs over the ranks. For that the products
up take plain tensors: torch's column-wise style would sum the gradients of its input on the way.
Rejected: summing there, which takes two more collectives per layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from torchmm.parallel.tensor.sequence import LocalNorm, distribute_parameters


class LatentHeads(ParallelStyle):
    """An attention that computes keys, values, and perhaps queries, from few features."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parts = {name: part for name, part in module.named_children() if part is not None}
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            if name in parts:
                compute_locally(parts[name], device_mesh, Replicate())
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if name in parts:
                LocalNorm()._apply(parts[name], device_mesh)
        for name in ("q_proj", "q_b_proj", "kv_b_proj"):
            if name in parts:
                compute_locally(parts[name], device_mesh, Shard(0))
        return module


def compute_locally(linear: Any, mesh: DeviceMesh, placement: Placement) -> None:
    """Lets a linear multiply with what a rank has of its weight, and return a plain tensor.

    Args:
        placement: of the weight. A bias is divided with the rows, and otherwise replicated; none is
            possible where columns are divided.
    """
    assert placement != Shard(1) or linear.bias is None
    distribute_parameters(linear, mesh, weight=placement, bias=placement)
    summed = [Partial()] if isinstance(placement, Replicate) else None

    def own(parameter: DTensor | None) -> Tensor | None:
        return None if parameter is None else parameter.to_local(grad_placements=summed)

    def forward(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()])
        return functional.linear(x, own(linear.weight), own(linear.bias))  # type: ignore[arg-type]

    linear.forward = forward
