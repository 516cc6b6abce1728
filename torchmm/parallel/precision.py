"""Mixed precision of a stage whose parameters are whole on one rank, without FSDP2.

On a mesh of one rank FSDP2 communicates nothing, but casts and copies every parameter before each
forward and backward pass, and copies every gradient. `MixedPrecision` computes the same values:

- Modules compute with copies of the parameters in the compute dtype, made once per step.
  Parameters that have the compute dtype already are used as they are.
- Floating-point inputs of a unit (a layer, or the module around the layers) are cast to the compute
  dtype, as by `cast_forward_inputs` of FSDP2.
- Gradients of several backward passes are summed in float32, in the order of the passes. A large
  gradient is added as soon as autograd has it, so that its memory is free early. Small ones are
  added together after the pass, with few kernels.

Between steps the modules have their own parameters, so that optimizers, checkpoints and exports are
independent of this file. Rejected: `torch.autocast`, which casts weights in every forward pass and
chooses other dtypes for norms and losses; a parametrization of each weight, which renames it.
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

SMALL = 2**18
"""Elements of the largest gradient that is kept until the end of the backward pass.

Arithmetic for 2.7 TB/s: adding 2**18 elements moves 2.6 MB in 1 us, less than a kernel launch.
"""
TOGETHER = 2**24
"""Elements of the gradients that are added together; they have float32 copies meanwhile."""


def apply_mixed_precision(module: LayeredModule, dtype: torch.dtype) -> None:
    """Let a stage compute in `dtype`, in place; its memory may still be unallocated."""
    setattr(module, _ATTRIBUTE, MixedPrecision(module, dtype))

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    for unit in (*module.layers, module):
        unit.register_forward_pre_hook(cast, with_kwargs=True)
    for name in module.forward_methods:
        setattr(module, name, _casting(getattr(module, name), dtype))


def mixed_precision(module: nn.Module) -> MixedPrecision | None:
    """Return the mixed precision of a stage, or None if it has none."""
    found: MixedPrecision | None = getattr(module, _ATTRIBUTE, None)
    return found


class MixedPrecision:
    """Compute copies of the parameters of one stage, and float32 sums of their gradients.

    Between `begin_step` and `end_step` the parameters of the module are the compute copies.

    Args:
        module: the stage.
        dtype: the compute dtype.
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
            backwards: the number of backward passes of the stage in this step.
        """
        if not self._weights:
            self._weights = self._list_weights()
            self._trained = [w for w in self._weights if w.master.requires_grad]
        copied: dict[torch.dtype, list[_Weight]] = {}  # one kernel converts from one dtype only
        for weight in self._weights:
            if weight.needs_copy():
                copied.setdefault(weight.master.dtype, []).append(weight)
        with torch.no_grad():
            for alike in copied.values():
                copies: list[Tensor] = [weight.compute for weight in alike]
                masters: list[Tensor] = [weight.master for weight in alike]
                torch._foreach_copy_(copies, masters)
        for weight in self._weights:
            weight.begin_step(sums=backwards > 1)
        self._active = True

    def accumulate_gradients(self) -> None:
        """Move gradients into the float32 sums; call it after each backward pass."""
        small: list[_Weight] = []
        elements = 0
        for weight in self._trained:
            if not weight.is_small:  # only `stage_backward_weight` bypasses the hook
                weight.accumulate_gradient()
            elif weight.has_new_gradient():
                small.append(weight)
                elements += weight.master.numel()
            if elements >= TOGETHER:
                _accumulate_together(small)
                small, elements = [], 0
        if small:
            _accumulate_together(small)

    def end_step(self) -> None:
        """Put the parameters back into the module, with their gradients; idempotent."""
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
        return [_Weight(parameter, own, self._dtype) for parameter, own in owners.items()]


class _Weight:
    """Compute copy and gradient sum of one parameter.

    Args:
        master: the parameter, which the optimizer updates.
        owners: the modules that have it, with its names; several if it is tied.
        dtype: the compute dtype.

    Attributes:
        compute: the parameter that modules compute with; the master itself if dtypes are equal.
        is_small: whether gradients are kept until the end of the backward pass.
        sum: the float32 sum of the gradients of the step so far.
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
        """Whether gradients are summed in float32 at present."""
        self.sum: Tensor | None = None
        if master.dtype != dtype:
            copy = torch.empty_like(master, dtype=dtype)
            self.compute = nn.Parameter(copy, requires_grad=master.requires_grad)
        self.is_small = master.numel() <= SMALL
        if master.requires_grad and not self.is_small:
            self.compute.register_post_accumulate_grad_hook(lambda _: self.accumulate_gradient())

    def needs_copy(self) -> bool:
        """Return True if the compute copy may differ from the master.

        Fused optimizers do not count their changes of a parameter, so that only parameters that are
        not trained have a version to rely on.
        """
        if self.compute is self.master:
            return False
        before, self._version = self._version, self.master._version
        return self.master.requires_grad or before != self._version

    def begin_step(self, sums: bool) -> None:
        """Put the compute copy into the modules.

        Args:
            sums: whether the step has several gradients of the parameter.
        """
        if self.compute is not self.master:
            for owner, name in self._owners:
                assert owner._parameters[name] is self.master, name
                owner._parameters[name] = self.compute
        # One gradient is its own sum.
        self._sums = sums or self.compute is not self.master or self.master.grad is not None
        if self._sums and self.master.grad is not None:
            self.sum, self.master.grad = self.master.grad.float(), None

    def has_new_gradient(self) -> bool:
        """Return True if a gradient has to be moved into the float32 sum."""
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
def _accumulate_together(weights: list[_Weight]) -> None:
    """Move the gradients of several compute copies into their float32 sums."""
    gradients: list[Tensor] = []
    for weight in weights:
        assert weight.compute.grad is not None
        gradients.append(weight.compute.grad)
        weight.compute.grad = None
    # On CUDA, one kernel adds several tensors only if all have the same dtype.
    wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    torch._foreach_copy_(wide, gradients)
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    for weight, addend in zip(weights, wide, strict=True):
        if weight.sum is None:
            weight.sum = addend
        else:
            sums.append(weight.sum)
            addends.append(addend)
    if sums:
        torch._foreach_add_(sums, addends)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with all floating-point tensors in it in `dtype`, itself if all are.

    Args:
        value: tensors in lists, tuples, mappings and dataclasses, as in inputs of modules.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        cast = {key: cast_floats(part, dtype) for key, part in value.items()}
        return value if _same(cast.values(), value.values()) else cast
    if isinstance(value, list | tuple):
        parts = [cast_floats(part, dtype) for part in value]
        if _same(parts, value):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        own = {part.name: getattr(value, part.name) for part in fields(value)}
        cast = cast_floats(own, dtype)
        return value if cast is own else replace(value, **cast)
    return value


def _same(ours: Any, theirs: Any) -> bool:
    """Return True if both have the same objects."""
    return all(a is b for a, b in zip(ours, theirs, strict=True))


def _casting(method: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return a method with the inputs cast, which hooks do for `forward` only."""

    @wraps(method)
    def casting(*args: Any, **kwargs: Any) -> Any:
        return method(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))

    return casting
