"""Idefics3 and SmolVLM: tiles, n x n patches per token, one linear layer as connector."""

from __future__ import annotations

from typing import Any

from torchmm.models.families.composites.components import (
    ModelComponents,
    component_problems,
    raise_problems,
    single_encoder_components,
    text_config,
)
from torchmm.models.families.text_conventions import TextConventions, Token
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


def idefics3_components(config: Any) -> ModelComponents:
    """Return the components of Idefics3 or SmolVLM from its config.

    Raises:
        ConfigError: A component is not supported.
    """
    raise_problems(config, component_problems(config))
    around = Token("<fake_token_around_image>")
    # The tokenizer of Idefics3 has no such token and splits the text into several tokens.
    global_image = Token("<global-img>", is_required=False)
    return single_encoder_components(
        config,
        text_config(config),
        TextConventions(config.image_token_id, prefix=(around, global_image), suffix=(around,)),
        {
            "final_norm": True,
            "pixel_shuffle_factor": config.scale_factor,
            "connector": "linear",
            "connector_bias": False,
        },
        files=(IDEFICS3_VISION, IDEFICS3_LLM),
        tiling=SPLIT_TILES if config.model_type == "idefics3" else SMOLVLM_TILES,
    )
