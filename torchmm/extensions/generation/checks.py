"""Check `[model.generator]` and the data of a generator."""

from __future__ import annotations

from pathlib import Path

from torchmm.recipe.check_model import SECTION, check_revision, is_missing_directory
from torchmm.recipe.explain import NO_VALUE, Problem, Problems
from torchmm.recipe.model_section import GeneratorConfig
from torchmm.recipe.recipe import Recipe


def check_generator(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of a recipe with a generator."""
    if recipe.model.generator is not None:
        yield from _check_section(recipe.model.generator)
        yield from _check_data(recipe)


def _check_section(section: GeneratorConfig) -> Problems:
    yield from check_revision(
        f"{SECTION}.revision", section.revision, f"{SECTION}.source", section.source
    )
    if section.source is None and section.config is None:
        yield Problem(SECTION, NO_VALUE, "neither source nor config is set; set one of the two")
    elif section.source is None and "_class_name" not in (section.config or {}):
        text = 'is missing; set the diffusers class, for example "PixArtTransformer2DModel"'
        yield Problem(f"{SECTION}.config._class_name", NO_VALUE, text)
    elif section.source is not None and is_missing_directory(section.source):
        text = "no such directory; train a generator first or correct the path"
        yield Problem(f"{SECTION}.source", section.source, text)
    vae = section.vae
    if vae is not None and vae.source is None and vae.config is None:
        yield Problem(
            f"{SECTION}.vae", NO_VALUE, "neither source nor config is set; set one of the two"
        )
    elif vae is not None and vae.source and not Path(vae.source).expanduser().is_dir():
        text = "no such directory; prepare or download the model first, or correct the path"
        yield Problem(f"{SECTION}.vae.source", vae.source, text)
    if section.loss_weight == section.text_loss_weight == 0:
        text = "and text_loss_weight are both 0, so there is no loss; raise one of them"
        yield Problem(f"{SECTION}.loss_weight", section.loss_weight, text)


def _check_data(recipe: Recipe) -> Problems:
    data = recipe.data
    validation = recipe.validation
    if data.sources and not any(source.target_image_column for source in data.sources):
        text = (
            'no source has target images; set target_image_column = "COLUMN" in a '
            "[[data.sources]] table"
        )
        yield Problem("data.sources", NO_VALUE, text, (SECTION,))
    if validation.generated_images and not any(
        source.target_image_column for source in data.validation
    ):
        text = (
            'requires validation images; set target_image_column = "COLUMN" in a '
            "[[data.validation]] table"
        )
        yield Problem(
            "validation.generated_images", validation.generated_images, text, ("data.validation",)
        )
    if validation.generated_images and not validation.interval:
        text = "requires validation runs; set validation.interval"
        yield Problem(
            "validation.generated_images",
            validation.generated_images,
            text,
            ("validation.interval",),
        )
