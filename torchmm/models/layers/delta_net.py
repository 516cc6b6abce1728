"""Gated delta nets (Qwen3-Next, Qwen3.5) on packed rows: nothing passes from sample to sample.

Such a layer has a causal convolution and a recurrent state where others have attention. Hugging
Face's forward knows where packed samples begin only if the libraries flash-linear-attention and
causal-conv1d are installed, and refuses packed rows otherwise. So its forward is replaced
(`packed_mixers`, which also has the convolution). The recurrence is `delta_ops`, on any device; on
CUDA in half precision flash-linear-attention's kernel if that library is installed. Its call was
never run here, only its arguments are tested.

Where several ranks share a row, a rank gets some of the heads of all its tokens before the
convolution, and gives their results back behind the recurrence (`shared_rows`): projections, norm
and gate are those of its own tokens.

When text is generated, a cache keeps the last inputs of the convolution and the state of every
prompt, in float32; a token then changes the state once (on any device with plain products).

Rejected: Hugging Face's forward with other functions in its module's namespace, which would change
models that are not ours; one call of the rule per segment, slow for many short ones.

Shape legend: T tokens, C channels of the convolution, G key heads, H value heads, K key features of
a head, V value features, W width of a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from torchmm.common.errors import ConfigError
from torchmm.common.layers import DeltaSizes
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.delta_ops import next_token_rule, packed_delta_rule, rule_with_states
from torchmm.models.layers.packed_mixers import (
    cached_convolution,
    pack_mixers,
    packed_convolution,
)
from torchmm.models.layers.shared_rows import RowHeads

MIXER = "linear_attn"
"""Hugging Face's name of a layer's delta net."""


class DeltaWeights(NamedTuple):
    """Parameters that are not in linears or norms; on a tensor-parallel rank those of its heads."""

    filters_CW: Tensor
    decay_H: Tensor
    """Logarithm of the decay's factor."""
    bias_H: Tensor
    """Added to the decay's input."""


def pack_delta_nets(layers: Iterable[nn.Module]) -> None:
    """Lets the delta nets among the layers work on packed rows, in place."""
    pack_mixers(layers, MIXER, _all_weights, _forward)


def delta_sizes(layer: nn.Module) -> DeltaSizes | None:
    """Sizes of a layer's delta net; None if it has attention."""
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
    """Layers of module `name`, on a device of this type.

    Raises:
        ConfigError: they would call flash-linear-attention, into which torch.compile cannot look.
    """
    if device == "cuda" and any(map(delta_sizes, layers)) and _library() is not None:
        raise ConfigError(
            f"compile: delta nets of {name!r} cannot be compiled with flash-linear-attention; "
            f"uninstall it, or remove {name!r} from compile.modules"
        )


def _all_weights(mixer: Any) -> DeltaWeights:
    return DeltaWeights(mixer.conv1d.weight.squeeze(1), mixer.A_log, mixer.dt_bias)


def _forward(mixer: Any, hidden_states: Tensor, segments: Segments) -> Tensor:
    """(1, T, D) to (1, T, D)."""
    weights: DeltaWeights = mixer.own_weights()
    heads = len(weights.decay_H)
    project = _project_interleaved if hasattr(mixer, "in_proj_qkvz") else _project
    mixed_TC, gate_TX, beta_TH, decay_TH = project(mixer, hidden_states)
    ranks = segments.row_heads
    if ranks is not None:
        mixed_TC, beta_TH, decay_TH = _own_heads(mixer, mixed_TC, beta_TH, decay_TH, ranks)
        weights = _weights_of_own_heads(mixer, weights, ranks)
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
        value_THV = ranks.own_tokens(value_THV, heads)
    rows = value_THV.flatten(0, 1)
    normed = mixer.norm(rows, gate_TX.reshape(rows.shape))
    return mixer.out_proj(normed.view(1, *gate_TX.shape))


def _own_heads(
    mixer: Any, mixed_SC: Tensor, beta_SH: Tensor, decay_SH: Tensor, ranks: RowHeads
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of all tokens of the row, for own heads."""
    query_SGK, key_SGK, value_SHV = _by_head(mixer, mixed_SC, beta_SH.shape[1], dim=1)
    value_THV, beta_TH1, decay_TH1, query_TGK, key_TGK = ranks.whole_rows(
        value_SHV, beta_SH[..., None], decay_SH[..., None], query_SGK, key_SGK
    )
    mixed_TC = torch.cat([x.flatten(1) for x in (query_TGK, key_TGK, value_THV)], 1)
    return mixed_TC, beta_TH1[..., 0], decay_TH1[..., 0]


def _weights_of_own_heads(mixer: Any, weights: DeltaWeights, ranks: RowHeads) -> DeltaWeights:
    filters_CW, decay_H, bias_H = weights
    heads = len(decay_H)
    by_head = _by_head(mixer, filters_CW, heads, dim=0)
    return DeltaWeights(
        torch.cat([ranks.own_heads(filters, heads).flatten(0, 1) for filters in by_head]),
        ranks.own_heads(decay_H, heads),
        ranks.own_heads(bias_H, heads),
    )


def _by_head(mixer: Any, channels: Tensor, heads: int, dim: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, with `dim` divided into heads and features.

    Args:
        heads: of values.
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
    """Channels, gate, and the inputs of beta and decay (Qwen3.5)."""
    linears = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
    return tuple(linear(hidden_1TD)[0] for linear in linears)


def _project_interleaved(mixer: Any, hidden_1TD: Tensor) -> tuple[Tensor, ...]:
    """The same (Qwen3-Next), whose linears hold everything of one key head together."""
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
    """(T, H, V), see `packed_delta_rule`."""
    half = value_THV.dtype in (torch.bfloat16, torch.float16)
    kernel = _library() if value_THV.is_cuda and half else None
    if kernel is not None:
        inputs = (query_TGK, key_TGK, value_THV, decay_TH, beta_TH)
        return call_library(kernel, inputs, segments)
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
    """(T, H, V) of whole prompts, or of the next token of each, from the state that was kept."""
    inputs = [query_TGK, key_TGK, value_THV, decay_TH, beta_TH]
    kept = segments.cache
    assert kept is not None
    if kept.whole_prompts:
        out_THV, states_BHKV = rule_with_states(inputs, segments.cu_seqlens_host)
    else:
        # Older versions have no method for it.
        before_BHKV = kept.layers[mixer.layer_idx].recurrent_states[0]
        assert before_BHKV is not None
        out_THV, states_BHKV = next_token_rule(inputs, before_BHKV)
    kept.update_recurrent_state(states_BHKV, mixer.layer_idx)
    return out_THV


def call_library(
    kernel: Callable[..., tuple[Tensor, Any]], inputs: tuple[Tensor, ...], segments: Segments
) -> Tensor:
    """(T, H, V) from flash-linear-attention's kernel, which wants rows of a batch."""
    names = ("q", "k", "v", "g", "beta")
    rows = {name: x[None].contiguous() for name, x in zip(names, inputs, strict=True)}
    starts = segments.cu_seqlens.long()
    return kernel(**rows, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)[0][0]


@cache
def _library() -> Any:
    """Flash-linear-attention's kernel; None if that library is not installed."""
    try:
        return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError:
        return None
