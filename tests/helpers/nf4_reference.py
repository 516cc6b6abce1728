"""NF4 as in the paper (QLoRA, arXiv 2305.14314), written without the package."""

import torch
from torch import Tensor

NF4_LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""Appendix E of the paper."""


def nf4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the nearest level of each weight, and the scale of each block of 64."""
    blocks = weight.float().reshape(-1, 64)
    scales = blocks.abs().max(1, keepdim=True).values
    scaled = blocks / torch.where(scales == 0, 1.0, scales)
    return (scaled[:, :, None] - NF4_LEVELS).abs().argmin(2).view_as(weight), scales


def round_to_nf4(weight: Tensor) -> Tensor:
    """Return the weight rounded to NF4 values."""
    codes, scales = nf4_codes(weight)
    return (NF4_LEVELS[codes].view(-1, 64) * scales).view_as(weight)
