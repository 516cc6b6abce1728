"""FSDP2 of a multimodal model: every modality module is a root of its own.

Separate roots let encoder and LLM run their backward passes one after the other (and later, on
meshes and in orders of their own). Every layer is one communication unit; embeddings, norms and
heads belong to the root's unit. Gradients are averaged over the data-parallel ranks, so losses
are scaled by that size beforehand. Gradient accumulation reduces once, on the last microbatch.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from torchmm.models.layered import LayeredModule


def apply_fsdp(module: LayeredModule, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shards `module` in place over a 1-D mesh, or 2-D (replicate, shard) for HSDP.

    Parameters, gradients and reductions stay float32; computing is done in `dtype`.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for method in module.forward_methods:
        register_fsdp_forward_method(module, method)


def set_last_microbatch(modules: list[LayeredModule], last: bool) -> None:
    """Reduces gradients in the coming backward passes only if they are the step's last."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
            module.set_is_last_backward(last)
