"""Hugging Face processor classes of multimodal models, with their settings and token names.

A processor replaces the placeholder of an image by as many placeholders as the image has tokens.
The processor settings determine their number. The tokens are attributes of the tokenizer, whose
names differ between processor classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmm.models.encoders import EncoderModule
from torchmm.models.families.composites.components import PAIR_PROCESSOR
from torchmm.models.families.encoders.family import patches_per_row, side

Settings = Callable[[Any, Sequence[EncoderModule]], dict[str, Any]]


def _constant(**settings: Any) -> Settings:
    return lambda config, encoders: dict(settings)


_NO_SETTINGS = _constant()


@dataclass(frozen=True)
class ProcessorFiles:
    """The Hugging Face processor of a multimodal model."""

    processor: str
    """Name of the processor class."""
    tokens: Mapping[str, str | None] = field(default_factory=dict)
    """Maps names of tokenizer attributes to the token, or to the config key with its id. None means
    the image placeholder."""
    token_settings: tuple[str, ...] = ()
    """Names in `tokens` that are also settings of the processor."""
    settings: Settings = _NO_SETTINGS
    """Function that returns the processor settings for config and encoders.

    The config is None if encoder and LLM have separate sources.
    """
    video: str = ""
    """Name of the video processor class, or ""."""
    untiled_settings: Settings = _NO_SETTINGS
    """Function that returns image processor settings without tiles, as for the encoder alone."""
    adds_markers: bool = False
    """Whether the processor adds the tokens around a placeholder."""
    prompt_token_name: str = ""
    """Name in `tokens` of the token for an image in prompts, if it is not the placeholder."""
    adds_bos: bool = True
    """Whether the processor adds the BOS token, as in training."""
    packages: tuple[str, ...] = ()
    """Packages that the processor requires in addition to transformers."""
    accepts_tokenizer: bool = True
    """Whether the processor accepts the tokenizer of an export."""


def _llava(config: Any, encoders: Sequence[EncoderModule]) -> dict[str, Any]:
    (encoder,) = encoders
    token = int(encoder.family.has_class_token)
    drops = token and encoder.spec.drop_class_token
    return {
        "patch_size": side(encoder.spec.config.patch_size),
        "vision_feature_select_strategy": "default" if drops else "full",
        "num_additional_image_tokens": token,
    }


def _folded(config: Any, encoders: Sequence[EncoderModule]) -> dict[str, Any]:
    # The processor counts patches of the size of a token, without a class token.
    (encoder,) = encoders
    return {
        "patch_size": side(encoder.spec.config.patch_size) * encoder.spec.pixel_shuffle_factor,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
    }


def _onevision(config: Any, encoders: Sequence[EncoderModule]) -> dict[str, Any]:
    (encoder,) = encoders
    token = int(encoder.family.has_class_token)
    drops = token and encoder.spec.drop_class_token
    return {
        "num_image_tokens": patches_per_row(encoder.spec.config) ** 2 + token,
        "vision_feature_select_strategy": "default" if drops else "full",
        "vision_aspect_ratio": config.vision_aspect_ratio,
    }


def _per_tile(key: str) -> Settings:
    def settings(config: Any, encoders: Sequence[EncoderModule]) -> dict[str, Any]:
        (encoder,) = encoders
        return {
            key: (patches_per_row(encoder.spec.config) // encoder.spec.pixel_shuffle_factor) ** 2
        }

    return settings


def _split(name: str) -> Settings:
    def settings(config: Any, encoders: Sequence[EncoderModule]) -> dict[str, Any]:
        (encoder,) = encoders
        return {
            "image_processor_type": name,
            "do_image_splitting": False,
            "max_image_size": {"longest_edge": side(encoder.spec.config.image_size)},
        }

    return settings


def _pixtral(config: Any, encoders: Sequence[EncoderModule]) -> dict[str, Any]:
    (encoder,) = encoders
    return {
        "patch_size": side(encoder.spec.config.patch_size),
        "spatial_merge_size": encoder.spec.pixel_shuffle_factor,
    }


_IMAGE: Mapping[str, str | None] = {"image_token": None}
_IMAGE_AND_VIDEO = {"image_token": "image_token_id", "video_token": "video_token_id"}
_QWEN = {
    **_IMAGE_AND_VIDEO,
    "vision_start_token": "vision_start_token_id",
    "vision_end_token": "vision_end_token_id",
}
_OMNI = {
    **_IMAGE_AND_VIDEO,
    "audio_token": "audio_token_id",
    "audio_bos_token": "audio_start_token_id",
    "audio_eos_token": "audio_end_token_id",
    "vision_bos_token": "vision_start_token_id",
    "vision_eos_token": "vision_end_token_id",
}
_INTERN = {
    "context_image_token": None,
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
_SMOL = {
    "image_token": None,
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}
_PIXTRAL = {
    "image_token": None,
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_GEMMA = {"boi_token": "boi_token_index", "eoi_token": "eoi_token_index", "image_token": None}
_GEMMA4 = {
    "boi_token": "boi_token_id",
    "eoi_token": "eoi_token_id",
    "image_token": None,
    # The processor always requires audio markers. Any tokens work for images.
    "boa_token": "boi_token_id",
    "eoa_token": "eoi_token_id",
}
_AUDIO_TOKENS = {"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
_VIDEO = ("torchvision",)
"""Package of all video processors."""
_SOUNDS = ("transformers[audio]",)
_QWEN_VIDEOS = "Qwen2VLVideoProcessor"
_GLM = "Glm4vVideoProcessor"
_QWEN3 = ProcessorFiles("Qwen3VLProcessor", _QWEN, video="Qwen3VLVideoProcessor", packages=_VIDEO)
PIXTRAL = ProcessorFiles(
    "PixtralProcessor", _PIXTRAL, tuple(_PIXTRAL), _pixtral, adds_markers=True, packages=_VIDEO
)
PIXEL_SHUFFLE_PROCESSOR = ProcessorFiles(PAIR_PROCESSOR, _IMAGE, ("image_token",), _folded)
"""Processor of an InternVL whose encoder and LLM have separate sources."""
PROCESSOR_FILES: dict[str, ProcessorFiles] = {
    "llava": ProcessorFiles(PAIR_PROCESSOR, _IMAGE, ("image_token",), _llava),
    "llava_next": ProcessorFiles("LlavaNextProcessor", _IMAGE, ("image_token",), _llava),
    "llava_onevision": ProcessorFiles(
        "LlavaOnevisionProcessor",
        {**_IMAGE, "video_token": "video_token_index"},
        ("image_token",),
        _onevision,
        "LlavaOnevisionVideoProcessor",
        packages=_VIDEO,
    ),
    "mistral3": PIXTRAL,
    "internvl": ProcessorFiles(
        "InternVLProcessor",
        _INTERN,
        settings=_per_tile("image_seq_length"),
        video="InternVLVideoProcessor",
        adds_markers=True,
        packages=_VIDEO,
    ),
    "idefics3": ProcessorFiles(
        "Idefics3Processor",
        _SMOL,
        settings=_per_tile("image_seq_len"),
        untiled_settings=_split("Idefics3ImageProcessor"),
        adds_markers=True,
    ),
    "smolvlm": ProcessorFiles(
        "SmolVLMProcessor",
        _SMOL,
        settings=_per_tile("image_seq_len"),
        video="SmolVLMVideoProcessor",
        untiled_settings=_split("SmolVLMImageProcessor"),
        adds_markers=True,
        packages=(*_VIDEO, "num2words"),
    ),
    "paligemma": ProcessorFiles(
        "PaliGemmaProcessor", _IMAGE, untiled_settings=_per_tile("image_seq_length"), adds_bos=False
    ),
    "gemma3": ProcessorFiles(
        "Gemma3Processor",
        _GEMMA,
        settings=lambda config, encoders: {"image_seq_length": config.mm_tokens_per_image},
        untiled_settings=_constant(
            image_processor_type="Gemma3ImageProcessor", do_pan_and_scan=False
        ),
        adds_markers=True,
        prompt_token_name="boi_token",
    ),
    "gemma4": ProcessorFiles(
        "Gemma4Processor",
        _GEMMA4,
        # The processor requires one for audio, also for models without an audio encoder.
        settings=_constant(
            feature_extractor={"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
        ),
        video="Gemma4VideoProcessor",
        adds_markers=True,
        packages=_VIDEO,
    ),
    "qwen2_vl": ProcessorFiles("Qwen2VLProcessor", _QWEN, video=_QWEN_VIDEOS, packages=_VIDEO),
    "qwen2_5_vl": ProcessorFiles("Qwen2_5_VLProcessor", _QWEN, video=_QWEN_VIDEOS, packages=_VIDEO),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    "qwen2_5_omni_thinker": ProcessorFiles(
        "Qwen2_5OmniProcessor", _OMNI, video=_QWEN_VIDEOS, packages=_VIDEO
    ),
    "qwen3_omni_moe_thinker": ProcessorFiles(
        "Qwen3OmniMoeProcessor", _OMNI, video=_QWEN_VIDEOS, packages=_VIDEO
    ),
    "voxtral": ProcessorFiles("VoxtralProcessor", accepts_tokenizer=False),
    "qwen2_audio": ProcessorFiles(
        "Qwen2AudioProcessor",
        {"audio_token": None, **_AUDIO_TOKENS},
        tuple(_AUDIO_TOKENS),
        packages=_SOUNDS,
    ),
    "audioflamingo3": ProcessorFiles(
        "AudioFlamingo3Processor", {"audio_token": None}, ("audio_token",), packages=_SOUNDS
    ),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe"),
        ProcessorFiles("Glm4vProcessor", _IMAGE_AND_VIDEO, video=_GLM, packages=_VIDEO),
    ),
    "glm46v": ProcessorFiles(
        "Glm46VProcessor", _IMAGE_AND_VIDEO, video="Glm46VVideoProcessor", packages=_VIDEO
    ),
}
"""Processors by Hugging Face model_type."""
