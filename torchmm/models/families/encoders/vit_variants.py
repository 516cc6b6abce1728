"""Vision transformers after CLIP on images of a fixed size: MetaCLIP 2, DINOv3, AIMv2 and RADIO.

Shape legend: N images, S positions of one image, D features.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import MetaClip2VisionModel, PreTrainedConfig, PreTrainedModel
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from torchmm.common.batch import EncoderInputs
from torchmm.common.layers import LayerDescription
from torchmm.models.families.encoders.family import EncoderFamily, patches_per_row, side
from torchmm.models.families.encoders.vision import Dinov2Family
from torchmm.models.layers.attention import PACKED


class MetaClip2Family(EncoderFamily):
    """MetaCLIP 2: the CLIP encoder with a model type that `AutoModel` and LLaVA do not support."""

    is_llava_compatible = False
    is_clip_equivalent = True

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        return MetaClip2VisionModel._from_config(config, dtype=dtype, attn_implementation=PACKED)


class Dinov3Family(EncoderFamily):
    """DINOv3: rotary positions of patches, register tokens, layer scale and optionally a gate.

    The Hugging Face encoder randomly perturbs positions in training. torchmm does not, because
    recomputed stages would have to sample the same values.
    """

    # DINOv3ViTImageProcessor requires torchvision. It resizes before it rounds.
    processor_class = "ViTImageProcessor"
    replaced_processor = "DINOv3ViTImageProcessor"
    crops = False
    layers = "model.layer"
    pre = ("embeddings",)
    patch_embedding = "embeddings.patch_embeddings"
    final_norm = "norm"
    unused = ("embeddings.mask_token",)
    renames = ((r"(model\.)?layer\.", "tower.model.layer."),)
    is_llava_compatible = False
    tensor_parallel: ClassVar[dict[str, str]] = {
        "attention": "local_heads",
        **{f"attention.{name}_proj": "colwise" for name in "qkv"},
        "attention.o_proj": "rowwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
        **dict.fromkeys(("norm1", "norm2", "layer_scale1", "layer_scale2"), "sequence"),
    }

    def styles(self, config: Any) -> dict[str, str]:
        gate = {"mlp.gate_proj": "colwise"} if config.use_gated_mlp else {}
        return self.tensor_parallel | gate

    def build(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        tower: Any = super().build(config, dtype)
        unperturbed = copy.copy(config)
        for change in ("shift", "jitter", "rescale"):
            setattr(unperturbed, f"pos_embed_{change}", None)
        tower.rope_embeddings.config = unperturbed
        return tower

    def context(
        self, tower: Any, inputs: EncoderInputs, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        _, rows, columns = inputs.grids_thw[0]
        size = side(tower.config.patch_size)
        example = torch.empty((1, 0, rows * size, columns * size), device=device)
        return tower.rope_embeddings(example)

    def run_layer(
        self, tower: Any, index: int, layer: nn.Module, hidden: Tensor, context: Any
    ) -> Tensor:
        cos, sin = (table.to(hidden.dtype) for table in context)
        return layer(hidden, position_embeddings=(cos, sin))

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        return hidden[:, self.num_prefix_tokens(tower.config) :].flatten(0, 1)

    def num_prefix_tokens(self, config: Any) -> int:
        return 1 + config.num_register_tokens

    def processor(self, config: Any) -> dict[str, Any]:
        return {
            **super().processor(config),
            "image_mean": list(IMAGENET_DEFAULT_MEAN),
            "image_std": list(IMAGENET_DEFAULT_STD),
        }

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        sizes = super().describe_layer(config, index)
        return replace(sizes, gated_ffn=config.use_gated_mlp, rotary=True)


class RadioFamily(Dinov2Family):
    """C-RADIO: DINOv2 layers, several class tokens, registers, resized learned positions.

    The encoder normalizes pixels itself, so the image processor does not. Files store queries, keys
    and values in one tensor and have no layer scales. The Hugging Face encoder also supports images
    of any size and groups of frames. torchmm supports the image size of the config and single
    frames.
    """

    processor_class = "CLIPImageProcessor"
    pre = ("input_conditioner", "embeddings")
    patch_embedding = "embeddings.patch_projection"
    final_norm = ""
    unused = ("embeddings.video_patch_projection", "summary_idxs")
    has_class_token = False
    is_llava_compatible = False
    renames = ((r"radio_model\.model\.blocks\.", "tower.encoder.layer."),)
    legacy_names = (
        (r"radio_model\.(model\.patch_generator\.)?", ""),
        (r"tower\.(video_)?embedder\.", r"tower.embeddings.\1patch_projection."),
        (r"tower\.pos_embed$", "tower.embeddings.position_embedding"),
        (r"tower\.cls_token\.token$", "tower.embeddings.cls_register_token"),
        (r"\.attn\.proj\.", ".attention.o_proj."),
    )
    fused_tensors = ((".attn.qkv.", tuple(f".attention.{name}_proj." for name in "qkv")),)
    optional_suffixes = ("layer_scale1.lambda1", "layer_scale2.lambda1")

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        dtype = tower.embeddings.patch_projection.weight.dtype
        return tower.embeddings(tower.input_conditioner(inputs.pixels).to(dtype))

    def finish(self, tower: Any, hidden: Tensor, context: Any, drop_class_token: bool) -> Tensor:
        return hidden[:, self.num_prefix_tokens(tower.config) :].flatten(0, 1)

    def num_prefix_tokens(self, config: Any) -> int:
        return config.num_summary_tokens

    def processor(self, config: Any) -> dict[str, Any]:
        return {**super().processor(config), "do_normalize": False}


class Aimv2Family(EncoderFamily):
    """AIMv2: gated MLPs, RMSNorm, no class token, learned or computed positions."""

    pre = ("embeddings",)
    patch_embedding = "embeddings.patch_embed"
    final_norm = "rms_norm"
    unused = ("head",)
    has_class_token = False
    tensor_parallel: ClassVar[dict[str, str]] = {
        "attention": "local_heads",
        **{f"attention.{name}_proj": "colwise" for name in "qkv"},
        "attention.out_proj": "rowwise",
        "ffn.gate_proj": "colwise",
        "ffn.up_proj": "colwise",
        "ffn.down_proj": "rowwise",
        "rms_norm1": "sequence",
        "rms_norm2": "sequence",
    }

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        rows = patches_per_row(tower.config)
        assert inputs.grids_thw[0][1:] == (rows, rows), "positions of full images are required"
        return super().embed(tower, inputs, context)

    def describe_layer(self, config: Any, index: int) -> LayerDescription:
        return replace(super().describe_layer(config, index), gated_ffn=True, norm="rms")
