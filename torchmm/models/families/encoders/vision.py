"""Other encoders of fixed-size images: DINOv2, InternViT, Idefics3 and SmolVLM.

If images are split into tiles, each tile is an image of the encoder.

Shape legend: N images, S positions of one image (class token included), D features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchmm.common.batch import EncoderInputs
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.family import EncoderFamily
from torchmm.models.families.tiling import INTERN_TILES, SPLIT_TILES


class Dinov2Family(EncoderFamily):
    """DINOv2, with layer scale and optionally a gate."""

    processor_class = "BitImageProcessor"
    layers = "encoder.layer"
    pre: tuple[str, ...] = ("embeddings",)
    patch_embedding = "embeddings.patch_embeddings.projection"
    final_norm = "layernorm"
    unused: tuple[str, ...] = ("embeddings.mask_token",)
    legacy_names: tuple[tuple[str, str], ...] = (
        (r"attention\.attention\.query\.", "attention.q_proj."),
        (r"attention\.attention\.key\.", "attention.k_proj."),
        (r"attention\.attention\.value\.", "attention.v_proj."),
        (r"attention\.output\.dense\.", "attention.o_proj."),
        (r"mlp\.weights_out\.", "mlp.down_proj."),
    )
    fused_tensors: tuple[tuple[str, tuple[str, ...]], ...] = (
        (".mlp.weights_in.", (".mlp.gate_proj.", ".mlp.up_proj.")),
    )

    def styles(self, config: Any) -> dict[str, str]:
        attention = {f"attention.{name}_proj": "colwise" for name in "qkv"}
        linears = {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
        if config.use_swiglu_ffn:
            linears = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise"}
            linears["mlp.down_proj"] = "rowwise"
        slices = ("norm1", "norm2", "layer_scale1", "layer_scale2")
        return {
            **attention,
            "attention.o_proj": "rowwise",
            **linears,
            **dict.fromkeys(slices, "sequence"),
        }

    def ffn_size(self, config: Any) -> int:
        size = int(config.hidden_size * config.mlp_ratio)
        # With a gate, two thirds of the size, rounded up to a multiple of 8.
        return -(-int(size * 2 / 3) // 8) * 8 if config.use_swiglu_ffn else size

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        gated = config.use_swiglu_ffn
        sizes = super().describe_layer(config, index)
        return replace(sizes, gated_ffn=gated, activation="silu" if gated else config.hidden_act)


class InternVisionFamily(EncoderFamily):
    """The InternViT encoder of InternVL, with layer scale."""

    processor_class = "GotOcr2ImageProcessor"
    tiling = INTERN_TILES
    crops = False
    layers = "encoder.layer"
    pre = ("embeddings",)
    patch_embedding = "embeddings.patch_embeddings.projection"
    final_norm = "layernorm"
    unused = ("embeddings.mask_token",)
    tensor_parallel: ClassVar[dict[str, str]] = {
        # No "sequence" styles: layer scales are direct parameters of a layer, not of submodules.
        "attention": "local_heads",
        "attention.q_proj": "colwise",
        "attention.k_proj": "colwise",
        "attention.v_proj": "colwise",
        "attention.projection_layer": "rowwise",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
    }

    def styles(self, config: Any) -> dict[str, str]:
        norms = ("attention.q_norm", "attention.k_norm") if config.use_qk_norm else ()
        return self.tensor_parallel | dict.fromkeys(norms, "sharded_norm")

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Any
    ) -> Tensor:
        return layer(hidden)

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        norm = "layer" if config.norm_type == "layer_norm" else "rms"
        sizes = super().describe_layer(config, index)
        return replace(sizes, norm=norm, qk_norm=config.use_qk_norm)  # type: ignore[arg-type]


class Idefics3Family(EncoderFamily):
    """The SigLIP encoder of Idefics3 and SmolVLM, with positions as fractions of the image."""

    processor_class = "SiglipImageProcessor"
    tiling = SPLIT_TILES
    crops = False
    pre = ("embeddings",)
    has_class_token = False

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        grids = [grid[1:] for grid in inputs.grids_thw]
        shown = torch.ones((len(grids), *grids[0]), dtype=torch.bool, device=inputs.pixels.device)
        return tower.embeddings(pixel_values=inputs.pixels, patch_attention_mask=shown)
