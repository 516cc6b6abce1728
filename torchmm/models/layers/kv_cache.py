"""Cache of the keys, values and states of earlier tokens, for generating text.

It is the `DynamicCache` of Hugging Face: keys and values of all tokens or of a window, or states of
convolutions and delta nets, depending on the config of each layer. Layers of torchmm read packed
sequences: first the complete prompts, then one new token per prompt. `PackedCache` converts between
both forms. It stores prompts right-aligned, with zeros before shorter prompts. So the newest tokens
have the same index, a window is the last keys, and the distance from the end shows which keys
belong to a prompt. Keys already have their RoPE positions.

Left-padded prompts in the layers, as in the Hugging Face `generate`, would require different
shapes of activations, messages and images than training.

Shape legend: B prompts, T tokens of all prompts, N new tokens of one prompt, S cached tokens per
prompt, L tokens of the longest prompt, H query heads, G key and value heads (G divides H),
R = H / G, D head size, C channels, W width of a filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig

from torchmm.common.batch import IGNORE_TARGET, Microbatch, MicrobatchMeta
from torchmm.common.device_copies import to_device


class PackedCache(DynamicCache):
    """Hugging Face cache of a batch of prompts in packed sequences.

    The first packed sequence has the complete prompts, later ones have the next tokens.

    Args:
        config: Config of the complete LLM. Layers of other stages stay empty.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.lengths: list[int] = []
        """Tokens of each prompt, including those of the current packed sequence."""
        self.has_full_prompts = True
        """Whether the current packed sequence has the complete prompts."""
        self._device = torch.device("cpu")
        self._positions_T: Tensor | None = None
        self._masks: dict[tuple[int, int], Tensor | None] = {}

    def begin_sequence(self, cu_seqlens: Sequence[int], device: torch.device) -> None:
        """Prepare for a packed sequence. Call it before each forward pass.

        Raises:
            ValueError: A later packed sequence does not have one token per prompt.
        """
        lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
        self.has_full_prompts = not self.lengths
        self._device = device
        self._masks = {}
        if self.has_full_prompts:
            self.lengths = lengths
            if len(lengths) > 1:
                longest = max(lengths)
                slots = [
                    row * longest + slot
                    for row, length in enumerate(lengths)
                    for slot in range(longest - length, longest)
                ]
                self._positions_T = to_device(torch.tensor(slots), device)
            return
        if lengths != [1] * len(self.lengths):
            raise ValueError(
                f"a sequence with {lengths} tokens for a cache of {len(self.lengths)} "
                "prompts; pass one token per prompt, or use a new cache"
            )
        self.lengths = [length + 1 for length in self.lengths]

    def visible_keys(self, num_keys: int, window: int) -> Tensor | None:
        """Return the mask (B, S), bool, of the keys that the newest token of a prompt attends to.

        The mask is None if each token attends to all keys.

        Args:
            num_keys: Number S of cached keys.
            window: Maximum number of keys that a token attends to. Use 0 for all.
        """
        key = num_keys, window
        if key not in self._masks:
            visible = [min(length, window or length) for length in self.lengths]
            self._masks[key] = None
            if min(visible) < num_keys:
                visible_B = to_device(torch.tensor(visible), self._device)
                back_S = torch.arange(num_keys - 1, -1, -1, device=self._device)
                self._masks[key] = back_S < visible_B[:, None]
        return self._masks[key]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values of a layer, (1, G, T, D) each.

        Returns:
            The arguments for complete prompts, all cached keys and values (B, G, S, D) for new
            tokens.
        """
        row = key_states, value_states
        if not self.has_full_prompts:
            keys, values = (x_1GBD.transpose(0, 2) for x_1GBD in row)
            return super().update(keys, values, layer_idx, *args, **kwargs)
        rows = [x[0].transpose(0, 1) for x in row]
        keys, values = (self.by_prompt(x_TGD).transpose(1, 2) for x_TGD in rows)
        super().update(keys, values, layer_idx, *args, **kwargs)
        return row

    def by_prompt(self, x_TX: Tensor) -> Tensor:
        """Return the values of a packed sequence, right-aligned by prompt: (B, L, ...)."""
        if not self.has_full_prompts:
            return x_TX[:, None]
        if self._positions_T is None:
            return x_TX[None]
        prompts = len(self.lengths)
        spaced = x_TX.new_zeros(prompts * max(self.lengths), *x_TX.shape[1:])
        return spaced.index_copy_(0, self._positions_T, x_TX).unflatten(0, (prompts, -1))

    def convolve(self, x_TC: Tensor, filters_CW: Tensor, layer_idx: int) -> Tensor | None:
        """Return the causal convolution of new tokens, (B, C), and store the last values.

        The result is None for complete prompts.
        """
        width = filters_CW.shape[1]
        x_BCL = self.by_prompt(x_TC).transpose(1, 2)
        last_BCW = self.update_conv_state(x_BCL, layer_idx, conv_kernel_size=width)[..., -width:]
        if self.has_full_prompts:
            return None
        return (last_BCW.to(filters_CW.dtype) * filters_CW).sum(-1).to(x_TC.dtype)


def cached_attention(
    query_1HBD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    visible_BS: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention (1, B, H, D) of the newest token of each prompt to its tokens.

    Args:
        query_1HBD: Queries.
        key_BGSD: Keys.
        value_BGSD: Values.
        visible_BS: Result of `PackedCache.visible_keys`.
        scale: Factor of the scores.
        softcap: Scores s become `softcap` tanh(s / `softcap`). If None, they stay the same.
        sinks_H: Additional score of every query, whose weight is dropped.
    """
    prompts, groups, _, width = key_BGSD.shape
    # Query heads that share a key head become queries of one head, so keys are not repeated.
    query_BGRD = query_1HBD.transpose(0, 2).reshape(prompts, groups, -1, width)
    visible = None if visible_BS is None else visible_BS[:, None, None]
    if softcap is None and sinks_H is None:
        out = functional.scaled_dot_product_attention(
            query_BGRD, key_BGSD, value_BGSD, visible, scale=scale
        )
        return out.reshape(1, prompts, -1, out.shape[3])
    scores = query_BGRD @ key_BGSD.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, groups, -1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if sinks_H is not None:
        weights = weights[..., :-1]
    out = weights.to(value_BGSD.dtype) @ value_BGSD
    return out.reshape(1, prompts, -1, out.shape[3])


def next_token_sequence(row: Microbatch, tokens_B: Tensor) -> Microbatch:
    """Return a packed sequence with one new token for each prompt.

    Args:
        row: Packed sequence of the previous forward pass: prompts, or one token for each prompt.
        tokens_B: (B,) new tokens.
    """
    prompts = len(tokens_B)
    if row.cu_seqlens[-1] == prompts and not row.encoders:
        return replace(row, input_ids_T=tokens_B, position_ids=row.position_ids + 1)
    last = [row.position_ids[..., a:b].amax() for a, b in pairwise(row.cu_seqlens)]
    # Positions of three coordinates have the same value in all of them.
    positions_B = torch.stack(last).to(tokens_B.device) + 1
    return Microbatch(
        input_ids_T=tokens_B,
        targets_T=torch.full_like(tokens_B, IGNORE_TARGET),
        position_ids=positions_B.expand(*row.position_ids.shape[:-1], prompts),
        cu_seqlens=list(range(prompts + 1)),
        encoders={},
        meta=MicrobatchMeta((), prompts),
        target_positions_L=tokens_B[:0],
    )


def extend_prompt(row: Microbatch, tokens_N: Tensor) -> Microbatch:
    """Return a prompt with more tokens, whose keys and values are recomputed.

    Args:
        row: Packed sequence with one prompt.
        tokens_N: (N,), int64, generated tokens.
    """
    positions = row.position_ids
    following_N = positions.amax() + 1 + torch.arange(len(tokens_N), device=positions.device)
    following = following_N.expand(*positions.shape[:-1], -1)
    # Generated tokens are targets of the tokens before them: some models see prompts both ways.
    ignored = torch.full_like(row.targets_T[:1], IGNORE_TARGET)
    length = row.input_ids_T.numel() + len(tokens_N)
    return replace(
        row,
        input_ids_T=torch.cat([row.input_ids_T, tokens_N]),
        targets_T=torch.cat([row.targets_T[:-1], tokens_N, ignored]),
        target_positions_L=None,  # type: ignore[arg-type]  # computed from the targets
        position_ids=torch.cat([positions, following], dim=-1),
        cu_seqlens=[0, length],
        meta=replace(row.meta, tokens=length),
    )
