"""Storage forms of parameters and optimizer states between steps. Updates compute in float32.

There are three forms: float32, bfloat16 with stochastic rounding, and 8 bits with a scale per
block.

**Stochastic rounding.** An update is often smaller than half the distance of two bfloat16 numbers,
and rounding to the nearest would always discard it. Rounding up with a probability equal to the
remainder is correct on average. The random bits are a hash of the parameter name, its step and the
position of the element in the unsharded tensor. They therefore do not depend on sharding, replicas
of a parameter on other ranks stay bitwise identical, and a resumed run continues with the same bits
without any state. Random generators are not used (torchao uses the generator of the rank), because
they differ between replicas and parallelism configs.

**8 bits.** Codes of a dynamic map (Dettmers, arXiv 2110.02861): exponents from 1 to 1e-7 with finer
steps towards 1, relative to the maximum of a block. A block is `BLOCK` adjacent elements in the
last dimension of the unsharded tensor. FSDP2 shards other dimensions, so no shard splits a block.
If tensor parallelism would split blocks, the recipe is rejected (`block_problems`). States are
therefore independent of the parallelism config, and load into any. In torchao, blocks follow the
flattened shard, and the shard size selects the 8-bit tensors. In contrast to torchao, second
moments never round to 0 unless they are 0, because a division by 0 would cause updates of any size.

Shape legend: R rows (all dimensions except the last), C columns (the last dimension), B blocks of a
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from torchmm.common.device_copies import to_device
from torchmm.common.layers import ModuleDescription
from torchmm.costs.layers import local_linears
from torchmm.models.hf.load import local_slices, local_tensor
from torchmm.recipe.training_section import STATE_BLOCK as BLOCK

StateDtype = Literal["float32", "bfloat16", "int8"]
StoredTensors = dict[str, Tensor]
"""Stored tensors of one value, by the suffix of its name."""


class ShardPositions(NamedTuple):
    """Positions of a local shard in the unsharded tensor."""

    rows_R: Tensor
    """Row numbers in the unsharded tensor, counted over all dimensions but the last."""
    columns_C: Tensor
    """Column numbers in the unsharded tensor; (R, C) if they differ between rows."""

    def of_rows(self, rows: slice) -> ShardPositions:
        """Return the positions of some of the rows."""
        return ShardPositions(self.rows_R[rows], self.columns_C)


def as_rows(local: Tensor) -> Tensor:
    """Return an (R, C) view of a contiguous tensor. Vectors and scalars are one row."""
    assert local.is_contiguous()  # otherwise this would be a copy
    return local.flatten(0, -2) if local.ndim > 1 else local.view(1, -1)


def shard_positions(tensor: Tensor) -> ShardPositions:
    """Return the int32 positions of the local shard of a parameter, on the parameter device."""
    device = local_tensor(tensor).device
    indices = [
        torch.arange(local_slice.start, local_slice.stop, device=device)
        for local_slice in local_slices(tensor)
    ] or [torch.zeros(1, dtype=torch.int64, device=device)]
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, numbers in enumerate(indices[:-1]):
        stride = prod(tensor.shape[dim + 1 : -1])
        rows = (rows[:, None] + stride * numbers).flatten()
    return ShardPositions(rows.int(), indices[-1].int())


def as_int32(bits: int) -> int:
    """Return the int32 value with the lowest 32 bits of `bits`."""
    return (bits + 2**31) % 2**32 - 2**31


def _hash(x: Tensor) -> Tensor:
    """Return the finalizer of MurmurHash3 of int32 values, with wrapping multiplications."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * as_int32(0x85EBCA6B)
    x = (x ^ ((x >> 13) & 0x7FFFF)) * as_int32(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


@dataclass(frozen=True)
class RandomBits:
    """Random bits for the elements of a tensor, independent of the parallelism config.

    Attributes:
        key: int32 on the device, different for every tensor and step, a scalar or (R,).
    """

    positions: ShardPositions
    key: Tensor

    def noise(self) -> Tensor:
        """Return (R, C) int32 values, uniform over [0, 2^16)."""
        rows_R = _hash(self.positions.rows_R.int() * as_int32(0x9E3779B1) + self.key.int())
        columns_C = _hash(self.positions.columns_C.int() * 0x7FEB352D + 0x2545F491)
        # The second hash combines row and column.
        noise_RC = rows_R[:, None] ^ columns_C
        noise_RC *= 0x2C1B3C6D
        noise_RC ^= noise_RC >> 15
        noise_RC *= 0x297A2D39
        return (noise_RC >> 16) & 0xFFFF

    def rounded(self, value_RC: Tensor) -> Tensor:
        """Return values rounded to bfloat16 stochastically.

        The probability of rounding away from 0 is the fraction of the lowest 16 bits.
        """
        bits_RC = self.noise()
        bits_RC += value_RC.view(torch.int32)
        bits_RC &= -0x10000
        return bits_RC.view(torch.float32).to(torch.bfloat16)


class StorageFormat(Protocol):
    """Storage form of a tensor between updates."""

    @property
    def zero(self) -> int:
        """Return the stored number of the value 0."""
        ...

    def shapes(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return shapes and dtypes of the stored tensors for an unsharded tensor."""
        ...

    def read(self, stored: StoredTensors) -> Tensor:
        """Return (R, C) float32 values; the stored tensor itself if it is float32."""
        ...

    def encode(self, value_RC: Tensor, bits: RandomBits) -> StoredTensors:
        """Return the tensors to store for float32 values, in the dtypes of `shapes`."""
        ...


@dataclass(frozen=True)
class Float32Format:
    """Float32 storage without conversion."""

    zero: ClassVar[int] = 0

    def shapes(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and float32, see `StorageFormat`."""
        return {"": (shape, torch.float32)}

    def read(self, stored: StoredTensors) -> Tensor:
        """Return the stored tensor, see `StorageFormat`."""
        return stored[""]

    def encode(self, value_RC: Tensor, bits: RandomBits) -> StoredTensors:
        """Return the value unchanged, see `StorageFormat`."""
        return {"": value_RC}


@dataclass(frozen=True)
class BFloat16Format:
    """Bfloat16 storage.

    Attributes:
        stochastic: Whether to round stochastically instead of to the nearest value.
    """

    zero: ClassVar[int] = 0
    stochastic: bool = True

    def shapes(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and bfloat16, see `StorageFormat`."""
        return {"": (shape, torch.bfloat16)}

    def read(self, stored: StoredTensors) -> Tensor:
        """Return the values in float32, see `StorageFormat`."""
        return stored[""].float()

    def encode(self, value_RC: Tensor, bits: RandomBits) -> StoredTensors:
        """Return the rounded values, see `StorageFormat`."""
        return {"": bits.rounded(value_RC) if self.stochastic else value_RC.bfloat16()}


class Int8BlockFormat:
    """8-bit codes with one float32 scale per block.

    Args:
        signed: Whether values may be negative.
    """

    def __init__(self, signed: bool, device: torch.device | None = None) -> None:
        values = dynamic_map(signed)
        self.zero = values.tolist().index(0.0)
        limits = (values[1:] + values[:-1]) / 2
        if not signed:
            limits[0] = 0.0  # Only 0 has the code of 0.
        device = device or torch.device("cpu")
        self._values = to_device(values, device)
        self._limits = to_device(limits, device)

    def shapes(self, shape: torch.Size) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return the shapes of codes and scales, see `StorageFormat`."""
        blocks = torch.Size([*shape[:-1], -(-shape[-1] // BLOCK)])
        return {"": (shape, torch.uint8), "_scale": (blocks, torch.float32)}

    def read(self, stored: StoredTensors) -> Tensor:
        """Return the decoded values, see `StorageFormat`."""
        codes_RC = stored[""]
        scales_RB = stored["_scale"]
        values_RC = self._values[codes_RC.int()]
        scales = scales_RB[..., None].expand(-1, -1, BLOCK).flatten(1)[:, : codes_RC.shape[1]]
        return values_RC.mul_(scales)

    def encode(self, value_RC: Tensor, bits: RandomBits) -> StoredTensors:
        """Return the nearest codes, see `StorageFormat`."""
        rows, columns = value_RC.shape
        padded_RC = functional.pad(value_RC, (0, -columns % BLOCK))
        blocks = padded_RC.view(rows, -(-columns // BLOCK), BLOCK)
        scales_RB = blocks.abs().amax(-1)
        scaled = blocks / scales_RB.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        codes = _count_below(scaled, self._limits)
        return {"": codes.flatten(1)[:, :columns], "_scale": scales_RB}


def _count_below(values: Tensor, limits: Tensor) -> Tensor:
    """Return the number of limits below each value as uint8.

    `torch.bucketize` does the same. The compiler for CPUs cannot fuse it with other operators.

    Args:
        limits: 255 ascending numbers.
    """
    if not torch.compiler.is_compiling():
        return torch.bucketize(values, limits, out_int32=True).to(torch.uint8)
    count = torch.zeros_like(values, dtype=torch.int32)
    for width in (128, 64, 32, 16, 8, 4, 2, 1):
        # NaN is above all limits, as for `torch.bucketize`.
        count = count + width * (~(limits[count + (width - 1)] >= values)).int()
    return count.to(torch.uint8)


def dynamic_map(signed: bool) -> Tensor:
    """Return the 256 values of the codes, ascending, at most 1."""
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        # Twice as many for each exponent nearer to 0, in the middles of equal parts of [0.1, 1].
        count = 2 ** (exponent + 6) * (1 if signed else 2)
        magnitudes = [10.0**exponent * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        values += [*magnitudes, *(-magnitude for magnitude in magnitudes if signed)]
    return torch.tensor(sorted(values))


def block_problems(module: ModuleDescription, tensor: int) -> list[str]:
    """Return why moments of a module, sharded over `tensor` ranks, have no common blocks."""
    inputs = {
        round(local_linears(layer, tensor)[name][0])
        for layer in dict.fromkeys(module.layers)
        for name, (full_size, _) in local_linears(layer, 1).items()
        if local_linears(layer, tensor)[name][0] != full_size
    }
    return [
        f'optimizer.state_dtype = "int8": with parallel.tensor = {tensor}, a rank has {num_inputs} '
        f"input features of linear layers of {module.name!r}, which is not a multiple of the "
        f'block size {BLOCK}; use "bfloat16" or another tensor-parallel degree'
        for num_inputs in sorted(inputs)
        if num_inputs % BLOCK
    ]


@cache
def state_format(
    dtype: StateDtype, signed: bool, matrix: bool, device: torch.device
) -> StorageFormat:
    """Return the storage form of a moment. Vectors are small and use float32 instead of 8 bits.

    Args:
        dtype: Storage dtype of the recipe.
        signed: Whether the moment may be negative.
        matrix: Whether the parameter has several dimensions.
        device: Device of the state.
    """
    if dtype == "bfloat16":
        return BFloat16Format()
    return Int8BlockFormat(signed, device) if dtype == "int8" and matrix else Float32Format()
