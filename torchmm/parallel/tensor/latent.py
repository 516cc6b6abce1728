"""Tensor parallelism of latent attention (DeepSeek's MLA).

Products down to few features are computed whole on every rank, those up to the heads for a rank's
own heads. In between, each rank has the gradient of its own heads only: parts of sums, so weights
of the products down, and of the norms after them, sum theirs over the ranks. For that the products
up take plain tensors: torch's column-wise style would sum the gradients of its input on the way.
Rejected: summing there, which takes two more collectives per layer."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from torchmm.parallel.tensor.linears import compute_locally
from torchmm.parallel.tensor.sequence import LocalNorm


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
