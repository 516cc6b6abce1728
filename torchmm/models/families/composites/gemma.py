"""PaliGemma and Gemma 3: SigLIP encoders, and bidirectional attention of some tokens."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

from torchmm.models.families.composites.components import (
    ModelComponents,
    component_problems,
    raise_problems,
    single_encoder_components,
    text_config,
)
from torchmm.models.families.encoders.family import patches_per_row
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.families.text_conventions import TextConventions
from torchmm.models.families.tiling import PAN_AND_SCAN


def paligemma_components(config: Any) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: A component is not supported, or sizes differ.
    """
    text = text_config(config)
    # `bidirectional` implements bidirectional prompts. With this setting, layers would have no
    # causal mask at all.
    text.use_bidirectional_attention = False
    problems = component_problems(config)
    if config.projection_dim != text.hidden_size:
        problems.append(
            f"projection_dim = {config.projection_dim} differs from hidden_size = "
            f"{text.hidden_size} of the LLM; set them to the same value"
        )
    raise_problems(config, problems)
    return single_encoder_components(
        config,
        text,
        TextConventions(config.image_token_id),
        {"final_norm": True, "connector": "linear"},
        llm_family=replace(LLM_FAMILIES[text.model_type], bidirectional="prompts"),
    )


def gemma3_components(config: Any) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: A component is not supported, or tokens do not divide patches.
    """
    text, vision = text_config(config), config.vision_config
    problems = component_problems(config)
    rows = patches_per_row(vision)
    tokens = isqrt(config.mm_tokens_per_image)
    if tokens**2 != config.mm_tokens_per_image or rows % tokens:
        problems.append(
            f"mm_tokens_per_image = {config.mm_tokens_per_image} is not a square number whose "
            f"root divides the {rows} patches per row of an image"
        )
    raise_problems(config, problems)
    family = LLM_FAMILIES[text.model_type]
    return single_encoder_components(
        config,
        text,
        TextConventions(
            config.image_token_id,
            prefix=("\n\n", config.boi_token_id),
            suffix=(config.eoi_token_id, "\n\n"),
        ),
        {
            "final_norm": True,
            "pixel_shuffle_factor": rows // tokens,
            "connector": "pool",
            "connector_eps": vision.layer_norm_eps,
        },
        llm_family=replace(family, bidirectional="images", image_token_id=config.image_token_id),
        tiling=PAN_AND_SCAN,
    )
