"""Mistral 3: the Pixtral encoder, n x n patches per token, a token at the end of each row."""

from __future__ import annotations

from typing import Any

from torchmm.models.families.composites.components import (
    ROW_MARKERS,
    ModelComponents,
    component_problems,
    raise_problems,
    single_encoder_components,
    text_config,
)
from torchmm.models.families.text_conventions import TextConventions


def mistral3_components(config: Any) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: A component or a choice of features is not supported.
    """
    text = text_config(config)
    problems = component_problems(config, towers=("pixtral",))
    if config.vision_feature_layer != -1:
        problems.append(
            f"vision_feature_layer = {config.vision_feature_layer}: only features of the last "
            "layer are supported; set it to -1"
        )
    raise_problems(config, problems)
    return single_encoder_components(
        config,
        text,
        TextConventions(config.image_token_id, **ROW_MARKERS),
        {
            "pixel_shuffle_factor": config.spatial_merge_size,
            "connector": "merge_mlp",
            "connector_act": config.projector_hidden_act,
            "connector_bias": config.multimodal_projector_bias,
            "connector_eps": text.rms_norm_eps,
        },
    )
