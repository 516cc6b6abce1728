"""InternVL: tiles, 2 x 2 patches per token, a connector of a norm and two linear layers."""

from __future__ import annotations

from typing import Any

from torchmm.common.batch import BoxFormat
from torchmm.models.families.composites.components import (
    LLAVA_LLM,
    ModelComponents,
    component_problems,
    raise_problems,
    single_encoder_components,
    text_config,
)
from torchmm.models.families.text_conventions import TextConventions, Token
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
_BOXES = BoxFormat(
    name_text="<ref>{}</ref>",
    box_text="<box>[{}]</box>",
    tokens=("<ref>", "</ref>", "<box>", "</box>"),
)


def internvl_components(config: Any) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: A component or a choice of features is not supported.
    """
    vision, layer = config.vision_config, config.vision_feature_layer
    problems = component_problems(config)
    if not isinstance(layer, int):
        problems.append(f"vision_feature_layer = {layer} is a list; use a single number")
    if config.vision_feature_select_strategy != "default":
        problems.append(
            f"vision_feature_select_strategy = {config.vision_feature_select_strategy!r} "
            "keeps the class token, which does not fit into a square of patches; set it to "
            "'default'"
        )
    raise_problems(config, problems)
    return single_encoder_components(
        config,
        text_config(config),
        TextConventions(
            config.image_token_id,
            prefix=(Token("<img>"),),
            suffix=(Token("</img>"),),
            boxes=_BOXES,
        ),
        {
            "feature_layer": layer if layer < 0 else layer - vision.num_hidden_layers - 1,
            "final_norm": layer == -1,
            "pixel_shuffle_factor": round(1 / config.downsample_ratio),
            "connector": "norm_mlp",
            "connector_act": config.projector_hidden_act,
        },
        files=(INTERN_VISION, LLAVA_LLM),
        tiling=INTERN_TILES,
    )
