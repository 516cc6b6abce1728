"""Cross entropy over a large vocabulary that never holds all logits in float32.

The logits come from Hugging Face's own head, in the compute dtype and with whatever scaling or
capping the family applies. Rows are cast, used and dropped one chunk at a time, in forward and
again in backward. Rejected: fusing the head into the chunks, which saves the compute-dtype logits
too but needs to know every family's head and, under FSDP, its gathered weight in backward.

Shape legend: L targets, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK_TARGETS = 1024
"""Rows cast to float32 at a time."""


def summed_cross_entropy(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """float32 scalar: sum of the cross entropies of all rows.

    Without chunks if they save nothing: for logits that are float32 already or fit into one chunk.
    """
    if logits_LV.dtype == torch.float32 or len(targets_L) <= CHUNK_TARGETS:
        return _in_float32(logits_LV, targets_L)
    chunks = zip(logits_LV.split(CHUNK_TARGETS), targets_L.split(CHUNK_TARGETS), strict=True)
    losses = [
        checkpoint(_in_float32, logits, targets, use_reentrant=False, preserve_rng_state=False)
        for logits, targets in chunks
    ]
    return torch.stack(losses).sum()


def _in_float32(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    return functional.cross_entropy(logits_LV.float(), targets_L, reduction="sum")
