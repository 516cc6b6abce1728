"""What models ask of ranks that share a packed row, each of which has a slice of its tokens.

Who they are and how they exchange what they have is `torchmm.parallel.context`'s business; models
import nothing of torch.distributed.

Shape legend: T tokens of the row, S of this rank's slice, H query heads, G key and value heads, D
features of a query or key, E of a value, K output tokens of an encoder.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from torchmm.common.row_slices import FeatureRoute


class RowHeads(Protocol):
    """Lets attention see all tokens of one row, with some of the heads."""

    def whole_rows(
        self, query_SHD: Tensor, key_SGD: Tensor, value_SGE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Own heads of all tokens; as many of keys and values as of queries, or a divisor."""
        ...

    def own_tokens(self, out_THE: Tensor, heads: int) -> Tensor:
        """All heads of own tokens.

        Args:
            out_THE: own heads of all tokens.
            heads: of all ranks.
        """
        ...

    def own_heads(self, scores_H: Tensor) -> Tensor:
        """Of scores of all heads, those of own heads."""
        ...


class RowRanks(Protocol):
    """The ranks that share rows, of which this process is one."""

    def heads(self, tokens: int) -> RowHeads:
        """How attention of a row with so many tokens exchanges them for heads."""
        ...

    def features(self, found_KD: Tensor, route: FeatureRoute) -> Tensor:
        """Features of the tokens in this rank's slice, for those that it has found. Collective.

        Args:
            found_KD: of the images that it reads; further rows, of dummy images, are left out.
        """
        ...

    def summed(self, values: Tensor) -> Tensor:
        """Sum over the ranks, without a gradient. Collective."""
        ...

    def of_last(self, values: Tensor) -> Tensor:
        """What the rank with the row's last tokens has, without a gradient. Collective."""
        ...
