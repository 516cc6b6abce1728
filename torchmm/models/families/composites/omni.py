"""The thinkers of Omni models: towers for images and sounds, and an LLM that writes.

Qwen2.5-Omni has Qwen2's layers; Qwen3-Omni has experts and deepstack. What speaks (talker and
vocoder) is left out: a run trains the thinker, and exports its class. Files of the whole model are
read, their other weights left alone.

Clips have a time position for each group of frames, and text continues behind the last of them: a
whole number in Qwen2.5-Omni, with its fraction in Qwen3-Omni. A sound counts up as text does. Clips
whose own sound is heard between their frames (`use_audio_in_video`) are not prepared: a clip and a
sound are two media here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

from torchmm.common.errors import ConfigError
from torchmm.common.module_names import AUDIO, VISION
from torchmm.models.families.composites.parts import CompositeParts, EncoderPart, refuse
from torchmm.models.families.composites.qwen3_vl import QWEN3_STYLES, tap_problems
from torchmm.models.families.composites.qwen_vl import build_without_towers, width_problems
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.families.text import TextConventions, Token
from torchmm.models.layered import WeightFiles

_ROOT = r"(thinker\.)?(model\.)?"
_LLM = WeightFiles(
    renames=(
        (r"(thinker\.)?lm_head\.", "backbone.lm_head."),
        (
            r"(thinker\.)?model\.(?!visual\.|audio_tower\.)(language_model\.)?",
            "backbone.model.language_model.",
        ),
    ),
    hf_prefixes=(
        ("backbone.lm_head.", "lm_head."),
        ("backbone.model.language_model.", "model.language_model."),
    ),
)
_VISION_2_5 = WeightFiles(
    renames=(
        (_ROOT + r"visual\.merger\.", "connector."),
        (_ROOT + r"visual\.", "tower."),
    ),
    hf_prefixes=(("connector.", "model.visual.merger."), ("tower.", "model.visual.")),
)
_VISION_3 = WeightFiles(
    renames=(
        (_ROOT + r"visual\.merger_list\.", "connector.deepstack_merger_list."),
        (_ROOT + r"visual\.(?=merger\.)", "connector."),
        (_ROOT + r"visual\.", "tower."),
    ),
    hf_prefixes=(
        ("connector.deepstack_merger_list.", "model.visual.merger_list."),
        ("connector.", "model.visual."),
        ("tower.", "model.visual."),
    ),
)
_SOUND_2_5 = WeightFiles(
    renames=(
        (_ROOT + r"audio_tower\.(?=(ln_post|proj)\.)", "connector."),
        (_ROOT + r"audio_tower\.", "tower."),
    ),
    hf_prefixes=(("connector.", "model.audio_tower."), ("tower.", "model.audio_tower.")),
)
_SOUND_3 = replace(
    _SOUND_2_5,
    renames=(
        (_ROOT + r"audio_tower\.(?=proj[12]\.)", "connector."),
        (_ROOT + r"audio_tower\.", "tower."),
    ),
)


def take_qwen2_5_omni(config: Any) -> CompositeParts:
    """Takes a thinker's config apart.

    Raises:
        ConfigError: the sizes of towers and LLM differ.
    """
    _check(config, [])
    family = LlmFamily(
        build=build_without_towers, text_model="model.language_model", logits_to_keep=False
    )
    encoders = {
        VISION: _part(config.vision_config, _VISION_2_5),
        AUDIO: _part(config.audio_config, _SOUND_2_5),
    }
    text = replace(_text(config, "<|{}_bos|>", "<|{}_eos|>"), clip_times="whole")
    return CompositeParts(config, family, _LLM, encoders, text)


def take_qwen3_omni(config: Any) -> CompositeParts:
    """Takes a thinker's config apart.

    Raises:
        ConfigError: the sizes of towers and LLM differ, or the tapped layers are impossible.
    """
    _check(config, tap_problems(config))
    family = LLM_FAMILIES["qwen3_moe"]
    family = replace(
        family,
        build=build_without_towers,
        text_model="model.language_model",
        logits_to_keep=False,
        tensor_parallel=QWEN3_STYLES | dict(family.tensor_parallel),
        taps=len(config.vision_config.deepstack_visual_indexes),
    )
    encoders = {
        VISION: _part(config.vision_config, _VISION_3),
        AUDIO: _part(config.audio_config, _SOUND_3, final_norm=True),
    }
    text = replace(_text(config, "<|{}_start|>", "<|{}_end|>"), clip_times="fractional")
    return CompositeParts(config, family, _LLM, encoders, text)


def _check(config: Any, problems: list[str]) -> None:
    """Refuses what neither of the two can be, and what has further problems.

    Raises:
        ConfigError: there are some.
    """
    if not hasattr(modeling_qwen2_5_omni, "Qwen2_5OmniThinkerModel"):  # Qwen3's came with it
        raise ConfigError(
            f"[model] {config.model_type}: transformers {transformers.__version__} builds "
            "this model differently; install 5.23"
        )
    problems = width_problems(config, "out_hidden_size") + problems
    given = config.audio_config.output_dim
    wanted = config.text_config.hidden_size
    if given != wanted:
        problems.append(
            f"audio_config.output_dim = {given} differs from text_config.hidden_size = "
            f"{wanted}; set them to the same value"
        )
    refuse(config, problems)


def _part(config: Any, files: WeightFiles, **settings: Any) -> EncoderPart:
    family = ENCODER_FAMILIES[config.model_type].variant(config)
    return EncoderPart(config, family, files, {**settings, "connector": "merger"})


def _text(config: Any, begin: str, end: str) -> TextConventions:
    """How media appear in the text.

    Args:
        begin: token before a medium, with a place for its kind.
        end: token after it.
    """
    return TextConventions(
        config.image_token_id,
        prefix=(_mark(config, "vision_start", begin.format("vision")),),
        suffix=(_mark(config, "vision_end", end.format("vision")),),
        mrope=True,
        video_token_id=config.video_token_id,
        tokens_per_second=config.position_id_per_seconds,
        sound_token_id=config.audio_token_id,
        sound_prefix=(_mark(config, "audio_start", begin.format("audio")),),
        sound_suffix=(_mark(config, "audio_end", end.format("audio")),),
    )


def _mark(config: Any, name: str, token: str) -> int | Token:
    """By its id, if the config has it: Hugging Face's classes know some of the four only."""
    token_id = getattr(config, f"{name}_token_id", None)
    return Token(token) if token_id is None else token_id
