"""What layers have in place of attention, on packed rows: nothing passes from sample to sample.

Hugging Face's forwards of delta nets and short convolutions run over the whole row. The forward of
each is replaced on the instance; its parameters and their names stay, and without `Segments`
Hugging Face's own forward runs. What is a parameter of the mixer itself, not of a linear or norm
in it, the new forward asks `own_weights` for: tensor parallelism replaces that to give a rank its
own.

Convolutions run on a row in which zeros stand in front of every segment, as many as a filter
reaches back. Where tokens go is worked out on the device.

Shape legend: T tokens, D features, C channels, W width of a filter.
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
"""Of a mixer and hidden states (1, T, D), which it returns."""


def pack_mixers(
    layers: Iterable[nn.Module],
    name: str,
    weights: Callable[[Any], Any],
    forward: PackedForward,
) -> None:
    """Lets the mixers among the layers work on packed rows, in place.

    Args:
        name: Hugging Face's, of a layer's mixer; layers without one are left alone.
        weights: of a whole mixer, for `own_weights`.
    """
    packed_forward = _packed(forward)
    for layer in layers:
        mixer: Any = getattr(layer, name, None)
        if mixer is not None:
            # Methods, not partials: for these, torch.compile makes a graph for every layer.
            mixer.own_weights = MethodType(weights, mixer)
            mixer.forward = MethodType(packed_forward, mixer)


def _packed(forward: PackedForward) -> Callable[..., Tensor]:
    def packed_forward(
        mixer: Any, hidden_states: Tensor, cu_seq_lens_q: Segments | None = None, **kwargs: Any
    ) -> Tensor:
        if not isinstance(cu_seq_lens_q, Segments):
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q
            whole: Callable[..., Tensor] = type(mixer).forward
            return whole(mixer, hidden_states, **kwargs)
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
    """(T, C): causal convolution of prompts' next tokens, behind what a cache has kept; None where
    there is none, or the prompts are here as a whole."""
    if segments.cache is None:
        return None
    return segments.cache.filtered(x_TC, filters_CW, mixer.layer_idx)


def packed_convolution(x_TC: Tensor, filters_CW: Tensor, segments: Segments) -> Tensor:
    """(T, C): causal convolution of each channel, which sees zeros before its segment."""
    reach = filters_CW.shape[1] - 1
    tokens = len(x_TC)
    starts = segments.cu_seqlens
    at_T = torch.arange(tokens, device=x_TC.device)
    # Of what the filter computes, by the position of the first value that it reads. All starts
    # are given, at least two: torch.compile makes a graph of its own for sizes zero and one.
    out_T = at_T + reach * (torch.bucketize(at_T, starts, right=True) - 1)
    spaced_PC = x_TC.new_zeros(tokens + reach * (len(starts) - 1), x_TC.shape[1])
    spaced_PC = spaced_PC.index_copy(0, out_T + reach, x_TC)
    out_CP = functional.conv1d(
        spaced_PC.T[None].to(filters_CW.dtype), filters_CW[:, None], groups=len(filters_CW)
    )[0]
    return out_CP.T.index_select(0, out_T).to(x_TC.dtype)
