"""Recipe checks of encoder layers that run in pieces during the communication of the LLM."""

from __future__ import annotations

from torchmm.recipe.explain import Problem, Problems
from torchmm.recipe.recipe import Recipe


def check_tensor_bubbles(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield keys that `parallel.tp_comm_fraction` does not support."""
    parallel = recipe.parallel
    key = "parallel.tp_comm_fraction"
    share = parallel.tp_comm_fraction
    if not share:
        return
    if recipe.compile.enabled is True:
        text = "stops within layers, which compiled layers cannot do; set compile.enabled = false"
        yield Problem(key, share, text, ("compile.enabled",))
    if parallel.placement != "colocated" or parallel.tensor == 1:
        text = 'has no use without placement = "colocated" and tensor > 1; remove it'
        yield Problem(key, share, text, ("parallel.placement", "parallel.tensor"))
        return
    if parallel.async_tensor_parallel:
        text = "needs collectives that the LLM waits for; set async_tensor_parallel = false"
        yield Problem(key, share, text, ("parallel.async_tensor_parallel",))
    sizes = {name: parallel.encoder_tensor(name) for name in recipe.model.encoder_names}
    smallest = min(sizes, key=sizes.__getitem__, default="")
    for name, size in sizes.items():
        if size != sizes[smallest]:
            text = (
                f"differs from parallel.{smallest}.tensor = {sizes[smallest]}: ranks that "
                "communicate in a piece must run it together, but here they run different actions "
                "of the other encoder; use the same size, or set parallel.tp_comm_fraction = 0"
            )
            keys = (f"parallel.{smallest}.tensor", "parallel.tensor", key)
            yield Problem(f"parallel.{name}.tensor", size, text, keys)
