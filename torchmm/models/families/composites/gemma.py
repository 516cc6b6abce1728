"""PaliGemma and Gemma 3: SigLIP, and attention in both directions among some tokens."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

from torchmm.common.module_names import VISION
from torchmm.models.families.composites.parts import (
    LLAVA_LLM,
    LLAVA_VISION,
    CompositeParts,
    EncoderPart,
    part_problems,
    refuse,
    text_config,
)
from torchmm.models.families.encoders.family import patches_per_row
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.families.text import TextConventions
from torchmm.models.families.tiling import PAN_AND_SCAN


def take_paligemma(config: Any) -> CompositeParts:
    """Takes a config apart.

    Raises:
        ConfigError: a part is not supported, or sizes differ.
    """
    text, vision = text_config(config), config.vision_config
    # `both_ways` handles the bidirectional prompts that this declares; layers would instead drop
    # causality altogether.
    text.use_bidirectional_attention = False
    problems = part_problems(config)
    if config.projection_dim != text.hidden_size:
        problems.append(
            f"projection_dim = {config.projection_dim} differs from the LLM's hidden_size = "
            f"{text.hidden_size}; make them equal"
        )
    refuse(config, problems)
    vision_part = EncoderPart(
        config=vision,
        family=ENCODER_FAMILIES[vision.model_type],
        files=LLAVA_VISION,
        settings={"final_norm": True, "connector": "linear", "connector_from_files": True},
    )
    return CompositeParts(
        llm_config=text,
        llm_family=replace(LLM_FAMILIES[text.model_type], both_ways="prompts"),
        llm_files=LLAVA_LLM,
        encoders={VISION: vision_part},
        text=TextConventions(config.image_token_id),
    )


def take_gemma3(config: Any) -> CompositeParts:
    """Takes a config apart.

    Raises:
        ConfigError: a part is not supported, or tokens do not divide patches.
    """
    text, vision = text_config(config), config.vision_config
    problems = part_problems(config)
    rows = patches_per_row(vision)
    tokens = isqrt(config.mm_tokens_per_image)
    if tokens**2 != config.mm_tokens_per_image or rows % tokens:
        problems.append(
            f"mm_tokens_per_image = {config.mm_tokens_per_image} is not a square whose side "
            f"divides the {rows} patches per row of an image"
        )
    refuse(config, problems)
    family = LLM_FAMILIES[text.model_type]
    vision_part = EncoderPart(
        config=vision,
        family=ENCODER_FAMILIES[vision.model_type],
        files=LLAVA_VISION,
        settings={
            "final_norm": True,
            "shuffle": rows // tokens,
            "connector": "pool",
            "connector_eps": vision.layer_norm_eps,
            "connector_from_files": True,
        },
        tiling=PAN_AND_SCAN,
    )
    return CompositeParts(
        llm_config=text,
        llm_family=replace(family, both_ways="images", image_token_id=config.image_token_id),
        llm_files=LLAVA_LLM,
        encoders={VISION: vision_part},
        text=TextConventions(
            config.image_token_id,
            prefix=("\n\n", config.boi_token_id),
            suffix=(config.eoi_token_id, "\n\n"),
        ),
    )
