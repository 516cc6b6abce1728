"""Parameters as the pieces that weight files have.

Most are one tensor in the files. The experts of a layer are one parameter for the model, (experts,
rows, columns) with gate and up projection behind each other, and two or three matrices per expert
in the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchmm.models.hf.shards import local_slices, local_tensor

_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Piece(NamedTuple):
    """A tensor in the files, and where its values go."""

    owner: str
    """Name of the parameter it is part of."""
    tensor: Tensor
    """That parameter."""
    expert: int | None = None
    """Which expert's; None: it is the whole parameter."""
    rows: slice = slice(0, 0)
    """Of an expert: which rows of its matrix."""

    @property
    def shape(self) -> list[int]:
        """In the files."""
        if self.expert is None:
            return list(self.tensor.shape)
        return [self.rows.stop - self.rows.start, self.tensor.shape[2]]

    def fill(self, stored: Any) -> None:
        """Copies this rank's part from a tensor in the files, of which only that is read."""
        local, own = local_tensor(self.tensor), local_slices(self.tensor)
        if not local.numel():
            return
        if self.expert is None:
            local.copy_(stored[own])
            return
        experts, rows, columns = own
        start, stop = max(rows.start, self.rows.start), min(rows.stop, self.rows.stop)
        if not experts.start <= self.expert < experts.stop or start >= stop:
            return
        values = stored[start - self.rows.start : stop - self.rows.start, columns]
        local[self.expert - experts.start, start - rows.start : stop - rows.start].copy_(values)


def pieces(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Parameters and buffers by name -> pieces by the name they would have on their own."""
    return {name: piece for owner, tensor in tensors.items() for name, piece in _of(owner, tensor)}


def _of(owner: str, tensor: Tensor) -> Iterator[tuple[str, Piece]]:
    group, _, leaf = owner.rpartition(".")
    if not group.endswith(".experts") or leaf not in _PROJECTIONS or tensor.ndim != 3:
        yield owner, Piece(owner, tensor)
        return
    size = tensor.shape[1] // len(_PROJECTIONS[leaf])
    for expert in range(tensor.shape[0]):
        for index, projection in enumerate(_PROJECTIONS[leaf]):
            rows = slice(index * size, (index + 1) * size)
            yield f"{group}.{expert}.{projection}.weight", Piece(owner, tensor, expert, rows)
