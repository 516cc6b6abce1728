"""AdamW on compact tensors as one compiled function: read, update, round, encode and write.

A large tensor takes one call, and with it one kernel. Small tensors are joined: their values are
copied into one buffer, updated in one call, and copied back.

The order of operations is that of the vectorized loop of torch's fused AdamW for CPUs, so that both
give equal bits there; the tail of that loop, up to 15 elements per tensor, rounds differently.
Multiplications and additions are fused only where the function requests it (`fused_multiply_add`).
All other contractions are disabled (`emulate_precision_casts`). So an element has the same bits in
every shard, in every copy of a parameter, in joined and in separate calls, and in a resumed run.
Results on CUDA and on a CPU differ: divisions and square roots are approximate in Triton.

Shape legend: R rows and C columns of a tensor; P tensors; U units of joined tensors, which have W
elements each: one, or a block with a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torchmm.common.device_copies import to_device
from torchmm.parallel.torch_private import fused_multiply_add
from torchmm.training.optimizers.forms import (
    BLOCK,
    Form,
    Int8Blocks,
    Places,
    RandomBits,
    Stored,
    as_int32,
)

SMALL = 2**20
"""Elements of the largest tensor that is joined with others."""
JOINED = 2**22
"""Elements in a joined call, at most `SMALL` more."""
STEP_KEY, MOMENT_KEY = 0x5851F42D, 0x14057B7E
"""Factors of the step and of the moment number in the key of random bits."""
COMPILER = {"backend": "inductor", "options": {"emulate_precision_casts": True}}


class Kind(NamedTuple):
    """How a parameter and its two moments are stored, and the constants of AdamW."""

    value: Form
    exp_avg: Form
    exp_avg_sq: Form
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True)
class Piece:
    """Rows of one parameter to update.

    Attributes:
        target, gradient: (R, C).
        moments: The stored first and second moment.
        places: int32 positions of the rows and columns.
        step: 0-dim, the number of this update, on the device.
        name_key: Hash of the parameter name.
    """

    kind: Kind
    target: Tensor
    gradient: Tensor
    moments: tuple[Stored, Stored]
    places: Places
    step: Tensor
    name_key: int
    lr: float
    weight_decay: float

    def stored(self) -> list[Tensor]:
        """Return the tensors that an update changes."""
        return [self.target, *(tensor for one in self.moments for tensor in one.values())]

    def unit(self) -> int:
        """Return the elements per unit if the piece can be joined, else 0."""
        if self.target.numel() > SMALL:
            return 0
        if not isinstance(self.kind.exp_avg, Int8Blocks):
            return 1
        return 0 if self.target.shape[1] % BLOCK else BLOCK


def update_pieces(
    pieces: Sequence[Piece], grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """Apply one AdamW update to all pieces, in place.

    Args:
        grad_scale: Divisor of the gradients, or None.
        found_inf: If not 0, nothing changes; may be None.
    """
    if not pieces:
        return
    separate = [piece for piece in pieces if not piece.unit()]
    joined = [*_joined(pieces)]
    ordered = [*separate, *(piece for group in joined for piece in group)]
    numbers_P8, keys_P = _numbers(ordered, grad_scale, found_inf)
    for piece, numbers_8, key in zip(separate, numbers_P8.unbind(), keys_P.unbind(), strict=False):
        _compiled(_update_piece, piece.kind)(
            piece.target, piece.gradient, *piece.moments, *piece.places, key, numbers_8
        )
    start = len(separate)
    for group in joined:
        stop = start + len(group)
        _update_joined(group, numbers_P8[start:stop], keys_P[start:stop])
        start = stop


def _joined(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield groups of pieces that one call updates."""
    alike: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        if piece.unit():
            key = (piece.kind, piece.gradient.dtype)
            alike.setdefault(key, []).append(piece)
    for group in alike.values():
        ready: list[Piece] = []
        elements = 0
        for piece in group:
            ready.append(piece)
            elements += piece.target.numel()
            if elements >= JOINED:
                yield ready
                ready, elements = [], 0
        if ready:
            yield ready


def _numbers(
    pieces: Sequence[Piece], grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the scalars of each piece: (P, 8) as `_adamw` reads them, and (P, 4) int32 keys.

    A row has 32 and 16 bytes, so that compiled code does not copy it to align it.
    """
    device = pieces[0].target.device
    host = [[piece.lr, piece.weight_decay, float(as_int32(piece.name_key))] for piece in pieces]
    host_P3 = to_device(torch.tensor(host, dtype=torch.float64), device)
    steps_P = torch.stack([piece.step for piece in pieces])
    (kind,) = {(piece.kind.betas) for piece in pieces}
    return _compiled(_scalars, kind)(steps_P, host_P3, grad_scale, found_inf)


def _scalars(
    betas: tuple[float, float],
    steps_P: Tensor,
    host_P3: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> tuple[Tensor, Tensor]:
    lr_P, weight_decay_P, names_P = host_P3.unbind(1)
    # In float64 on the host's numbers, as torch's kernel for CPUs.
    steps = steps_P.double()
    numbers = [
        1 - lr_P * weight_decay_P,
        -(lr_P / (1 - betas[0] ** steps)),
        (1 - betas[1] ** steps).sqrt(),
        torch.ones_like(steps) if grad_scale is None else grad_scale.expand_as(steps),
        torch.zeros_like(steps) if found_inf is None else found_inf.expand_as(steps),
    ]
    numbers += [torch.zeros_like(steps)] * 3
    keys_P = steps_P.int() * STEP_KEY + names_P.int()
    keys_P4 = torch.stack([keys_P + as_int32(i * MOMENT_KEY) for i in range(4)], 1)
    return torch.stack([n.float() for n in numbers], 1), keys_P4


def _adamw(
    kind: Kind,
    target: Tensor,
    gradient: Tensor,
    stored: tuple[Stored, Stored],
    places: Places,
    keys: Sequence[Tensor],
    numbers: Sequence[Tensor],
) -> None:
    """Update all tensors of (R, C) elements in place.

    Args:
        keys: Of the random bits of the value, the first and the second moment.
        numbers: Factor of weight decay, negative step size, square root of the second bias
            correction, divisor of the gradient, and whether to change nothing. Scalars or (R, 1).
    """
    decay, negative_step, bias2_sqrt, grad_scale, found_inf = numbers[:5]
    forms = (kind.value, kind.exp_avg, kind.exp_avg_sq)
    tensors = ({"": target}, *stored)
    value, exp_avg, exp_avg_sq = (f.read(t) for f, t in zip(forms, tensors, strict=True))
    beta1, beta2 = kind.betas
    gradient = gradient.float() / grad_scale
    exp_avg = _lerp(exp_avg, gradient, 1 - beta1)
    squares = (1 - beta2) * gradient
    exp_avg_sq = fused_multiply_add(squares, gradient, exp_avg_sq * beta2)
    denominator = exp_avg_sq.sqrt() / bias2_sqrt + kind.eps
    value = value * decay + negative_step * exp_avg / denominator
    for form, old, new, key in zip(
        forms, tensors, (value, exp_avg, exp_avg_sq), keys, strict=False
    ):
        for name, encoded in form.encode(new, RandomBits(places, key)).items():
            shape = [-1] + [1] * (encoded.ndim - 1)
            stays = (found_inf if not found_inf.ndim else found_inf.view(shape)) != 0
            old[name].copy_(torch.where(stays, old[name], encoded))


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Return `torch.lerp` with the rounding of its vectorized loop for CPUs."""
    weights = torch.full_like(start, weight)
    if abs(weight) < 0.5:
        return fused_multiply_add(weights, end - start, start)
    return fused_multiply_add(weights - 1, end - start, end)


def _update_piece(
    kind: Kind,
    target: Tensor,
    gradient: Tensor,
    exp_avg: Stored,
    exp_avg_sq: Stored,
    rows_R: Tensor,
    columns_C: Tensor,
    keys_4: Tensor,
    numbers_8: Tensor,
) -> None:
    """Update one piece in place."""
    places = Places(rows_R, columns_C)
    keys, numbers = keys_4.unbind(), numbers_8.unbind()
    _adamw(kind, target, gradient, (exp_avg, exp_avg_sq), places, keys, numbers)


def _update_joined(pieces: Sequence[Piece], numbers_P8: Tensor, keys_P4: Tensor) -> None:
    """Copy pieces into common buffers, update these, and copy the results back."""
    width, device = pieces[0].unit(), pieces[0].target.device
    every = [piece.stored() for piece in pieces]
    packed = [torch.cat([t.reshape(-1) for t in alike]) for alike in zip(*every, strict=True)]
    gradient = torch.cat([piece.gradient.reshape(-1) for piece in pieces])
    rows = torch.cat([piece.places.rows_R for piece in pieces])
    columns = torch.cat([piece.places.columns_C for piece in pieces])
    shapes = [piece.target.shape for piece in pieces]
    units = [shape.numel() // width for shape in shapes]
    table = [
        [0, *accumulate(units[:-1])],
        [shape[1] // width for shape in shapes],
        [0, *accumulate(shape[0] for shape in shapes[:-1])],
        [0, *accumulate(shape[1] for shape in shapes[:-1])],
        units,
    ]
    table_5P = to_device(torch.tensor(table), device)
    numbers = torch.arange(len(pieces), device=device)
    piece_U = numbers.repeat_interleave(table_5P[4], output_size=sum(units))
    update = _compiled(_update_units, pieces[0].kind, width)
    update(packed, gradient, rows, columns, piece_U, table_5P, keys_P4, numbers_P8)
    for alike, whole in zip(zip(*every, strict=True), packed, strict=True):
        parts = whole.split([tensor.numel() for tensor in alike])
        torch._foreach_copy_([tensor.view(-1) for tensor in alike], [*parts])


def _update_units(
    kind: Kind,
    width: int,
    packed: Sequence[Tensor],
    gradient: Tensor,
    rows: Tensor,
    columns: Tensor,
    piece_U: Tensor,
    table_5P: Tensor,
    keys_P4: Tensor,
    numbers_P8: Tensor,
) -> None:
    """Update joined pieces in place.

    Args:
        packed: The values of the target and of the tensors of both moments.
        rows, columns: Positions of the rows and columns of all pieces.
        piece_U: The piece of each unit.
        table_5P: For each piece: its first unit, units per row, first row, and first column.
    """
    firsts, per_row, first_row, first_column = (table_5P[i][piece_U] for i in range(4))
    unit_U = torch.arange(piece_U.shape[0], device=piece_U.device) - firsts
    rows_U = rows[first_row + unit_U // per_row]
    within_W = torch.arange(width, device=piece_U.device)
    columns_UW = columns[(first_column + unit_U % per_row * width)[:, None] + within_W]
    places = Places(rows_U, columns_UW)
    keys = [keys_P4[:, i][piece_U] for i in range(3)]
    numbers = [numbers_P8[:, i][piece_U][:, None] for i in range(5)]
    target, *states = (tensor.view(piece_U.shape[0], -1) for tensor in packed)
    half = len(states) // 2
    suffixes = ("", "_scale")
    moments = tuple(
        dict(zip(suffixes, part, strict=False)) for part in (states[:half], states[half:])
    )
    _adamw(kind, target, gradient.view(-1, width), moments, places, keys, numbers)


@cache
def _compiled(function: Callable[..., None], *constants: object) -> Callable[..., None]:
    """Return `function` for its first arguments, compiled for all sizes of the others."""

    def call(*args: object) -> object:
        return function(*constants, *args)

    # torch.compile looks graphs up by code. Each combination has its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return torch.compile(call, fullgraph=True, dynamic=True, **COMPILER)
