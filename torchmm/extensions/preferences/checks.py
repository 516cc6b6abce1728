"""Check the section `[preference]`."""

from __future__ import annotations

from typing import Any

from torchmm.extensions.preferences.section import PreferenceConfig
from torchmm.recipe.explain import NO_VALUE, Problem, Problems
from torchmm.recipe.recipe import Recipe


def check_preference(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of `[preference]`, and of keys that preference tuning does not support."""
    config = PreferenceConfig.from_parent(recipe)
    defaults = PreferenceConfig()
    key = "training.loss"
    if recipe.training.loss != "preference":
        for name, value in vars(config).items():
            if value != getattr(defaults, name):
                text = 'requires training.loss = "preference"; set it, or remove the key'
                yield Problem(f"preference.{name}", value, text, (key,))
        return
    if config.loss_type != "simpo" and config.simpo_gamma != defaults.simpo_gamma:
        text = 'requires loss_type = "simpo"; set it, or remove the key'
        yield Problem("preference.simpo_gamma", config.simpo_gamma, text, ("preference.loss_type",))
    generator = None if recipe.model.generator is None else NO_VALUE
    producers = NO_VALUE if recipe.data.producers.is_used else None
    unsupported: list[tuple[str, Any, str]] = [
        ("model.generator", generator, "remove the section"),
        ("model.chunked_loss", recipe.model.chunked_loss, "set it to false"),
        ("data.producers", producers, "remove the section"),
        ("validation.num_samples", recipe.validation.num_samples, "set it to 0"),
        ("training.label_smoothing", recipe.training.label_smoothing, "set it to 0"),
        ("training.z_loss", recipe.training.z_loss, "set it to 0"),
    ]
    for name, value, fix in unsupported:
        if value:
            text = f'is not supported with training.loss = "preference"; {fix}'
            yield Problem(name, value, text, (key,))
