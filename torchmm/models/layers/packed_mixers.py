"""Token mixers other than attention on packed sequences, without leakage between samples.

The Hugging Face forwards of delta nets and short convolutions ignore sample boundaries. The forward
of each instance is therefore replaced. Parameters and their names do not change, and calls without
`Segments` run the Hugging Face forward. The new forward reads parameters that are direct members of
the mixer (not of a linear layer or norm) through `local_weights`. Tensor parallelism replaces this
method, so that it returns the shard of the rank.

Convolutions run on a copy of the sequence with W - 1 zeros before each segment:

    tokens   a b c | d e            W = 3
    padded   0 0 a b c 0 0 d e

Positions are computed on the device.

Shape legend: T tokens, D features, C channels, W width of a filter, P padded positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchmm.models.layers.attention import Segments

PackedForward = Callable[[Any, Tensor, Segments], Tensor]
"""Forward of a mixer: maps the mixer, hidden states (1, T, D) and segments to (1, T, D)."""


def pack_mixers(
    layers: Iterable[nn.Module],
    name: str,
    weights: Callable[[Any], Any],
    forward: PackedForward,
) -> None:
    """Replace the forward of mixers in the layers by one for packed sequences, in place.

    Args:
        layers: Transformer layers.
        name: Hugging Face name of the mixer in a layer. Layers without it do not change.
        weights: Function that returns the parameters of an unsharded mixer, for `local_weights`.
        forward: New forward.
    """
    packed_forward = _packed(forward)
    for layer in layers:
        mixer: Any = getattr(layer, name, None)
        if mixer is not None:
            # Methods, because torch.compile would compile one graph per layer for partials.
            mixer.local_weights = MethodType(weights, mixer)
            mixer.forward = MethodType(packed_forward, mixer)


def _packed(forward: PackedForward) -> Callable[..., Tensor]:
    def packed_forward(
        mixer: Any, hidden_states: Tensor, cu_seq_lens_q: Segments | None = None, **kwargs: Any
    ) -> Tensor:
        if not isinstance(cu_seq_lens_q, Segments):
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q
            original: Callable[..., Tensor] = type(mixer).forward
            return original(mixer, hidden_states, **kwargs)
        caches = (kwargs.get("cache_params"), kwargs.get("past_key_values"))
        if kwargs.get("attention_mask") is not None or any(
            cache not in (None, cu_seq_lens_q.cache) for cache in caches
        ):
            raise ValueError(
                "packed sequences require a batch size of 1, no attention mask and no other caches"
            )
        return forward(mixer, hidden_states, cu_seq_lens_q)

    return packed_forward


def cached_convolution(
    mixer: Any, x_TC: Tensor, filters_CW: Tensor, segments: Segments
) -> Tensor | None:
    """Return the causal convolution (T, C) of new tokens, which also reads cached inputs.

    The result is None without a cache and for complete prompts.

    Args:
        mixer: Mixer with the index of its layer.
        x_TC: (T, C), one new token per prompt.
        filters_CW: (C, W), filters.
        segments: Segments with the cache.
    """
    if segments.cache is None:
        return None
    return segments.cache.convolve(x_TC, filters_CW, mixer.layer_idx)


def packed_convolution(x_TC: Tensor, filters_CW: Tensor, segments: Segments) -> Tensor:
    """Return the causal convolution (T, C) of each channel, with zeros before each segment.

    Args:
        x_TC: (T, C), packed sequence.
        filters_CW: (C, W), filters.
        segments: Segments of the sequence.
    """
    padding = filters_CW.shape[1] - 1
    tokens = len(x_TC)
    starts = segments.cu_seqlens
    at_T = torch.arange(tokens, device=x_TC.device)
    # Position of each output in the padded result. `starts` is complete, with at least two values,
    # because torch.compile specializes graphs for sizes 0 and 1.
    out_T = at_T + padding * (torch.bucketize(at_T, starts, right=True) - 1)
    spaced_PC = x_TC.new_zeros(tokens + padding * (len(starts) - 1), x_TC.shape[1])
    spaced_PC = spaced_PC.index_copy(0, out_T + padding, x_TC)
    out_CP = functional.conv1d(
        spaced_PC.T[None].to(filters_CW.dtype), filters_CW[:, None], groups=len(filters_CW)
    )[0]
    return out_CP.T.index_select(0, out_T).to(x_TC.dtype)
