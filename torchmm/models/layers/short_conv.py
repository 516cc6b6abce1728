"""Short convolutions (LFM2) on packed sequences, without leakage between samples.

Most layers of LFM2 have a causal convolution over three tokens instead of attention. One linear
layer computes the input and two gates, before and after the convolution. The Hugging Face forward
ignores sample boundaries, so that the first tokens of a sample would read the previous sample. Its
forward is therefore replaced (`packed_mixers`). The argument `seq_idx` of Hugging Face has an
effect only with the library causal-conv1d.

With context parallelism, a rank runs the convolution over all tokens for some channels
(`sequence_exchange`).

Shape legend: T tokens, D features, C channels (of this tensor-parallel rank), W width of a filter.
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
"""Hugging Face name of the convolution with its linear layers in a layer."""


class Filters(NamedTuple):
    """The filters of the channels, or of the channels of a tensor-parallel rank."""

    weights_CW: Tensor
    bias_C: Tensor | None


def pack_short_convolutions(layers: Iterable[nn.Module]) -> None:
    """Replace the forward of short convolutions by one for packed sequences, in place."""
    pack_mixers(layers, SHORT_CONVOLUTION, _all_filters, _forward)


def convolution_sizes(layer: nn.Module) -> ConvolutionSizes | None:
    """Return the sizes of the short convolution of a layer, or None if it has no packed one."""
    mixer: Any = getattr(layer, SHORT_CONVOLUTION, None)
    return ConvolutionSizes(mixer.conv_kernel_size) if hasattr(mixer, "local_weights") else None


def _all_filters(mixer: Any) -> Filters:
    return Filters(mixer.conv.weight.squeeze(1), mixer.conv.bias)


def _forward(mixer: Any, hidden_states: Tensor, segments: Segments) -> Tensor:
    """Return the output (1, T, D) for hidden states (1, T, D)."""
    filters: Filters = mixer.local_weights()
    in_gate_TC, out_gate_TC, x_TC = mixer.in_proj(hidden_states)[0].chunk(3, dim=-1)
    x_TC = in_gate_TC * x_TC
    ranks = segments.head_exchange
    if ranks is None:
        x_TC = _convolve(mixer, x_TC, filters, segments)
    else:
        channels = x_TC.shape[1]
        [local_TC1] = ranks.to_local_heads(x_TC[..., None])
        weights_CW, bias_C = filters
        local = Filters(
            ranks.select_local_heads(weights_CW, channels),
            None if bias_C is None else ranks.select_local_heads(bias_C, channels),
        )
        filtered_TC = _convolve(mixer, local_TC1[..., 0], local, segments)
        x_TC = ranks.to_local_tokens(filtered_TC[..., None], channels)[..., 0]
    return mixer.out_proj((out_gate_TC * x_TC)[None])


def _convolve(mixer: Any, x_TC: Tensor, filters: Filters, segments: Segments) -> Tensor:
    out_TC = cached_convolution(mixer, x_TC, filters.weights_CW, segments)
    if out_TC is None:
        out_TC = packed_convolution(x_TC, filters.weights_CW, segments)
    return out_TC if filters.bias_C is None else out_TC + filters.bias_C
