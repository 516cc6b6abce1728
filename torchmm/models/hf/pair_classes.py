"""Hugging Face classes of an encoder and an LLM from separate sources.

A class fits if it computes exactly what the torchmm model computes: LLaVA, whose encoder and LLM
are built by `AutoModel`, with two linear layers between them; or Audio Flamingo 3, with its encoder
and any LLM. No weight is converted or omitted, so an export is read back as the same model. If no
class fits, the reason is reported before the run, and the parts are exported to separate folders.

A pair with InternViT, and a norm between folded patches and linear layers, is an InternVL. Its
images have one size, and only placeholders in the text. Its processor is that of LLaVA, which
counts placeholders in the same way. The processor identifies such an export when it is read again.

Two classes almost fit. Idefics3 has one linear layer after the last norm of the encoder, and
Lfm2-VL uses SigLIP2 features after that norm, which cannot be disabled. A separate class of torchmm
would require that users trust remote code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from torchmm.models.encoders import EncoderSpec
from torchmm.models.families.composites.components import LLAVA_VISION
from torchmm.models.families.composites.internvl import INTERN_VISION
from torchmm.models.families.composites.registry import COMPOSITES
from torchmm.models.families.composites.speech import AUDIO_FILES
from torchmm.models.families.encoders.family import EncoderFamily, patches_per_row
from torchmm.models.families.llms.logit_scaling import describe_logit_change
from torchmm.models.hf.pair_parity import class_difference
from torchmm.models.layered import WeightFiles
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel

CONNECTORS = {
    (False, "mlp"): "mlp",
    (True, "mlp"): "pixel_shuffle_mlp",
    (True, "norm_mlp"): "pixel_shuffle_norm_mlp",
}
"""Names in recipes by (whether neighboring patches are folded, `EncoderSpec.connector`)."""
AUDIO_FLAMINGO_ENCODER = "audioflamingo3_encoder"
"""Encoder of the only audio class for any LLM whose connector has two linear layers."""


class PairClass(NamedTuple):
    """The Hugging Face class of an encoder and an LLM."""

    kind: type[PreTrainedModel]
    config: Callable[[int], PreTrainedConfig]
    """Function that returns the config for the id of the placeholder token."""
    encoder_files: WeightFiles
    """Names of the encoder weights. The LLM has the names of LLaVA."""


def pair_class(model: MultimodalModel) -> PairClass | str:
    """Return the class of a model from separate sources, or the reason why it has none.

    Needs no other ranks.

    Args:
        model: Model from separate sources with at least one encoder.
    """
    encoders = model.encoder_modules()
    if len(encoders) > 1:
        names = " and ".join(encoder.name for encoder in encoders)
        return f"no class combines several encoders ({names}) with a separate LLM"
    (encoder,) = encoders
    spec = encoder.spec
    llm = model.llm
    if reason := _llm_problem(llm) or _encoder_problem(spec, llm):
        return reason
    hf_class = _class_of(spec, llm.config)

    def build_hf(spec: EncoderSpec, config: PreTrainedConfig, token_id: int) -> PreTrainedModel:
        small_class = _class_of(spec, config)
        return small_class.kind._from_config(
            small_class.config(token_id), attn_implementation="eager"
        )

    name = hf_class.kind.__name__
    return class_difference(spec, llm, name, hf_class.encoder_files, build_hf) or hf_class


def _class_of(spec: EncoderSpec, llm_config: PreTrainedConfig) -> PairClass:
    """Return the class of an encoder and an LLM that have one."""
    if spec.config.model_type == AUDIO_FLAMINGO_ENCODER:
        config = partial(_audio_flamingo_config, spec, llm_config)
        return PairClass(AudioFlamingo3ForConditionalGeneration, config, AUDIO_FILES)
    if spec.connector == "norm_mlp":
        config = partial(_intern_config, spec, llm_config)
        return PairClass(InternVLForConditionalGeneration, config, INTERN_VISION)
    config = partial(_llava_config, spec, llm_config)
    return PairClass(LlavaForConditionalGeneration, config, LLAVA_VISION)


def describe_export_class(model: MultimodalModel) -> str:
    """Return the Hugging Face class of an export, or why the model is exported in parts."""
    if model.composite is not None:
        return COMPOSITES[model.composite.model_type].kind.__name__
    if not model.encoders:
        return type(model.llm.backbone).__name__
    hf_class = pair_class(model)
    if isinstance(hf_class, str):
        return f"components without a common Hugging Face class: {hf_class}"
    return hf_class.kind.__name__


def is_exported_as_llava(family: EncoderFamily) -> bool:
    """Return True if an encoder with the connector of LLaVA is exported as LLaVA.

    The logits of the LLM must be plain.
    """
    return family.inputs == "fixed" and (family.is_llava_compatible or family.is_clip_equivalent)


def _llm_problem(llm: LlmModule) -> str:
    """Return why no class has this LLM after an encoder, or ""."""
    family = llm.family
    model_type = llm.config.model_type
    if change := describe_logit_change(llm.text_config, family):
        return f"{model_type} {change}, which Hugging Face classes for an encoder and any LLM omit"
    if (family.text_model, family.head) != ("model", "lm_head"):
        return (
            f"{model_type} uses other component names ({family.text_model}, {family.head}) "
            "than LLMs in Hugging Face classes with an encoder"
        )
    return ""


def _encoder_problem(spec: EncoderSpec, llm: LlmModule) -> str:
    """Return why no class has this encoder and connector before the LLM, or ""."""
    kind = spec.config.model_type
    has_norm = spec.connector == "norm_mlp"
    if spec.pixel_shuffle_factor != 1 and not (has_norm and spec.family.modality == "image"):
        return (
            f"no class combines {spec.pixel_shuffle_factor} x {spec.pixel_shuffle_factor} outputs "
            "of this encoder in two linear layers, as connector = "
            f'"{CONNECTORS[True, spec.connector]}" does; '
            '"mlp" does not combine them, and "pixel_shuffle_norm_mlp" with InternViT is '
            "InternVL"
        )
    if kind == AUDIO_FLAMINGO_ENCODER:
        tied = llm.text_config.tie_word_embeddings
        return "Audio Flamingo 3 does not support a tied head and embedding" if tied else ""
    if not is_exported_as_llava(spec.family):
        return _llava_problem(spec)
    reason = ""
    if spec.tiles is not None:
        reason = "images are split into tiles, which classes for any encoder do not support as "
        reason += "here"
    elif has_norm and kind != "internvl_vision":
        reason = f"InternVL of Hugging Face supports only its own encoder, not {kind}"
    elif has_norm and not llm.family.is_registered:
        reason = (
            f"InternVL with {llm.config.model_type}, which is not a registered model type, cannot "
            "be loaded again"
        )
    return reason


def _llava_problem(spec: EncoderSpec) -> str:
    """Return why LLaVA does not support an encoder."""
    kind = spec.config.model_type
    family = spec.family
    if family.modality == "audio":
        return f"no class has two linear layers between {kind} and a separate LLM"
    if family.fixed_merge:
        return f"{kind} merges patches itself; no class has two more linear layers after it"
    if family.inputs != "fixed":
        return f"no class supports features of {kind} for images of any size in this form"
    return f"LLaVA cannot build {kind}, or would use tokens that are not patches"


def _intern_config(spec: EncoderSpec, llm: Any, image_token_id: int) -> PreTrainedConfig:
    return InternVLConfig(
        vision_config=spec.config,
        text_config=llm,
        image_token_id=image_token_id,
        image_seq_length=(patches_per_row(spec.config) // spec.pixel_shuffle_factor) ** 2,
        downsample_ratio=1 / spec.pixel_shuffle_factor,
        projector_hidden_act=spec.connector_act,
        # -1 would select the output of the last norm of the encoder, if it has one.
        vision_feature_layer=spec.family.layer_count(spec.config) + 1 + spec.feature_layer,
        vision_feature_select_strategy="default",
        tie_word_embeddings=llm.tie_word_embeddings,
    )


def _llava_config(spec: EncoderSpec, llm: Any, image_token_id: int) -> PreTrainedConfig:
    vision = spec.config
    if spec.family.is_clip_equivalent:
        # The same encoder with the model type that `AutoModel` supports.
        settings = spec.config.to_dict()
        known = [k for k in CLIPVisionConfig().to_dict() if k in settings and k != "model_type"]
        vision = CLIPVisionConfig(**{key: settings[key] for key in known})
    return LlavaConfig(
        vision_config=vision,
        text_config=llm,
        image_token_index=image_token_id,
        image_seq_length=patches_per_row(spec.config) ** 2,
        projector_hidden_act=spec.connector_act,
        vision_feature_layer=spec.feature_layer,
        # "default" drops the first output, which is a patch if the encoder has no class token.
        vision_feature_select_strategy="default" if spec.family.has_class_token else "full",
        tie_word_embeddings=llm.tie_word_embeddings,
    )


def _audio_flamingo_config(spec: EncoderSpec, llm: Any, sound_token_id: int) -> PreTrainedConfig:
    return AudioFlamingo3Config(
        audio_config=spec.config,
        text_config=llm,
        audio_token_id=sound_token_id,
        projector_hidden_act=spec.connector_act,
        projector_bias=spec.connector_bias,
    )
