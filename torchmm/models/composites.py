"""Composite Hugging Face models, taken apart into the encoder "vision" and the LLM.

Each composite says which Hugging Face configs its parts have and how its checkpoints name them;
everything else is the same as for an encoder put before an LLM by hand. Both old and new names of
checkpoints on the hub are read. Rejected: running the composite's own forward, which pads images,
has one device for both parts and cannot be cut into stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2_5_VLForConditionalGeneration

from torchmm.errors import ConfigError
from torchmm.models.attention import PACKED
from torchmm.models.encoder_families import ENCODER_FAMILIES, EncoderFamily
from torchmm.models.layered import WeightFiles
from torchmm.models.llm import LLM_FAMILIES, LlmFamily
from torchmm.models.multimodal import TextConventions

LLAVA_LLM = WeightFiles(
    renames=(
        (r"(language_model\.)?lm_head\.", "backbone.lm_head."),
        (r"(language_model\.model|model\.language_model)\.", "backbone.model."),
    ),
    hf_prefixes=(
        ("backbone.lm_head.", "lm_head."),
        ("backbone.model.", "model.language_model."),
    ),
)
LLAVA_VISION = WeightFiles(
    renames=(
        (r"(model\.)?vision_tower\.(vision_model\.)?", "tower."),
        (r"(model\.)?multi_modal_projector\.", "connector."),
    ),
    hf_prefixes=(
        ("tower.", "model.vision_tower."),
        ("connector.", "model.multi_modal_projector."),
    ),
)
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


class CompositeParts(NamedTuple):
    """What a composite config says about its parts."""

    llm_config: PreTrainedConfig
    llm_family: LlmFamily
    llm_files: WeightFiles
    encoder_config: PreTrainedConfig
    encoder_family: EncoderFamily
    encoder_files: WeightFiles
    encoder: dict[str, Any]
    """Further settings of the `EncoderSpec`."""
    text: TextConventions


def _take_llava(config: Any) -> CompositeParts:
    text, vision = copy.deepcopy(config.text_config), config.vision_config
    # The composite's own setting rules; the parts' would tie or untie the head by themselves.
    text.tie_word_embeddings = config.tie_word_embeddings
    family = ENCODER_FAMILIES.get(vision.model_type)
    problems = []
    if text.model_type not in LLM_FAMILIES:
        problems.append(
            f"LLM {text.model_type!r} is not supported; supported: {', '.join(LLM_FAMILIES)}"
        )
    if family is None or family.layout != "fixed":
        fixed = [name for name, f in ENCODER_FAMILIES.items() if f.layout == "fixed"]
        problems.append(
            f"vision tower {vision.model_type!r} is not supported; supported: {', '.join(fixed)}"
        )
    layer = config.vision_feature_layer
    if not isinstance(layer, int):
        problems.append(f"vision_feature_layer = {layer} is a list; supported: a single number")
        layer = -1
    drops_first = config.vision_feature_select_strategy == "default"
    if drops_first and family is not None and not family.has_class_token:
        problems.append(
            f"vision_feature_select_strategy = 'default' drops the first patch of "
            f"{vision.model_type!r}, which has no class token; set it to 'full'"
        )
    if problems:
        raise ConfigError([f"[model] llava: {problem}" for problem in problems])
    assert family is not None
    return CompositeParts(
        llm_config=text,
        llm_family=LLM_FAMILIES[text.model_type],
        llm_files=LLAVA_LLM,
        encoder_config=vision,
        encoder_family=family,
        encoder_files=LLAVA_VISION,
        encoder={
            "feature_layer": layer if layer < 0 else layer - vision.num_hidden_layers - 1,
            "drop_class_token": drops_first,
            "connector_act": config.projector_hidden_act,
            "connector_bias": config.multimodal_projector_bias,
            "connector_from_files": True,
        },
        text=TextConventions(config.image_token_id),
    )


def _build_qwen_text(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    # Hugging Face has no causal LM of the text part alone: take the composite without its tower.
    model = Qwen2_5_VLForConditionalGeneration._from_config(
        config, dtype=dtype, attn_implementation=PACKED
    )
    model.model.visual = None
    return model


def _take_qwen2_5_vl(config: Any) -> CompositeParts:
    if config.vision_config.out_hidden_size != config.text_config.hidden_size:
        raise ConfigError(
            f"[model] qwen2_5_vl: vision_config.out_hidden_size = "
            f"{config.vision_config.out_hidden_size} differs from text_config.hidden_size = "
            f"{config.text_config.hidden_size}; make them equal"
        )
    return CompositeParts(
        llm_config=config,
        llm_family=LlmFamily(build=_build_qwen_text, text_model="model.language_model"),
        llm_files=QWEN_LLM,
        encoder_config=config.vision_config,
        encoder_family=ENCODER_FAMILIES["qwen2_5_vl_vision"],
        encoder_files=QWEN_VISION,
        encoder={"connector": "merger", "connector_from_files": True},
        text=TextConventions(
            config.image_token_id,
            prefix_ids=(config.vision_start_token_id,),
            suffix_ids=(config.vision_end_token_id,),
            mrope=True,
        ),
    )


COMPOSITES: dict[str, Callable[[Any], CompositeParts]] = {
    "llava": _take_llava,
    "qwen2_5_vl": _take_qwen2_5_vl,
}
"""Supported composites by Hugging Face model_type."""
