"""LLaVA with fixed-size images or the Pixtral encoder, and LLaVA-NeXT and -OneVision with tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchmm.common.module_names import VISION
from torchmm.models.families.composites.components import (
    LLAVA_VISION,
    NO_VERIFIED_FAMILIES,
    ROW_MARKERS,
    ModelComponents,
    VerifiedFamilies,
    component_problems,
    raise_problems,
    single_encoder_components,
    text_config,
)
from torchmm.models.families.encoders.family import side
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.text_conventions import TextConventions
from torchmm.models.families.tiling import LLAVA_NEXT_TILES, ONEVISION_TILES
from torchmm.models.layered import WeightFiles

LLAVA_NEXT_VISION = WeightFiles(
    renames=((r"(model\.)?image_newline", "connector.image_newline"), *LLAVA_VISION.renames),
    hf_prefixes=(
        ("connector.image_newline", "model.image_newline"),
        *LLAVA_VISION.hf_prefixes,
    ),
)


def llava_components(
    config: Any, unlisted: VerifiedFamilies = NO_VERIFIED_FAMILIES
) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Args:
        config: Config of the model.
        unlisted: Verified families of unregistered components.

    Raises:
        ConfigError: A component or a choice of features is not supported.
    """
    text, vision = text_config(config), config.vision_config
    family = unlisted.tower or ENCODER_FAMILIES.get(vision.model_type)
    any_size = ("pixtral",) if config.model_type == "llava" else ()
    problems = component_problems(config, also=any_size, unlisted=unlisted)
    layer = config.vision_feature_layer
    if not isinstance(layer, int):
        problems.append(f"vision_feature_layer = {layer} is a list; use a single number")
        layer = -1
    drops_first = config.vision_feature_select_strategy == "default"
    if drops_first and family is not None and not family.has_class_token:
        problems.append(
            "vision_feature_select_strategy = 'default' drops the first patch of "
            f"{vision.model_type!r}, which has no class token; set it to 'full'"
        )
    raise_problems(config, problems)
    assert family is not None
    markers = ROW_MARKERS if vision.model_type == "pixtral" else {}
    return single_encoder_components(
        config,
        text,
        TextConventions(config.image_token_id, **markers),
        {
            "feature_layer": layer if layer < 0 else layer - vision.num_hidden_layers - 1,
            "drop_class_token": drops_first,
            "connector_act": config.projector_hidden_act,
            "connector_bias": config.multimodal_projector_bias,
        },
        family=family,
        llm_family=unlisted.llm,
    )


def llava_next_components(config: Any) -> ModelComponents:
    """Return the components of LLaVA-NeXT or LLaVA-OneVision, which are LLaVA with tiles.

    Raises:
        ConfigError: A component or a choice of features is not supported, or
            resolutions are not multiples of the tile size.
    """
    parts = llava_components(config)
    tower = config.vision_config
    vision = parts.encoders[VISION]
    problems = []
    if vision.family.has_class_token and not vision.settings["drop_class_token"]:
        problems.append(
            "vision_feature_select_strategy = 'full' keeps the class token, which does not "
            "fit into a grid of patches; set it to 'default'"
        )
    size = side(tower.image_size)
    if any(length % size for pinpoint in config.image_grid_pinpoints for length in pinpoint):
        problems.append(
            f"image_grid_pinpoints = {config.image_grid_pinpoints} are not multiples of "
            f"image_size = {size}"
        )
    tiling = LLAVA_NEXT_TILES
    if config.model_type == "llava_onevision":
        ratio = config.vision_aspect_ratio
        max_tiles = ratio.removeprefix("anyres_max_")
        if not max_tiles.isdecimal():
            problems.append(
                f"vision_aspect_ratio = {ratio!r} is not supported; use 'anyres_max_N', where "
                "N is the maximum number of tiles whose tokens an image may have"
            )
        tiling = replace(ONEVISION_TILES, most_tiles=int(max_tiles) if max_tiles.isdecimal() else 0)
    raise_problems(config, problems)
    pinpoints = [list(pinpoint) for pinpoint in config.image_grid_pinpoints]
    tiled = vision._replace(
        files=LLAVA_NEXT_VISION,
        settings={**vision.settings, "connector": "line_mlp"},
        tiling=replace(tiling, overrides={"image_grid_pinpoints": pinpoints}),
    )
    return parts._replace(encoders={VISION: tiled})
