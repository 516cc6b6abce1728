"""What every composite says about its parts, and what several of them have in common."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from torchmm.common.errors import ConfigError
from torchmm.common.module_names import VISION
from torchmm.models.families.encoders.family import EncoderFamily
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.llms.logits import own_logits
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.families.text import TextConventions, Token
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
ROW_MARKS: dict[str, Any] = {"suffix": (Token("[IMG_END]"),), "row_end": Token("[IMG_BREAK]")}
"""How images of Pixtral's tower appear in the text, for `TextConventions`."""
PAIR_PROCESSOR = "LlavaProcessor"
"""Hugging Face's processor of images as encoder and LLM from separate sources have them."""
_CAPS = ("paligemma", "gemma4")
"""Composites that apply `final_logit_softcapping` of the LLM."""


class EncoderPart(NamedTuple):
    """What a composite config says about one of its encoders."""

    config: PreTrainedConfig
    family: EncoderFamily
    files: WeightFiles
    settings: dict[str, Any]
    """Further ones of the `EncoderSpec`."""
    tiling: Tiling | None = None
    """How the composite's image processor cuts pictures, if it can."""


class CompositeParts(NamedTuple):
    """What a composite config says about its parts."""

    llm_config: PreTrainedConfig
    llm_family: LlmFamily
    llm_files: WeightFiles
    encoders: dict[str, EncoderPart]
    """By name, `VISION` first if it sees."""
    text: TextConventions

    def without_marks(self) -> CompositeParts:
        """The same with placeholders alone in the text, and whole pictures."""
        encoders = {name: part._replace(tiling=None) for name, part in self.encoders.items()}
        text = TextConventions(self.text.image_token)
        return self._replace(encoders=encoders, text=text)


def one_encoder(
    config: Any,
    llm: Any,
    text: TextConventions,
    settings: dict[str, Any],
    *,
    family: EncoderFamily | None = None,
    llm_family: LlmFamily | None = None,
    files: tuple[WeightFiles, WeightFiles] = (LLAVA_VISION, LLAVA_LLM),
    tiling: Tiling | None = None,
) -> CompositeParts:
    """Return the parts of a composite with a vision encoder.

    Args:
        llm: configuration of the LLM.
        settings: fields of the `EncoderSpec`.
        family: defaults to the family of the vision config.
        llm_family: defaults to the family of `llm`.
        files: weights of the encoder and of the LLM.
    """
    vision = config.vision_config
    family = family or ENCODER_FAMILIES[vision.model_type]
    llm_family = llm_family or LLM_FAMILIES[llm.model_type]
    encoders = {VISION: EncoderPart(vision, family, files[0], settings, tiling)}
    return CompositeParts(llm, llm_family, files[1], encoders, text)


def text_config(config: Any) -> Any:
    """Return the configuration of the LLM. The composite decides whether the head is tied."""
    text = copy.deepcopy(config.text_config)
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


class Unlisted(NamedTuple):
    """Families of a composite's parts that no table lists, where it takes any parts."""

    tower: EncoderFamily | None = None
    llm: LlmFamily | None = None


ALL_LISTED = Unlisted()


def part_problems(
    config: Any,
    towers: Sequence[str] = (),
    also: Sequence[str] = (),
    unlisted: Unlisted = ALL_LISTED,
) -> list[str]:
    """Parts that are not supported.

    Args:
        towers: those that the composite can have; empty: all on images of a fixed size.
        also: further ones.
    """
    vision = getattr(config.vision_config, "model_type", None)
    problems = llm_problems(config, unlisted)
    families = ENCODER_FAMILIES.items()
    fixed = [name for name, f in families if f.inputs == "fixed" and f.in_composites]
    known = (*(towers or fixed), *also)
    if vision not in known and (unlisted.tower is None or not unlisted.tower.in_composites):
        problems.append(
            f"vision encoder {vision!r} is not supported; use one of: {', '.join(known)}"
        )
    return problems


def llm_problems(config: Any, unlisted: Unlisted = ALL_LISTED) -> list[str]:
    """Return the problems of the LLM of a composite."""
    text = config.text_config.model_type
    problems = []
    family = unlisted.llm or LLM_FAMILIES.get(text)
    if family is None:
        problems.append(f"LLM {text!r} is not supported; use one of: {', '.join(LLM_FAMILIES)}")
    elif change := own_logits(config.text_config, family, caps=config.model_type in _CAPS):
        problems.append(
            f"LLM {text!r} {change}, which the multimodal class of Hugging Face omits; "
            "override the setting, or set encoder and LLM separately as "
            "[model.encoders.NAME] and [model.llm]"
        )
    return problems


def refuse(config: Any, problems: list[str]) -> None:
    """All problems of a composite, as one error if there are any.

    Raises:
        ConfigError: there are.
    """
    if problems:
        raise ConfigError([f"[model] {config.model_type}: {problem}" for problem in problems])
