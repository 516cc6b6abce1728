"""Sizes of what a layer may have in place of attention, between its models and its costs."""

from __future__ import annotations

from typing import NamedTuple


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
