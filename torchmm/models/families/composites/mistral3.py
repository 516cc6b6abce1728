"""Mistral 3: Pixtral's tower, n x n patches to a token, a token at the end of every row."""

from __future__ import annotations

from typing import Any

from torchmm.common.module_names import VISION
from torchmm.models.families.composites.parts import (
    LLAVA_LLM,
    LLAVA_VISION,
    ROW_MARKS,
    CompositeParts,
    EncoderPart,
    part_problems,
    refuse,
    text_config,
)
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.families.text import TextConventions


def take_mistral3(config: Any) -> CompositeParts:
    """Takes a config apart.

    Raises:
        ConfigError: a part or a choice of features is not supported.
    """
    text = text_config(config)
    vision = config.vision_config
    problems = part_problems(config, towers=("pixtral",))
    if config.vision_feature_layer != -1:
        problems.append(
            f"vision_feature_layer = {config.vision_feature_layer}: only the last layer's features "
            "are supported; set it to -1"
        )
    refuse(config, problems)
    vision_part = EncoderPart(
        config=vision,
        family=ENCODER_FAMILIES[vision.model_type],
        files=LLAVA_VISION,
        settings={
            "shuffle": config.spatial_merge_size,
            "connector": "merge_mlp",
            "connector_act": config.projector_hidden_act,
            "connector_bias": config.multimodal_projector_bias,
            "connector_eps": text.rms_norm_eps,
            "connector_from_files": True,
        },
    )
    return CompositeParts(
        llm_config=text,
        llm_family=LLM_FAMILIES[text.model_type],
        llm_files=LLAVA_LLM,
        encoders={VISION: vision_part},
        text=TextConventions(config.image_token_id, **ROW_MARKS),
    )
