"""Audio LLMs: Voxtral, Qwen2-Audio and Audio Flamingo 3. Their only encoder is "audio".

Tokens around the placeholders of an audio:

- Voxtral (mistral-common): `[BEGIN_AUDIO]` before it.
- Qwen2-Audio: its processor adds none. Its documentation and chat template add `<|audio_bos|>` and
  `<|audio_eos|>` around each audio. Chats also have the index of the audio and a line break.
- Audio Flamingo 3: none.

None of these models ties the head to the embeddings, regardless of the config.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torchmm.common.module_names import AUDIO
from torchmm.models.families.composites.components import (
    LLAVA_LLM,
    EncoderComponent,
    ModelComponents,
    llm_problems,
    raise_problems,
)
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.families.text_conventions import TextConventions, Token
from torchmm.models.layered import WeightFiles

_LLM = replace(
    LLAVA_LLM,
    # The first prefix is that of files from transformers 5.17 to 5.21.
    renames=((r"language_model\.model\.model\.", "backbone.model."), *LLAVA_LLM.renames),
)
AUDIO_FILES = WeightFiles(
    renames=(
        (r"(model\.)?audio_tower\.", "tower."),
        (r"(model\.)?multi_modal_projector\.", "connector."),
    ),
    hf_prefixes=(
        ("tower.", "model.audio_tower."),
        ("connector.", "model.multi_modal_projector."),
    ),
)
_GROUP = 4
"""Number of positions per token in Voxtral."""


def voxtral_components(config: Any) -> ModelComponents:
    """Return the components of Voxtral, whose connector has two linear layers.

    Each token has the features of four positions.

    Raises:
        ConfigError: A component is not supported, or the sizes do not allow
            groups of four positions.
    """
    audio = config.audio_config
    problems = []
    if audio.intermediate_size != _GROUP * audio.hidden_size:
        problems.append(
            f"audio_config.intermediate_size = {audio.intermediate_size} must be the size of "
            f"the features of {_GROUP} positions; set it to {_GROUP} times "
            f"audio_config.hidden_size = {audio.hidden_size}"
        )
    if audio.max_source_positions % _GROUP:
        problems.append(
            f"audio_config.max_source_positions = {audio.max_source_positions} is not a "
            f"multiple of {_GROUP}, the number of positions per token"
        )
    if config.audio_token_id is None:
        problems.append(
            "audio_token_id is missing; set it to the id of [AUDIO], which is 24 in Voxtral"
        )
    settings = {
        "pixel_shuffle_factor": 2,
        "final_norm": True,
        "connector_act": config.projector_hidden_act,
        "connector_bias": False,
    }
    text = TextConventions(config.audio_token_id, prefix=(Token("[BEGIN_AUDIO]"),))
    return _audio_components(config, "voxtral_encoder", settings, text, problems)


def qwen2_audio_components(config: Any) -> ModelComponents:
    """Return the components of Qwen2-Audio, whose connector is one linear layer.

    Raises:
        ConfigError: A component is not supported.
    """
    text = TextConventions(
        config.audio_token_id,
        prefix=(Token("<|audio_bos|>"),),
        suffix=(Token("<|audio_eos|>"),),
        around_sounds=("Audio {}: ", "\n"),
    )
    return _audio_components(config, "qwen2_audio_encoder", {"connector": "linear"}, text, [])


def audioflamingo3_components(config: Any) -> ModelComponents:
    """Return the components of Audio Flamingo 3, whose connector has two linear layers.

    Raises:
        ConfigError: A component is not supported.
    """
    settings = {
        "connector_act": config.projector_hidden_act,
        "connector_bias": config.projector_bias,
    }
    text = TextConventions(config.audio_token_id)
    return _audio_components(config, "audioflamingo3_encoder", settings, text, [])


def _audio_components(
    config: Any, tower: str, settings: dict[str, Any], text: TextConventions, problems: list[str]
) -> ModelComponents:
    audio = config.audio_config
    if audio.model_type != tower:
        problems.append(f"audio encoder {audio.model_type!r} is not supported; use {tower}")
    raise_problems(config, problems + llm_problems(config))
    llm = copy.deepcopy(config.text_config)
    llm.tie_word_embeddings = False
    family = ENCODER_FAMILIES[tower].variant(audio)
    component = EncoderComponent(audio, family, AUDIO_FILES, settings)
    return ModelComponents(
        llm_config=llm,
        llm_family=LLM_FAMILIES[llm.model_type],
        llm_files=_LLM,
        encoders={AUDIO: component},
        text=text,
    )
