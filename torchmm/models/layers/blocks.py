"""Tokens that see each other in both directions although attention is causal.

Gemma 3 lets the tokens of an image see each other, PaliGemma those of a prompt. With causal
attention alone losses are off by 1e-3 or less: little enough to miss.

Shape legend: T tokens of a microbatch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torchmm.models.layers.attention import to_device


def image_blocks(images_T: Tensor, cu_seqlens: list[int]) -> Tensor:
    """int64 (T,): which run of neighbouring image tokens a token belongs to; -1: to none.

    Args:
        images_T: bool: placeholders.
        cu_seqlens: starts of samples, and T; no run goes from one to the next.
    """
    begins_T = images_T & ~torch.cat([images_T.new_zeros(1), images_T[:-1]])
    begins_T |= images_T & _starts(cu_seqlens, images_T.device)
    return torch.where(images_T, begins_T.cumsum(0) - 1, -1)


def prompt_blocks(targets_T: Tensor, cu_seqlens: list[int]) -> Tensor:
    """int64 (T,): the sample whose prompt a token belongs to; -1: to none.

    The prompt ends with the first token that has a target.

    Args:
        targets_T: bool: which tokens have one.
    """
    before_T = targets_T.cumsum(0) - targets_T.long()
    sample_T = _starts(cu_seqlens, targets_T.device).cumsum(0) - 1
    first_S = to_device(torch.tensor(cu_seqlens[:-1]), targets_T.device)
    return torch.where(before_T == before_T[first_S][sample_T], sample_T, -1)


def _starts(cu_seqlens: list[int], device: torch.device) -> Tensor:
    """bool (T,): first tokens of samples."""
    starts_T = torch.zeros(cu_seqlens[-1], dtype=torch.bool)
    starts_T[[start for start, _ in pairwise(cu_seqlens)]] = True
    return to_device(starts_T, device)
