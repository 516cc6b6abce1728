"""GLM-4.1V and GLM-4.6V (dense) and GLM-4.5V (mixture of experts), with M-RoPE positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchmm.common.batch import ClipText
from torchmm.models.families.composites.components import (
    ModelComponents,
    raise_problems,
    single_encoder_components,
)
from torchmm.models.families.composites.qwen_vl import (
    QWEN_LLM,
    build_without_encoders,
    output_size_problems,
)
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.families.text_conventions import TextConventions
from torchmm.models.layered import WeightFiles

GLM_VISION = WeightFiles(
    renames=(
        (r"(model\.)?visual\.(?=(merger|downsample|post_layernorm)\.)", "connector."),
        (r"(model\.)?visual\.", "tower."),
    ),
    hf_prefixes=(
        ("connector.", "model.visual."),
        ("tower.", "model.visual."),
    ),
)
_TIMES = {  # as in Hugging Face processors; GLM-4.5V has that of GLM-4.1V
    "glm4v": "{frames}{whole_s}",
    "glm4v_moe": "{frames}{whole_s}",
    "glm46v": "{frames}{first_s:.1f} seconds",
}
"""Text of a group of video frames with its time, by model type (`ClipText`)."""
_TEXTS = {"glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe"}
"""Maps model types of the text component to LLM families with the same layers."""


def glm4v_components(config: Any) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: A component is not supported, or the sizes of tower and LLM differ.
    """
    # The config of glm46v accepts any parts.
    part_family = "glm4v_moe" if config.model_type == "glm4v_moe" else "glm4v"
    problems = []
    for key, kind in (("text_config", "text"), ("vision_config", "vision")):
        model_type = getattr(config, key).model_type
        if model_type != f"{part_family}_{kind}":
            problems.append(
                f"{key}.model_type = {model_type!r} is not supported; use {part_family}_{kind}"
            )
    raise_problems(config, problems)
    raise_problems(config, output_size_problems(config, "out_hidden_size"))
    family = LLM_FAMILIES[_TEXTS[config.text_config.model_type]]
    text = TextConventions(
        config.image_token_id,
        prefix=(config.image_start_token_id,),
        suffix=(config.image_end_token_id,),
        mrope=True,
        clip=ClipText(
            _TIMES[config.model_type],
            prefix=(config.video_start_token_id,),
            suffix=(config.video_end_token_id,),
        ),
    )
    return single_encoder_components(
        config,
        config,
        text,
        {"connector": "merger"},
        llm_family=replace(family, build=build_without_encoders, text_model="model.language_model"),
        files=(GLM_VISION, QWEN_LLM),
    )
