"""Sizes that a recipe leaves open (`orchestrate`), filled in before anything else looks at it."""

from __future__ import annotations

from torchmm.planning.encoder_sizes import choose_encoders, leaves_encoders_open
from torchmm.planning.executions import simulated_profile
from torchmm.planning.forecast import Forecaster
from torchmm.planning.placement import orchestrated_units
from torchmm.recipe.recipe import Recipe


def orchestrated(recipe: Recipe, world_size: int) -> Recipe:
    """The recipe with sizes of colocated encoders, or of modules apart, chosen if it asks for that.

    Raises:
        ConfigError: nothing fits into memory, or the device is unknown.
    """
    if recipe.parallel.leaves_units_open:
        return orchestrated_units(recipe, world_size)
    if not leaves_encoders_open(recipe):
        return recipe
    profile = simulated_profile(recipe)
    return choose_encoders(Forecaster(recipe, world_size, profile)).recipe
