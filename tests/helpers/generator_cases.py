"""A tiny generator after tiny LLMs and encoders, and target images."""

from math import prod

import torch
from model_cases import ENCODERS, LLMS

from torchmm.common.generated import GeneratorInputs
from torchmm.recipe.model_section import (
    AutoencoderConfig,
    EncoderConfig,
    GeneratorConfig,
    LlmConfig,
    ModelConfig,
)

PIXART = {
    "_class_name": "PixArtTransformer2DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 3,
    "sample_size": 16,
    "patch_size": 4,
}
VALUES = 3 * 4 * 4
VAE = {
    "block_out_channels": [8, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 4,
    "latent_channels": 2,
    "scaling_factor": 0.6,
    "shift_factor": 0.1,
}
"""A VAE whose latents each represent 2 x 2 pixels."""
LATENT_VALUES = 2 * 2 * 2
"""Number of values in a patch of 2 x 2 latents; a patch of pixels has `VALUES`."""
NOISE = {"": VALUES, "mean": LATENT_VALUES, "sampled": 2 * LATENT_VALUES}
"""Random numbers per patch."""


def generator_config(llm: str = "llama", encoder: str | None = "clip", **settings) -> ModelConfig:
    encoders = {"eye": EncoderConfig(config=ENCODERS[encoder])} if encoder else {}
    generator = GeneratorConfig(config={**PIXART, **settings}, frames=3)
    llm_config = LlmConfig(config=LLMS[llm])
    return ModelConfig(llm=llm_config, encoders=encoders, generator=generator)


def latent_config(
    latents: str = "mean", vae: dict | None = None, encoder: str | None = None, **settings
) -> ModelConfig:
    """Return the config for latents, in patches as large as those of pixels."""
    config = generator_config(encoder=encoder, sample_size=8, patch_size=2)
    autoencoder = AutoencoderConfig(config={**VAE, **(vae or {})}, latent_mode=latents, **settings)
    assert config.generator is not None
    generator = config.generator.model_copy(update={"vae": autoencoder})
    return config.model_copy(update={"generator": generator})


def generator_inputs(
    grids: list[tuple[int, int, int]],
    contexts: list[int],
    positions: torch.Tensor | None = None,
    latents: str = "",
) -> GeneratorInputs:
    """Return random images with these grids, and times between 0.1 and 0.9.

    Args:
        latents: Latents ("mean" or "sampled") that determine the size of noise; "": pixels.
    """
    draw = torch.Generator().manual_seed(4)
    patches = sum(map(prod, grids))
    if positions is None:
        positions = torch.arange(sum(contexts))
    return GeneratorInputs(
        patches_PV=torch.rand(patches, VALUES, generator=draw) * 2 - 1,
        noise_PV=torch.randn(patches, NOISE[latents], generator=draw),
        times=[0.1 + 0.8 * i / len(grids) for i in range(len(grids))],
        grids_thw=grids,
        context_positions_K=positions,
        contexts=contexts,
        in_loss=[True] * len(grids),
        latent_values=LATENT_VALUES if latents else 0,
    )
