"""Vision encoders of Qwen-VL: packed patches of images of any size, with merged outputs.

Shape legend: P patches of all images, D features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from torchmm.common.batch import EncoderInputs
from torchmm.common.device_copies import to_device
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.family import EncoderFamily, frame_starts
from torchmm.models.layers.attention import PACKED, PACKED_FLASH, Segments


class QwenContext(NamedTuple):
    """Layer inputs of Qwen vision encoders that depend on the grids."""

    frames: Segments
    rotary: tuple[Tensor, Tensor]
    windows: Segments | None = None
    order: Tensor | None = None
    """int64, indices of units of `merge`**2 patches in window order."""


class QwenVisionFamily(EncoderFamily):
    """The base class of Qwen vision encoders. Each frame attends to itself.

    Defaults are those of Qwen2.5-VL.
    """

    inputs = "patches"
    processor_class = "Qwen2VLImageProcessor"
    layers = "blocks"
    pre: tuple[str, ...] = ("patch_embed",)
    patch_embedding = "patch_embed.proj"
    final_norm = ""
    has_class_token = False
    fixed_merge = True
    merger: tuple[str, ...] = ("merger",)
    tensor_parallel: ClassVar[dict[str, str]] = {
        "attn": "packed_qkv",
        "attn.proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
        "norm1": "sequence",
        "norm2": "sequence",
    }
    tower: ClassVar[Any]
    """Hugging Face class."""

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        tower = self.tower._from_config(config, dtype=dtype, attn_implementation=PACKED)
        tower.config._attn_implementation = PACKED_FLASH
        return tower

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> QwenContext:
        frames = Segments.from_starts(frame_starts(inputs.grids_thw), device)
        return QwenContext(frames, self._rotary(tower, inputs, device))

    def _rotary(
        self, tower: Any, inputs: EncoderInputs, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        grids = torch.tensor(inputs.grids_thw)
        merge = tower.config.spatial_merge_size
        positions = to_device(get_vision_position_ids(grids, merge), device)
        return tower.rotary_pos_emb(positions, positions)

    def embed(self, tower: Any, inputs: EncoderInputs, context: QwenContext) -> Tensor:
        return tower.patch_embed(inputs.pixels)

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: QwenContext
    ) -> Tensor:
        segments = self._segments(tower.config, index, context)
        # Hugging Face would compute max_seqlen in each layer. It is unused.
        rotary = context.rotary
        return layer(hidden, cu_seqlens=segments, max_seqlen=0, position_embeddings=rotary)

    def _segments(self, config: Any, index: int, context: QwenContext) -> Segments:
        """Return the segments of the attention of a layer."""
        return context.frames

    def finish(
        self, tower: Any, hidden: Tensor, context: QwenContext, drop_class_token: bool
    ) -> Tensor:
        return hidden if tower.merger is None else tower.merger(hidden)

    def hidden_shape(self, config: Any, patches: list[int]) -> tuple[int, ...]:
        return sum(patches), self.width(config)

    def output_size(self, config: Any) -> int:
        return config.out_hidden_size

    def merge(self, config: Any) -> int:
        return config.spatial_merge_size

    def processor(self, config: Any) -> dict[str, Any]:
        return {
            "patch_size": config.patch_size,
            "temporal_patch_size": config.temporal_patch_size,
            "merge_size": config.spatial_merge_size,
        }

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        merge = config.spatial_merge_size
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return (merge**2, values), (1, merge, merge)

    def layer_count(self, config: Any) -> int:
        return config.depth

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        sizes = super().describe_layer(config, index)
        return replace(sizes, rotary=True, rotary_float32=True, packed_qkv=True)


class Qwen2VisionFamily(QwenVisionFamily):
    """The encoder of Qwen2-VL, with MLPs without a gate and different config keys."""

    tensor_parallel: ClassVar[dict[str, str]] = {
        "attn": "packed_qkv",
        "attn.proj": "rowwise",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
        "norm1": "sequence",
        "norm2": "sequence",
    }
    tower: ClassVar[Any] = Qwen2VisionTransformerPretrainedModel

    def width(self, config: Any) -> int:
        return config.embed_dim

    def output_size(self, config: Any) -> int:
        return config.hidden_size

    def ffn_size(self, config: Any) -> int:
        return int(config.embed_dim * config.mlp_ratio)


class Qwen2_5VisionFamily(QwenVisionFamily):  # noqa: N801 - as Hugging Face writes it
    """The encoder of Qwen2.5-VL, with gated MLPs and window attention except in a few layers."""

    tower: ClassVar[Any] = Qwen2_5_VisionTransformerPretrainedModel

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> QwenContext:
        config = tower.config
        order, windows = get_vision_window_index(
            torch.tensor(inputs.grids_thw),
            spatial_merge_size=config.spatial_merge_size,
            window_size=config.window_size,
            patch_size=config.patch_size,
        )
        order = to_device(order, device)
        cos, sin = self._rotary(tower, inputs, device)
        unit = config.spatial_merge_size**2
        return QwenContext(
            Segments.from_starts(frame_starts(inputs.grids_thw), device),
            (_reorder(cos, order, unit), _reorder(sin, order, unit)),
            Segments.from_starts(windows.tolist(), device),
            order,
        )

    def embed(self, tower: Any, inputs: EncoderInputs, context: QwenContext) -> Tensor:
        assert context.order is not None
        unit = tower.config.spatial_merge_size**2
        return _reorder(tower.patch_embed(inputs.pixels), context.order, unit)

    def _segments(self, config: Any, index: int, context: QwenContext) -> Segments:
        assert context.windows is not None
        return context.frames if index in config.fullatt_block_indexes else context.windows

    def finish(
        self, tower: Any, hidden: Tensor, context: QwenContext, drop_class_token: bool
    ) -> Tensor:
        assert context.order is not None
        x_PD = _reorder(hidden, context.order.argsort(), tower.config.spatial_merge_size**2)
        return super().finish(tower, x_PD, context, drop_class_token)

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        is_full_attention = index in config.fullatt_block_indexes
        window = None if is_full_attention else (config.window_size // config.patch_size) ** 2
        sizes = super().describe_layer(config, index)
        return replace(sizes, gated_ffn=True, window=window, norm="rms")


def _reorder(x_PD: Tensor, order: Tensor, unit: int) -> Tensor:
    return x_PD.unflatten(0, (-1, unit))[order].flatten(0, 1)
