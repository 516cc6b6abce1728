"""The vision encoder of GLM-4V: learned positions, and a norm and a convolution after the layers.

Learned positions are resized to the grid of each image. Norm, convolution and merger after the
layers form one module, `GlmMerger`, which is the connector of multimodal models. The convolution
has no overlap and reads the patches of one token, so that it is a matmul like the patch embedding.

Shape legend: P patches of all images, K output tokens of all images, D features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel
from transformers.vision_utils import get_vision_position_ids

from torchmm.common.batch import EncoderInputs
from torchmm.common.device_copies import to_device
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.family import frame_starts, side
from torchmm.models.families.encoders.qwen import QwenVisionFamily
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.patch_embedding import patch_embed_as_matmul


class GlmContext(NamedTuple):
    """Inputs of layers and position embeddings that depend on the grids."""

    frames: Segments
    rotary: tuple[Tensor, Tensor]
    lengths: Tensor
    """(frames of all images,), int64, number of patches of each frame."""
    shapes: Tensor
    """(frames of all images, 3), int64: 1, rows and columns of each frame."""
    positions: Tensor
    """(P, 2), int64, row and column of each patch."""


class GlmMerger(nn.Module):
    """The part after the layers, with Hugging Face names.

    Args:
        tower: Hugging Face encoder whose modules are used.
    """

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.post_layernorm = tower.post_layernorm
        self.downsample = tower.downsample
        self.merger = tower.merger

    def forward(self, x_PD: Tensor) -> Tensor:
        """Return the tokens (K, D_llm) for the output (P, D) of the last layer.

        Patches of a token are adjacent.
        """
        return merge_patches(self, x_PD)


def merge_patches(parts: Any, x_PD: Tensor) -> Tensor:
    """Return the tokens (K, D_llm), computed by the modules of a connector or of an encoder."""
    rows, columns = parts.downsample.kernel_size
    x_KhwD = parts.post_layernorm(x_PD).unflatten(0, (-1, rows, columns))
    return parts.merger(parts.downsample(x_KhwD.permute(0, 3, 1, 2)).flatten(1))


class GlmVisionFamily(QwenVisionFamily):
    """The encoder of GLM-4.1V and GLM-4.6V."""

    processor_class = "Glm4vImageProcessor"
    pre = ("patch_embed", "post_conv_layernorm", "embeddings")
    splits_clips = True
    merger = ("post_layernorm", "downsample", "merger")
    merger_styles: ClassVar[dict[str, str]] = {
        "merger.gate_proj": "colwise",
        "merger.up_proj": "colwise",
        "merger.down_proj": "rowwise",
    }
    merger_norms = ("merger",)
    tower: ClassVar[Any] = Glm4vVisionModel

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        tower: Any = super().build(config, dtype)
        patch_embed_as_matmul(tower.downsample)
        return tower

    def detach_merger(self, tower: Any) -> nn.Module:
        merger = GlmMerger(tower)
        for name in self.merger:
            setattr(tower, name, None)
        return merger

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> Any:
        grids = inputs.grids_thw
        frames = [(1, rows, columns) for count, rows, columns in grids for _ in range(count)]
        shapes = torch.tensor(frames)
        merge = tower.config.spatial_merge_size
        positions = to_device(get_vision_position_ids(torch.tensor(grids), merge), device)
        return GlmContext(
            Segments.from_starts(frame_starts(grids), device),
            tower.rotary_pos_emb(positions, positions),
            to_device(shapes.prod(1), device),
            to_device(shapes, device),
            positions,
        )

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        x_PD = tower.post_conv_layernorm(tower.patch_embed(inputs.pixels))
        rows, columns = context.positions.unbind(1)
        return tower.embeddings(x_PD, context.lengths, context.shapes, rows, columns)

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        return hidden if tower.merger is None else merge_patches(tower, hidden)

    def patch_size(self, config: Any) -> int:
        return side(config.patch_size)

    def ffn_size(self, config: Any) -> int:
        return config.out_hidden_size  # `intermediate_size` of the config is that of the merger

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        return replace(super().describe_layer(config, index), gated_ffn=True, norm="rms")


class GlmMoeVisionFamily(GlmVisionFamily):
    """The encoder of GLM-4.5V, which has a mixture-of-experts LLM."""

    tower: ClassVar[Any] = Glm4vMoeVisionModel
