"""4-bit NormalFloat (NF4, arXiv 2305.14314) weights of frozen linear layers.

A block of 64 adjacent inputs of one output has a scale, the maximum magnitude in float32, and 64
codes. A code is the index of the nearest of 16 levels to weight / scale. A stored block has 32
bytes with two codes each, the first in the high bits, followed by the 4 bytes of the scale.

    stored[o] = block 0: 32 bytes of codes, 4 bytes of scale | block 1: ...        4.5 bits/weight

A stored weight is one plain uint8 parameter. FSDP2 shards and gathers its rows without a cast,
tensor parallelism shards rows or blocks, and checkpoints save it like other parameters. A rank
encodes its shard of a file to the same bytes as a single process.

Other implementations do not have this property. `NF4Tensor` of torchao subtracts the mean scale of
the tensor, so that separately encoded shards differ (`benchmarks/results`). In bitsandbytes, scales
are attributes of a parameter subclass, which FSDP2 does not shard. Double quantization of scales
would save another 0.37 bits per weight, but its blocks of 256 scales are shared by several rows.

The backward pass decodes the weight again, so that autograd does not save the decoded weight.

Shape legend: O output features, I input features, K blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchmm.common.device_copies import to_device

BLOCK = 64
"""Number of weights with a common scale."""
BLOCK_BYTES = 36
"""Stored bytes of a block."""
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the codes (arXiv 2305.14314, appendix E)."""
CHUNK = 2**22
"""Maximum number of weights that are encoded or decoded together, to bound temporary memory."""


@dataclass(frozen=True)
class Nf4Format:
    """NF4 storage of a weight, a `WeightFormat`.

    Attributes:
        dtype: Dtype of the original parameter.
    """

    dtype: torch.dtype
    block: ClassVar[int] = BLOCK
    block_bytes: ClassVar[int] = BLOCK_BYTES

    def encode(self, weight_OI: Tensor) -> Tensor:
        """Return the uint8 codes and scales, see `WeightFormat`."""
        rows = max(1, CHUNK // max(1, weight_OI.shape[1]))
        return torch.cat([_encode(chunk) for chunk in weight_OI.split(rows)])

    def decode(self, stored: Tensor) -> Tensor:
        """Return the weights in `dtype`, see `WeightFormat`."""
        return decode(stored, self.dtype)


class Nf4Linear(nn.Linear):
    """A frozen linear layer with an NF4 weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the linear layer with the decoded weight."""
        return multiply(input, self.weight, self.bias)


def convert_linear(linear: nn.Linear) -> None:
    """Replace the weight of a linear layer on the meta device, in place."""
    outputs, inputs = linear.weight.shape
    stored = linear.weight.new_empty(outputs, inputs // BLOCK * BLOCK_BYTES, dtype=torch.uint8)
    linear.weight = nn.Parameter(stored, requires_grad=False)
    linear.__class__ = Nf4Linear


def multiply(x: Tensor, stored: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b.

    Args:
        x: (..., I), floating-point.
        stored: (O, bytes), NF4 weight.
        bias: (O,), frozen.
    """
    if not x.is_floating_point():
        raise TypeError(f"the input of a quantized linear layer is {x.dtype}, not floating-point")
    product: Tensor = _Multiply.apply(x, stored, bias)
    return product


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored)
        return functional.linear(x, decode(stored, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (stored,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ decode(stored, gradient.dtype), None, None


def decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights (O, I) in `dtype`. Products of level and scale are rounded once."""
    if torch.compiler.is_compiling():  # inductor fuses the operators
        return _decode(stored, dtype)
    outputs, columns = stored.shape
    inputs = columns // BLOCK_BYTES * BLOCK
    rows = max(1, CHUNK // max(1, inputs))
    if outputs <= rows:
        return _decode(stored, dtype)
    weight_OI = torch.empty(outputs, inputs, dtype=dtype, device=stored.device)
    for chunk, part in zip(weight_OI.split(rows), stored.split(rows), strict=True):
        chunk.copy_(_decode(part, dtype))
    return weight_OI


def _encode(weight_OI: Tensor) -> Tensor:
    blocks = weight_OI.float().unflatten(1, (-1, BLOCK))
    scales_OK1 = blocks.abs().amax(-1, keepdim=True)
    scaled = blocks / scales_OK1.clamp(min=torch.finfo(torch.float32).tiny)
    levels = torch.tensor(LEVELS)
    limits = ((levels[1:].double() + levels[:-1].double()) / 2).float()
    codes = torch.bucketize(scaled, limits.to(scaled.device), out_int32=True).to(torch.uint8)
    pairs = codes[..., ::2] << 4 | codes[..., 1::2]
    return torch.cat((pairs, scales_OK1.contiguous().view(torch.uint8)), -1).flatten(1)


def _decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = stored.unflatten(1, (-1, BLOCK_BYTES))
    scales_OK1 = blocks[..., BLOCK // 2 :].contiguous().view(torch.float32)
    pairs = _level_pairs(stored.device)[blocks[..., : BLOCK // 2].int()]
    return (pairs.flatten(2) * scales_OK1).to(dtype).flatten(1)


@cache
def _level_pairs(device: torch.device) -> Tensor:
    """Return the two levels of each byte, (256, 2), float32."""
    levels = torch.tensor(LEVELS)
    codes = torch.arange(256)
    return to_device(torch.stack((levels[codes >> 4], levels[codes & 15]), -1), device)
