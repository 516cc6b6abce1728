"""Sizes of what only some layers have, between models and their costs: mixers in place of
attention, adapters of linears.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class DeltaSizes(NamedTuple):
    """A gated delta net."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    key_dim: int
    """Features of a query or key of one head."""
    value_dim: int
    filter_width: int
    """Tokens that the convolution sees, its own included."""
    interleaved: bool = False
    """Whether two linears hold everything of a key head together, instead of four."""


class ConvolutionSizes(NamedTuple):
    """A convolution over a few tokens between two gates, each as wide as hidden states."""

    filter_width: int
    """Tokens that it sees, its own included."""


MixerSizes = DeltaSizes | ConvolutionSizes


class LowRank(NamedTuple):
    """Sizes of what an adapter adds to a frozen linear: two trained matrices, and perhaps a
    magnitude for each output."""

    inputs: int
    outputs: int
    rank: int
    divided: Literal["inputs", "outputs"] | None
    """What of the linear tensor-parallel ranks divide; None: every rank has all of it whole."""
    magnitudes: bool = False
