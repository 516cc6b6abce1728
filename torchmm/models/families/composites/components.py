"""Components of multimodal Hugging Face models (composites), and helpers for several of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from torchmm.common.errors import ConfigError
from torchmm.common.module_names import VISION
from torchmm.models.families.encoders.family import EncoderFamily
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.llms.logit_scaling import describe_logit_change
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.families.text_conventions import TextConventions, Token
from torchmm.models.families.tiling import Tiling
from torchmm.models.layered import WeightFiles

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
ROW_MARKERS: dict[str, Any] = {"suffix": (Token("[IMG_END]"),), "row_end": Token("[IMG_BREAK]")}
"""Arguments of `TextConventions` for images of the Pixtral encoder."""
PAIR_PROCESSOR = "LlavaProcessor"
"""Hugging Face processor of models with encoder and LLM from separate sources."""
_CAPS = ("paligemma", "gemma4")
"""Model types that apply `final_logit_softcapping` of the LLM."""


class EncoderComponent(NamedTuple):
    """An encoder of a multimodal model."""

    config: PreTrainedConfig
    family: EncoderFamily
    files: WeightFiles
    settings: dict[str, Any]
    """Other fields of the `EncoderSpec`."""
    tiling: Tiling | None = None
    """Tiling of images by the image processor, or None without tiles."""


class ModelComponents(NamedTuple):
    """The components of a multimodal model."""

    llm_config: PreTrainedConfig
    llm_family: LlmFamily
    llm_files: WeightFiles
    encoders: dict[str, EncoderComponent]
    """Encoders by name, with `VISION` first if the model has it."""
    text: TextConventions

    def without_markers(self) -> ModelComponents:
        """Return the components with only placeholders in the text, and without tiles."""
        encoders = {name: part._replace(tiling=None) for name, part in self.encoders.items()}
        text = TextConventions(self.text.image_token)
        return self._replace(encoders=encoders, text=text)


def single_encoder_components(
    config: Any,
    llm: Any,
    text: TextConventions,
    settings: dict[str, Any],
    *,
    family: EncoderFamily | None = None,
    llm_family: LlmFamily | None = None,
    files: tuple[WeightFiles, WeightFiles] = (LLAVA_VISION, LLAVA_LLM),
    tiling: Tiling | None = None,
) -> ModelComponents:
    """Return the components of a multimodal model with one vision encoder.

    Args:
        config: Config of the multimodal model.
        llm: Config of the LLM.
        text: Conventions for images in text.
        settings: Fields of the `EncoderSpec`.
        family: Family of the encoder. Defaults to the family of the vision config.
        llm_family: Family of the LLM. Defaults to the family of `llm`.
        files: Weight files of the encoder and of the LLM.
        tiling: Tiling of images, or None.
    """
    vision = config.vision_config
    family = family or ENCODER_FAMILIES[vision.model_type]
    llm_family = llm_family or LLM_FAMILIES[llm.model_type]
    encoders = {VISION: EncoderComponent(vision, family, files[0], settings, tiling)}
    return ModelComponents(llm, llm_family, files[1], encoders, text)


def text_config(config: Any) -> Any:
    """Return the config of the LLM, with `tie_word_embeddings` of the multimodal model."""
    text = copy.deepcopy(config.text_config)
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


class VerifiedFamilies(NamedTuple):
    """Verified families of unregistered components, for models that support any components."""

    tower: EncoderFamily | None = None
    llm: LlmFamily | None = None


NO_VERIFIED_FAMILIES = VerifiedFamilies()


def component_problems(
    config: Any,
    towers: Sequence[str] = (),
    also: Sequence[str] = (),
    unlisted: VerifiedFamilies = NO_VERIFIED_FAMILIES,
) -> list[str]:
    """Return messages for the components that are not supported.

    Args:
        config: Config of the multimodal model.
        towers: Model types of supported encoders. If empty, all encoders of fixed-size images.
        also: Additional model types.
        unlisted: Verified families of unregistered components.
    """
    vision = getattr(config.vision_config, "model_type", None)
    problems = llm_problems(config, unlisted)
    families = ENCODER_FAMILIES.items()
    fixed = [name for name, f in families if f.inputs == "fixed" and f.is_llava_compatible]
    known = (*(towers or fixed), *also)
    if vision not in known and (unlisted.tower is None or not unlisted.tower.is_llava_compatible):
        problems.append(
            f"vision encoder {vision!r} is not supported; use one of: {', '.join(known)}"
        )
    return problems


def llm_problems(config: Any, unlisted: VerifiedFamilies = NO_VERIFIED_FAMILIES) -> list[str]:
    """Return the problems of the LLM of a multimodal model."""
    text = config.text_config.model_type
    problems = []
    family = unlisted.llm or LLM_FAMILIES.get(text)
    if family is None:
        problems.append(f"LLM {text!r} is not supported; use one of: {', '.join(LLM_FAMILIES)}")
    elif change := describe_logit_change(
        config.text_config, family, caps=config.model_type in _CAPS
    ):
        problems.append(
            f"LLM {text!r} {change}, which the multimodal class of Hugging Face omits; "
            "override the setting, or set encoder and LLM separately as "
            "[model.encoders.NAME] and [model.llm]"
        )
    return problems


def raise_problems(config: Any, problems: list[str]) -> None:
    """Raise an error with all problems of a multimodal model, if any.

    Raises:
        ConfigError: The list of problems is not empty.
    """
    if problems:
        raise ConfigError([f"[model] {config.model_type}: {problem}" for problem in problems])
