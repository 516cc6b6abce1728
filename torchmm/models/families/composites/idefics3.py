"""Idefics3 and SmolVLM: tiles, n x n patches to a token, one linear."""

from __future__ import annotations

from typing import Any

from torchmm.common.module_names import VISION
from torchmm.models.families.composites.parts import (
    CompositeParts,
    EncoderPart,
    part_problems,
    refuse,
    text_config,
)
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.families.text import TextConventions, Token
from torchmm.models.families.tiling import SMOLVLM_TILES, SPLIT_TILES
from torchmm.models.layered import WeightFiles

IDEFICS3_LLM = WeightFiles(
    renames=((r"lm_head\.", "backbone.lm_head."), (r"model\.text_model\.", "backbone.model.")),
    hf_prefixes=(
        ("backbone.lm_head.", "lm_head."),
        ("backbone.model.", "model.text_model."),
    ),
)
IDEFICS3_VISION = WeightFiles(
    renames=(
        (r"model\.vision_model\.", "tower."),
        (r"model\.connector\.modality_projection\.proj\.", "connector.linear."),
    ),
    hf_prefixes=(
        ("tower.", "model.vision_model."),
        ("connector.linear.", "model.connector.modality_projection.proj."),
    ),
)


def take_idefics3(config: Any) -> CompositeParts:
    """Takes a config of Idefics3 or SmolVLM apart.

    Raises:
        ConfigError: a part is not supported.
    """
    text, vision = text_config(config), config.vision_config
    refuse(config, part_problems(config))
    around = Token("<fake_token_around_image>")
    # Idefics3's own tokenizer spells it with several tokens.
    whole = Token("<global-img>", needed=False)
    vision_part = EncoderPart(
        config=vision,
        family=ENCODER_FAMILIES[vision.model_type],
        files=IDEFICS3_VISION,
        settings={
            "final_norm": True,
            "shuffle": config.scale_factor,
            "connector": "linear",
            "connector_bias": False,
            "connector_from_files": True,
        },
        tiling=SPLIT_TILES if config.model_type == "idefics3" else SMOLVLM_TILES,
    )
    return CompositeParts(
        llm_config=text,
        llm_family=LLM_FAMILIES[text.model_type],
        llm_files=IDEFICS3_LLM,
        encoders={VISION: vision_part},
        text=TextConventions(config.image_token_id, prefix=(around, whole), suffix=(around,)),
    )
