"""Qwen2-VL and Qwen2.5-VL, whose encoders support images of any size and merge patches."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from torchmm.common.batch import BoxFormat
from torchmm.models.families.composites.components import (
    ModelComponents,
    raise_problems,
    single_encoder_components,
)
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.text_conventions import TextConventions
from torchmm.models.layered import WeightFiles
from torchmm.models.layers.attention import PACKED
from torchmm.models.layers.deepstack import add_deepstack_features
from torchmm.models.layers.delta_net import pack_delta_nets

QWEN_LLM = WeightFiles(
    renames=(
        (r"lm_head\.", "backbone.lm_head."),
        (r"model\.(?!visual\.)(language_model\.)?", "backbone.model.language_model."),
    ),
    hf_prefixes=(("backbone.", ""),),
)
QWEN_VISION = WeightFiles(
    renames=(
        (r"(model\.)?visual\.merger\.", "connector."),
        (r"(model\.)?visual\.", "tower."),
    ),
    hf_prefixes=(
        ("connector.", "model.visual.merger."),
        ("tower.", "model.visual."),
    ),
)

_BOX_TOKENS = ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>")
_BOXES = {
    "qwen2_vl": BoxFormat(
        name_text="<|object_ref_start|>{}<|object_ref_end|>",
        box_text="<|box_start|>{}<|box_end|>",
        has_pairs=True,
        tokens=_BOX_TOKENS,
    ),
    "qwen2_5": BoxFormat("pixels", tokens=_BOX_TOKENS),
    "qwen3": BoxFormat(tokens=_BOX_TOKENS),
}
"""Format of boxes by start of the model type."""


def build_without_encoders(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a multimodal model without its encoders.

    Hugging Face has no causal LM class for the text component.
    """
    model: Any = AutoModelForImageTextToText.from_config(
        config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
    )
    model.model.visual = None
    if hasattr(model.model, "audio_tower"):
        model.model.audio_tower = None
    text = model.model.language_model
    if hasattr(text, "_deepstack_process"):
        text._deepstack_process = add_deepstack_features
    pack_delta_nets(text.layers)
    return model


def output_size_problems(config: Any, key: str) -> list[str]:
    """Return the problem if the output size `vision_config.key` does not fit the LLM."""
    output_size = getattr(config.vision_config, key)
    hidden_size = config.text_config.hidden_size
    if output_size == hidden_size:
        return []
    return [
        f"vision_config.{key} = {output_size} differs from text_config.hidden_size = "
        f"{hidden_size}; set them to the same value"
    ]


def qwen_text(config: Any) -> TextConventions:
    """Return the text conventions for images and videos of Qwen-VL models."""
    return TextConventions(
        config.image_token_id,
        prefix=(config.vision_start_token_id,),
        suffix=(config.vision_end_token_id,),
        mrope=True,
        video_token_id=config.video_token_id,
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
        boxes=qwen_boxes(config.model_type),
    )


def qwen_boxes(model_type: str) -> BoxFormat:
    """Return the format of boxes that a Qwen model was trained on."""
    return next(form for start, form in _BOXES.items() if model_type.startswith(start))


def qwen_vl_components(config: Any) -> ModelComponents:
    """Return the components of a multimodal model from its config.

    Raises:
        ConfigError: The sizes of encoder and LLM differ.
    """
    key = "hidden_size" if config.model_type == "qwen2_vl" else "out_hidden_size"
    raise_problems(config, output_size_problems(config, key))
    return single_encoder_components(
        config,
        config,
        qwen_text(config),
        {"connector": "merger"},
        family=ENCODER_FAMILIES[f"{config.model_type}_vision"],
        llm_family=LlmFamily(build=build_without_encoders, text_model="model.language_model"),
        files=(QWEN_VISION, QWEN_LLM),
    )
