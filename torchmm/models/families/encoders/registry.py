"""The registered encoder families, and the SigLIP families.

Shape legend: N images, P patches of all images, D features, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchmm.common.batch import EncoderInputs
from torchmm.models.families.encoders.audio import Wav2Vec2Family, WhisperFamily
from torchmm.models.families.encoders.family import EncoderFamily, image_starts
from torchmm.models.families.encoders.gemma4 import Gemma4VisionFamily
from torchmm.models.families.encoders.glm4v import GlmMoeVisionFamily, GlmVisionFamily
from torchmm.models.families.encoders.omni import (
    Qwen2_5OmniAudioFamily,
    Qwen2_5OmniVisionFamily,
    Qwen3OmniAudioFamily,
    Qwen3OmniVisionFamily,
)
from torchmm.models.families.encoders.pixtral import PixtralFamily
from torchmm.models.families.encoders.qwen import Qwen2_5VisionFamily, Qwen2VisionFamily
from torchmm.models.families.encoders.qwen3 import (
    Qwen3MoeVisionFamily,
    Qwen3p5MoeVisionFamily,
    Qwen3p5VisionFamily,
    Qwen3VisionFamily,
)
from torchmm.models.families.encoders.speech import (
    AudioFlamingoFamily,
    Qwen2AudioFamily,
    VoxtralAudioFamily,
)
from torchmm.models.families.encoders.vision import Dinov2Family, Idefics3Family, InternVisionFamily
from torchmm.models.families.encoders.vit_variants import (
    Aimv2Family,
    Dinov3Family,
    MetaClip2Family,
    RadioFamily,
)
from torchmm.models.layers.attention import Segments


class SiglipFamily(EncoderFamily):
    """SigLIP, which has no class token and square images of a fixed size."""

    processor_class = "SiglipImageProcessor"
    pre = ("embeddings",)
    unused = ("head",)
    has_class_token = False
    crops = False


class Siglip2Family(SiglipFamily):
    """SigLIP2 NaFlex, with packed patches of images of any size."""

    inputs = "patches"
    processor_class = "Siglip2ImageProcessor"

    def context(self, tower: nn.Module, inputs: EncoderInputs, device: torch.device) -> Segments:
        return Segments.from_starts(image_starts(inputs.grids_thw), device)

    def embed(self, tower: Any, inputs: EncoderInputs, context: Any) -> Tensor:
        embeddings = tower.embeddings
        weight = embeddings.patch_embedding.weight
        x_PD = embeddings.patch_embedding(inputs.pixels.to(weight.dtype))
        side = embeddings.position_embedding_size
        table = embeddings.position_embedding.weight.view(1, side, side, -1).permute(0, 3, 1, 2)
        table = table.contiguous()  # torch 2.13: wrong result for one column in channels_last
        if table.device.type == "cpu":
            table = table.float()  # CPUs have no half-precision antialiasing
        resized = {grid: _resize(table, grid[1:]) for grid in set(inputs.grids_thw)}
        positions_PD = torch.cat([resized[grid] for grid in inputs.grids_thw])
        return (x_PD + positions_PD.to(x_PD.dtype))[None]

    def processor(self, config: Any) -> dict[str, Any]:
        return {"patch_size": config.patch_size, "max_num_patches": config.num_patches}

    def smallest_image(self, config: Any) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        return (1, config.num_channels * config.patch_size**2), (1, 1, 1)


ENCODER_FAMILIES: dict[str, EncoderFamily] = {
    "clip_vision_model": EncoderFamily(),
    "metaclip_2_vision_model": MetaClip2Family(),
    "siglip_vision_model": SiglipFamily(),
    "siglip2_vision_model": Siglip2Family(),
    "dinov2": Dinov2Family(),
    "internvl_vision": InternVisionFamily(),
    "idefics3_vision": Idefics3Family(),
    "smolvlm_vision": Idefics3Family(),
    "qwen2_vl_vision": Qwen2VisionFamily(),
    "qwen2_5_vl_vision": Qwen2_5VisionFamily(),
    "qwen3_vl_vision": Qwen3VisionFamily(),
    "qwen3_vl_moe_vision": Qwen3MoeVisionFamily(),
    "qwen3_5_vision": Qwen3p5VisionFamily(),
    "qwen3_5_moe_vision": Qwen3p5MoeVisionFamily(),
    "glm4v_vision": GlmVisionFamily(),
    "glm4v_moe_vision": GlmMoeVisionFamily(),
    "dinov3_vit": Dinov3Family(),
    "aimv2_vision_model": Aimv2Family(),
    "radio": RadioFamily(),
    "pixtral": PixtralFamily(),
    "gemma4_vision": Gemma4VisionFamily(),
    "whisper": WhisperFamily(),
    "wav2vec2": Wav2Vec2Family(),
    "qwen2_5_omni_vision_encoder": Qwen2_5OmniVisionFamily(),
    "qwen2_5_omni_audio_encoder": Qwen2_5OmniAudioFamily(),
    "voxtral_encoder": VoxtralAudioFamily(),
    "qwen2_audio_encoder": Qwen2AudioFamily(),
    "audioflamingo3_encoder": AudioFlamingoFamily(),
    "qwen3_omni_moe_vision_encoder": Qwen3OmniVisionFamily(),
    "qwen3_omni_moe_audio_encoder": Qwen3OmniAudioFamily(),
}
"""Registered encoder families by Hugging Face model_type. Each has a parity test."""


def _resize(table_1DHW: Tensor, size: tuple[int, ...]) -> Tensor:
    resized = functional.interpolate(
        table_1DHW, size=size, mode="bilinear", align_corners=False, antialias=True
    )
    return resized[0].flatten(1).T
