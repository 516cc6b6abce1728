"""AdamW on compact tensors as one compiled function: read, update, round, encode and write.

The function processes units of `BLOCK` adjacent elements in a row. A large tensor requires one
call, and therefore one kernel. Small tensors, and tensors whose rows end within a unit, are joined:
they are copied into one buffer, updated in one call, and copied back.

The order of operations is that of the vectorized loop of the fused AdamW of torch for CPUs. On a
CPU the results are bitwise equal to that optimizer, except in the last `size % 16` elements of a
tensor. The scalar loop for these elements rounds second moments differently, by one unit in the
last place.

Multiplications and additions are fused only in `fused_multiply_add`, and `emulate_precision_casts`
disables all other contractions. An element should therefore have the same bits in all shards, in
all replicas of a parameter, in joined and separate calls, and in a resumed run, on one type of
device. Tests show this with inductor for CPUs. The function has not been tested on CUDA. Results on
CUDA and on a CPU differ, because Triton approximates divisions.

Shape legend: R rows and C columns of a tensor; P tensors; U units; W elements of a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmm.common.device_copies import to_device
from torchmm.extensions.low_precision.state_formats import (
    BLOCK,
    RandomBits,
    ShardPositions,
    StorageFormat,
    StoredTensors,
    as_int32,
)
from torchmm.parallel.torch_compat import fused_multiply_add

MAX_SMALL_ELEMENTS = 2**20
"""Maximum number of elements of a tensor that is joined because it is small."""
JOINED_ELEMENTS = 2**22
"""Number of elements of a joined call.

The last tensor may exceed this limit by `MAX_SMALL_ELEMENTS` elements or a row.
"""
STEP_KEY, MOMENT_KEY = 0x5851F42D, 0x14057B7E
"""Factors of the step and of the moment number in the key of random bits."""
INDUCTOR_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,  # no contraction of multiplications and additions
    "assert_indirect_indexing": False,  # no index depends on external data
    "max_pointwise_cat_inputs": 16,  # one kernel for the numbers of `_scalars`
}
"""Options of torch.compile."""


class GraphKey(NamedTuple):
    """Key of a compiled graph."""

    formats: tuple[StorageFormat, StorageFormat, StorageFormat]
    """Storage formats of the parameter and its two moments."""
    small_beta1: bool
    """Whether beta1 is at most 0.5."""


class AdamWConstants(NamedTuple):
    """Constants of AdamW."""

    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True)
class UpdateSlice:
    """Rows of one parameter to update.

    Attributes:
        target, gradient: (R, C).
        moments: The stored first and second moment.
        positions: int32 positions of the rows and columns.
        step: 0-dim, the number of this update, on the device.
        name_key: Hash of the parameter name.
    """

    kind: GraphKey
    target: Tensor
    gradient: Tensor
    moments: tuple[StoredTensors, StoredTensors]
    positions: ShardPositions
    step: Tensor
    name_key: int
    lr: float
    weight_decay: float

    def tensors(self) -> list[tuple[Tensor, int, int]]:
        """Return gradient, target and states, their elements per unit and their padding values."""
        states = [
            (tensor, 1 if suffix else BLOCK, storage_format.zero)
            for storage_format, stored in zip(self.kind.formats[1:], self.moments, strict=True)
            for suffix, tensor in stored.items()
        ]
        return [(self.gradient, BLOCK, 0), (self.target, BLOCK, 0), *states]

    @property
    def padding(self) -> int:
        """Return the elements missing in the last unit of a row."""
        return -self.target.shape[1] % BLOCK

    def split(self) -> Iterator[UpdateSlice]:
        """Yield the slice in parts of at most `JOINED_ELEMENTS` elements, or one row."""
        rows = max(1, JOINED_ELEMENTS // (self.target.shape[1] + self.padding))
        for start in range(0, self.target.shape[0], rows):
            part = slice(start, start + rows)
            first, second = ({k: t[part] for k, t in one.items()} for one in self.moments)
            yield replace(
                self,
                target=self.target[part],
                gradient=self.gradient[part],
                moments=(first, second),
                positions=self.positions.of_rows(part),
            )


def update_slices(
    slices: Sequence[UpdateSlice],
    constants: AdamWConstants,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Apply one AdamW update to all slices, in place.

    Args:
        grad_scale: 0-dim divisor of the gradients, or None.
        found_inf: 0-dim; if it is not 0, no tensor changes. May be None.
    """
    groups: list[list[UpdateSlice]] = []
    small: list[UpdateSlice] = []
    for update_slice in slices:
        if update_slice.padding or update_slice.target.numel() <= MAX_SMALL_ELEMENTS:
            small.extend(update_slice.split())
        else:
            groups.append([update_slice])
    separate = len(groups)
    groups.extend(_group_slices(small))
    if not groups:
        return
    device = groups[0][0].target.device
    ordered = [update_slice for group in groups for update_slice in group]
    numbers_PN, keys_P4 = _numbers(ordered, constants, grad_scale, found_inf)
    table_P6 = to_device(
        torch.tensor([row for group in groups for row in _unit_offsets(group)]), device
    )
    start = 0
    for index, group in enumerate(groups):
        if index < separate:
            (update_slice,) = group
            units = [tensor.view(-1, width) for tensor, width, _ in update_slice.tensors()]
            tables = [table_P6[start], keys_P4[start], numbers_PN[start]]
            _compiled(_update_units, update_slice.kind)(units, [*update_slice.positions], tables)
        else:
            rows = slice(start, start + len(group))
            _update_joined(group, [table_P6[rows], keys_P4[rows], numbers_PN[rows]])
        start += len(group)


def _group_slices(slices: Iterable[UpdateSlice]) -> Iterator[list[UpdateSlice]]:
    """Yield groups of slices of one kind with about `JOINED_ELEMENTS` elements."""
    by_kind: dict[tuple, list[UpdateSlice]] = {}
    for update_slice in slices:
        by_kind.setdefault((update_slice.kind, update_slice.gradient.dtype), []).append(
            update_slice
        )
    for group in by_kind.values():
        group_slices: list[UpdateSlice] = []
        elements = 0
        for update_slice in group:
            group_slices.append(update_slice)
            elements += update_slice.target.shape[0] * (
                update_slice.target.shape[1] + update_slice.padding
            )
            if elements >= JOINED_ELEMENTS:
                yield group_slices
                group_slices, elements = [], 0
        if group_slices:
            yield group_slices


def _unit_offsets(group: Sequence[UpdateSlice]) -> list[list[int]]:
    """Return for each slice its first unit, row and column, units per row, and columns.

    A row has a multiple of 16 bytes. Compiled code copies inputs that start elsewhere.
    """
    table = []
    first_unit = first_row = first_column = 0
    for update_slice in group:
        rows, columns = update_slice.target.shape
        per_row = -(-columns // BLOCK)
        table.append([first_unit, first_row, first_column, per_row, columns, 0])
        first_unit += rows * per_row
        first_row += rows
        first_column += columns
    return table


def _numbers(
    slices: Sequence[UpdateSlice],
    constants: AdamWConstants,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the float32 numbers of `_adamw`, one row per slice, and the (P, 4) int32 keys."""
    values = (
        (update_slice.lr, update_slice.weight_decay, float(as_int32(update_slice.name_key)))
        for update_slice in slices
    )
    host_P6 = torch.tensor([[*numbers, *constants] for numbers in values], dtype=torch.float64)
    steps_P = torch.stack([update_slice.step for update_slice in slices])
    host_P6 = to_device(host_P6, steps_P.device)
    return _compiled(_scalars)(steps_P, host_P6, grad_scale, found_inf)


def _scalars(
    steps_P: Tensor, host_P6: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor, Tensor]:
    lr_P, weight_decay_P, names_P, beta1_P, beta2_P, eps_P = host_P6.unbind(1)
    steps = steps_P.double()  # The kernel for CPUs computes these numbers in float64.
    zeros = torch.zeros_like(steps)
    numbers = [
        1 - lr_P * weight_decay_P,
        -(lr_P / (1 - beta1_P**steps)),
        (1 - beta2_P**steps).sqrt(),
        1 - beta1_P,
        beta2_P,
        1 - beta2_P,
        eps_P,
        zeros + 1 if grad_scale is None else zeros + grad_scale,
        zeros if found_inf is None else zeros + found_inf,
        *[zeros] * 3,  # to a multiple of 16 bytes
    ]
    keys_P = steps_P.int() * STEP_KEY + names_P.int()
    keys_P4 = torch.stack([keys_P + as_int32(i * MOMENT_KEY) for i in range(4)], 1)
    return torch.stack([n.float() for n in numbers], 1), keys_P4


def _update_joined(group: Sequence[UpdateSlice], tables: Sequence[Tensor]) -> None:
    """Copy slices into common buffers, update these, and copy the results back."""
    device = group[0].target.device
    buffers, stored, copies = [], [], []
    for parts in zip(*(update_slice.tensors() for update_slice in group), strict=True):
        first, width, padding_value = parts[0]
        sizes = [t.shape[0] * -(-t.shape[1] // width) * width for t, _, _ in parts]
        buffer = torch.empty(sum(sizes), dtype=first.dtype, device=device)
        if any(update_slice.padding for update_slice in group):
            buffer.fill_(padding_value)
        buffers.append(buffer.view(-1, width))
        for (tensor, _, _), target in zip(parts, buffer.split(sizes), strict=True):
            if tensor.shape[0] > 1 and target.numel() > tensor.numel():
                stored.append(tensor)
                copies.append(target.view(tensor.shape[0], -1)[:, : tensor.shape[1]])
            else:
                stored.append(tensor.view(-1))
                copies.append(target[: tensor.numel()])
    _copy_all(copies, stored)
    rows = torch.cat([update_slice.positions.rows_R for update_slice in group])
    columns = torch.cat([update_slice.positions.columns_C for update_slice in group])
    slice_P = torch.arange(len(group), device=device)
    units = [
        update_slice.target.shape[0] * -(-update_slice.target.shape[1] // BLOCK)
        for update_slice in group
    ]
    units_P = to_device(torch.tensor(units), device)
    slice_U = slice_P.repeat_interleave(units_P, output_size=sum(units))
    update = _compiled(_update_units, group[0].kind)
    update(buffers, [rows, columns], tables, slice_U)
    unchanged = len(group)  # the gradients
    _copy_all(stored[unchanged:], copies[unchanged:])


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, of equal shape and dtype, with few kernels."""
    by_kind: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        # Separate lists, because non-contiguous tensors disable the fast path of a list.
        lists = by_kind.setdefault((target.dtype, target.ndim), ([], []))
        lists[0].append(target)
        lists[1].append(source)
    for group_targets, group_sources in by_kind.values():
        torch._foreach_copy_(group_targets, group_sources)


def _update_units(
    kind: GraphKey,
    tensors: Sequence[Tensor],
    shard_positions: Sequence[Tensor],
    tables: Sequence[Tensor],
    slice_U: Tensor | None = None,
) -> None:
    """Update units of one or several slices in place.

    Args:
        tensors: The gradient, the value and the tensors of both moments. (U, W), scales (U, 1).
        shard_positions: The positions of the rows and of the columns of all slices.
        tables: From `_unit_offsets` and `_numbers`, for one or all slices.
        slice_U: The slice of each unit, if there are several.
    """
    # Views with a constant number of columns, which the compiler needs for one kernel.
    gradient, target, *states = (
        tensor if tensor.shape[1] == 1 else tensor.view(-1, BLOCK) for tensor in tensors
    )
    rows, columns = shard_positions
    unit_positions, keys, numbers = (
        table.unbind() if slice_U is None else [column[slice_U] for column in table.unbind(1)]
        for table in tables
    )
    first_unit, first_row, first_column, per_row, column_count, _ = unit_positions
    unit_U = torch.arange(target.shape[0], device=target.device) - first_unit
    column_UW = (unit_U % per_row * BLOCK)[:, None] + torch.arange(BLOCK, device=target.device)
    column_UW = column_UW.minimum((column_count - 1).view(-1, 1))  # padding
    column_UW = column_UW + first_column.view(-1, 1)
    positions = ShardPositions(rows[first_row + unit_U // per_row], columns[column_UW])
    half = len(states) // 2
    first, second = (
        dict(zip(("", "_scale"), part, strict=False)) for part in (states[:half], states[half:])
    )
    numbers = [number.view(-1, 1) for number in numbers[:9]]
    _adamw(kind, gradient, ({"": target}, first, second), positions, keys[:3], numbers)


def _adamw(
    kind: GraphKey,
    gradient: Tensor,
    stored: Sequence[StoredTensors],
    positions: ShardPositions,
    keys: Sequence[Tensor],
    numbers: Sequence[Tensor],
) -> None:
    """Update the stored value and moments of (U, W) elements in place.

    Args:
        keys: Keys of the random bits of the value, the first and the second moment.
        numbers: (U, 1) or (1, 1) each, see `_scalars`.
    """
    decay, negative_step, bias2_sqrt, weight1, beta2, weight2, eps, grad_scale, found_inf = numbers
    value, exp_avg, exp_avg_sq = (f.read(t) for f, t in zip(kind.formats, stored, strict=True))
    gradient = gradient.float() / grad_scale
    distance = gradient - exp_avg
    if kind.small_beta1:
        exp_avg = fused_multiply_add(weight1 - 1, distance, gradient)
    else:
        exp_avg = fused_multiply_add(weight1, distance, exp_avg)
    exp_avg_sq = fused_multiply_add(weight2 * gradient, gradient, exp_avg_sq * beta2)
    denominator = exp_avg_sq.sqrt() / bias2_sqrt + eps
    value = value * decay + negative_step * exp_avg / denominator
    results = (value, exp_avg, exp_avg_sq)
    for storage_format, old, new, key in zip(kind.formats, stored, results, keys, strict=True):
        for suffix, encoded in storage_format.encode(new, RandomBits(positions, key)).items():
            old[suffix].copy_(torch.where(found_inf == 0, encoded, old[suffix]))


@cache
def _compiled(function: Callable[..., Any], *kind: GraphKey) -> Callable[..., Any]:
    """Return `function` of `kind`, compiled for all sizes of tensors."""

    def call(*args: object) -> object:
        return function(*kind, *args)

    # torch.compile looks graphs up by code. Each kind has separate code.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return torch.compile(call, fullgraph=True, dynamic=True, options=INDUCTOR_OPTIONS)
