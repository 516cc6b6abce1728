"""Interfaces to hidden states between layers, which tensor-parallel ranks may have as slices.

Models use only these protocols. The implementations for tensor parallelism are in
`torchmm.parallel.tensor`.

Shape legend: T positions of the sequence, K rows to add, R rows of a message, D features.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SequenceOps(Protocol):
    """Operations on the hidden states between two layers of a module."""

    def all_gather(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all positions, (..., T, D)."""
        ...

    def add_rows(self, hidden: Tensor, positions_K: Tensor, rows_KD: Tensor) -> Tensor:
        """Return the hidden states with rows added at the given positions.

        Args:
            hidden: (..., T, D), or the slice of a rank.
            positions_K: (K,), int64, distinct positions within T.
            rows_KD: (K, D), dtype of `hidden`.
        """
        ...

    def use_replicated(self, values: Tensor) -> Tensor:
        """Return a replicated tensor for use in the layers. Its gradients are summed over ranks."""
        ...

    def from_previous_stage(self, hidden: Tensor, positions: int) -> Tensor:
        """Return the layer input of a stage after the first.

        Args:
            hidden: (..., T, D), or a slice: the output of the previous stage.
            positions: Number of positions T of the full sequence.
        """
        ...

    def to_next_stage(self, hidden: Tensor) -> Tensor:
        """Return the output that a stage before the last sends to the next stage."""
        ...


class UnshardedSequenceOps:
    """The implementation of `SequenceOps` for ranks that have all positions."""

    def all_gather(self, hidden: Tensor) -> Tensor:
        return hidden

    def add_rows(self, hidden: Tensor, positions_K: Tensor, rows_KD: Tensor) -> Tensor:
        return hidden.index_add(-2, positions_K, rows_KD.expand(*hidden.shape[:-2], -1, -1))

    def use_replicated(self, values: Tensor) -> Tensor:
        return values

    def from_previous_stage(self, hidden: Tensor, positions: int) -> Tensor:
        return hidden

    def to_next_stage(self, hidden: Tensor) -> Tensor:
        return hidden


class RowSharding(Protocol):
    """Differentiable conversion between replicated rows and equal shards of rows per rank."""

    def local_rows(self, rows: Tensor) -> Tensor:
        """Return the shard of this rank of (..., R, D). The backward pass all-gathers.

        R must be a multiple of the number of ranks.
        """
        ...

    def all_gather_rows(self, local_rows: Tensor) -> Tensor:
        """Return the all-gathered shards of all ranks.

        The backward pass selects the shard of this rank. The gradient must be the same on all
        ranks.
        """
        ...
