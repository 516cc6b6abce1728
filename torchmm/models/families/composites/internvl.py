"""InternVL: tiles, 2 x 2 patches to a token, norm and two linears."""

from __future__ import annotations

from typing import Any

from torchmm.common.module_names import VISION
from torchmm.models.families.composites.parts import (
    LLAVA_LLM,
    CompositeParts,
    EncoderPart,
    part_problems,
    refuse,
    text_config,
)
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.families.text import TextConventions, Token
from torchmm.models.families.tiling import INTERN_TILES
from torchmm.models.layered import WeightFiles

INTERN_VISION = WeightFiles(
    renames=(
        (r"(model\.)?vision_tower\.", "tower."),
        (r"(model\.)?multi_modal_projector\.layer_norm\.", "connector.layer_norm."),
        (r"(model\.)?multi_modal_projector\.", "connector.mlp."),
    ),
    hf_prefixes=(
        ("tower.", "model.vision_tower."),
        ("connector.layer_norm.", "model.multi_modal_projector.layer_norm."),
        ("connector.mlp.", "model.multi_modal_projector."),
    ),
)


def take_internvl(config: Any) -> CompositeParts:
    """Takes a config apart.

    Raises:
        ConfigError: a part or a choice of features is not supported.
    """
    text, vision, layer = text_config(config), config.vision_config, config.vision_feature_layer
    problems = part_problems(config)
    if not isinstance(layer, int):
        problems.append(f"vision_feature_layer = {layer} is a list; supported: a single number")
    if config.vision_feature_select_strategy != "default":
        problems.append(
            f"vision_feature_select_strategy = {config.vision_feature_select_strategy!r} keeps the "
            "class token, which no square of patches has room for; set it to 'default'"
        )
    refuse(config, problems)
    vision_part = EncoderPart(
        config=vision,
        family=ENCODER_FAMILIES[vision.model_type],
        files=INTERN_VISION,
        settings={
            "feature_layer": layer if layer < 0 else layer - vision.num_hidden_layers - 1,
            "final_norm": layer == -1,
            "shuffle": round(1 / config.downsample_ratio),
            "connector": "norm_mlp",
            "connector_act": config.projector_hidden_act,
            "connector_from_files": True,
        },
        tiling=INTERN_TILES,
    )
    return CompositeParts(
        llm_config=text,
        llm_family=LLM_FAMILIES[text.model_type],
        llm_files=LLAVA_LLM,
        encoders={VISION: vision_part},
        text=TextConventions(
            config.image_token_id, prefix=(Token("<img>"),), suffix=(Token("</img>"),)
        ),
    )
