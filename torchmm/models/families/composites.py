"""Composite Hugging Face models, taken apart into the encoder "vision" and the LLM.

Each composite says which Hugging Face configs its parts have and how its checkpoints name them;
everything else is the same as for an encoder combined with an LLM by hand. Both old and new names
of checkpoints on the hub are read. Rejected: running the composite's own forward, which pads
images, has one device for both parts and cannot be cut into stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from math import isqrt
from typing import Any, NamedTuple

import torch
from transformers import (
    Gemma3ForConditionalGeneration,
    Idefics3ForConditionalGeneration,
    InternVLForConditionalGeneration,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    PaliGemmaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    SmolVLMForConditionalGeneration,
)

from torchmm.common.errors import ConfigError
from torchmm.models.families.encoder_family import EncoderFamily, patches_per_row, side
from torchmm.models.families.encoders import ENCODER_FAMILIES
from torchmm.models.families.tiling import (
    INTERN_TILES,
    LLAVA_NEXT_TILES,
    ONEVISION_TILES,
    PAN_AND_SCAN,
    SMOLVLM_TILES,
    SPLIT_TILES,
    Tiling,
)
from torchmm.models.layered import WeightFiles
from torchmm.models.layers.attention import PACKED
from torchmm.models.llm import LLM_FAMILIES, LlmFamily
from torchmm.models.multimodal import TextConventions, Token

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
LLAVA_NEXT_VISION = WeightFiles(
    renames=((r"(model\.)?image_newline", "connector.image_newline"), *LLAVA_VISION.renames),
    hf_prefixes=(
        ("connector.image_newline", "model.image_newline"),
        *LLAVA_VISION.hf_prefixes,
    ),
)
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
    tiling: Tiling | None = None
    """How its image processor cuts pictures, if it can."""


def _text_config(config: Any) -> Any:
    """That of the LLM; the composite's own setting rules whether the head is tied."""
    text = copy.deepcopy(config.text_config)
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def _part_problems(config: Any) -> list[str]:
    """Parts that are not supported."""
    text, vision = config.text_config.model_type, config.vision_config.model_type
    problems = []
    if text not in LLM_FAMILIES:
        problems.append(f"LLM {text!r} is not supported; supported: {', '.join(LLM_FAMILIES)}")
    elif LLM_FAMILIES[text].own_logits and config.model_type != "paligemma":
        problems.append(
            f"LLM {text!r} scales or caps its logits, which Hugging Face's composite leaves out; "
            "name encoder and LLM as [model.encoders.NAME] and [model.llm] instead"
        )
    family = ENCODER_FAMILIES.get(vision)
    if family is None or family.inputs != "fixed":
        fixed = [name for name, f in ENCODER_FAMILIES.items() if f.inputs == "fixed"]
        problems.append(f"vision tower {vision!r} is not supported; supported: {', '.join(fixed)}")
    return problems


def _refuse(config: Any, problems: list[str]) -> None:
    if problems:
        raise ConfigError([f"[model] {config.model_type}: {problem}" for problem in problems])


def _take_llava(config: Any) -> CompositeParts:
    text, vision = _text_config(config), config.vision_config
    family = ENCODER_FAMILIES.get(vision.model_type)
    problems = _part_problems(config)
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
    _refuse(config, problems)
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


def _take_llava_next(config: Any) -> CompositeParts:
    """LLaVA-NeXT and LLaVA-OneVision: LLaVA on tiles."""
    parts = _take_llava(config)
    tower = config.vision_config
    problems = []
    if parts.encoder_family.has_class_token and not parts.encoder["drop_class_token"]:
        problems.append(
            "vision_feature_select_strategy = 'full' keeps the class token, which no line of "
            "patches has room for; set it to 'default'"
        )
    size = side(tower.image_size)
    if any(length % size for pinpoint in config.image_grid_pinpoints for length in pinpoint):
        problems.append(
            f"image_grid_pinpoints = {config.image_grid_pinpoints} are not whole tiles of "
            f"image_size = {size}"
        )
    _refuse(config, problems)
    tiling = LLAVA_NEXT_TILES
    if config.model_type == "llava_onevision":
        most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        tiling = replace(ONEVISION_TILES, most_tiles=most)
    pinpoints = [list(pinpoint) for pinpoint in config.image_grid_pinpoints]
    return parts._replace(
        encoder_files=LLAVA_NEXT_VISION,
        encoder={**parts.encoder, "connector": "line_mlp"},
        tiling=replace(tiling, overridden={"image_grid_pinpoints": pinpoints}),
    )


def _take_internvl(config: Any) -> CompositeParts:
    text, vision, layer = _text_config(config), config.vision_config, config.vision_feature_layer
    problems = _part_problems(config)
    if not isinstance(layer, int):
        problems.append(f"vision_feature_layer = {layer} is a list; supported: a single number")
    if config.vision_feature_select_strategy != "default":
        problems.append(
            f"vision_feature_select_strategy = {config.vision_feature_select_strategy!r} keeps the "
            "class token, which no square of patches has room for; set it to 'default'"
        )
    _refuse(config, problems)
    return CompositeParts(
        llm_config=text,
        llm_family=LLM_FAMILIES[text.model_type],
        llm_files=LLAVA_LLM,
        encoder_config=vision,
        encoder_family=ENCODER_FAMILIES[vision.model_type],
        encoder_files=INTERN_VISION,
        encoder={
            "feature_layer": layer if layer < 0 else layer - vision.num_hidden_layers - 1,
            "final_norm": layer == -1,
            "shuffle": round(1 / config.downsample_ratio),
            "connector": "norm_mlp",
            "connector_act": config.projector_hidden_act,
            "connector_from_files": True,
        },
        text=TextConventions(
            config.image_token_id, prefix=(Token("<img>"),), suffix=(Token("</img>"),)
        ),
        tiling=INTERN_TILES,
    )


def _take_idefics3(config: Any) -> CompositeParts:
    """Idefics3 and SmolVLM."""
    text, vision = _text_config(config), config.vision_config
    _refuse(config, _part_problems(config))
    around = Token("<fake_token_around_image>")
    # Idefics3's own tokenizer spells it with several tokens.
    whole = Token("<global-img>", needed=False)
    return CompositeParts(
        llm_config=text,
        llm_family=LLM_FAMILIES[text.model_type],
        llm_files=IDEFICS3_LLM,
        encoder_config=vision,
        encoder_family=ENCODER_FAMILIES[vision.model_type],
        encoder_files=IDEFICS3_VISION,
        encoder={
            "final_norm": True,
            "shuffle": config.scale_factor,
            "connector": "linear",
            "connector_bias": False,
            "connector_from_files": True,
        },
        text=TextConventions(config.image_token_id, prefix=(around, whole), suffix=(around,)),
        tiling=SPLIT_TILES if config.model_type == "idefics3" else SMOLVLM_TILES,
    )


def _take_paligemma(config: Any) -> CompositeParts:
    text, vision = _text_config(config), config.vision_config
    # `both_ways` handles the bidirectional prompts that this declares; layers would instead drop
    # causality altogether.
    text.use_bidirectional_attention = False
    problems = _part_problems(config)
    if config.projection_dim != text.hidden_size:
        problems.append(
            f"projection_dim = {config.projection_dim} differs from the LLM's hidden_size = "
            f"{text.hidden_size}; make them equal"
        )
    _refuse(config, problems)
    return CompositeParts(
        llm_config=text,
        llm_family=replace(LLM_FAMILIES[text.model_type], both_ways="prompts"),
        llm_files=LLAVA_LLM,
        encoder_config=vision,
        encoder_family=ENCODER_FAMILIES[vision.model_type],
        encoder_files=LLAVA_VISION,
        encoder={"final_norm": True, "connector": "linear", "connector_from_files": True},
        text=TextConventions(config.image_token_id),
    )


def _take_gemma3(config: Any) -> CompositeParts:
    text, vision = _text_config(config), config.vision_config
    problems = _part_problems(config)
    rows = patches_per_row(vision)
    tokens = isqrt(config.mm_tokens_per_image)
    if tokens**2 != config.mm_tokens_per_image or rows % tokens:
        problems.append(
            f"mm_tokens_per_image = {config.mm_tokens_per_image} is not a square whose side "
            f"divides the {rows} patches per row of an image"
        )
    _refuse(config, problems)
    family = LLM_FAMILIES[text.model_type]
    return CompositeParts(
        llm_config=text,
        llm_family=replace(family, both_ways="images", image_token_id=config.image_token_id),
        llm_files=LLAVA_LLM,
        encoder_config=vision,
        encoder_family=ENCODER_FAMILIES[vision.model_type],
        encoder_files=LLAVA_VISION,
        encoder={
            "final_norm": True,
            "shuffle": rows // tokens,
            "connector": "pool",
            "connector_eps": vision.layer_norm_eps,
            "connector_from_files": True,
        },
        text=TextConventions(
            config.image_token_id,
            prefix=("\n\n", config.boi_token_id),
            suffix=(config.eoi_token_id, "\n\n"),
        ),
        tiling=PAN_AND_SCAN,
    )


def _build_qwen_text(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    # Hugging Face has no causal LM of the text part alone: take the composite without its tower.
    kind: Any = COMPOSITES[config.model_type].kind
    model = kind._from_config(config, dtype=dtype, attn_implementation=PACKED)
    model.model.visual = None
    return model


def _take_qwen_vl(config: Any) -> CompositeParts:
    vision = config.vision_config
    key = "hidden_size" if config.model_type == "qwen2_vl" else "out_hidden_size"
    if getattr(vision, key) != config.text_config.hidden_size:
        raise ConfigError(
            f"[model] {config.model_type}: vision_config.{key} = {getattr(vision, key)} differs "
            f"from text_config.hidden_size = {config.text_config.hidden_size}; make them equal"
        )
    return CompositeParts(
        llm_config=config,
        llm_family=LlmFamily(build=_build_qwen_text, text_model="model.language_model"),
        llm_files=QWEN_LLM,
        encoder_config=vision,
        encoder_family=ENCODER_FAMILIES[f"{config.model_type}_vision"],
        encoder_files=QWEN_VISION,
        encoder={"connector": "merger", "connector_from_files": True},
        text=TextConventions(
            config.image_token_id,
            prefix=(config.vision_start_token_id,),
            suffix=(config.vision_end_token_id,),
            mrope=True,
            video_token_id=config.video_token_id,
            tokens_per_second=getattr(vision, "tokens_per_second", None),
        ),
    )


class Composite(NamedTuple):
    """A family of composite models."""

    kind: type[PreTrainedModel]
    """Hugging Face's class."""
    take: Callable[[Any], CompositeParts]
    """Takes its config apart."""


COMPOSITES: dict[str, Composite] = {
    "llava": Composite(LlavaForConditionalGeneration, _take_llava),
    "llava_next": Composite(LlavaNextForConditionalGeneration, _take_llava_next),
    "llava_onevision": Composite(LlavaOnevisionForConditionalGeneration, _take_llava_next),
    "internvl": Composite(InternVLForConditionalGeneration, _take_internvl),
    "idefics3": Composite(Idefics3ForConditionalGeneration, _take_idefics3),
    "smolvlm": Composite(SmolVLMForConditionalGeneration, _take_idefics3),
    "paligemma": Composite(PaliGemmaForConditionalGeneration, _take_paligemma),
    "gemma3": Composite(Gemma3ForConditionalGeneration, _take_gemma3),
    "qwen2_vl": Composite(Qwen2VLForConditionalGeneration, _take_qwen_vl),
    "qwen2_5_vl": Composite(Qwen2_5_VLForConditionalGeneration, _take_qwen_vl),
}
"""Supported composites by Hugging Face model_type."""
