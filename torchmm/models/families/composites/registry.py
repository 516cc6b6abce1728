"""Registered multimodal Hugging Face models, split into encoders ("vision", "audio") and the LLM.

For each model type, a function returns the configs of the components and their names in
checkpoints. All other code is shared with models whose encoder and LLM have separate sources. Both
old and new names of checkpoints on the Hub are supported. The forward of the multimodal class is
not used: it pads images, requires one device for all components, and cannot be split into stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from transformers import (
    AudioFlamingo3ForConditionalGeneration,
    Gemma3ForConditionalGeneration,
    Gemma4ForConditionalGeneration,
    Glm4vForConditionalGeneration,
    Glm4vMoeForConditionalGeneration,
    Glm46VForConditionalGeneration,
    Idefics3ForConditionalGeneration,
    InternVLForConditionalGeneration,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMForConditionalGeneration,
    VoxtralForConditionalGeneration,
)

from torchmm.models.families.composites.components import ModelComponents
from torchmm.models.families.composites.gemma import gemma3_components, paligemma_components
from torchmm.models.families.composites.gemma4 import gemma4_components
from torchmm.models.families.composites.glm4v import glm4v_components
from torchmm.models.families.composites.idefics3 import idefics3_components
from torchmm.models.families.composites.internvl import internvl_components
from torchmm.models.families.composites.llava import llava_components, llava_next_components
from torchmm.models.families.composites.mistral3 import mistral3_components
from torchmm.models.families.composites.omni import qwen2_5_omni_components, qwen3_omni_components
from torchmm.models.families.composites.qwen3_vl import qwen3_vl_components
from torchmm.models.families.composites.qwen_vl import qwen_vl_components
from torchmm.models.families.composites.speech import (
    audioflamingo3_components,
    qwen2_audio_components,
    voxtral_components,
)


class Composite(NamedTuple):
    """A registered type of multimodal models."""

    kind: type[PreTrainedModel]
    """Hugging Face class."""
    get_components: Callable[..., ModelComponents]
    """Function that returns the components for a config."""
    supports_any_component: bool = False
    """Whether encoder and LLM may have any type that `AutoModel` builds. `get_components` then also
    receives the verified families of unregistered components."""


COMPOSITES: dict[str, Composite] = {
    "llava": Composite(
        LlavaForConditionalGeneration, llava_components, supports_any_component=True
    ),
    "llava_next": Composite(LlavaNextForConditionalGeneration, llava_next_components),
    "llava_onevision": Composite(LlavaOnevisionForConditionalGeneration, llava_next_components),
    "mistral3": Composite(Mistral3ForConditionalGeneration, mistral3_components),
    "internvl": Composite(InternVLForConditionalGeneration, internvl_components),
    "idefics3": Composite(Idefics3ForConditionalGeneration, idefics3_components),
    "smolvlm": Composite(SmolVLMForConditionalGeneration, idefics3_components),
    "paligemma": Composite(PaliGemmaForConditionalGeneration, paligemma_components),
    "gemma3": Composite(Gemma3ForConditionalGeneration, gemma3_components),
    "gemma4": Composite(Gemma4ForConditionalGeneration, gemma4_components),
    "qwen2_vl": Composite(Qwen2VLForConditionalGeneration, qwen_vl_components),
    "qwen2_5_vl": Composite(Qwen2_5_VLForConditionalGeneration, qwen_vl_components),
    "qwen3_vl": Composite(Qwen3VLForConditionalGeneration, qwen3_vl_components),
    "qwen3_vl_moe": Composite(Qwen3VLMoeForConditionalGeneration, qwen3_vl_components),
    "qwen3_5": Composite(Qwen3_5ForConditionalGeneration, qwen3_vl_components),
    "qwen3_5_moe": Composite(Qwen3_5MoeForConditionalGeneration, qwen3_vl_components),
    "qwen2_5_omni_thinker": Composite(
        Qwen2_5OmniThinkerForConditionalGeneration, qwen2_5_omni_components
    ),
    "qwen3_omni_moe_thinker": Composite(
        Qwen3OmniMoeThinkerForConditionalGeneration, qwen3_omni_components
    ),
    "voxtral": Composite(VoxtralForConditionalGeneration, voxtral_components),
    "qwen2_audio": Composite(Qwen2AudioForConditionalGeneration, qwen2_audio_components),
    "audioflamingo3": Composite(AudioFlamingo3ForConditionalGeneration, audioflamingo3_components),
    "glm4v": Composite(Glm4vForConditionalGeneration, glm4v_components),
    "glm4v_moe": Composite(Glm4vMoeForConditionalGeneration, glm4v_components),
    "glm46v": Composite(Glm46VForConditionalGeneration, glm4v_components),
}
"""Registered multimodal models by Hugging Face model_type."""
