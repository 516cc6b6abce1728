"""Gated delta nets (Qwen3-Next, Qwen3.5) on packed sequences, without leakage between samples.

Such a layer has a causal convolution and a recurrent state instead of attention:

    projections -> convolution -> gated delta rule -> norm and gate -> output projection

The Hugging Face forward supports packed sequences only with the libraries flash-linear-attention
and causal-conv1d, and raises an error without them. Its forward is therefore replaced
(`packed_mixers`, which also has the convolution). `delta_ops` has the recurrence for all devices.
On CUDA in half precision, the kernel of flash-linear-attention runs if that library is installed.
Tests check only the arguments of this kernel call; the kernel itself has never been run.

With context parallelism, ranks exchange tokens for heads before the convolution, and back after the
recurrence (`sequence_exchange`). Projections, norm and gate run on local tokens.

For text generation, a cache stores the last inputs of the convolution and the state of each prompt
in float32. Each new token then updates the state once, with matmuls on any device.

Patching functions in the Hugging Face module is not an option, because it would also change other
models in the process. One call of the rule per segment would be slow for many short segments.

Shape legend: T tokens, S tokens of the local slice, D features, C channels of the convolution,
G key heads, H value heads, K key features of a head, V value features, W width of a filter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from torchmm.common.errors import ConfigError
from torchmm.common.layers import DeltaSizes
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.delta_ops import (
    delta_rule_next_token,
    delta_rule_with_states,
    packed_delta_rule,
)
from torchmm.models.layers.packed_mixers import (
    cached_convolution,
    pack_mixers,
    packed_convolution,
)
from torchmm.models.layers.sequence_exchange import HeadExchange

MIXER = "linear_attn"
"""Hugging Face name of the delta net in a layer."""


class DeltaWeights(NamedTuple):
    """Parameters outside of linear layers and norms, or the shard of a tensor-parallel rank."""

    filters_CW: Tensor
    decay_H: Tensor
    """Logarithm of the decay rate."""
    bias_H: Tensor
    """Bias of the decay input."""


def pack_delta_nets(layers: Iterable[nn.Module]) -> None:
    """Replace the forward of delta nets by one for packed sequences, in place."""
    pack_mixers(layers, MIXER, _all_weights, _forward)


def delta_sizes(layer: nn.Module) -> DeltaSizes | None:
    """Return the sizes of the delta net of a layer, or None without one."""
    mixer: Any = getattr(layer, MIXER, None)
    if mixer is None:
        return None
    return DeltaSizes(
        key_heads=mixer.num_k_heads,
        value_heads=mixer.num_v_heads,
        key_dim=mixer.head_k_dim,
        value_dim=mixer.head_v_dim,
        filter_width=mixer.conv_kernel_size,
        interleaved=hasattr(mixer, "in_proj_qkvz"),
    )


def check_compiles(name: str, layers: Iterable[nn.Module], device: str) -> None:
    """Check that torch.compile supports the delta nets in the layers of module `name`.

    Raises:
        ConfigError: They would call flash-linear-attention, which torch.compile cannot trace.
    """
    if device == "cuda" and any(map(delta_sizes, layers)) and _fla_kernel() is not None:
        raise ConfigError(
            f"compile: delta nets of {name!r} cannot be compiled with flash-linear-attention; "
            f"uninstall it, or remove {name!r} from compile.modules"
        )


def _all_weights(mixer: Any) -> DeltaWeights:
    return DeltaWeights(mixer.conv1d.weight.squeeze(1), mixer.A_log, mixer.dt_bias)


def _forward(mixer: Any, hidden_states: Tensor, segments: Segments) -> Tensor:
    """Return the output (1, T, D) for hidden states (1, T, D)."""
    weights: DeltaWeights = mixer.local_weights()
    heads = len(weights.decay_H)
    project = _project_interleaved if hasattr(mixer, "in_proj_qkvz") else _project
    mixed_TC, gate_TX, beta_TH, decay_TH = project(mixer, hidden_states)
    ranks = segments.head_exchange
    if ranks is not None:
        mixed_TC, beta_TH, decay_TH = _exchange_heads(mixer, mixed_TC, beta_TH, decay_TH, ranks)
        weights = _select_local_weights(mixer, weights, ranks)
    filtered_TC = cached_convolution(mixer, mixed_TC, weights.filters_CW, segments)
    if filtered_TC is None:
        filtered_TC = packed_convolution(mixed_TC, weights.filters_CW, segments)
    mixed_TC = ACT2FN[mixer.activation](filtered_TC)
    rate_H = -weights.decay_H.float().exp()
    decay_TH = rate_H * functional.softplus(decay_TH.float() + weights.bias_H)
    query_TGK, key_TGK, value_THV = _by_head(mixer, mixed_TC, len(rate_H), dim=1)
    rule = delta_rule if segments.cache is None else partial(_cached_rule, mixer)
    value_THV = rule(query_TGK, key_TGK, value_THV, decay_TH, beta_TH.sigmoid(), segments)
    if ranks is not None:
        value_THV = ranks.to_local_tokens(value_THV, heads)
    rows = value_THV.flatten(0, 1)
    normed = mixer.norm(rows, gate_TX.reshape(rows.shape))
    return mixer.out_proj(normed.view(1, *gate_TX.shape))


def _exchange_heads(
    mixer: Any, mixed_SC: Tensor, beta_SH: Tensor, decay_SH: Tensor, ranks: HeadExchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Return channels (T, local C), beta and decay (T, local H) of all tokens for local heads."""
    query_SGK, key_SGK, value_SHV = _by_head(mixer, mixed_SC, beta_SH.shape[1], dim=1)
    value_THV, beta_TH1, decay_TH1, query_TGK, key_TGK = ranks.to_local_heads(
        value_SHV, beta_SH[..., None], decay_SH[..., None], query_SGK, key_SGK
    )
    mixed_TC = torch.cat([x.flatten(1) for x in (query_TGK, key_TGK, value_THV)], 1)
    return mixed_TC, beta_TH1[..., 0], decay_TH1[..., 0]


def _select_local_weights(mixer: Any, weights: DeltaWeights, ranks: HeadExchange) -> DeltaWeights:
    filters_CW, decay_H, bias_H = weights
    heads = len(decay_H)
    by_head = _by_head(mixer, filters_CW, heads, dim=0)
    return DeltaWeights(
        torch.cat([ranks.select_local_heads(filters, heads).flatten(0, 1) for filters in by_head]),
        ranks.select_local_heads(decay_H, heads),
        ranks.select_local_heads(bias_H, heads),
    )


def _by_head(mixer: Any, channels: Tensor, heads: int, dim: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values, with `dim` split into heads and features.

    Args:
        mixer: Delta net.
        channels: Tensor with the channels of the convolution in dimension `dim`.
        heads: Number of value heads.
        dim: Dimension to split.
    """
    values = heads * mixer.head_v_dim
    keys = (channels.shape[dim] - values) // 2
    query, key, value = channels.split([keys, keys, values], dim)
    return (
        query.unflatten(dim, (-1, mixer.head_k_dim)),
        key.unflatten(dim, (-1, mixer.head_k_dim)),
        value.unflatten(dim, (heads, mixer.head_v_dim)),
    )


def _project(mixer: Any, hidden_1TD: Tensor) -> tuple[Tensor, ...]:
    """Return channels (T, C), gate, and the inputs of beta and decay (T, H), for Qwen3.5."""
    linears = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
    return tuple(linear(hidden_1TD)[0] for linear in linears)


def _project_interleaved(mixer: Any, hidden_1TD: Tensor) -> tuple[Tensor, ...]:
    """Return the projections for Qwen3-Next, whose linear layers interleave them by key head."""
    shared = mixer.num_v_heads // mixer.num_k_heads
    keys = mixer.head_k_dim
    values = shared * mixer.head_v_dim
    sizes = [keys, keys, values, values]
    heads_TGX = mixer.in_proj_qkvz(hidden_1TD)[0].unflatten(-1, (-1, sum(sizes)))
    query, key, value, gate = (x.flatten(1) for x in heads_TGX.split(sizes, dim=-1))
    shares_TGX = mixer.in_proj_ba(hidden_1TD)[0].unflatten(-1, (-1, 2 * shared))
    beta, decay = (x.flatten(1) for x in shares_TGX.split(shared, dim=-1))
    return torch.cat([query, key, value], dim=-1), gate, beta, decay


def delta_rule(
    query_TGK: Tensor,
    key_TGK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    segments: Segments,
) -> Tensor:
    """Return the output (T, H, V) of the gated delta rule (see `packed_delta_rule`).

    Args:
        query_TGK: (T, G, K), queries.
        key_TGK: (T, G, K), keys.
        value_THV: (T, H, V), values.
        decay_TH: (T, H), logarithms of the decay.
        beta_TH: (T, H), update rates in [0, 1].
        segments: Segments of the packed sequence.
    """
    half = value_THV.dtype in (torch.bfloat16, torch.float16)
    kernel = _fla_kernel() if value_THV.is_cuda and half else None
    if kernel is not None:
        inputs = (query_TGK, key_TGK, value_THV, decay_TH, beta_TH)
        return call_fla_kernel(kernel, inputs, segments)
    starts = segments.cu_seqlens_host
    return packed_delta_rule(query_TGK, key_TGK, value_THV, decay_TH, beta_TH, starts)


def _cached_rule(
    mixer: Any,
    query_TGK: Tensor,
    key_TGK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    segments: Segments,
) -> Tensor:
    """Return the output (T, H, V) of complete prompts or of new tokens, and update the cache."""
    inputs = [query_TGK, key_TGK, value_THV, decay_TH, beta_TH]
    cache = segments.cache
    assert cache is not None
    if cache.has_full_prompts:
        out_THV, states_BHKV = delta_rule_with_states(inputs, segments.cu_seqlens_host)
    else:
        # Older versions of transformers have no method that returns the state.
        before_BHKV = cache.layers[mixer.layer_idx].recurrent_states[0]
        assert before_BHKV is not None
        out_THV, states_BHKV = delta_rule_next_token(inputs, before_BHKV)
    cache.update_recurrent_state(states_BHKV, mixer.layer_idx)
    return out_THV


def call_fla_kernel(
    kernel: Callable[..., tuple[Tensor, Any]], inputs: tuple[Tensor, ...], segments: Segments
) -> Tensor:
    """Return the output (T, H, V) of the flash-linear-attention kernel, in a batch of size 1."""
    names = ("q", "k", "v", "g", "beta")
    rows = {name: x[None].contiguous() for name, x in zip(names, inputs, strict=True)}
    starts = segments.cu_seqlens.long()
    return kernel(**rows, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)[0][0]


@functools.cache
def _fla_kernel() -> Any:
    """Return the kernel of flash-linear-attention, or None if the library is not installed."""
    try:
        return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError:
        return None
