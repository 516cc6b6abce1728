"""Qwen3-Omni's thinker: towers for images and sounds, an LLM with experts and deepstack.

What speaks (talker, code2wav) is left out: a run trains the thinker, and exports its class. Files
of the whole model are read, their other weights left alone.

A clip's time positions are fractions of a second's, and text continues behind the last of them; a
sound counts up as text does. Clips whose own sound is heard between their frames
(`use_audio_in_video`) are not prepared: a clip and a sound are two media here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from torchmm.common.errors import ConfigError
from torchmm.common.module_names import AUDIO, VISION
from torchmm.models.families.composites.parts import CompositeParts, EncoderPart, refuse
from torchmm.models.families.composites.qwen3_vl import QWEN3_STYLES, tap_problems
from torchmm.models.families.composites.qwen_vl import width_problems
from torchmm.models.families.encoders.table import ENCODER_FAMILIES
from torchmm.models.families.llms.table import LLM_FAMILIES
from torchmm.models.families.text import TextConventions, Token
from torchmm.models.layered import WeightFiles
from torchmm.models.layers.attention import PACKED
from torchmm.models.layers.deepstack import add_block

_ROOT = r"(thinker\.)?(model\.)?"
OMNI_LLM = WeightFiles(
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
OMNI_VISION = WeightFiles(
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
OMNI_SOUND = WeightFiles(
    renames=(
        (_ROOT + r"audio_tower\.(?=proj[12]\.)", "connector."),
        (_ROOT + r"audio_tower\.", "tower."),
    ),
    hf_prefixes=(("connector.", "model.audio_tower."), ("tower.", "model.audio_tower.")),
)


def take_qwen3_omni(config: Any) -> CompositeParts:
    """Takes a thinker's config apart.

    Raises:
        ConfigError: the sizes of towers and LLM differ, or the tapped layers are impossible.
    """
    if not hasattr(modeling_qwen3_omni_moe, "Qwen3OmniMoeThinkerModel"):
        raise ConfigError(
            f"[model] {config.model_type}: transformers {transformers.__version__} builds thinkers "
            "in another way; install 5.23"
        )
    vision = config.vision_config
    audio = config.audio_config
    problems = width_problems(config, "out_hidden_size") + tap_problems(config)
    if audio.output_dim != config.text_config.hidden_size:
        problems.append(
            f"audio_config.output_dim = {audio.output_dim} differs from text_config.hidden_size = "
            f"{config.text_config.hidden_size}; make them equal"
        )
    refuse(config, problems)
    sounds = ENCODER_FAMILIES[audio.model_type].variant(audio)
    family = LLM_FAMILIES["qwen3_moe"]
    family = replace(
        family,
        build=_build_text,
        text_model="model.language_model",
        logits_to_keep=False,
        tensor_parallel=QWEN3_STYLES | dict(family.tensor_parallel),
        taps=len(vision.deepstack_visual_indexes),
    )
    settings = {"connector": "merger", "connector_from_files": True}
    seen = EncoderPart(vision, ENCODER_FAMILIES[vision.model_type], OMNI_VISION, settings)
    heard = EncoderPart(
        audio,
        sounds,
        OMNI_SOUND,
        {**settings, "final_norm": True},
    )
    return CompositeParts(
        llm_config=config,
        llm_family=family,
        llm_files=OMNI_LLM,
        encoders={VISION: seen, AUDIO: heard},
        text=TextConventions(
            config.image_token_id,
            prefix=(_mark(config, "vision_start"),),
            suffix=(_mark(config, "vision_end"),),
            mrope=True,
            video_token_id=config.video_token_id,
            tokens_per_second=config.position_id_per_seconds,
            clip_times="fractional",
            sound_token_id=config.audio_token_id,
            sound_prefix=(_mark(config, "audio_start"),),
            sound_suffix=(_mark(config, "audio_end"),),
        ),
    )


def _mark(config: Any, name: str) -> int | Token:
    """By its id, which Hugging Face's class of config knows for one of the four only."""
    token_id = getattr(config, f"{name}_token_id", None)
    return Token(f"<|{name}|>") if token_id is None else token_id


def _build_text(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    kind: Any = Qwen3OmniMoeThinkerForConditionalGeneration
    model = kind._from_config(config, dtype=dtype, attn_implementation=PACKED)
    model.model.visual = None
    model.model.audio_tower = None
    model.model.language_model._deepstack_process = add_block
    return model
