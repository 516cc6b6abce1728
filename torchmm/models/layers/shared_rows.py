"""What models ask of ranks that share a packed row, each of which has a slice of its tokens.

Who they are and how they exchange what they have is `torchmm.parallel.context`'s business; models
import nothing of torch.distributed.

Shape legend: T tokens of the row, S of this rank's slice, H heads that the ranks divide, G heads of
which each is read by as many of these, D features of a head, K output tokens of an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from torchmm.common.row_slices import RowShare


class RowHeads(Protocol):
    """Lets attention, or what a layer has in its place, see all tokens of one row, with some of the
    heads: those of queries in attention, of values in a delta net, channels of a convolution."""

    def whole_rows(self, divided_SHD: Tensor, *read_SGD: Tensor) -> list[Tensor]:
        """(T, own H, D) and (T, own G, D): own heads of all tokens, and those that they read: as
        many, or a divisor.

        Args:
            read_SGD: what the divided heads read, as queries read keys and values; (S, H, D) is
                divided like them. Features may differ in number from tensor to tensor.
        """
        ...

    def own_tokens(self, out_THE: Tensor, heads: int) -> Tensor:
        """All heads of own tokens.

        Args:
            out_THE: own heads of all tokens.
            heads: of all ranks.
        """
        ...

    def own_heads(self, values: Tensor, heads: int) -> Tensor:
        """Of values of all heads, (H, ...) or (G, ...), those of the heads that `whole_rows` gives.

        Args:
            heads: H, of all ranks.
        """
        ...


class RowRanks(Protocol):
    """The ranks that share rows, of which this process is one."""

    def heads(self, tokens: int) -> RowHeads:
        """How layers exchange the tokens of a row with so many of them for heads."""
        ...

    def features(self, found: Mapping[str, Tensor], row: RowShare) -> dict[str, Tensor]:
        """Return the features (K, D) of the tokens of this rank by encoder. Collective.

        Args:
            found: Features (K, D) of the images that this rank encodes, by encoder. Rows of dummy
                images are dropped.
            row: Routes of the encoders that have images in the packed sequence.
        """
        ...

    def summed(self, values: Tensor) -> Tensor:
        """Sum over the ranks, without a gradient. Collective."""
        ...
