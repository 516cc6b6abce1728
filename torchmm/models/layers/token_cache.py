"""What layers keep of the tokens so far, for the next one to be computed alone.

It is Hugging Face's `DynamicCache`: keys and values of all tokens or of a window, or the states of
convolutions and delta nets, by what the config says of each layer. Rows are packed here: prompts of
different lengths follow each other, then come rows of one token for each prompt. `PackedCache`
stands between the two forms. Prompts are stored right-aligned, with zeros in front, so that the
newest tokens are neighbours, windows are the last keys, and a key's distance from the end says
whether a prompt has it. Positions are in the keys already, so moving them changes nothing.

Rejected: left-padded prompts in the layers too, as Hugging Face's `generate` has them, with which
no layer, message or image would have the form it has in training.

Shape legend: B prompts, T tokens of all prompts, N new tokens of one, S tokens kept of each, L
tokens of the longest, H query heads, G key and value heads (G divides H), R = H / G, D head size, C
channels, W width of a filter.
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


class PromptLengths:
    """How many tokens each prompt has, the newest included, and so which keys are its own."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self._device = device
        self._made: dict[tuple[int, int], Tensor | None] = {}

    def visible(self, kept: int, window: int) -> Tensor | None:
        """bool (B, S): which of the last S = `kept` keys a prompt's newest token sees; None: all.

        Args:
            window: how many it sees at most; 0: all.
        """
        key = kept, window
        if key not in self._made:
            own = [min(length, window or length) for length in self.lengths]
            self._made[key] = None
            if min(own) < kept:
                own_B = to_device(torch.tensor(own), self._device)
                back_S = torch.arange(kept - 1, -1, -1, device=self._device)
                self._made[key] = back_S < own_B[:, None]
        return self._made[key]


class PackedCache(DynamicCache):
    """Hugging Face's cache of a batch of prompts, whose tokens come as packed rows.

    The first row has whole prompts, every later one the next token of each.

    Args:
        config: of the LLM, whole; layers of other stages stay empty.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.now: PromptLengths | None = None
        """Of the row that is computed."""
        self.whole_prompts = True
        """Whether that is the first one."""
        self._places_T: Tensor | None = None

    def begin_row(self, cu_seqlens: Sequence[int], device: torch.device) -> None:
        """Before each forward: which row comes.

        Raises:
            ValueError: it has not one token for each prompt.
        """
        lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
        self.whole_prompts = self.now is None
        if self.now is None:
            self.now = PromptLengths(lengths, device)
            self._places_T = None
            if len(lengths) > 1:
                longest = max(lengths)
                places = [
                    row * longest + place
                    for row, length in enumerate(lengths)
                    for place in range(longest - length, longest)
                ]
                self._places_T = to_device(torch.tensor(places), device)
            return
        if lengths != [1] * len(self.now.lengths):
            raise ValueError(
                f"a row with {lengths} tokens for a cache of {len(self.now.lengths)} prompts; give "
                "each prompt its next token, or use a new cache"
            )
        self.now = PromptLengths([length + 1 for length in self.now.lengths], device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer's row, (1, G, T, D) each, kept.

        Returns:
            Of whole prompts: the same. Of their next tokens: all so far, (B, G, S, D).
        """
        row = key_states, value_states
        if not self.whole_prompts:  # a token of each is a prompt's row, without further ado
            keys, values = (x_1GBD.transpose(0, 2) for x_1GBD in row)
            return super().update(keys, values, layer_idx, *args, **kwargs)
        rows = [x[0].transpose(0, 1) for x in row]
        keys, values = (self.by_prompt(x_TGD).transpose(1, 2) for x_TGD in rows)
        super().update(keys, values, layer_idx, *args, **kwargs)
        return row

    def by_prompt(self, x_TX: Tensor) -> Tensor:
        """(B, L, ...) of a row's values: right-aligned, zeros where there is none."""
        assert self.now is not None
        if not self.whole_prompts:
            return x_TX[:, None]
        if self._places_T is None:
            return x_TX[None]
        prompts = len(self.now.lengths)
        spaced = x_TX.new_zeros(prompts * max(self.now.lengths), *x_TX.shape[1:])
        return spaced.index_copy_(0, self._places_T, x_TX).unflatten(0, (prompts, -1))

    def filtered(self, x_TC: Tensor, filters_CW: Tensor, layer_idx: int) -> Tensor | None:
        """(B, C): causal convolution of the prompts' next tokens; None of whole prompts, whose last
        values are kept."""
        width = filters_CW.shape[1]
        x_BCL = self.by_prompt(x_TC).transpose(1, 2)
        last_BCW = self.update_conv_state(x_BCL, layer_idx, conv_kernel_size=width)[..., -width:]
        if self.whole_prompts:
            return None
        return (last_BCW.to(filters_CW.dtype) * filters_CW).sum(-1).to(x_TC.dtype)


def cached_attention(
    query_1HBD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    lengths: PromptLengths,
    scale: float,
    window: int,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """(1, B, H, D): attention of each prompt's newest token to all its tokens.

    Args:
        window: how many tokens it sees, itself included; 0: all.
        softcap: scores s become `softcap` tanh(s / `softcap`); None: they stay.
        sinks_H: a further score for every query, whose weight is of no value.
    """
    prompts, groups, _, width = key_BGSD.shape
    # Query heads of a group are as many queries of one head: nothing is repeated.
    query_BGRD = query_1HBD.transpose(0, 2).reshape(prompts, groups, -1, width)
    seen_BS = lengths.visible(key_BGSD.shape[2], window)
    seen = None if seen_BS is None else seen_BS[:, None, None]
    if softcap is None and sinks_H is None:
        out = functional.scaled_dot_product_attention(
            query_BGRD, key_BGSD, value_BGSD, seen, scale=scale
        )
        return out.reshape(1, prompts, -1, out.shape[3])
    scores = query_BGRD @ key_BGSD.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(1, groups, -1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if sinks_H is not None:
        weights = weights[..., :-1]
    out = weights.to(value_BGSD.dtype) @ value_BGSD
    return out.reshape(1, prompts, -1, out.shape[3])


def next_row(row: Microbatch, tokens_B: Tensor) -> Microbatch:
    """Return a packed sequence with one new token for each prompt.

    Args:
        row: Packed sequence of the previous forward pass: prompts, or one token for each prompt.
        tokens_B: (B,) new tokens.
    """
    prompts = len(tokens_B)
    if row.cu_seqlens[-1] == prompts and not row.encoders:  # a token of each already
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


def grown_row(row: Microbatch, tokens_N: Tensor) -> Microbatch:
    """Return a prompt with more tokens, to be computed again as a whole."""
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
        target_positions_L=None,  # type: ignore[arg-type]  # to be found again
        position_ids=torch.cat([positions, following], dim=-1),
        cu_seqlens=[0, length],
        meta=replace(row.meta, tokens=length),
    )
