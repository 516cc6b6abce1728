"""Deepstack (arXiv 2406.04334): hidden states of several vision layers reach the LLM.

The outputs of some layers of the tower ("taps") pass mergers of their own. What they give is added
to the LLM's hidden states at the images' tokens, the first tap's after the LLM's first layer, the
next one's after the second, and so on.

Taps travel unmerged from one encoder stage to the next, so that all mergers are in the last one:
the encoder's connector. They leave it as one tensor (K, (1 + taps) D): features, then one block for
each tap. It goes every way that features of other encoders go: between ranks with other sizes,
in parts, as zeros times nothing where a microbatch has no images. Where the LLM is cut before it
has used all blocks, its stages hand the rest on. Rejected: mergers beside the layers they follow,
whose outputs would travel: they are as large as what they are made of (K tokens of the LLM's width
for 4 K patches of the tower's), and the connector would be spread over stages; one message for each
tap straight to the LLM stage that adds it, which only the last encoder stage's order allows anyway.

Hugging Face's text model adds the blocks itself, by boolean masks, which wait for the device. Its
method is replaced by `add_block`, its list of blocks by one of functions.

Shape legend: K output tokens of all images, T tokens of the microbatch, P patches, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Add = Callable[[Tensor], Tensor]
"""Hidden states (1, T, D), or a rank's slice of them, to the same with a block added."""


class DeepstackConnector(nn.Module):
    """A tower's merger and those of its taps, under Hugging Face's names.

    Args:
        merger: of the last layer's output.
        deepstack_merger_list: of the taps; None: there are none.
    """

    def __init__(self, merger: nn.Module, deepstack_merger_list: nn.ModuleList | None) -> None:
        super().__init__()
        self.merger = merger
        self.deepstack_merger_list = deepstack_merger_list

    def forward(self, hidden_PD: Tensor, taps: Sequence[Tensor] = ()) -> Tensor:
        """(K, (1 + taps) D_llm), from the last layer's output and those of the tapped ones."""
        mergers = self.deepstack_merger_list or ()
        blocks = [merger(tap_PD) for merger, tap_PD in zip(mergers, taps, strict=True)]
        return torch.cat([self.merger(hidden_PD), *blocks], dim=1)


def add_block(hidden: Tensor, _: None, add: Add | None) -> Tensor:
    """Takes the place of a text model's `_deepstack_process`."""
    return hidden if add is None else add(hidden)


@contextmanager
def adding_blocks(text_model: nn.Module, adds: Sequence[Add | None]) -> Iterator[None]:
    """Lets forwards of `text_model` add blocks, also those that are called by another module's.

    Args:
        adds: by layer, from the first on; None: nothing is added after it.
    """

    def give(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {**kwargs, "deepstack_visual_embeds": adds}

    handle = text_model.register_forward_pre_hook(give, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
