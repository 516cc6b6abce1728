"""The Pixtral vision encoder: packed patches of images of any size, with 2D rotary positions.

Shape legend: P patches of all images, D features.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchmm.common.batch import EncoderInputs
from torchmm.common.device_copies import to_device
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.family import EncoderFamily, frame_starts, side
from torchmm.models.layers.attention import Segments


class PixtralContext(NamedTuple):
    """Layer inputs that depend on the grids."""

    images: Segments
    rotary: tuple[Tensor, Tensor]


class PixtralFamily(EncoderFamily):
    """The Pixtral encoder, which has Llama layers with bidirectional attention."""

    inputs = "patches"
    processor_class = "PixtralImageProcessor"
    layers = "transformer.layers"
    pre = ("patch_conv", "ln_pre")
    patch_embedding = "patch_conv"
    final_norm = ""
    has_class_token = False
    tensor_parallel: ClassVar[dict[str, str]] = {
        "attention": "local_heads",
        **{f"attention.{name}_proj": "colwise" for name in "qkv"},
        "attention.o_proj": "rowwise",
        "feed_forward.gate_proj": "colwise",
        "feed_forward.up_proj": "colwise",
        "feed_forward.down_proj": "rowwise",
        "attention_norm": "sequence",
        "ffn_norm": "sequence",
    }

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> PixtralContext:
        grids = inputs.grids_thw
        places_P2 = to_device(torch.cat([grid_positions(grid) for grid in grids]), device)
        rotary = tower.patch_positional_embedding(inputs.pixels, places_P2)
        return PixtralContext(Segments.from_starts(frame_starts(grids), device), rotary)

    def embed(self, tower: Any, inputs: EncoderInputs, context: PixtralContext) -> Tensor:
        weight = tower.patch_conv.weight.flatten(1)  # a convolution without overlap
        return tower.ln_pre(functional.linear(inputs.pixels.to(weight.dtype), weight))[None]

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: PixtralContext
    ) -> Tensor:
        cos, sin = (table.to(hidden.dtype) for table in context.rotary)
        return layer(hidden, context.images, position_embeddings=(cos, sin))

    def processor(self, config: Any) -> dict[str, Any]:
        size = side(config.patch_size)
        return {"patch_size": {"height": size, "width": size}}

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (1, config.num_channels * side(config.patch_size) ** 2), (1, 1, 1)

    def smallest_folded(
        self, config: Any, shuffle: int
    ) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        (_, values), _ = self.smallest_image(config)
        return (shuffle**2, values), (1, shuffle, shuffle)

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        return LayerDescription(
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            ffn_size=config.intermediate_size,
            gated_ffn=True,
            causal=False,
            activation=config.hidden_act,
        )


def grid_positions(grid: tuple[int, int, int]) -> Tensor:
    """Return the row and column of each patch of an image or video, (P, 2), int64."""
    frames, rows, columns = grid
    at_row, at_column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([at_row, at_column], -1).flatten(0, 1).repeat(frames, 1)
