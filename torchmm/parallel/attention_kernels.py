"""Which flash attention kernels torch calls on CUDA: its own, or those of FlashAttention 3 or 4.

Packed attention goes through torch's operators, into which `torch.nn.attention` puts other kernels
where their packages are installed. Masks, windows and float32 that they do not know stay an error
of theirs. No kernel but torch's own has been run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import attention

Kernels = Literal["default", "fa3", "fa4"]
_PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn"}
"""What torch imports them from."""


def kernel_problems(kernels: Kernels, device: torch.device) -> list[str]:
    """Why this kind of device cannot use these kernels."""
    if kernels == "default":
        return []
    key = f'training.attention = "{kernels}"'
    if device.type != "cuda":
        return [f'{key}: needs a GPU; use "default"']
    if kernels.upper() not in _available():
        return [f'{key}: torch {torch.__version__} has no switch for them; use "default"']
    if importlib.util.find_spec(_PACKAGES[kernels]) is None:
        return [f'{key}: {_PACKAGES[kernels]} is not installed; install it, or use "default"']
    return []


def use_kernels(kernels: Kernels) -> str:
    """Lets torch call these kernels from now on; what attention runs on, for the log."""
    if kernels == "default":
        return "attention: torch's own kernels"
    activate: Callable[[str], None] = attention.activate_flash_attention_impl
    activate(kernels.upper())
    return f"attention: kernels of FlashAttention {kernels[-1]}"


def _available() -> list[str]:
    names: Callable[[], list[str]] = getattr(attention, "list_flash_attention_impls", list)
    return names()
