"""From the recipe's `[model.generator]` to a generator; separate because it needs diffusers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers import PixArtTransformer2DModel

from torchmm.common.errors import ConfigError
from torchmm.common.generated import GeneratorSpec
from torchmm.models.families.generators.pixart import GENERATOR_FAMILIES
from torchmm.models.generator import DitSpec, GeneratorModule
from torchmm.models.layered import WeightFiles
from torchmm.recipe.model_section import GeneratorConfig

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
) -> GeneratorModule:
    """The generator of a recipe, on the current default device.

    Args:
        llm_hidden_size: features of the LLM's hidden states.

    Raises:
        ConfigError: all that is wrong with the section.
    """
    config = _load(section)
    name = str(config.get("_class_name"))
    family = GENERATOR_FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            f"[model.generator] _class_name = {name!r} is not supported; supported: "
            f"{', '.join(GENERATOR_FAMILIES)}"
        )
    complete = family.complete(config, llm_hidden_size)
    images = GeneratorSpec(
        size_px=complete["sample_size"],
        patch_size_px=complete["patch_size"],
        frames=section.frames,
        context_tokens=section.context_tokens,
        time_sampling=section.time_sampling,
    )
    # One made for another LLM has a connector of other sizes, which is replaced by a new one.
    fits = section.source is not None and config.get("caption_channels") == llm_hidden_size
    files = replace(GENERATOR_FILES, source=section.place)
    if not fits:
        files = replace(files, renames=files.renames[1:], partial=True)
    spec = DitSpec(family, name, complete, images, dtype, connector_from_files=fits)
    return GeneratorModule(spec, files)


def _load(section: GeneratorConfig) -> dict[str, Any]:
    """The diffusers config of the section, not yet checked."""
    if section.source is None:
        return dict(section.config or {})
    try:
        reader: Any = PixArtTransformer2DModel  # any class reads configs of all classes
        found = reader.load_config(section.source, revision=section.revision)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[model.generator] source = {section.source!r} has no readable config.json; name a "
            f"local directory or a model of the hub ({str(error).splitlines()[0]})"
        ) from error
    return {**found, **(section.config or {})}
