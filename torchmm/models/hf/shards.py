"""This rank's part of a parameter, be it a plain tensor or a DTensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, one slice per dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory of this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_slice(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into `target`."""
    local_tensor(target).copy_(whole[local_slices(target)])
