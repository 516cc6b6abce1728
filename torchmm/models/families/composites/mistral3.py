"""Mistral 3: the Pixtral encoder, n x n patches per token, a token at the end of each row."""

from __future__ import annotations

from typing import Any

from torchmm.models.families.composites.components import (
    ROW_MARKS,
    CompositeParts,
    one_encoder,
    part_problems,
    refuse,
    text_config,
)
from torchmm.models.families.text_conventions import TextConventions


def take_mistral3(config: Any) -> CompositeParts:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: A component or a choice of features is not supported.
    """
    text = text_config(config)
    problems = part_problems(config, towers=("pixtral",))
    if config.vision_feature_layer != -1:
        problems.append(
            f"vision_feature_layer = {config.vision_feature_layer}: only features of the last "
            "layer are supported; set it to -1"
        )
    refuse(config, problems)
    return one_encoder(
        config,
        text,
        TextConventions(config.image_token_id, **ROW_MARKS),
        {
            "shuffle": config.spatial_merge_size,
            "connector": "merge_mlp",
            "connector_act": config.projector_hidden_act,
            "connector_bias": config.multimodal_projector_bias,
            "connector_eps": text.rms_norm_eps,
        },
    )
