"""Rotary frequencies that depend on the length of a sample.

RoPE type "longrope" has two sets of frequencies: one for samples of at most
`original_max_position_embeddings` tokens, one for longer samples. The Hugging Face module selects
the set by the highest position in its input. In a packed sequence that is the position of the
longest sample, and with context parallelism that of the local slice. `sample_frequencies` selects
the set for each sample, so that packing and parallelism do not change the result.

RoPE type "dynamic" computes new frequencies for each length beyond `max_position_embeddings`. The
Hugging Face module stores the longest length so far, so its result depends on earlier inputs. Such
samples are therefore rejected.

Shape legend: T tokens of the packed sequence or of the local slice, D features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchmm.models.hf.config_checks import rope_settings


class RotaryLimits:
    """Sample lengths at which rotary frequencies of an LLM change.

    Args:
        config: Config of the LLM.
    """

    def __init__(self, config: Any) -> None:
        settings = rope_settings(config)
        self.switches = frozenset(
            rope["original_max_position_embeddings"]
            for rope in settings
            if rope.get("rope_type") == "longrope"
        )
        """Lengths after which "longrope" uses its frequencies for long samples."""
        is_dynamic = any("dynamic" in str(rope.get("rope_type")) for rope in settings)
        self.maximum: int | None = config.max_position_embeddings if is_dynamic else None
        """Maximum length of a sample, or None for no limit."""

    def problem(self, tokens: int) -> str | None:
        """Return the reason why samples of `tokens` tokens are rejected, or None."""
        if self.maximum is None or tokens <= self.maximum:
            return None
        return (
            'rope_type = "dynamic" is not supported for samples longer than '
            f"max_position_embeddings = {self.maximum} (this sample has {tokens} tokens); use "
            "shorter sequences or another rope_type"
        )


@contextmanager
def sample_frequencies(text_model: nn.Module, lengths_T: Tensor) -> Iterator[None]:
    """Select frequencies of rotary modules in `text_model` by the length of each sample.

    Args:
        text_model: Text model with the rotary modules.
        lengths_T: (T,), int64, number of tokens of the sample of each token.
    """
    rotaries = [module for module in text_model.modules() if hasattr(module, "rope_type")]
    for rotary in rotaries:
        rotary.forward = partial(_rotate_by_sample, rotary, lengths_T)
    try:
        yield
    finally:
        for rotary in rotaries:
            del rotary.forward


def _rotate_by_sample(
    rotary: Any, lengths_T: Tensor, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, ...]:
    """Return cosines and sines (1, T, D) with the frequencies of each sample."""
    forward = partial(type(rotary).forward, rotary, x)
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    settings = rotary.config.rope_parameters
    settings = settings if layer_type is None else settings[layer_type]
    if settings["rope_type"] != "longrope":
        return forward(position_ids=position_ids, **kwargs)
    limit = settings["original_max_position_embeddings"]
    is_long_T = lengths_T > limit
    short = forward(position_ids=position_ids.masked_fill(is_long_T, 0), **kwargs)
    # The Hugging Face module selects by the highest position, so one beyond the limit is added.
    long_position = position_ids.new_full((*position_ids.shape[:-1], 1), limit)
    long = forward(position_ids=torch.cat([position_ids, long_position], -1), **kwargs)
    return tuple(
        torch.where(is_long_T[:, None], of_long[..., :-1, :], of_short)
        for of_long, of_short in zip(long, short, strict=True)
    )
