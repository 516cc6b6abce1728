"""The vision encoder of Gemma 4: packed patches of images of any size, averaged in squares.

Shape legend: P patches of all images, D features.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from torchmm.common.batch import EncoderInputs
from torchmm.common.device_copies import to_device
from torchmm.common.errors import ConfigError
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.family import EncoderFamily, frame_starts
from torchmm.models.families.encoders.pixtral import grid_positions
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.connectors import fold_patches


class Gemma4Context(NamedTuple):
    """Layer inputs that depend on the grids."""

    images: Segments
    grids_thw: list[tuple[int, int, int]]
    positions_1P2: Tensor
    """(1, P, 2), int64, column and row of each patch."""
    rotary: tuple[Tensor, Tensor]


class Gemma4VisionFamily(EncoderFamily):
    """The Gemma 4 encoder: norms before and after each block, gated MLPs, 2D rotary positions."""

    inputs = "patches"
    processor_class = "Gemma4ImageProcessor"
    pre = ("patch_embedder",)
    patch_embedding = "patch_embedder.input_proj"
    final_norm = ""
    has_class_token = False
    fixed_merge = True
    tensor_parallel: ClassVar[dict[str, str]] = {
        **{f"self_attn.{name}_proj.linear": "colwise" for name in "qkv"},
        "self_attn.q_norm": "replicated_with_grad_allreduce",
        "self_attn.k_norm": "replicated_with_grad_allreduce",
        "self_attn.o_proj.linear": "rowwise",
        "mlp.gate_proj.linear": "colwise",
        "mlp.up_proj.linear": "colwise",
        "mlp.down_proj.linear": "rowwise",
        "input_layernorm": "sequence",
        "post_attention_layernorm": "sequence",
        "pre_feedforward_layernorm": "sequence",
        "post_feedforward_layernorm": "sequence",
    }

    def variant(self, config: Any) -> EncoderFamily:
        reject_clipping(config)
        # Features for other LLMs are not standardized. Exported configs also disable it.
        config.standardize = False
        return self

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> Gemma4Context:
        grids = inputs.grids_thw
        positions = torch.cat([grid_positions(grid) for grid in grids])
        positions_1P2 = to_device(positions.flip(-1), device)[None]
        return Gemma4Context(
            Segments.from_starts(frame_starts(grids), device),
            grids,
            positions_1P2,
            tower.encoder.rotary_emb(inputs.pixels, positions_1P2),
        )

    def embed(self, tower: Any, inputs: EncoderInputs, context: Gemma4Context) -> Tensor:
        positions_1P2 = context.positions_1P2
        padding_1P = torch.zeros_like(positions_1P2[..., 0], dtype=torch.bool)
        return tower.patch_embedder(inputs.pixels[None], positions_1P2, padding_1P)

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Gemma4Context
    ) -> Tensor:
        cos, sin = (table.to(hidden.dtype) for table in context.rotary)
        return layer(
            hidden,
            position_embeddings=(cos, sin),
            attention_mask=context.images,
            position_ids=context.positions_1P2,
        )

    def finish(
        self, tower: Any, hidden: Tensor, context: Gemma4Context, drop_class_token: bool
    ) -> Tensor:
        side = tower.config.pooling_kernel_size
        folded = fold_patches(hidden[0].float(), context.grids_thw, side)
        mean_KD = folded.unflatten(-1, (side**2, -1)).mean(1).to(hidden.dtype)
        if tower.pooler is None:  # the Gemma 4 connector scales
            return mean_KD
        return (mean_KD.float() * tower.config.hidden_size**0.5).to(hidden.dtype)

    def merge(self, config: Any) -> int:
        return config.pooling_kernel_size

    def processor(self, config: Any) -> dict[str, Any]:
        names = ("patch_size", "pooling_kernel_size")
        return {name: getattr(config, name) for name in names}

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        side = config.pooling_kernel_size
        return (side**2, 3 * config.patch_size**2), (1, side, side)

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        return LayerDescription(
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            ffn_size=config.intermediate_size,
            gated_ffn=True,
            causal=False,
            norm_place="around",
            norm_weight_float32=True,
            activation=config.hidden_activation,
            qk_norm=True,
        )


def reject_clipping(config: Any) -> None:
    """Reject configs whose linear layers clamp inputs and outputs.

    Raises:
        ConfigError: The config enables clipping.
    """
    if config.use_clipped_linears:
        raise ConfigError(
            "[model] gemma4_vision: use_clipped_linears = true (Gemma 4 E2B, E4B) is not "
            "supported; use an encoder without it (31B, 26B-A4B)"
        )
