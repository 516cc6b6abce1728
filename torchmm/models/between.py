"""What a module may do with hidden states between its layers, and with rows of its ranks.

Modules only see these protocols; what tensor-parallel ranks do is in `torchmm.parallel.tensor`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Between(Protocol):
    """What may be done with hidden states between two layers of a module."""

    def gathered(self, hidden: Tensor) -> Tensor:
        """The hidden states of all positions."""
        ...

    def add_rows(self, hidden: Tensor, positions_K: Tensor, rows_KD: Tensor) -> Tensor:
        """Hidden states with rows added at some positions, of which none is named twice.

        Args:
            hidden: (..., T, D).
            positions_K: int64, within T.
            rows_KD: of the same dtype.
        """
        ...

    def read(self, values: Tensor) -> Tensor:
        """What layers read that all ranks have whole; its gradients are summed over them."""
        ...

    def arrived(self, hidden: Tensor, positions: int) -> Tensor:
        """What a stage behind the first hands to its layers.

        Args:
            hidden: (..., T, D), or a slice of it: what the stage before has handed on.
            positions: T.
        """
        ...

    def leaving(self, hidden: Tensor) -> Tensor:
        """What a stage in front of the last hands on of what its layers have returned."""
        ...


class WholeSequences:
    """`Between` where a rank has all positions."""

    def gathered(self, hidden: Tensor) -> Tensor:
        return hidden

    def add_rows(self, hidden: Tensor, positions_K: Tensor, rows_KD: Tensor) -> Tensor:
        return hidden.index_add(-2, positions_K, rows_KD.expand(*hidden.shape[:-2], -1, -1))

    def read(self, values: Tensor) -> Tensor:
        return values

    def arrived(self, hidden: Tensor, positions: int) -> Tensor:
        return hidden

    def leaving(self, hidden: Tensor) -> Tensor:
        return hidden


class RowsOfRanks(Protocol):
    """Rows of which tensor-parallel ranks have all, or each an equal part; differentiable."""

    def own_rows(self, rows: Tensor) -> Tensor:
        """This rank's part of (..., R, D), whose gradient is gathered; the ranks divide R."""
        ...

    def every_row(self, own: Tensor) -> Tensor:
        """The parts of all ranks; backward keeps this rank's part of the gradient, which must be
        the same on all of them."""
        ...
