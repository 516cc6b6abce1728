"""Activation checkpointing of a layered module: what backward recomputes instead of keeping.

The layer's `forward` is replaced on the instance, so parameter names stay and FSDP's hooks stay
outside of the recomputed region. Rejected: `checkpoint_wrapper`, which renames every parameter.

A layer in mode "offload" is recomputed as a whole, from an input that waits in the host's memory
(`host_inputs`). Rejected: moving all that a layer keeps, as `torch.autograd.graph.save_on_cpu`
around a layer does: weights too, and tensors as often as they are saved, which takes longer than to
compute them again (docs/concepts/layer_tuning.md).
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
from torchmm.parallel.compilation import Compilation, Forward
from torchmm.parallel.host_inputs import HostInputs

HOST_INPUTS = "torchmm_host_inputs"
"""Attribute of modules whose tasks choose: a `HostInputs`."""
_KEPT_OPERATORS = {
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
_KEPT_NAMESPACES = ("torchmm::", "torch_attn::")
"""Namespaces of packed attention (ours on CPU, torch's varlen kernel on CUDA) and of the linears
of async tensor parallelism."""


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
        mode: Mode of all layers and tasks. If "auto", `set_layer_modes` sets the modes before each
            forward pass.
        compilation: Compiles the layers. If None, the layers stay eager.
        is_eager_on_cuda: Whether the layers run on CUDA without torch.compile. "selective" modes of
            plans are then "full", see `ActivationCheckpointConfig.mode_of`.
    """
    tuned = mode == "auto"
    inputs = HostInputs()
    if tuned:
        module.layer_modes = ["none"] * len(module.layers)
        setattr(module, HOST_INPUTS, inputs)
    module.recomputes = mode not in ("none", "auto")
    compiled = _compilers(module, compilation)
    selective = _compilers(module, compilation if tuned else None, "selective")
    for index, layer in enumerate(module.layers):
        # Layers of other modules may read trained tensors besides their first argument.
        is_frozen = module.kind == "encoder" and not any(
            parameter.requires_grad for parameter in layer.parameters()
        )
        recomputing = partial(_recomputing, is_frozen=is_frozen)
        if tuned:
            ways = _ways(layer.forward, recomputing, compiled[index], selective[index], inputs)
            if is_eager_on_cuda:
                ways["selective"] = ways["full"]
            layer.forward = _choosing(ways, module.layer_modes, index)
        elif mode != "none":
            chosen = recomputing(layer.forward, _settings(mode))
            full = recomputing(layer.forward, _settings("full"))
            layer.forward = compiled[index](chosen, full)
        elif compilation is not None:
            layer.forward = compiled[index](layer.forward, layer.forward)


def _compilers(
    module: LayeredModule, compilation: Compilation | None, way: str = ""
) -> list[Callable[[Forward, Forward], Forward]]:
    """Return one function per layer that compiles a forward, see `LayerKind.compiled`."""
    if compilation is None:
        return [lambda forward, _: forward] * len(module.layers)
    return [kind.compiled for kind in compilation.kinds(module, way)]


def set_layer_modes(module: LayeredModule, modes: Sequence[str]) -> None:
    """What the backwards of following forwards run again, by layer of an "auto" module.

    Dropout stays reproducible: what is run again starts from the random state of the first time,
    and leaves the present one alone.

    Raises:
        ValueError: not one mode for each layer.
    """
    if len(modes) != len(module.layer_modes):
        raise ValueError(
            f"{len(modes)} recomputation modes for {len(module.layer_modes)} layers of "
            f"{module.name}; build the plan from the layout that split the model"
        )
    module.layer_modes[:] = modes


def host_inputs(module: LayeredModule) -> HostInputs | None:
    """What sends inputs of a module's layers to the host; None: nothing does."""
    found: HostInputs | None = getattr(module, HOST_INPUTS, None)
    return found


def _settings(mode: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return settings


def _ways(
    forward: Forward,
    recomputing: Callable[[Forward, dict[str, Any]], Forward],
    compiled: Callable[[Forward, Forward], Forward],
    selective: Callable[[Forward, Forward], Forward],
    inputs: HostInputs,
) -> dict[str, Forward]:
    """Return the forward of a layer in each mode.

    Recomputation of all operators wraps the compiled code, so three modes share one graph.
    Selective recomputation chooses among operators, so it is inside of a separate graph.
    """
    plain = compiled(forward, forward)
    full = recomputing(forward, _settings("full"))
    return {
        "none": plain,
        "selective": selective(recomputing(forward, _settings("selective")), full),
        "full": recomputing(plain, _settings("full")),
        "offload": _offloading(plain, inputs),
    }


def _choosing(ways: dict[str, Forward], modes: list[str], index: int) -> Forward:
    def choosing_forward(*args: Any, **kwargs: Any) -> Any:
        return ways[modes[index]](*args, **kwargs)

    return choosing_forward


def _recomputing(forward: Forward, settings: dict[str, Any], *, is_frozen: bool) -> Forward:
    """Return a forward whose operators run again in backward.

    Args:
        forward: Forward of a layer.
        settings: Keyword arguments of `checkpoint`.
        is_frozen: Whether the layer needs no backward if its first argument needs none.
    """

    # Not a partial of `checkpoint`: torch.compile starts at functions outside of torch only.
    def recomputing_forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Without a backward there is nothing to recompute. torch 2.13 cannot compile `checkpoint`
        # around attention there: it rejects operators with random numbers.
        has_backward = torch.is_grad_enabled() and (hidden.requires_grad or not is_frozen)
        if not has_backward:
            return forward(hidden, *args, **kwargs)
        return checkpoint(forward, hidden, *args, **settings, **kwargs)

    return recomputing_forward


def _offloading(forward: Forward, inputs: HostInputs) -> Forward:
    def offloading_forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Other arguments are shared by all layers, so they stay, and stay out of the hooks' sight.
        def forward_of(hidden: Tensor) -> Any:
            return forward(hidden, *args, **kwargs)

        with saved_tensors_hooks(inputs.pack, inputs.unpack):
            return checkpoint(forward_of, hidden, use_reentrant=False)

    return offloading_forward


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in _KEPT_OPERATORS or str(operator).startswith(
        tuple(name.replace("::", ".") for name in _KEPT_NAMESPACES)
    )
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
