"""Activation checkpointing of the layers of a module.

The `forward` of a layer is replaced on the instance. Parameter names do not change, and hooks of
FSDP remain outside of the recomputed region. `checkpoint_wrapper` would rename all parameters.

A layer in mode "offload" is fully recomputed from an input in host memory
(`get_activation_offload`). Offloading all saved tensors, as `torch.autograd.graph.save_on_cpu`
does, would include weights and duplicates. It takes longer than recomputation
(docs/concepts/layer_tuning.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchmm.models.layered import LayeredModule
from torchmm.parallel.activation_offload import ActivationOffload
from torchmm.parallel.compilation import Compilation, Forward

OFFLOAD_ATTRIBUTE = "torchmm_host_inputs"
"""Attribute for the `ActivationOffload` of modules whose tasks have different modes."""
_SAVED_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,  # of experts
    torch.ops.aten._scaled_mm.default,  # of float8
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_SAVED_NAMESPACES = ("torchmm::", "torch_attn::")
"""Operator namespaces of packed attention (torchmm on CPU, the varlen kernel of torch on CUDA) and
of the linears of async tensor parallelism."""


def apply_activation_checkpoint(
    module: LayeredModule,
    mode: str,
    compilation: Compilation | None = None,
    *,
    is_eager_on_cuda: bool = False,
) -> None:
    """Recompute layers in backward: all operators ("full"), or the cheap ones ("selective").

    Args:
        module: Module whose layers are changed in place.
        mode: Mode of all layers and tasks. If "auto", `set_recompute_modes` sets the modes before
            each forward pass.
        compilation: Compiles the layers. If None, the layers stay eager.
        is_eager_on_cuda: Whether the layers run on CUDA without torch.compile. "selective" modes of
            plans are then "full", see `ActivationCheckpointConfig.mode_of`.
    """
    is_auto = mode == "auto"
    offload = ActivationOffload()
    if is_auto:
        module.recompute_modes = ["none"] * len(module.layers)
        setattr(module, OFFLOAD_ATTRIBUTE, offload)
    module.uses_recomputation = mode not in ("none", "auto")
    compiled = _compilers(module, compilation)
    selective = _compilers(module, compilation if is_auto else None, "selective")
    for index, layer in enumerate(module.layers):
        # Layers of other modules can read trainable tensors besides their first argument.
        is_frozen = module.kind == "encoder" and not any(
            parameter.requires_grad for parameter in layer.parameters()
        )
        recomputing = partial(_with_recompute, is_frozen=is_frozen)
        if is_auto:
            forwards = _forwards_by_mode(
                layer.forward, recomputing, compiled[index], selective[index], offload
            )
            if is_eager_on_cuda:
                forwards["selective"] = forwards["full"]
            layer.forward = _select_forward(forwards, module.recompute_modes, index)
        elif mode != "none":
            chosen = recomputing(layer.forward, _checkpoint_arguments(mode))
            full = recomputing(layer.forward, _checkpoint_arguments("full"))
            layer.forward = compiled[index](chosen, full)
        elif compilation is not None:
            layer.forward = compiled[index](layer.forward, layer.forward)


def _compilers(
    module: LayeredModule, compilation: Compilation | None, variant: str = ""
) -> list[Callable[[Forward, Forward], Forward]]:
    """Return one function per layer that compiles a forward, see `LayerKind.compiled`."""
    if compilation is None:
        return [lambda forward, _: forward] * len(module.layers)
    return [kind.compiled for kind in compilation.kinds(module, variant)]


def set_recompute_modes(module: LayeredModule, modes: Sequence[str]) -> None:
    """Set the recomputation mode of each layer of an "auto" module for later forward passes.

    Dropout is reproducible: recomputation uses the RNG state of the forward pass, and restores the
    current RNG state.

    Raises:
        ValueError: The number of modes is not the number of layers.
    """
    if len(modes) != len(module.recompute_modes):
        raise ValueError(
            f"{len(modes)} recomputation modes for {len(module.recompute_modes)} layers of "
            f"{module.name}; build the plan from the layout that split the model"
        )
    module.recompute_modes[:] = modes


def get_activation_offload(module: LayeredModule) -> ActivationOffload | None:
    """Return the activation offloading of a module, or None if it has none."""
    inputs: ActivationOffload | None = getattr(module, OFFLOAD_ATTRIBUTE, None)
    return inputs


def _checkpoint_arguments(mode: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return settings


def _forwards_by_mode(
    forward: Forward,
    recomputing: Callable[[Forward, dict[str, Any]], Forward],
    compiled: Callable[[Forward, Forward], Forward],
    selective: Callable[[Forward, Forward], Forward],
    inputs: ActivationOffload,
) -> dict[str, Forward]:
    """Return the forward of a layer in each mode.

    Recomputation of all operators wraps the compiled code, so three modes share one graph.
    Selective recomputation chooses among operators, so it is inside of a separate graph.
    """
    plain = compiled(forward, forward)
    full = recomputing(forward, _checkpoint_arguments("full"))
    return {
        "none": plain,
        "selective": selective(recomputing(forward, _checkpoint_arguments("selective")), full),
        "full": recomputing(plain, _checkpoint_arguments("full")),
        "offload": _with_offload(plain, inputs),
    }


def _select_forward(forwards: dict[str, Forward], modes: list[str], index: int) -> Forward:
    def choosing_forward(*args: Any, **kwargs: Any) -> Any:
        return forwards[modes[index]](*args, **kwargs)

    return choosing_forward


def _with_recompute(forward: Forward, settings: dict[str, Any], *, is_frozen: bool) -> Forward:
    """Return a forward whose operators run again in backward.

    Args:
        forward: Forward of a layer.
        settings: Keyword arguments of `checkpoint`.
        is_frozen: Whether the layer needs no backward if its first argument needs none.
    """

    # Not a partial of `checkpoint`, because torch.compile does not trace functions of torch.
    def recomputing_forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Without a backward pass, no recomputation is needed. torch 2.13 cannot compile
        # `checkpoint` around attention then, because it rejects operators with random numbers.
        has_backward = torch.is_grad_enabled() and (hidden.requires_grad or not is_frozen)
        if not has_backward:
            return forward(hidden, *args, **kwargs)
        return checkpoint(forward, hidden, *args, **settings, **kwargs)

    return recomputing_forward


def _with_offload(forward: Forward, inputs: ActivationOffload) -> Forward:
    def offloading_forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # All layers share the remaining arguments, so they are not offloaded by the hooks.
        def forward_of(hidden: Tensor) -> Any:
            return forward(hidden, *args, **kwargs)

        with saved_tensors_hooks(inputs.pack, inputs.unpack):
            return checkpoint(forward_of, hidden, use_reentrant=False)

    return offloading_forward


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = operator in _SAVED_OPERATORS or str(operator).startswith(
        tuple(name.replace("::", ".") for name in _SAVED_NAMESPACES)
    )
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
