"""Thinkers of Qwen Omni models: encoders for images, videos and audio, and an LLM.

Qwen2.5-Omni has Qwen2 layers. Qwen3-Omni has experts and DeepStack. The speech output (talker and
vocoder) is omitted: a run trains and exports the thinker. Files of the full model can be read, and
their other weights are ignored.

Positions. Each group of video frames has a time position, and text continues after the last one.
Times are integers in Qwen2.5-Omni and fractional in Qwen3-Omni. Positions of audio increase as
those of text. If a record has `use_audio_in_video`, the tokens of a video and its audio alternate:
in chunks of `seconds_per_chunk` (Qwen2.5-Omni), or in the order of their times (Qwen3-Omni).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

from torchmm.common.errors import ConfigError
from torchmm.common.module_names import AUDIO, VISION
from torchmm.models.families.composites.components import (
    EncoderComponent,
    ModelComponents,
    raise_problems,
)
from torchmm.models.families.composites.qwen3_vl import QWEN3_STYLES, deepstack_problems
from torchmm.models.families.composites.qwen_vl import (
    build_without_encoders,
    output_size_problems,
    qwen_boxes,
)
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.llms.family import LlmFamily
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.families.text_conventions import TextConventions, Token
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
_AUDIO_2_5 = WeightFiles(
    renames=(
        (_ROOT + r"audio_tower\.(?=(ln_post|proj)\.)", "connector."),
        (_ROOT + r"audio_tower\.", "tower."),
    ),
    hf_prefixes=(("connector.", "model.audio_tower."), ("tower.", "model.audio_tower.")),
)
_AUDIO_3 = replace(
    _AUDIO_2_5,
    renames=(
        (_ROOT + r"audio_tower\.(?=proj[12]\.)", "connector."),
        (_ROOT + r"audio_tower\.", "tower."),
    ),
)


def qwen2_5_omni_components(config: Any) -> ModelComponents:
    """Return the components of a thinker from its config.

    Raises:
        ConfigError: The sizes of encoders and LLM differ.
    """
    _check(config, [])
    family = LlmFamily(
        build=build_without_encoders, text_model="model.language_model", logits_to_keep=False
    )
    encoders = {
        VISION: _encoder_component(config.vision_config, _VISION_2_5),
        AUDIO: _encoder_component(config.audio_config, _AUDIO_2_5),
    }
    chunk_tokens = int(config.position_id_per_seconds * config.seconds_per_chunk)
    text = replace(
        _text(config, "<|{}_bos|>", "<|{}_eos|>"),
        clip_times="whole",
        audio_chunk_tokens=chunk_tokens,
    )
    return ModelComponents(config, family, _LLM, encoders, text)


def qwen3_omni_components(config: Any) -> ModelComponents:
    """Return the components of a thinker from its config.

    Raises:
        ConfigError: The sizes of encoders and LLM differ, or the tapped layers are impossible.
    """
    _check(config, deepstack_problems(config))
    family = LLM_FAMILIES["qwen3_moe"]
    family = replace(
        family,
        build=build_without_encoders,
        text_model="model.language_model",
        logits_to_keep=False,
        tensor_parallel=QWEN3_STYLES | dict(family.tensor_parallel),
        deepstack_layers=len(config.vision_config.deepstack_visual_indexes),
    )
    encoders = {
        VISION: _encoder_component(config.vision_config, _VISION_3),
        AUDIO: _encoder_component(config.audio_config, _AUDIO_3, final_norm=True),
    }
    text = replace(
        _text(config, "<|{}_start|>", "<|{}_end|>"), clip_times="fractional", audio_chunk_tokens=0
    )
    return ModelComponents(config, family, _LLM, encoders, text)


def _check(config: Any, problems: list[str]) -> None:
    """Check the installed transformers version and the sizes of an Omni model.

    Args:
        config: Config of the thinker.
        problems: Other problems to report.

    Raises:
        ConfigError: At least one problem exists.
    """
    if not hasattr(
        modeling_qwen2_5_omni, "Qwen2_5OmniThinkerModel"
    ):  # same release as the class of Qwen3
        raise ConfigError(
            f"[model] {config.model_type}: transformers {transformers.__version__} builds "
            "this model differently; install 5.23"
        )
    problems = output_size_problems(config, "out_hidden_size") + problems
    output_size = config.audio_config.output_dim
    hidden_size = config.text_config.hidden_size
    if output_size != hidden_size:
        problems.append(
            f"audio_config.output_dim = {output_size} differs from text_config.hidden_size = "
            f"{hidden_size}; set them to the same value"
        )
    raise_problems(config, problems)


def _encoder_component(config: Any, files: WeightFiles, **settings: Any) -> EncoderComponent:
    family = ENCODER_FAMILIES[config.model_type].variant(config)
    return EncoderComponent(config, family, files, {**settings, "connector": "merger"})


def _text(config: Any, begin: str, end_token: str) -> TextConventions:
    """Return the text conventions for media.

    Args:
        config: Config of the thinker.
        begin: Token before a medium, with {} for its type.
        end_token: Token after a medium, with {} for its type.
    """
    return TextConventions(
        config.image_token_id,
        prefix=(_token_or_id(config, "vision_start", begin.format("vision")),),
        suffix=(_token_or_id(config, "vision_end", end_token.format("vision")),),
        mrope=True,
        video_token_id=config.video_token_id,
        tokens_per_second=config.position_id_per_seconds,
        sound_token_id=config.audio_token_id,
        sound_prefix=(_token_or_id(config, "audio_start", begin.format("audio")),),
        sound_suffix=(_token_or_id(config, "audio_end", end_token.format("audio")),),
        boxes=qwen_boxes(config.model_type),
    )


def _token_or_id(config: Any, name: str, token: str) -> int | Token:
    """Return the id of a token from the config, or the token if the config lacks its id."""
    token_id = getattr(config, f"{name}_token_id", None)
    return Token(token) if token_id is None else token_id
