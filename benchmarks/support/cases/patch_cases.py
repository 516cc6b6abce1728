"""Qwen2.5-VL's patch embedding: before, the convolution; after, the same module as a product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from support.harness import Row, time_pairs
from torchmm.models.layers.patch_embedding import patch_embed_as_matmul

PATCH_EMBEDDING = "patch embedding"
"""Name of the rows' case, without width and dtype."""
WIDTH = 1280
KERNEL = (2, 14, 14)
"""Frames, rows, columns of a patch."""


def patch_rows(patches: int, pairs: int) -> list[Row]:
    """Return times of forward and backward, before (the baseline) and after, in fp32 and bf16."""
    rows = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        before, after = _convolution(dtype), _convolution(dtype)
        patch_embed_as_matmul(after)
        x = torch.randn(patches, 3, *KERNEL, generator=torch.Generator().manual_seed(0))
        ours, baseline = (_pass(module, x.to(dtype)) for module in (after, before))
        ours(), baseline()
        times = time_pairs(ours, baseline, pairs, torch.device("cpu"))
        case = f"{PATCH_EMBEDDING}, width {WIDTH}, {patches} patches, {name}"
        seconds = times.median_ours_s, times.median_baseline_s
        rows.append(Row(case, "forward and backward", "s", *seconds, better="lower"))
        rows.append(Row(case, "speedup", "x", times.speed_ratio, baseline=1.0, goal=1.0))
    return rows


def _convolution(dtype: torch.dtype) -> nn.Conv3d:
    return nn.Conv3d(3, WIDTH, KERNEL, KERNEL, bias=False, dtype=dtype)


def _pass(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        module.zero_grad()
        module(x).sum().backward()

    return run
