"""Mixed precision of a stage whose parameters are unsharded on one rank, without FSDP2.

On a mesh of one rank FSDP2 does not communicate, but casts and copies each parameter before each
forward and backward pass, and copies each gradient. `MixedPrecision` computes the same values:

- Modules compute with copies of the parameters in the compute dtype, made once per step.
  Parameters that have the compute dtype already are used as they are.
- Floating-point inputs of a unit (a layer, or the module around the layers) are cast to the compute
  dtype, as by `cast_forward_inputs` of FSDP2.
- Gradients of several backward passes are summed in float32, in the order of the passes. A large
  gradient is added as soon as autograd has it, so that its memory is free early. Small ones are
  added together after the pass, with few kernels.

Between steps the modules have their original parameters, so optimizers, checkpoints and exports are
independent of this file. `torch.autocast` is not used, because it casts weights in every forward
pass, and selects different dtypes for norms and losses. A parametrization would rename weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from torchmm.models.layered import LayeredModule

_ATTRIBUTE = "torchmm_mixed_precision"

SMALL_GRADIENT_ELEMENTS = 2**18
"""Maximum number of elements of gradients that are kept until the end of the backward pass.

Estimate for 2.7 TB/s: adding 2**18 elements moves 2.6 MB in 1 us, less than a kernel launch.
"""
BATCHED_ELEMENTS = 2**24
"""Number of elements of gradients that are added together, with temporary float32 copies."""


def apply_mixed_precision(module: LayeredModule, dtype: torch.dtype) -> None:
    """Set the compute dtype of a stage, in place. Its memory can still be unallocated."""
    setattr(module, _ATTRIBUTE, MixedPrecision(module, dtype))

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    for unit in (*module.layers, module):
        unit.register_forward_pre_hook(cast, with_kwargs=True)
    for name in module.forward_methods:
        setattr(module, name, _cast_inputs(getattr(module, name), dtype))


def mixed_precision(module: nn.Module) -> MixedPrecision | None:
    """Return the mixed precision of a stage, or None if it has none."""
    precision: MixedPrecision | None = getattr(module, _ATTRIBUTE, None)
    return precision


class MixedPrecision:
    """Compute copies of the parameters of one stage, and float32 sums of their gradients.

    Between `begin_step` and `end_step` the parameters of the module are the compute copies.

    Args:
        module: Stage.
        dtype: Compute dtype.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype
        self._weights: list[_Weight] = []
        self._trained: list[_Weight] = []
        self._active = False

    def begin_step(self, backwards: int) -> None:
        """Replace the parameters of the module by compute copies with their current values.

        Args:
            backwards: Number of backward passes of the stage in this step.
        """
        if not self._weights:
            self._weights = self._list_weights()
            self._trained = [w for w in self._weights if w.master.requires_grad]
        copied: dict[torch.dtype, list[_Weight]] = {}  # one kernel converts from one dtype only
        for weight in self._weights:
            if weight.needs_copy():
                copied.setdefault(weight.master.dtype, []).append(weight)
        with torch.no_grad():
            for weights in copied.values():
                copies: list[Tensor] = [weight.compute for weight in weights]
                masters: list[Tensor] = [weight.master for weight in weights]
                torch._foreach_copy_(copies, masters)
        for weight in self._weights:
            weight.begin_step(sums=backwards > 1)
        self._active = True

    def accumulate_gradients(self) -> None:
        """Move gradients into the float32 sums. Call after each backward pass."""
        small: list[_Weight] = []
        elements = 0
        for weight in self._trained:
            if not weight.is_small:  # only `stage_backward_weight` bypasses the hook
                weight.accumulate_gradient()
            elif weight.has_new_gradient():
                small.append(weight)
                elements += weight.master.numel()
            if elements >= BATCHED_ELEMENTS:
                _accumulate_batch(small)
                small, elements = [], 0
        if small:
            _accumulate_batch(small)

    def end_step(self) -> None:
        """Restore the original parameters of the module, with their gradients. Idempotent."""
        if not self._active:
            return
        self._active = False
        self.accumulate_gradients()  # after an error, gradients of an unfinished pass
        for weight in self._weights:
            weight.end_step()

    def _list_weights(self) -> list[_Weight]:
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in self._module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    owners.setdefault(parameter, []).append((owner, name))
        return [
            _Weight(parameter, owner_names, self._dtype)
            for parameter, owner_names in owners.items()
        ]


class _Weight:
    """Compute copy and gradient sum of one parameter.

    Args:
            master: Parameter that the optimizer updates.
            owners: (module, parameter name) pairs. A tied parameter has several.
            dtype: Compute dtype.

        Attributes:
            compute: Parameter that modules compute with. The master itself if dtypes are equal.
            is_small: Whether gradients are kept until the end of the backward pass.
            sum: Float32 sum of the gradients of the step.
    """

    __slots__ = ("_owners", "_sums", "_version", "compute", "is_small", "master", "sum")

    def __init__(
        self, master: nn.Parameter, owners: list[tuple[nn.Module, str]], dtype: torch.dtype
    ) -> None:
        self.master = master
        self.compute = master
        self._owners = owners
        self._version = -1
        self._sums = False
        """Whether gradients are currently summed in float32."""
        self.sum: Tensor | None = None
        if master.dtype != dtype:
            copy = torch.empty_like(master, dtype=dtype)
            self.compute = nn.Parameter(copy, requires_grad=master.requires_grad)
        self.is_small = master.numel() <= SMALL_GRADIENT_ELEMENTS
        if master.requires_grad and not self.is_small:
            self.compute.register_post_accumulate_grad_hook(lambda _: self.accumulate_gradient())

    def needs_copy(self) -> bool:
        """Return True if the compute copy may differ from the master.

        Fused optimizers do not increment the version of a parameter. The version is therefore
        reliable only for frozen parameters.
        """
        if self.compute is self.master:
            return False
        before, self._version = self._version, self.master._version
        return self.master.requires_grad or before != self._version

    def begin_step(self, sums: bool) -> None:
        """Put the compute copy into the modules.

        Args:
            sums: Whether the parameter has several gradients in the step.
        """
        if self.compute is not self.master:
            for owner, name in self._owners:
                assert owner._parameters[name] is self.master, name
                owner._parameters[name] = self.compute
        # A single gradient needs no sum.
        self._sums = sums or self.compute is not self.master or self.master.grad is not None
        if self._sums and self.master.grad is not None:
            self.sum, self.master.grad = self.master.grad.float(), None

    def has_new_gradient(self) -> bool:
        """Return True if a gradient must be moved into the float32 sum."""
        return self._sums and self.compute.grad is not None

    def accumulate_gradient(self) -> None:
        """Move the gradient of the compute copy into the float32 sum."""
        if not self.has_new_gradient():
            return
        gradient, self.compute.grad = self.compute.grad, None
        assert gradient is not None
        if self.sum is None:
            self.sum = gradient.float()
        else:
            self.sum += gradient

    def end_step(self) -> None:
        """Put the master back into the modules, with the gradient in its dtype."""
        if self.compute is not self.master:
            for owner, name in self._owners:
                owner._parameters[name] = self.master
        self._sums = False
        if self.sum is not None:
            self.master.grad, self.sum = self.sum.to(self.master.dtype), None


@torch.no_grad()
def _accumulate_batch(weights: list[_Weight]) -> None:
    """Move the gradients of several compute copies into their float32 sums."""
    gradients: list[Tensor] = []
    for weight in weights:
        assert weight.compute.grad is not None
        gradients.append(weight.compute.grad)
        weight.compute.grad = None
    # On CUDA, one kernel adds several tensors only if all have the same dtype.
    float32_gradients = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    torch._foreach_copy_(float32_gradients, gradients)
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    for weight, addend in zip(weights, float32_gradients, strict=True):
        if weight.sum is None:
            weight.sum = addend
        else:
            sums.append(weight.sum)
            addends.append(addend)
    if sums:
        torch._foreach_add_(sums, addends)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors in `value`. Return `value` itself if no cast is needed.

    Args:
        value: Tensors, or nested lists, tuples, dicts and dataclasses of tensors.
        dtype: Target dtype.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        cast = {key: cast_floats(part, dtype) for key, part in value.items()}
        return value if _are_same_objects(cast.values(), value.values()) else cast
    if isinstance(value, list | tuple):
        parts = [cast_floats(part, dtype) for part in value]
        if _are_same_objects(parts, value):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        values = {part.name: getattr(value, part.name) for part in fields(value)}
        cast = cast_floats(values, dtype)
        return value if cast is values else replace(value, **cast)
    return value


def _are_same_objects(first: Any, second: Any) -> bool:
    """Return True if both iterables contain the same objects."""
    return all(a is b for a, b in zip(first, second, strict=True))


def _cast_inputs(method: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return a method that casts its inputs. Hooks cast only the inputs of `forward`."""

    @wraps(method)
    def casting(*args: Any, **kwargs: Any) -> Any:
        return method(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))

    return casting
