"""An RMSNorm over features that are divided among tensor-parallel ranks.

OLMo 2 normalizes the queries of all heads together. Each rank has those of its own heads; the mean
of squares is summed over the ranks, one number per position, and the rest stays local. Rejected:
Hugging Face's plan, which gathers queries, keys and values and attends with all heads on every
rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchmm.parallel.tensor.sequence import distribute_parameters


class ShardedNorm(ParallelStyle):
    """The norm behind a column-wise linear; its weight is divided like that one's rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm: Any = module
        features = norm.weight.numel()
        distribute_parameters(module, device_mesh, weight=Shard(0))

        def forward(x: Tensor) -> Tensor:
            weight = cast(DTensor, norm.weight).to_local()
            assert x.shape[-1] == weight.shape[-1], "tensor_problems has refused that"
            wide = x.float()
            own = wide.square().sum(-1, keepdim=True)
            squares = DTensor.from_local(own, device_mesh, [Partial()], run_check=False)
            whole = squares.redistribute(placements=[Replicate()])
            mean = whole.to_local(grad_placements=[Partial()]) / features
            return (weight * (wide * torch.rsqrt(mean + norm.variance_epsilon))).to(x.dtype)

        module.forward = forward
        return module
