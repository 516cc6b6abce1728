"""Value checks of recipes that belong to this extension."""

from __future__ import annotations

from torchmm.balance.simulation.section import SimulationConfig, find_conflicts
from torchmm.recipe.explain import NO_VALUE, Problem, Problems, suggest
from torchmm.recipe.recipe import Recipe


def check_simulation_section(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of [simulation]."""
    simulation = SimulationConfig.from_parent(recipe)
    encoders = recipe.model.encoder_names
    also = ("training.sequence_length", "simulation")
    for conflict in find_conflicts(simulation, recipe.training.sequence_length):
        yield Problem(conflict.key, conflict.value, conflict.text, also)
    for name in simulation.images:
        if name not in encoders:
            known = ", ".join(encoders) or "none"
            text = f"is not an encoder of the model{suggest(name, encoders)}; use one of: {known}"
            yield Problem(f"simulation.images.{name}", NO_VALUE, text, ("model",))
    if simulation.generated is not None and recipe.model.generator is None:
        text = "the model has no generator; add [model.generator] or remove this section"
        yield Problem("simulation.generated", NO_VALUE, text, ("model.generator",))
