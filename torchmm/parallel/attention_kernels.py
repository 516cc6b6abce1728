"""Attention kernels of a process on CUDA: torch, FlashAttention 3 or FlashAttention 4.

Packed attention calls operators of torch, for which `torch.nn.attention` can register kernels of
different packages. These packages raise errors for unsupported masks, windows and dtypes. Only the
kernels of torch have been tested. Encoders with images of one size have a separate setting, by GPU
and head dimension (`torchmm.models.layers.attention.image_kernels`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import attention

from torchmm.models.layers.attention import image_kernels

AttentionKernels = Literal["default", "fa3", "fa4"]
_PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn"}
"""Modules that torch imports for each kernel."""


def kernel_problems(kernels: AttentionKernels, device: torch.device) -> list[str]:
    """Return why a device does not support these kernels. Empty if it does."""
    if kernels == "default":
        return []
    key = f'training.attention = "{kernels}"'
    if device.type != "cuda":
        return [f'{key}: requires a GPU; use "default"']
    if kernels.upper() not in _available_kernels():
        return [f'{key}: torch {torch.__version__} cannot select this kernel; use "default"']
    if importlib.util.find_spec(_PACKAGES[kernels]) is None:
        return [f'{key}: {_PACKAGES[kernels]} is not installed; install it, or use "default"']
    return []


def select_kernels(kernels: AttentionKernels, device: torch.device) -> str:
    """Select the attention kernels of torch, and return a line for the log."""
    if kernels != "default":
        activate: Callable[[str], None] = attention.activate_flash_attention_impl
        activate(kernels.upper())
    name = "torch" if kernels == "default" else f"FlashAttention {kernels[-1]}"
    images = describe_image_kernels(device)
    return f"attention kernels: {name}" + (f"; images of one size: {images}" if images else "")


def describe_image_kernels(device: torch.device) -> str:
    """Return the attention kernels of encoders with images of one size on a GPU; "" on a CPU."""
    if device.type != "cuda":
        return ""
    measured = image_kernels(torch.cuda.get_device_name(device)).items()
    widths = [width for width, kernel in measured if kernel == "cudnn"]
    return f"cuDNN for heads of {', '.join(widths)}" if widths else "flash"


def _available_kernels() -> list[str]:
    names: Callable[[], list[str]] = getattr(attention, "list_flash_attention_impls", list)
    return names()
