"""Build a generator from `[model.generator]`. A separate module, because it requires diffusers."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from torchmm.common.errors import ConfigError, describe_load_error, install_command

try:
    from diffusers import PixArtTransformer2DModel
except ModuleNotFoundError as error:
    raise ConfigError(
        "[model.generator] requires diffusers, which is not installed; "
        f"{install_command('generation')}"
    ) from error

from torchmm.common.generated import GeneratorSpec
from torchmm.extensions.generation.families.autoencoder import latent_spec
from torchmm.extensions.generation.families.pixart import GENERATOR_FAMILIES
from torchmm.extensions.generation.generator import DitModule, DitSpec
from torchmm.extensions.generation.latents import LatentSpec
from torchmm.models.hf.config_values import MODEL_ERRORS, build_checked, value_problems
from torchmm.models.layered import WeightFiles
from torchmm.recipe.model_section import GeneratorConfig

UNET = (
    ". A U-Net has no layers that can be split into stages "
    "(docs/reference/supported_combinations.md)"
)
GENERATOR_FILES = WeightFiles(
    renames=(
        (r"caption_projection\.", "connector."),
        (r"scale_shift_table$", "output.scale_shift_table"),
        (r"", "dit."),
    ),
    hf_prefixes=(
        ("connector.", "caption_projection."),
        ("output.", ""),
        ("dit.", ""),
    ),
)


def build_generator(
    section: GeneratorConfig, llm_hidden_size: int, dtype: torch.dtype
) -> DitModule:
    """Return the generator of a recipe, on the current default device.

    Args:
        section: Section [model.generator] of the recipe.
        llm_hidden_size: Hidden size of the LLM.
        dtype: Dtype of the weights.

    Raises:
        ConfigError: The section has problems. The error lists all of them.
    """
    config = _load(section)
    if problems := value_problems("[model.generator] config", config):
        raise ConfigError(problems)
    name = str(config.get("_class_name"))
    family = GENERATOR_FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            f"[model.generator] _class_name = {name!r} is not supported; use one of: "
            f"{', '.join(GENERATOR_FAMILIES)}" + (UNET if name.startswith("UNet") else "")
        )
    latents = _latents(section, config)
    channels = 3 if latents is None else latents.channels
    complete = family.complete(config, llm_hidden_size, channels)
    factor = 1 if latents is None else latents.factor
    images = GeneratorSpec(
        size_px=factor * complete["sample_size"],
        patch_size_px=factor * complete["patch_size"],
        frames=section.frames,
        context_tokens=section.context_tokens,
        time_sampling=section.timestep_sampling,
        latent_values=0 if latents is None else latents.values,
        latent_noise=0 if latents is None else latents.sizes.noise_per_patch - latents.values,
    )
    # A generator for another LLM has a connector of different shapes, which is initialized again.
    fits = section.source is not None and config.get("caption_channels") == llm_hidden_size
    files = replace(GENERATOR_FILES, source=section.source_with_revision)
    if not fits:
        files = replace(files, renames=files.renames[1:], allows_other_tensors=True)
    spec = DitSpec(family, name, complete, images, dtype, fits, latents)
    return DitModule(spec, files)


def _latents(section: GeneratorConfig, config: dict[str, Any]) -> LatentSpec | None:
    """Return the autoencoder of the section, or None without an autoencoder."""
    if section.vae is None:
        return None
    side = config.get(
        "patch_size", inspect.signature(PixArtTransformer2DModel).parameters["patch_size"].default
    )
    return build_checked("model.generator.vae", section.vae, lambda vae: latent_spec(vae, side))


def _load(section: GeneratorConfig) -> dict[str, Any]:
    """Return the diffusers config of the section, which is not checked yet."""
    if section.source is None:
        return dict(section.config or {})
    try:
        reader: Any = PixArtTransformer2DModel  # any class reads configs of all classes
        config = reader.load_config(section.source, revision=section.revision)
    except (OSError, *MODEL_ERRORS) as error:
        raise ConfigError(
            f"[model.generator] source = {section.source!r} has no readable config.json; use "
            f"a local directory or a model of the Hub ({describe_load_error(error)})"
        ) from error
    return {**config, **(section.config or {})}
