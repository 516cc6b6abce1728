"""Storage forms of frozen weights of linear layers, such as 4-bit codes.

A converter (`torchmm.planning.converters`) replaces the weight (O, I) of a linear layer by a uint8
tensor (O, bytes). A row has consecutive blocks, and a block has all bytes of `block` adjacent
inputs. Shards with complete rows or complete blocks therefore have the same bytes in every
parallelism config, and checkpoints have the same tensor.

Shape legend: O output features, I input features.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class WeightFormat(Protocol):
    """Storage form of the weight of a linear layer."""

    @property
    def block(self) -> int:
        """Return the number of adjacent inputs in a block."""
        ...

    @property
    def block_bytes(self) -> int:
        """Return the number of bytes of a block."""
        ...

    def encode(self, weight_OI: Tensor) -> Tensor:
        """Return the uint8 tensor (O, bytes) of weights (O, I)."""
        ...

    def decode(self, stored: Tensor) -> Tensor:
        """Return the weights (O, I), in the dtype of the original parameter."""
        ...


def stored_shape(shape: torch.Size, form: WeightFormat) -> torch.Size:
    """Return the shape of the stored tensor of a weight (O, I)."""
    outputs, inputs = shape
    return torch.Size([outputs, inputs // form.block * form.block_bytes])


def value_shape(stored: torch.Size, form: WeightFormat) -> torch.Size:
    """Return the shape (O, I) of the weight of a stored tensor."""
    outputs, columns = stored
    return torch.Size([outputs, columns // form.block_bytes * form.block])


def value_slices(stored: tuple[slice, ...], form: WeightFormat) -> tuple[slice, ...]:
    """Return the slices of a weight (O, I) for slices of its stored tensor.

    Raises:
        ValueError: The slices divide a block.
    """
    rows, columns = stored
    if columns.start % form.block_bytes or columns.stop % form.block_bytes:
        raise ValueError(f"bytes {columns.start} to {columns.stop} divide a block of a weight")
    start, stop = (n // form.block_bytes * form.block for n in (columns.start, columns.stop))
    return rows, slice(start, stop)
