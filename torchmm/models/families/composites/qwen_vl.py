"""Qwen's vision-language models, whose towers take images of any size and merge patches."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
)

from torchmm.common.module_names import VISION
from torchmm.models.families.composites.parts import CompositeParts, EncoderPart, refuse
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.text import TextConventions
from torchmm.models.layered import WeightFiles
from torchmm.models.layers.attention import PACKED

QWEN_LLM = WeightFiles(
    renames=(
        (r"lm_head\.", "backbone.lm_head."),
        (r"model\.(?!visual\.)(language_model\.)?", "backbone.model.language_model."),
    ),
    hf_prefixes=(("backbone.", ""),),
)
QWEN_VISION = WeightFiles(
    renames=(
        (r"(model\.)?visual\.merger\.", "connector."),
        (r"(model\.)?visual\.", "tower."),
    ),
    hf_prefixes=(
        ("connector.", "model.visual.merger."),
        ("tower.", "model.visual."),
    ),
)
QWEN_VL: dict[str, type[PreTrainedModel]] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
}
"""Hugging Face's classes by model_type."""


def build_without_tower(kind: Any, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A composite without its tower: Hugging Face has no causal LM of its text part alone."""
    model = kind._from_config(config, dtype=dtype, attn_implementation=PACKED)
    model.model.visual = None
    return model


def width_problems(config: Any, key: str) -> list[str]:
    """What is wrong if the tower's outputs, `vision_config.key` wide, do not fit the LLM."""
    given = getattr(config.vision_config, key)
    wanted = config.text_config.hidden_size
    if given == wanted:
        return []
    return [
        f"vision_config.{key} = {given} differs from text_config.hidden_size = {wanted}; make "
        "them equal"
    ]


def qwen_text(config: Any) -> TextConventions:
    """How images and clips appear in the text of all of them."""
    return TextConventions(
        config.image_token_id,
        prefix=(config.vision_start_token_id,),
        suffix=(config.vision_end_token_id,),
        mrope=True,
        video_token_id=config.video_token_id,
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
    )


def _build_text(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    return build_without_tower(QWEN_VL[config.model_type], config, dtype)


def take_qwen_vl(config: Any) -> CompositeParts:
    """Takes a config apart.

    Raises:
        ConfigError: the sizes of tower and LLM differ.
    """
    vision = config.vision_config
    key = "hidden_size" if config.model_type == "qwen2_vl" else "out_hidden_size"
    refuse(config, width_problems(config, key))
    vision_part = EncoderPart(
        config=vision,
        family=ENCODER_FAMILIES[f"{config.model_type}_vision"],
        files=QWEN_VISION,
        settings={"connector": "merger", "connector_from_files": True},
    )
    return CompositeParts(
        llm_config=config,
        llm_family=LlmFamily(build=_build_text, text_model="model.language_model"),
        llm_files=QWEN_LLM,
        encoders={VISION: vision_part},
        text=qwen_text(config),
    )
