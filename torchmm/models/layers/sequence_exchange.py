"""Interfaces of context parallelism for models: ranks that share a packed sequence.

Each rank has a slice of the tokens. `torchmm.parallel.context` implements the interfaces, so that
models do not import torch.distributed.

Shape legend: T tokens of the packed sequence, S tokens of the local slice, H heads that are divided
among ranks, G heads that these heads read (G divides H), D and E features of a head, K output
tokens of an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from torchmm.common.sequence_slices import SliceContext


class HeadExchange(Protocol):
    """The exchange of tokens for heads: a rank gets all tokens of a sequence for some heads.

    Heads are those of queries in attention, of values in a delta net, or channels of a convolution.
    """

    def to_local_heads(self, divided_SHD: Tensor, *read_SGD: Tensor) -> list[Tensor]:
        """Return all tokens for the local heads: (T, local H, D) and (T, local G, D).

        The local G is equal to the local H or divides it.

        Args:
            divided_SHD: (S, H, D), such as queries.
            read_SGD: (S, G, D) each, such as keys and values. Tensors (S, H, D) are divided like
                `divided_SHD`. The number of features may differ between tensors.
        """
        ...

    def to_local_tokens(self, out_THE: Tensor, heads: int) -> Tensor:
        """Return all heads for the local tokens, (S, H, E).

        Args:
            out_THE: (T, local H, E), local heads of all tokens.
            heads: Number of heads H of all ranks.
        """
        ...

    def select_local_heads(self, values: Tensor, heads: int) -> Tensor:
        """Return the values of the local heads of `to_local_heads`.

        Args:
            values: Values of all heads, (H, ...) or (G, ...).
            heads: Number of heads H of all ranks.
        """
        ...


class SequenceRanks(Protocol):
    """The context-parallel ranks that share packed sequences, including this process."""

    size: int
    """Number of ranks."""

    def heads(self, tokens: int, ranks: int) -> HeadExchange | None:
        """Return the exchange of tokens for heads of a packed sequence.

        None if this rank has the complete sequence.

        Args:
            tokens: Number of tokens of the sequence.
            ranks: Number of adjacent ranks that share the sequence.
        """
        ...

    def exchange_features(
        self, features: Mapping[str, Tensor], row: SliceContext
    ) -> dict[str, Tensor]:
        """Return the features (K, D) of the tokens of this rank by encoder. Collective.

        Args:
            features: Features (K, D) of the images that this rank encodes, by encoder. Rows of
                dummy images are dropped.
            row: Routes of the encoders that have images in the packed sequence.
        """
        ...

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, without a gradient. Collective."""
        ...
