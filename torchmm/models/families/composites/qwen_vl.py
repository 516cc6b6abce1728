"""Qwen's vision-language models, whose towers take images of any size and merge patches."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from torchmm.models.families.composites.parts import CompositeParts, one_encoder, refuse
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.text import TextConventions
from torchmm.models.layered import WeightFiles
from torchmm.models.layers.attention import PACKED
from torchmm.models.layers.deepstack import add_block
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


def build_without_towers(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a composite without its towers: Hugging Face has no causal LM of the text part."""
    model: Any = AutoModelForImageTextToText.from_config(
        config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
    )
    model.model.visual = None
    if hasattr(model.model, "audio_tower"):
        model.model.audio_tower = None
    text = model.model.language_model
    if hasattr(text, "_deepstack_process"):
        text._deepstack_process = add_block
    pack_delta_nets(text.layers)
    return model


def width_problems(config: Any, key: str) -> list[str]:
    """What is wrong if the tower's outputs, `vision_config.key` wide, do not fit the LLM."""
    given = getattr(config.vision_config, key)
    wanted = config.text_config.hidden_size
    if given == wanted:
        return []
    return [
        f"vision_config.{key} = {given} differs from text_config.hidden_size = {wanted}; set "
        "them to the same value"
    ]


def qwen_text(config: Any) -> TextConventions:
    """How images and clips appear in the text of all of them."""
    return TextConventions(
        config.image_token_id,
        prefix=(config.vision_start_token_id,),
        suffix=(config.vision_end_token_id,),
        mrope=True,
        video_token_id=config.video_token_id,
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
    )


def take_qwen_vl(config: Any) -> CompositeParts:
    """Takes a config apart.

    Raises:
        ConfigError: the sizes of tower and LLM differ.
    """
    key = "hidden_size" if config.model_type == "qwen2_vl" else "out_hidden_size"
    refuse(config, width_problems(config, key))
    return one_encoder(
        config,
        config,
        qwen_text(config),
        {"connector": "merger"},
        family=ENCODER_FAMILIES[f"{config.model_type}_vision"],
        llm_family=LlmFamily(build=build_without_towers, text_model="model.language_model"),
        files=(QWEN_VISION, QWEN_LLM),
    )
