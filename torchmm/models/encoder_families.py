"""How each family of image encoders is cut into pre, context, layers and post.

A family says which Hugging Face class is the tower, what runs before its layers, what every stage
works out from the image grids alone (`context`), how a layer is called and what leaves the last
one. Rejected: running the towers' own forwards, in which Qwen's window permutation and SigLIP2's
padding are inline, so that a stage could not start in the middle.

Shape legend: N images, P patches of all images, S positions of one image (class token included),
D features, C channels.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from torchmm.batch import EncoderInputs, LayerDescription
from torchmm.models.attention import PACKED, PACKED_UNSPLIT, Segments, to_device


class EncoderFamily:
    """CLIP-like towers on images of a fixed size; base of all families."""

    layout: Literal["fixed", "patches"] = "fixed"
    processor_class = "CLIPImageProcessor"
    layers = "encoder.layers"
    pre: tuple[str, ...] = ("embeddings", "pre_layrnorm")
    patch_embedding = "embeddings.patch_embedding"
    unused: tuple[str, ...] = ("post_layernorm",)
    """Parts behind the layers that only Hugging Face's pooled output reads."""
    has_class_token = True
    fixed_merge = False
    """Whether the tower itself merges patches, which fixes its last layer and connectors."""
    tensor_parallel: ClassVar[dict[str, str]] = {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.out_proj": "rowwise",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
        "layer_norm1": "sequence",
        "layer_norm2": "sequence",
    }
    """Style of each linear and norm of a layer."""

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """The tower, whole."""
        return AutoModel.from_config(config, dtype=dtype, attn_implementation=PACKED)

    def context(self, tower: nn.Module, inputs: EncoderInputs, device: torch.device) -> Any:
        """What layers need beside hidden states, from the grids alone."""
        return None

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        """Hidden states before the first layer: (N, S, D)."""
        return tower.pre_layrnorm(tower.embeddings(inputs.pixels))

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Any
    ) -> Tensor:
        """One layer."""
        return layer(hidden, context)

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        """(P, D) outputs, image after image, in the order of their placeholders."""
        return (hidden[:, 1:] if drop_class_token else hidden).flatten(0, 1)

    def hidden_shape(self, config: Any, patches: list[int]) -> tuple[int, ...]:
        """Shape of the hidden states between layers, from the number of patches of each image."""
        return len(patches), patches[0] + self.has_class_token, config.hidden_size

    def output_size(self, config: Any) -> int:
        """D of what `finish` returns."""
        return config.hidden_size

    def merge(self, config: Any) -> int:
        """Patches per row and column that `finish` makes one."""
        return 1

    def processor(self, config: Any) -> dict[str, Any]:
        """Settings of the image processor that follow from the config."""
        size = config.image_size
        return {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """Shape of the pixels and (frames, rows, columns) of the smallest valid image."""
        patches = config.image_size // config.patch_size
        shape = (1, config.num_channels, config.image_size, config.image_size)
        return shape, (1, patches, patches)

    def layer_count(self, config: Any) -> int:
        """Layers of the whole tower."""
        return config.num_hidden_layers

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        """Sizes of a layer."""
        heads = config.num_attention_heads
        return LayerDescription(
            hidden_size=config.hidden_size,
            heads=heads,
            kv_heads=heads,
            head_dim=config.hidden_size // heads,
            ffn_size=config.intermediate_size,
            gated_ffn=False,
            causal=False,
            norm="layer",
            activation=config.hidden_act,
            rotary=False,
            batched=self.layout == "fixed",
        )


class SiglipFamily(EncoderFamily):
    """SigLIP: no class token; squares of a fixed size."""

    processor_class = "SiglipImageProcessor"
    pre = ("embeddings",)
    unused = ("post_layernorm", "head")
    has_class_token = False

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        return tower.embeddings(inputs.pixels)

    def processor(self, config: Any) -> dict[str, Any]:
        return {"size": {"height": config.image_size, "width": config.image_size}}


class Siglip2Family(SiglipFamily):
    """SigLIP2 NaFlex: patches of images of any size, packed without padding."""

    layout = "patches"
    processor_class = "Siglip2ImageProcessor"

    def context(self, tower: nn.Module, inputs: EncoderInputs, device: torch.device) -> Segments:
        return Segments.from_starts(_image_starts(inputs.grids_thw), device)

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        embeddings = tower.embeddings
        weight = embeddings.patch_embedding.weight
        x_PD = embeddings.patch_embedding(inputs.pixels.to(weight.dtype))
        side = embeddings.position_embedding_size
        table = embeddings.position_embedding.weight.view(1, side, side, -1).permute(0, 3, 1, 2)
        table = table.contiguous()  # interpolate is wrong for one column in channels_last (2.13)
        if table.device.type == "cpu":
            table = table.float()  # no half-precision antialiasing on CPU
        resized = {grid: _resize(table, grid[1:]) for grid in set(inputs.grids_thw)}
        positions_PD = torch.cat([resized[grid] for grid in inputs.grids_thw])
        return (x_PD + positions_PD.to(x_PD.dtype))[None]

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        return hidden[0]

    def hidden_shape(self, config: Any, patches: list[int]) -> tuple[int, ...]:
        return 1, sum(patches), config.hidden_size

    def processor(self, config: Any) -> dict[str, Any]:
        return {"patch_size": config.patch_size, "max_num_patches": config.num_patches}

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (1, config.num_channels * config.patch_size**2), (1, 1, 1)


class QwenContext(NamedTuple):
    """Grids of a microbatch as Qwen's vision layers need them."""

    frames: Segments
    windows: Segments
    order: Tensor
    """int64: merged units of `merge`**2 patches in window order."""
    rotary: tuple[Tensor, Tensor]


class Qwen2_5VisionFamily(EncoderFamily):  # noqa: N801 - as Hugging Face writes it
    """Qwen2.5-VL: patches of images of any size, attention in windows except in a few layers."""

    layout = "patches"
    processor_class = "Qwen2VLImageProcessor"
    layers = "blocks"
    pre = ("patch_embed",)
    patch_embedding = "patch_embed.proj"
    unused = ()
    has_class_token = False
    fixed_merge = True
    tensor_parallel: ClassVar[dict[str, str]] = {
        "attn": "packed_qkv",
        "attn.proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
        "norm1": "sequence",
        "norm2": "sequence",
    }

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(
            config, dtype=dtype, attn_implementation=PACKED
        )
        tower.config._attn_implementation = PACKED_UNSPLIT
        return tower

    def context(self, tower: Any, inputs: EncoderInputs, device: torch.device) -> QwenContext:
        config = tower.config
        grids = torch.tensor(inputs.grids_thw)
        order, windows = get_vision_window_index(
            grids,
            spatial_merge_size=config.spatial_merge_size,
            window_size=config.window_size,
            patch_size=config.patch_size,
        )
        order = to_device(order, device)
        positions = to_device(get_vision_position_ids(grids, config.spatial_merge_size), device)
        cos, sin = tower.rotary_pos_emb(positions, positions)
        unit = config.spatial_merge_size**2
        return QwenContext(
            Segments.from_starts(_frame_starts(inputs.grids_thw), device),
            Segments.from_starts(windows.tolist(), device),
            order,
            (_reorder(cos, order, unit), _reorder(sin, order, unit)),
        )

    def embed(self, tower: Any, inputs: EncoderInputs, context: QwenContext) -> Tensor:
        unit = tower.config.spatial_merge_size**2
        return _reorder(tower.patch_embed(inputs.pixels), context.order, unit)

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: QwenContext
    ) -> Tensor:
        whole = index in tower.config.fullatt_block_indexes
        return layer(
            hidden,
            cu_seqlens=context.frames if whole else context.windows,
            max_seqlen=0,  # would otherwise be computed per layer, and is not read
            position_embeddings=context.rotary,
        )

    def finish(
        self, tower: Any, hidden: Tensor, context: QwenContext, drop_class_token: bool
    ) -> Tensor:
        x_PD = _reorder(hidden, context.order.argsort(), tower.config.spatial_merge_size**2)
        return x_PD if tower.merger is None else tower.merger(x_PD)

    def hidden_shape(self, config: Any, patches: list[int]) -> tuple[int, ...]:
        return sum(patches), config.hidden_size

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
        whole = index in config.fullatt_block_indexes
        window = None if whole else (config.window_size // config.patch_size) ** 2
        sizes = super().describe_layer(config, index)
        return replace(
            sizes, gated_ffn=True, window=window, norm="rms", rotary=True, packed_qkv=True
        )


ENCODER_FAMILIES: dict[str, EncoderFamily] = {
    "clip_vision_model": EncoderFamily(),
    "siglip_vision_model": SiglipFamily(),
    "siglip2_vision_model": Siglip2Family(),
    "qwen2_5_vl_vision": Qwen2_5VisionFamily(),
}
"""Supported families by Hugging Face model_type. One is supported when its parity test passes."""


def _image_starts(grids_thw: list[tuple[int, int, int]]) -> list[int]:
    return _starts([prod(grid) for grid in grids_thw])


def _frame_starts(grids_thw: list[tuple[int, int, int]]) -> list[int]:
    return _starts([rows * columns for frames, rows, columns in grids_thw for _ in range(frames)])


def _starts(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _resize(table_1DHW: Tensor, size: tuple[int, ...]) -> Tensor:
    resized = functional.interpolate(
        table_1DHW, size=size, mode="bilinear", align_corners=False, antialias=True
    )
    return resized[0].flatten(1).T


def _reorder(x_PD: Tensor, order: Tensor, unit: int) -> Tensor:
    return x_PD.unflatten(0, (-1, unit))[order].flatten(0, 1)
