"""GLM-4V: GLM-4.1V and GLM-4.6V, dense, and GLM-4.5V with experts; three-dimensional positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import (
    Glm4vForConditionalGeneration,
    Glm4vMoeForConditionalGeneration,
    Glm46VForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from torchmm.common.batch import ClipText
from torchmm.common.module_names import VISION
from torchmm.models.families.composites.parts import CompositeParts, EncoderPart, refuse
from torchmm.models.families.composites.qwen_vl import (
    QWEN_LLM,
    build_without_tower,
    width_problems,
)
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.families.text import TextConventions
from torchmm.models.layered import WeightFiles

GLM_VISION = WeightFiles(
    renames=(
        (r"(model\.)?visual\.(?=(merger|downsample|post_layernorm)\.)", "connector."),
        (r"(model\.)?visual\.", "tower."),
    ),
    hf_prefixes=(
        ("connector.", "model.visual."),
        ("tower.", "model.visual."),
    ),
)
GLM4V: dict[str, type[PreTrainedModel]] = {
    "glm4v": Glm4vForConditionalGeneration,
    "glm4v_moe": Glm4vMoeForConditionalGeneration,
    "glm46v": Glm46VForConditionalGeneration,
}
"""Hugging Face's classes by model_type."""
_TIMES = {  # Hugging Face's processors write them; GLM-4.5V's is GLM-4.1V's
    "glm4v": "{frames}{whole_s}",
    "glm4v_moe": "{frames}{whole_s}",
    "glm46v": "{frames}{first_s:.1f} seconds",
}
"""Groups of frames of a clip with their times, see `ClipText`."""
_TEXTS = {"glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe"}
"""Whose layers they have, by model_type of the text part."""


def take_glm4v(config: Any) -> CompositeParts:
    """Takes a config apart.

    Raises:
        ConfigError: a part is not supported, or the sizes of tower and LLM differ.
    """
    refuse(config, _part_problems(config))
    refuse(config, width_problems(config, "out_hidden_size"))
    family = LLM_FAMILIES[_TEXTS[config.text_config.model_type]]
    vision_part = EncoderPart(
        config=config.vision_config,
        family=ENCODER_FAMILIES[config.vision_config.model_type],
        files=GLM_VISION,
        settings={"connector": "merger", "connector_from_files": True},
    )
    return CompositeParts(
        llm_config=config,
        llm_family=replace(family, build=_build_text, text_model="model.language_model"),
        llm_files=QWEN_LLM,
        encoders={VISION: vision_part},
        text=TextConventions(
            config.image_token_id,
            prefix=(config.image_start_token_id,),
            suffix=(config.image_end_token_id,),
            mrope=True,
            clip=ClipText(
                _TIMES[config.model_type],
                prefix=(config.video_start_token_id,),
                suffix=(config.video_end_token_id,),
            ),
        ),
    )


def _part_problems(config: Any) -> list[str]:
    """Of glm46v, whose config takes any parts."""
    found = {"text_config": config.text_config, "vision_config": config.vision_config}
    family = "glm4v_moe" if config.model_type == "glm4v_moe" else "glm4v"
    known = {"text_config": f"{family}_text", "vision_config": f"{family}_vision"}
    return [
        f"{key}.model_type = {part.model_type!r} is not supported; supported: {known[key]}"
        for key, part in found.items()
        if part.model_type != known[key]
    ]


def _build_text(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    return build_without_tower(GLM4V[config.model_type], config, dtype)
