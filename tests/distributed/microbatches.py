"""Random packed microbatches of a tiny image-text model, built without a data loader."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from pipeline_cases import DELTA_NETS, EXPERTS, PLACEHOLDERS

from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.recipe.model_section import ModelConfig

IMAGE_TOKENS = 4
VOCAB = 64

MODEL = ModelConfig.model_validate(
    {
        "llm": {
            "config": {
                "model_type": "qwen3",
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            }
        },
        "encoders": {
            "vision": {
                "config": {
                    "model_type": "clip_vision_model",
                    "image_size": 16,
                    "patch_size": 8,
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                }
            }
        },
    }
)


TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}
LEARNED_POSITIONS = {"num_position_embeddings": 16}
DEEPSTACK = {**LEARNED_POSITIONS, "deepstack_visual_indexes": [0, 1, 2]}
AUDIO = {
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "max_source_positions": 100,
}
OMNI_AUDIO = {**AUDIO, "output_dim": 32, "downsample_hidden_size": 8}
COMPOSITES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_vl": {"vision_config": DEEPSTACK, "text_config": {}},
    "qwen3_vl_moe": {"vision_config": DEEPSTACK, "text_config": EXPERTS},
    "qwen3_5": {"vision_config": LEARNED_POSITIONS, "text_config": DELTA_NETS},
    "qwen3_omni_moe_thinker": {
        "vision_config": DEEPSTACK,
        "audio_config": OMNI_AUDIO,
        "text_config": EXPERTS,
    },
    "qwen2_5_omni_thinker": {
        "vision_config": {"window_size": 16, "fullatt_block_indexes": [1]},
        "audio_config": {
            **AUDIO,
            "output_dim": 32,
            "n_window": 3,
        },
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            }
        },
    },
    "voxtral": {
        "audio_config": {**AUDIO, "encoder_ffn_dim": 128},
        "text_config": {"model_type": "llama"},
    },
    "qwen2_audio": {"audio_config": AUDIO, "text_config": {"model_type": "qwen2"}},
    "audioflamingo3": {"audio_config": AUDIO, "text_config": {"model_type": "qwen2"}},
}
"""Config entries that differ between the multimodal models."""
AUDIO_GROUPS = {
    "qwen3_omni_moe_thinker": (1, 8),
    "qwen2_5_omni_thinker": (2, 2),
    "voxtral": (4, 2),
    "qwen2_audio": (2, 3),
    "audioflamingo3": (2, 3),
}
"""Encoder positions per audio token, and mel frames per encoder position."""
ODD = ("qwen2_audio", "audioflamingo3")
"""Models whose audio ends with an encoder position that belongs to no token."""
TOLERANCES = {"qwen3_5": 5e-5}
"""Gradients of decays are small differences of large sums (`test_delta_net`)."""


def composite_model(
    model_type: str, llm_layers: int, tower_layers: int, tied: bool = False
) -> ModelConfig:
    """Return a config of a multimodal checkpoint with the LLM of `MODEL`.

    Its microbatches come from `with_patches`.
    """
    assert MODEL.llm is not None and MODEL.llm.config is not None
    text = {k: v for k, v in MODEL.llm.config.items() if k != "model_type"}
    parts = COMPOSITES[model_type]
    text |= {**parts["text_config"], "num_hidden_layers": llm_layers}
    config: dict[str, Any] = {
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": tied,
        PLACEHOLDERS.get(model_type, "image_token_id"): 3,
    }
    if "vision_config" in parts:
        config["vision_config"] = {**TOWER, **parts["vision_config"], "depth": tower_layers}
    if "audio_config" in parts:
        del text["head_dim"]
        config["audio_config"] = {**parts["audio_config"], "encoder_layers": tower_layers}
    return ModelConfig.model_validate({"config": config})


def towers_of(composite: str) -> tuple[str, ...]:
    """Return the names of the encoders of a multimodal model. "" means an LLM with CLIP."""
    parts = COMPOSITES.get(composite, {"vision_config": {}})
    return tuple(name for name in ("vision", "audio") if f"{name}_config" in parts)


def with_patches(microbatch: Microbatch, composite: str) -> Microbatch:
    """Return the microbatch with patches for the encoders of a multimodal model.

    Each image has 4 x 4 patches per token before merging. For models with audio and vision, every
    second image is replaced by audio. For models with audio only, all images are.
    """
    towers = towers_of(composite)
    group, frames = AUDIO_GROUPS.get(composite, (0, 0))
    patches = {"vision": 4 * IMAGE_TOKENS, "audio": group * IMAGE_TOKENS + (composite in ODD)}
    samples, seen = [], 0
    token_positions: dict[str, list[torch.Tensor]] = {name: [] for name in towers}
    for sample in microbatch.meta.samples:
        if sample.images:
            name = towers[seen % len(towers)]
            image = replace(sample.images[0], patches=patches[name])
            sample = replace(sample, images=(image,), encoder=name)  # noqa: PLW2901
            vision_positions_K = microbatch.encoders["vision"].positions_K
            token_positions[name].append(
                vision_positions_K[seen * IMAGE_TOKENS : (seen + 1) * IMAGE_TOKENS]
            )
            seen += 1
        samples.append(sample)
    encoders = {}
    generator = torch.Generator().manual_seed(microbatch.cu_seqlens[1])
    for name, positions in token_positions.items():
        if positions:
            grid = (1, 4, 4) if name == "vision" else (1, 1, patches[name])
            values = 3 * 2 * 4 * 4 if name == "vision" else frames * AUDIO["num_mel_bins"]
            pixels = torch.randn(len(positions) * patches[name], values, generator=generator)
            grids = [grid] * len(positions)
            group_size = None if name == "vision" else group
            tokens = torch.cat(positions)
            encoders[name] = EncoderInputs(pixels, grids, tokens, None, group_size)
    meta = replace(microbatch.meta, samples=tuple(samples))
    return replace(microbatch, encoders=encoders, meta=meta)


def random_microbatch(seed: int, images: int, tokens: int = 64) -> Microbatch:
    """Build a packed sequence with `images` image samples, one text sample and padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB, (tokens,), generator=generator)
    targets = torch.full((tokens,), IGNORE_TARGET)
    starts, positions, samples, at = [0], [], [], 0
    for sample in range(images + 1):
        placeholders = IMAGE_TOKENS if sample < images else 0
        length = placeholders + 4 + int(torch.randint(0, 5, (), generator=generator))
        positions += range(at, at + placeholders)
        first = at + max(placeholders - 1, 0)
        targets[first : at + length - 1] = ids[first + 1 : at + length]
        at += length
        starts.append(at)
        image = (ImageMeta(16, 16, IMAGE_TOKENS, IMAGE_TOKENS),) * (placeholders > 0)
        encoder = "vision" if image else None
        samples.append(SampleMeta("random", sample, length, image, encoder))
    assert at < tokens
    position_ids = torch.cat([torch.arange(b - a) for a, b in pairwise([*starts, tokens])])
    encoders = {}
    if images:
        pixels = torch.randn(images, 3, 16, 16, generator=generator)
        encoders["vision"] = EncoderInputs(pixels, [(1, 2, 2)] * images, torch.tensor(positions))
    meta = MicrobatchMeta(tuple(samples), tokens)
    return Microbatch(ids, targets, position_ids, [*starts, tokens], encoders, meta)
