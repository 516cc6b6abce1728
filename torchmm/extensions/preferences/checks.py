"""Check the section `[preference]`."""

from __future__ import annotations

from torchmm.extensions.preferences.section import PreferenceConfig
from torchmm.recipe.explain import Problem, Problems
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
    unsupported = {
        "model.generator": (recipe.model.generator is not None, "remove the generator"),
        "model.chunked_loss": (recipe.model.chunked_loss, "set it to false"),
        "data.producers": (recipe.data.producers.is_used, "remove the data workers"),
        "validation.num_samples": (recipe.validation.num_samples > 0, "set it to 0"),
    }
    for name, (is_used, fix) in unsupported.items():
        if is_used:
            text = f'is not supported with training.loss = "preference"; {fix}'
            yield Problem(name, True, text, (key,))
