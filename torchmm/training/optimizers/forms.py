"""How tensors of parameters and optimizer states rest between steps; updates compute in float32.

Three forms: float32 as it is; bfloat16, rounded at random; 8 bits, with a scale for every block.

**Rounding at random.** A step of learning is often smaller than half the distance of two bfloat16
numbers, and rounding to the nearest would lose it, always. Rounding up with a probability equal to
the remainder is right in the mean. The random bits are a hash of the parameter's name, its step and
the element's place in the *whole* tensor. So they do not depend on how a tensor is sharded, copies
of a parameter on other ranks stay bit-equal, and a resumed run goes on with the same ones, without
any state. Rejected: random generators (torchao's rounding draws from the rank's), which differ
between replicas and layouts.

**8 bits.** Codes of a dynamic map (Dettmers, arXiv 2110.02861): exponents from 1 to 1e-7 with finer
steps towards 1, relative to the largest of a block. Blocks are `BLOCK` neighbours in the last
dimension of the whole tensor. FSDP2 shards others, so that no shard cuts a block; where tensor
parallelism would, the recipe is refused (`block_problems`). States are therefore equal in every
layout, and load into any. Rejected: torchao's blocks, which follow the flattened shard, and its
choice by the shard's size which tensors have 8 bits. Unlike there, second moments never round to
0 unless they are 0: dividing by them would give steps of any size.

Shape legend: R rows (all dimensions but the last), C columns (the last dimension), B blocks of a
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from torchmm.balance.costs.layers import local_linears
from torchmm.common.device_copies import to_device
from torchmm.common.layers import ModuleDescription
from torchmm.models.hf.load import local_slices, local_tensor
from torchmm.recipe.training_section import STATE_BLOCK as BLOCK

StateDtype = Literal["float32", "bfloat16", "int8"]
_MASK = 0xFFFFFFFF
Stored = dict[str, Tensor]
"""Tensors of one value at rest, by what is appended to its name."""


class Places(NamedTuple):
    """Where a rank's part of a tensor is in the whole."""

    rows_R: Tensor
    """int64, numbers of the rows, counted over all dimensions but the last."""
    columns_C: Tensor
    """int64."""

    def of_rows(self, rows: slice) -> Places:
        """Those of some of the rows."""
        return Places(self.rows_R[rows], self.columns_C)


def as_rows(local: Tensor) -> Tensor:
    """(R, C) view of any contiguous tensor; vectors and numbers are one row."""
    assert local.is_contiguous()  # otherwise this would be a copy
    return local.flatten(0, -2) if local.ndim > 1 else local.view(1, -1)


def places_of(tensor: Tensor) -> Places:
    """Of this rank's part of a parameter, on its device."""
    device = local_tensor(tensor).device
    found = [torch.arange(own.start, own.stop, device=device) for own in local_slices(tensor)] or [
        torch.zeros(1, dtype=torch.int64, device=device)
    ]
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, numbers in enumerate(found[:-1]):
        stride = prod(tensor.shape[dim + 1 : -1])
        rows = (rows[:, None] + stride * numbers).flatten()
    return Places(rows, found[-1])


def _hashed(x: Tensor) -> Tensor:
    """32 random-looking bits for every number, as int32 (the finalizer of MurmurHash3)."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    x = x ^ (x >> 16)
    return (x - ((x >> 31) << 32)).to(torch.int32)


@dataclass(frozen=True)
class RandomBits:
    """Random bits for the elements of a tensor; the same in every layout.

    Attributes:
        key: int64 scalar on the device, different for every tensor and step.
    """

    places: Places
    key: Tensor

    def noise(self) -> Tensor:
        """(R, C) int32, uniform over [0, 2^16)."""
        rows_R = _hashed(self.places.rows_R * 0x9E3779B1 + self.key)
        columns_C = _hashed(self.places.columns_C * 0x7FEB352D + 0x2545F491)
        # Hashed once more as pairs, in 32 bits, whose products wrap around.
        noise_RC = rows_R[:, None] ^ columns_C
        noise_RC *= 0x2C1B3C6D
        noise_RC ^= noise_RC >> 15
        noise_RC *= 0x297A2D39
        return (noise_RC >> 16) & 0xFFFF

    def rounded(self, value_RC: Tensor) -> Tensor:
        """bfloat16: the neighbour away from 0 with the probability of the 16 bits that go."""
        bits_RC = self.noise()
        bits_RC += value_RC.view(torch.int32)
        bits_RC &= -0x10000
        return bits_RC.view(torch.float32).to(torch.bfloat16)


class Form(Protocol):
    """How a tensor rests."""

    def shapes(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Of what is stored for a whole tensor of that shape."""
        ...

    def read(self, stored: Stored) -> Tensor:
        """(R, C) in float32; the stored tensor itself where it is float32."""
        ...

    def write(self, stored: Stored, value_RC: Tensor, bits: RandomBits) -> None:
        """Keeps what `read` has given, changed."""
        ...


class Float32:
    """As it is."""

    def shapes(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """See `Form`."""
        return {"": (shape, torch.float32)}

    def read(self, stored: Stored) -> Tensor:
        """See `Form`."""
        return stored[""]

    def write(self, stored: Stored, value_RC: Tensor, bits: RandomBits) -> None:
        """Nothing: it was changed where it is."""


class BFloat16:
    """Half the bytes.

    Args:
        at_random: whether rounding is right in the mean, or to the nearest.
    """

    def __init__(self, at_random: bool = True) -> None:
        self._at_random = at_random

    def shapes(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """See `Form`."""
        return {"": (shape, torch.bfloat16)}

    def read(self, stored: Stored) -> Tensor:
        """See `Form`."""
        return stored[""].float()

    def write(self, stored: Stored, value_RC: Tensor, bits: RandomBits) -> None:
        """See `Form`."""
        stored[""].copy_(bits.rounded(value_RC) if self._at_random else value_RC)


class Int8Blocks:
    """Codes of 8 bits and a float32 scale for every block.

    Args:
        signed: whether values may be below 0.
    """

    def __init__(self, signed: bool) -> None:
        self._signed = signed

    def shapes(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """See `Form`."""
        blocks = torch.Size([*shape[:-1], -(-shape[-1] // BLOCK)])
        return {"": (shape, torch.uint8), "_scale": (blocks, torch.float32)}

    def read(self, stored: Stored) -> Tensor:
        """See `Form`."""
        codes_RC = stored[""]
        values_RC = _map_on(self._signed, codes_RC.device)[codes_RC.int()]
        scales_RC = stored["_scale"].repeat_interleave(BLOCK, 1)[:, : codes_RC.shape[1]]
        return values_RC.mul_(scales_RC)

    def write(self, stored: Stored, value_RC: Tensor, bits: RandomBits) -> None:
        """Codes of the nearest values."""
        rows, columns = value_RC.shape
        padded_RC = functional.pad(value_RC, (0, -columns % BLOCK))
        blocks = padded_RC.view(rows, -(-columns // BLOCK), BLOCK)
        scales_RB = blocks.abs().amax(-1)
        scaled = blocks / scales_RB.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        codes = torch.bucketize(scaled, _limits_on(self._signed, value_RC.device), out_int32=True)
        stored[""].copy_(codes.flatten(1)[:, :columns])
        stored["_scale"].copy_(scales_RB)


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of codes, ascending, at most 1."""
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        # Twice as many for each exponent nearer to 0, in the middles of even parts of [0.1, 1].
        count = 2 ** (exponent + 6) * (1 if signed else 2)
        parts = [10.0**exponent * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        values += [*parts, *(-part for part in parts if signed)]
    return torch.tensor(sorted(values))


@cache
def _map_on(signed: bool, device: torch.device) -> Tensor:
    return to_device(dynamic_map(signed), device)


@cache
def _limits_on(signed: bool, device: torch.device) -> Tensor:
    """Above which values the next code begins."""
    values = dynamic_map(signed)
    limits = (values[1:] + values[:-1]) / 2
    if not signed:
        limits[0] = 0.0  # all that is not 0 has a code that is not 0
    return to_device(limits, device)


def block_problems(module: ModuleDescription, tensor: int) -> list[str]:
    """Why a module's moments, split over `tensor` ranks, have no blocks that ranks agree on."""
    inputs = {
        round(local_linears(layer, tensor)[name][0])
        for layer in dict.fromkeys(module.layers)
        for name, (whole, _) in local_linears(layer, 1).items()
        if local_linears(layer, tensor)[name][0] != whole
    }
    return [
        f'optimizer.state_dtype = "int8": parallel.tensor = {tensor} leaves a rank {own} inputs of '
        f"linears of {module.name!r}, which is no multiple of {BLOCK}, the block of a scale; use "
        '"bfloat16" or other sizes'
        for own in sorted(inputs)
        if own % BLOCK
    ]


def state_form(dtype: StateDtype, signed: bool, ndim: int) -> Form:
    """How a moment of a parameter rests; vectors are few and stay float32 instead of 8 bits.

    Args:
        signed: whether it may be below 0.
        ndim: dimensions of the parameter.
    """
    if dtype == "bfloat16":
        return BFloat16()
    return Int8Blocks(signed) if dtype == "int8" and ndim > 1 else Float32()
