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

from torchmm.models.families.composites.components import CompositeParts
from torchmm.models.families.composites.gemma import take_gemma3, take_paligemma
from torchmm.models.families.composites.gemma4 import take_gemma4
from torchmm.models.families.composites.glm4v import take_glm4v
from torchmm.models.families.composites.idefics3 import take_idefics3
from torchmm.models.families.composites.internvl import take_internvl
from torchmm.models.families.composites.llava import take_llava, take_llava_next
from torchmm.models.families.composites.mistral3 import take_mistral3
from torchmm.models.families.composites.omni import take_qwen2_5_omni, take_qwen3_omni
from torchmm.models.families.composites.qwen3_vl import take_qwen3_vl
from torchmm.models.families.composites.qwen_vl import take_qwen_vl
from torchmm.models.families.composites.speech import (
    take_audioflamingo3,
    take_qwen2_audio,
    take_voxtral,
)


class Composite(NamedTuple):
    """A registered type of multimodal models."""

    kind: type[PreTrainedModel]
    """Hugging Face class."""
    take: Callable[..., CompositeParts]
    """Function that returns the components for a config."""
    takes_any: bool = False
    """Whether encoder and LLM may have any type that `AutoModel` builds. `take` then also receives
    the verified families of unregistered components."""


COMPOSITES: dict[str, Composite] = {
    "llava": Composite(LlavaForConditionalGeneration, take_llava, takes_any=True),
    "llava_next": Composite(LlavaNextForConditionalGeneration, take_llava_next),
    "llava_onevision": Composite(LlavaOnevisionForConditionalGeneration, take_llava_next),
    "mistral3": Composite(Mistral3ForConditionalGeneration, take_mistral3),
    "internvl": Composite(InternVLForConditionalGeneration, take_internvl),
    "idefics3": Composite(Idefics3ForConditionalGeneration, take_idefics3),
    "smolvlm": Composite(SmolVLMForConditionalGeneration, take_idefics3),
    "paligemma": Composite(PaliGemmaForConditionalGeneration, take_paligemma),
    "gemma3": Composite(Gemma3ForConditionalGeneration, take_gemma3),
    "gemma4": Composite(Gemma4ForConditionalGeneration, take_gemma4),
    "qwen2_vl": Composite(Qwen2VLForConditionalGeneration, take_qwen_vl),
    "qwen2_5_vl": Composite(Qwen2_5_VLForConditionalGeneration, take_qwen_vl),
    "qwen3_vl": Composite(Qwen3VLForConditionalGeneration, take_qwen3_vl),
    "qwen3_vl_moe": Composite(Qwen3VLMoeForConditionalGeneration, take_qwen3_vl),
    "qwen3_5": Composite(Qwen3_5ForConditionalGeneration, take_qwen3_vl),
    "qwen3_5_moe": Composite(Qwen3_5MoeForConditionalGeneration, take_qwen3_vl),
    "qwen2_5_omni_thinker": Composite(
        Qwen2_5OmniThinkerForConditionalGeneration, take_qwen2_5_omni
    ),
    "qwen3_omni_moe_thinker": Composite(
        Qwen3OmniMoeThinkerForConditionalGeneration, take_qwen3_omni
    ),
    "voxtral": Composite(VoxtralForConditionalGeneration, take_voxtral),
    "qwen2_audio": Composite(Qwen2AudioForConditionalGeneration, take_qwen2_audio),
    "audioflamingo3": Composite(AudioFlamingo3ForConditionalGeneration, take_audioflamingo3),
    "glm4v": Composite(Glm4vForConditionalGeneration, take_glm4v),
    "glm4v_moe": Composite(Glm4vMoeForConditionalGeneration, take_glm4v),
    "glm46v": Composite(Glm46VForConditionalGeneration, take_glm4v),
}
"""Registered multimodal models by Hugging Face model_type."""
