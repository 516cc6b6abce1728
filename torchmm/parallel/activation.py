"""Activation checkpointing of a layered module: what backward recomputes instead of keeping.

The layer's `forward` is replaced on the instance, so parameter names stay and FSDP's hooks stay
outside of the recomputed region. Rejected: `checkpoint_wrapper`, which renames every parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchmm.models.layered import LayeredModule

_KEPT_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_KEPT_NAMESPACES = ("torchmm::", "torch_attn::")
"""Namespaces of packed attention (ours on CPU, torch's varlen kernel on CUDA) and of the linears
of async tensor parallelism."""


def apply_activation_checkpoint(module: LayeredModule, mode: str) -> None:
    """Recomputes layers in backward: all of it ("full"), or the cheap operators ("selective")."""
    if mode == "none":
        return
    module.recomputes = True
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for layer in module.layers:
        layer.forward = _recomputing(layer.forward, settings)


def _recomputing(forward: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    # Not a partial of `checkpoint`: torch.compile starts at functions outside of torch only.
    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **settings, **kwargs)

    return recomputing_forward


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in _KEPT_OPERATORS or str(operator).startswith(
        tuple(name.replace("::", ".") for name in _KEPT_NAMESPACES)
    )
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
