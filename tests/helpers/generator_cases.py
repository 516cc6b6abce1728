"""A tiny generator after tiny LLMs and encoders, and images for it to draw."""

from math import prod

import torch
from model_cases import ENCODERS, LLMS

from torchmm.common.generated import GeneratorInputs
from torchmm.recipe.model_section import EncoderConfig, GeneratorConfig, LlmConfig, ModelConfig

PIXART = {
    "_class_name": "PixArtTransformer2DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 3,
    "sample_size": 16,
    "patch_size": 4,
}
VALUES = 3 * 4 * 4


def generator_config(llm: str = "llama", encoder: str | None = "clip", **settings) -> ModelConfig:
    encoders = {"eye": EncoderConfig(config=ENCODERS[encoder])} if encoder else {}
    generator = GeneratorConfig(config={**PIXART, **settings}, frames=3)
    llm_config = LlmConfig(config=LLMS[llm])
    return ModelConfig(llm=llm_config, encoders=encoders, generator=generator)


def generator_inputs(
    grids: list[tuple[int, int, int]], contexts: list[int], positions: torch.Tensor | None = None
) -> GeneratorInputs:
    """Random images of these grids; times between 0.1 and 0.9."""
    draw = torch.Generator().manual_seed(4)
    patches = sum(map(prod, grids))
    if positions is None:
        positions = torch.arange(sum(contexts))
    return GeneratorInputs(
        patches_PV=torch.rand(patches, VALUES, generator=draw) * 2 - 1,
        noise_PV=torch.randn(patches, VALUES, generator=draw),
        times=[0.1 + 0.8 * i / len(grids) for i in range(len(grids))],
        grids_thw=grids,
        context_positions_K=positions,
        contexts=contexts,
        counted=[True] * len(grids),
    )
