"""An encoder and an LLM from separate sources: which Hugging Face class they are together.

A class is theirs if it computes what our model computes, to the last tensor: LLaVA's, whose tower
and LLM are whatever `AutoModel` builds, with two linears between them; Audio Flamingo 3's, with its
own tower and any LLM. Nothing is trained further, converted or left out, so an export is read back
as the model that it is of. Where there is no such class the reason is said before the run, and
the parts are exported side by side.

With InternViT, and a norm between folded patches and linears, a pair is an InternVL. Its images
have one size, and in the text placeholders alone; its processor is LLaVA's, which counts the same,
and by which it is known when it is read again.

Rejected: classes that come near. Idefics3's has one linear behind the tower's last norm, Lfm2-VL's
takes SigLIP2's features behind that norm; a norm cannot be set to do nothing. A class of our own,
which others would have to trust as remote code.
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
from torchmm.models.families.composites.internvl import INTERN_VISION
from torchmm.models.families.composites.parts import LLAVA_VISION
from torchmm.models.families.composites.speech import SOUND_FILES
from torchmm.models.families.composites.table import COMPOSITES
from torchmm.models.families.encoders.family import EncoderFamily, patches_per_row
from torchmm.models.families.llms.logits import own_logits
from torchmm.models.hf.pair_proof import class_difference
from torchmm.models.layered import WeightFiles
from torchmm.models.llm import LlmModule
from torchmm.models.multimodal import MultimodalModel

CONNECTORS = {
    (False, "mlp"): "mlp",
    (True, "mlp"): "pixel_shuffle_mlp",
    (True, "norm_mlp"): "pixel_shuffle_norm_mlp",
}
"""As recipes call them: (whether neighbours are folded, `EncoderSpec.connector`)."""
HEARING = "audioflamingo3_encoder"
"""Tower of the only class for any LLM whose connector is two linears behind a tower for sounds."""


class PairClass(NamedTuple):
    """A Hugging Face class that an encoder and an LLM are."""

    kind: type[PreTrainedModel]
    config: Callable[[int], PreTrainedConfig]
    """From the id of the placeholder."""
    encoder_files: WeightFiles
    """What it calls the encoder's tensors; the LLM's are LLaVA's."""


def pair_class(model: MultimodalModel) -> PairClass | str:
    """Return the class of a model from separate sources, or the reason why it has none.

    Needs no other ranks.

    Args:
        model: Model with at least one encoder that is not a composite.
    """
    encoders = model.encoder_modules()
    if len(encoders) > 1:
        names = " and ".join(encoder.name for encoder in encoders)
        return f"no class puts several encoders ({names}) before an LLM of its own"
    (encoder,) = encoders
    spec = encoder.spec
    llm = model.llm
    if reason := _llm_problem(llm) or _connector_problem(spec):
        return reason
    if spec.config.model_type == HEARING:
        if llm.text_config.tie_word_embeddings:
            return "Audio Flamingo 3 does not tie the LLM's head to its embeddings"
    else:
        reason = "" if becomes_llava(spec.family) else _tower_problem(spec)
        reason = reason or _tile_problem(spec)
        if spec.connector == "norm_mlp":
            reason = reason or _intern_problem(spec, llm)
        if reason:
            return reason
    found = _class_of(spec, llm.config)

    def build_hf(spec: EncoderSpec, config: PreTrainedConfig, token_id: int) -> PreTrainedModel:
        plain = _class_of(spec, config)
        return plain.kind._from_config(plain.config(token_id), attn_implementation="eager")

    name = found.kind.__name__
    return class_difference(spec, llm, name, found.encoder_files, build_hf) or found


def _class_of(spec: EncoderSpec, llm_config: PreTrainedConfig) -> PairClass:
    """Return the class of an encoder and an LLM that have one."""
    if spec.config.model_type == HEARING:
        config = partial(_hearing_config, spec, llm_config)
        return PairClass(AudioFlamingo3ForConditionalGeneration, config, SOUND_FILES)
    if spec.connector == "norm_mlp":
        config = partial(_intern_config, spec, llm_config)
        return PairClass(InternVLForConditionalGeneration, config, INTERN_VISION)
    config = partial(_llava_config, spec, llm_config)
    return PairClass(LlavaForConditionalGeneration, config, LLAVA_VISION)


def exported_as(model: MultimodalModel) -> str:
    """Hugging Face's class of an export, for the reader; or that it is in parts, and why."""
    if model.composite is not None:
        return COMPOSITES[model.composite.model_type].kind.__name__
    if not model.encoders:
        return type(model.llm.backbone).__name__
    found = pair_class(model)
    if isinstance(found, str):
        return f"parts, which have no Hugging Face class together: {found}"
    return found.kind.__name__


def becomes_llava(family: EncoderFamily) -> bool:
    """Whether an encoder of `family` in front of an LLM is exported as LLaVA, if their connector is
    LLaVA's and logits are plain."""
    return family.inputs == "fixed" and (family.in_composites or family.same_as_clip)


def _llm_problem(llm: LlmModule) -> str:
    family = llm.family
    model_type = llm.config.model_type
    if change := own_logits(llm.text_config, family):
        return f"{model_type} {change}, which Hugging Face classes with an encoder and any LLM omit"
    if (family.text_model, family.head) != ("model", "lm_head"):
        return (
            f"{model_type} has other names of parts ({family.text_model}, {family.head}) than LLMs "
            "in Hugging Face's classes with an encoder"
        )
    return ""


def _connector_problem(spec: EncoderSpec) -> str:
    if spec.shuffle == 1 or (spec.connector == "norm_mlp" and spec.family.modality == "image"):
        return ""
    return (
        f"no class folds {spec.shuffle} x {spec.shuffle} outputs of such a tower into two linears, "
        f'as connector = "{CONNECTORS[True, spec.connector]}" does; "mlp" does not fold, and with '
        'InternViT "pixel_shuffle_norm_mlp" is InternVL\'s'
    )


def _tower_problem(spec: EncoderSpec) -> str:
    kind = spec.config.model_type
    family = spec.family
    if family.modality == "audio":
        return f"no class puts two linears between {kind} and an LLM of its own"
    if family.fixed_merge:
        return f"{kind} merges patches itself; no class has two more linears behind it"
    if family.inputs != "fixed":
        return f"no class takes {kind}'s features, of images of any size, as they are here"
    return f"LLaVA cannot build {kind}, or would take tokens that are no patch's for patches"


def _intern_problem(spec: EncoderSpec, llm: LlmModule) -> str:
    if spec.config.model_type != "internvl_vision":
        return f"Hugging Face's InternVL builds no tower but its own, not {spec.config.model_type}"
    if not llm.family.listed:
        return f"InternVL with {llm.config.model_type}, which no table lists, is not read again"
    return ""


def _tile_problem(spec: EncoderSpec) -> str:
    if spec.tiles is None:
        return ""
    return "pictures are cut into tiles, which classes for any tower do not know as they are here"


def _intern_config(spec: EncoderSpec, llm: Any, image_token_id: int) -> PreTrainedConfig:
    return InternVLConfig(
        vision_config=spec.config,
        text_config=llm,
        image_token_id=image_token_id,
        image_seq_length=(patches_per_row(spec.config) // spec.shuffle) ** 2,
        downsample_ratio=1 / spec.shuffle,
        projector_hidden_act=spec.connector_act,
        # -1 would be what passed the tower's last norm, if it has one.
        vision_feature_layer=spec.family.layer_count(spec.config) + 1 + spec.feature_layer,
        vision_feature_select_strategy="default",
        tie_word_embeddings=llm.tie_word_embeddings,
    )


def _llava_config(spec: EncoderSpec, llm: Any, image_token_id: int) -> PreTrainedConfig:
    return LlavaConfig(
        vision_config=_as_clip(spec.config) if spec.family.same_as_clip else spec.config,
        text_config=llm,
        image_token_index=image_token_id,
        image_seq_length=patches_per_row(spec.config) ** 2,
        projector_hidden_act=spec.connector_act,
        vision_feature_layer=spec.feature_layer,
        # "default" drops the first output, which is a patch where there is no class token.
        vision_feature_select_strategy="default" if spec.family.has_class_token else "full",
        tie_word_embeddings=llm.tie_word_embeddings,
    )


def _as_clip(config: PreTrainedConfig) -> CLIPVisionConfig:
    """The same tower under the name that `AutoModel` knows."""
    settings = config.to_dict()
    known = CLIPVisionConfig().to_dict()
    return CLIPVisionConfig(
        **{key: settings[key] for key in known if key in settings and key != "model_type"}
    )


def _hearing_config(spec: EncoderSpec, llm: Any, sound_token_id: int) -> PreTrainedConfig:
    return AudioFlamingo3Config(
        audio_config=spec.config,
        text_config=llm,
        audio_token_id=sound_token_id,
        projector_hidden_act=spec.connector_act,
        projector_bias=spec.connector_bias,
    )
