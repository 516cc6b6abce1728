"""Tensors that stay in float32 if a model is loaded in a narrower dtype.

A Hugging Face class lists such tensors as `_keep_in_fp32_modules_strict` (for float16 and bfloat16)
and `_keep_in_fp32_modules` (for float16 only). `from_pretrained` follows both lists, but building a
model from its config does not.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn


def float32_names(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the parts of tensor names that `from_pretrained` keeps in float32 for `dtype`."""
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return names


def keep_in_float32(model: nn.Module, names: Collection[str]) -> None:
    """Make parameters and buffers with these parts in their names float32, in place."""
    for fqn, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                if any(name in f"{fqn}.{leaf}" for name in names):
                    wide = tensor.detach().float()
                    if isinstance(tensor, nn.Parameter):
                        wide = nn.Parameter(wide, requires_grad=tensor.requires_grad)
                    tensors[leaf] = wide


def convert_to_buffer(module: nn.Module, leaf: str) -> None:
    """Turn a frozen parameter into a buffer, which FSDP2 does not cast to the compute dtype."""
    parameter = module._parameters.pop(leaf)
    assert parameter is not None and not parameter.requires_grad
    module.register_buffer(leaf, parameter.detach())
