"""Short convolutions (LFM2) on packed rows: nothing passes from sample to sample.

Most layers of LFM2 have a causal convolution over three tokens where others have attention,
between two gates that the same linear gives. Hugging Face's forward runs it over the whole row, so
the first tokens of a sample would read the last ones of the sample before. So its forward is
replaced (`packed_mixers`). Rejected: Hugging Face's `seq_idx`, which only the library causal-conv1d
looks at.

Where several ranks share a row, a rank runs the convolution over all of its tokens, for some of the
channels (`shared_rows`).

Shape legend: T tokens, C channels (of a tensor-parallel rank: its own), W width of a filter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchmm.common.layers import ConvolutionSizes
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.packed_mixers import (
    cached_convolution,
    pack_mixers,
    packed_convolution,
)

SHORT_CONVOLUTION = "conv"
"""Hugging Face's name of a layer's convolution with its linears."""


class Filters(NamedTuple):
    """Of the channels; on a tensor-parallel rank of its own."""

    weights_CW: Tensor
    bias_C: Tensor | None


def pack_short_convolutions(layers: Iterable[nn.Module]) -> None:
    """Lets the short convolutions among the layers work on packed rows, in place."""
    pack_mixers(layers, SHORT_CONVOLUTION, _all_filters, _forward)


def convolution_sizes(layer: nn.Module) -> ConvolutionSizes | None:
    """Sizes of a layer's short convolution; None if it has none that is packed."""
    mixer: Any = getattr(layer, SHORT_CONVOLUTION, None)
    return ConvolutionSizes(mixer.conv_kernel_size) if hasattr(mixer, "own_weights") else None


def _all_filters(mixer: Any) -> Filters:
    return Filters(mixer.conv.weight.squeeze(1), mixer.conv.bias)


def _forward(mixer: Any, hidden_states: Tensor, segments: Segments) -> Tensor:
    """(1, T, D) to (1, T, D)."""
    filters: Filters = mixer.own_weights()
    in_gate_TC, out_gate_TC, x_TC = mixer.in_proj(hidden_states)[0].chunk(3, dim=-1)
    x_TC = in_gate_TC * x_TC
    ranks = segments.row_heads
    if ranks is None:
        x_TC = _filtered(mixer, x_TC, filters, segments)
    else:
        channels = x_TC.shape[1]
        [own_TC1] = ranks.whole_rows(x_TC[..., None])
        weights_CW, bias_C = filters
        own = Filters(
            ranks.own_heads(weights_CW, channels),
            None if bias_C is None else ranks.own_heads(bias_C, channels),
        )
        found_TC = _filtered(mixer, own_TC1[..., 0], own, segments)
        x_TC = ranks.own_tokens(found_TC[..., None], channels)[..., 0]
    return mixer.out_proj((out_gate_TC * x_TC)[None])


def _filtered(mixer: Any, x_TC: Tensor, filters: Filters, segments: Segments) -> Tensor:
    out_TC = cached_convolution(mixer, x_TC, filters.weights_CW, segments)
    if out_TC is None:
        out_TC = packed_convolution(x_TC, filters.weights_CW, segments)
    return out_TC if filters.bias_C is None else out_TC + filters.bias_C
