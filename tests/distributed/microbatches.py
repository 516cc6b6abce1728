"""Random packed microbatches of a tiny image-text model, made by hand."""

from dataclasses import replace
from itertools import pairwise

import torch

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


TAPPED = {
    "model_type": "qwen3_vl_vision",
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1, 2],
}


def deepstack_model(llm_layers: int, tower_layers: int, tied: bool = False) -> ModelConfig:
    """The same LLM as a Qwen3-VL's, with three taps, for microbatches `with_patches`."""
    assert MODEL.llm is not None and MODEL.llm.config is not None
    text = {k: v for k, v in MODEL.llm.config.items() if k != "model_type"}
    config = {
        "model_type": "qwen3_vl",
        "text_config": {**text, "num_hidden_layers": llm_layers},
        "vision_config": {**TAPPED, "depth": tower_layers},
        "image_token_id": 3,
        "tie_word_embeddings": tied,
    }
    return ModelConfig.model_validate({"config": config})


def with_patches(microbatch: Microbatch) -> Microbatch:
    """The same with images of 4 x 4 patches, which become as many tokens when they are merged."""
    samples = tuple(
        replace(s, images=tuple(replace(i, patches=4 * IMAGE_TOKENS) for i in s.images))
        for s in microbatch.meta.samples
    )
    encoders = {}
    for name, inputs in microbatch.encoders.items():
        count = len(inputs.grids_thw)
        generator = torch.Generator().manual_seed(microbatch.cu_seqlens[1])
        pixels = torch.randn(count * 16, 3 * 2 * 4 * 4, generator=generator)
        encoders[name] = EncoderInputs(pixels, [(1, 4, 4)] * count, inputs.positions_K)
    return replace(microbatch, encoders=encoders, meta=replace(microbatch.meta, samples=samples))


def random_microbatch(seed: int, images: int, tokens: int = 64) -> Microbatch:
    """One pack: `images` image samples, one text sample, padding."""
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
