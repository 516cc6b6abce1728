"""Activation checkpointing of a layered module: what backward recomputes instead of keeping.

The layer's `forward` is replaced on the instance, so parameter names stay and FSDP's hooks stay
outside of the recomputed region. Rejected: `checkpoint_wrapper`, which renames every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Recomputes layers in backward: all of it ("full"), or the cheap operators ("selective").

    Args:
        mode: of all layers and tasks; "tuned": as `set_layer_modes` says before each forward.
    """
    if mode == "none":
        return
    if mode == "tuned":
        module.layer_modes = ["none"] * len(module.layers)
        for index, layer in enumerate(module.layers):
            layer.forward = _choosing(layer.forward, module.layer_modes, index)
        return
    module.recomputes = True
    for layer in module.layers:
        layer.forward = _recomputing(layer.forward, _settings(mode))


def set_layer_modes(module: LayeredModule, modes: Sequence[str]) -> None:
    """What the backwards of following forwards run again, by layer of a "tuned" module.

    Dropout stays reproducible: what is run again starts from the random state of the first time,
    and leaves the present one alone.

    Raises:
        ValueError: not one mode for each layer.
    """
    if len(modes) != len(module.layer_modes):
        raise ValueError(
            f"{len(modes)} modes of recomputation for {len(module.layer_modes)} layers of "
            f"{module.name}; make the plan from the layout that cut the model"
        )
    module.layer_modes[:] = modes


def _settings(mode: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return settings


def _choosing(forward: Callable[..., Any], modes: list[str], index: int) -> Callable[..., Any]:
    recomputing = {mode: _recomputing(forward, _settings(mode)) for mode in ("selective", "full")}

    def choosing_forward(*args: Any, **kwargs: Any) -> Any:
        return recomputing.get(modes[index], forward)(*args, **kwargs)

    return choosing_forward


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
