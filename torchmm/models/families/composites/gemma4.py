"""Gemma 4: images of any size, means of n x n patches as tokens, one linear layer as connector.

If the config enables it, tokens of an image attend to each other in layers with a sliding window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchmm.models.families.composites.components import (
    LLAVA_LLM,
    ModelComponents,
    component_problems,
    raise_problems,
    single_encoder_components,
    text_config,
)
from torchmm.models.families.encoders.gemma4 import reject_clipping
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.families.text_conventions import TextConventions
from torchmm.models.layered import WeightFiles

GEMMA4_VISION = WeightFiles(
    renames=(
        (r"model\.vision_tower\.std_", "connector.std_"),
        (r"model\.vision_tower\.", "tower."),
        (r"model\.embed_vision\.embedding_projection\.", "connector.linear."),
    ),
    hf_prefixes=(
        ("tower.", "model.vision_tower."),
        ("connector.std_", "model.vision_tower.std_"),
        ("connector.linear.", "model.embed_vision.embedding_projection."),
    ),
)


def gemma4_components(config: Any) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: A component is not supported.
    """
    text, vision = text_config(config), config.vision_config
    problems = component_problems(config, towers=("gemma4_vision",))
    if config.audio_config is not None:
        problems.append(
            "audio_config (Gemma 4 E2B, E4B): the audio encoder is not supported; use a "
            "model without it (31B, 26B-A4B)"
        )
    raise_problems(config, problems)
    reject_clipping(vision)
    family = replace(LLM_FAMILIES[text.model_type], image_token_id=config.image_token_id)
    if text.use_bidirectional_attention == "vision":
        family = replace(family, bidirectional="images in windows")
    return single_encoder_components(
        config,
        text,
        TextConventions(
            config.image_token_id, prefix=(config.boi_token_id,), suffix=(config.eoi_token_id,)
        ),
        {"connector": "scaled_linear", "connector_eps": vision.rms_norm_eps},
        llm_family=family,
        files=(GEMMA4_VISION, LLAVA_LLM),
    )
