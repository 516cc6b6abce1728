"""DeepStack (arXiv 2406.04334): the LLM reads features of several vision layers.

The outputs of some encoder layers (taps) pass separate mergers. The results are added to the hidden
states of the LLM at image tokens: features of tap i are added after layer i of the LLM.

    encoder layers    .. tap 0 .... tap 1 .... last
                           |          |          |
    mergers             block 0    block 1   features        (K, (1 + taps) D)
                           |          |          |
    LLM               layer 0    layer 1    embeddings

Encoder stages send the tap outputs unmerged, so that all mergers are in the last stage (the
connector). Mergers next to the tapped layers would not reduce messages, as their outputs have the
same size, and would spread the connector over stages. The connector returns one tensor
(K, (1 + taps) D): features, then one block for each tap. This tensor is communicated like the
features of other encoders. LLM stages pass unused blocks to the next stage.

The Hugging Face text model adds blocks with boolean masks, which synchronize with the device.
`add_deepstack_features` replaces this method, and a list of functions replaces the list of blocks.

Shape legend: K output tokens of all images, T tokens of the microbatch, P patches, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

AddFeatures = Callable[[Tensor], Tensor]
"""Function that adds a block to hidden states (1, T, D), or to the slice of a rank."""


class DeepstackConnector(nn.Module):
    """The mergers of an encoder and of its taps, with Hugging Face names.

    Args:
        merger: Merger for the output of the last layer.
        deepstack_merger_list: Mergers of the taps, or None without taps.
    """

    def __init__(self, merger: nn.Module, deepstack_merger_list: nn.ModuleList | None) -> None:
        super().__init__()
        self.merger = merger
        self.deepstack_merger_list = deepstack_merger_list

    def forward(self, hidden_PD: Tensor, deepstack_layers: Sequence[Tensor] = ()) -> Tensor:
        """Return the features and one block per tap, (K, (1 + taps) D_llm).

        Args:
            hidden_PD: (P, D), output of the last layer.
            deepstack_layers: (P, D) each, outputs of the tapped layers.
        """
        mergers = self.deepstack_merger_list or ()
        blocks = [merger(tap_PD) for merger, tap_PD in zip(mergers, deepstack_layers, strict=True)]
        return torch.cat([self.merger(hidden_PD), *blocks], dim=1)


def add_deepstack_features(hidden: Tensor, _: None, add: AddFeatures | None) -> Tensor:
    """Add a block to hidden states. This replaces `_deepstack_process` of a text model."""
    return hidden if add is None else add(hidden)


@contextmanager
def deepstack_features(text_model: nn.Module, adds: Sequence[AddFeatures | None]) -> Iterator[None]:
    """Make forward passes of `text_model` add blocks within the context.

    Args:
        text_model: Text model, which may be a submodule of the called model.
        adds: Functions that add blocks, by layer, from the first layer. None adds no block.
    """

    def add_features(
        _: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        return args, {**kwargs, "deepstack_visual_embeds": adds}

    handle = text_model.register_forward_pre_hook(add_features, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
