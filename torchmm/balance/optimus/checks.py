"""Recipe checks of encoder layers that run in pieces during the communication of the LLM."""

from __future__ import annotations

from torchmm.recipe.explain import Problem, Problems
from torchmm.recipe.recipe import Recipe


def check_tp_comm_fraction(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield keys that `parallel.tp_comm_fraction` does not support."""
    parallel = recipe.parallel
    key = "parallel.tp_comm_fraction"
    share = parallel.tp_comm_fraction
    if not share:
        return
    if recipe.compile.enabled is True:
        text = (
            "interleaves encoder layers, which compiled layers do not support; set "
            "compile.enabled = false"
        )
        yield Problem(key, share, text, ("compile.enabled",))
    if parallel.placement != "colocated" or parallel.tensor == 1:
        text = 'has no effect without placement = "colocated" and tensor > 1; remove it'
        yield Problem(key, share, text, ("parallel.placement", "parallel.tensor"))
        return
    if parallel.async_tensor_parallel:
        text = "requires synchronous collectives of the LLM; set async_tensor_parallel = false"
        yield Problem(key, share, text, ("parallel.async_tensor_parallel",))
    sizes = {name: parallel.encoder_tensor(name) for name in recipe.model.encoder_names}
    smallest = min(sizes, key=sizes.__getitem__, default="")
    for name, size in sizes.items():
        if size != sizes[smallest]:
            text = (
                f"differs from parallel.{smallest}.tensor = {sizes[smallest]}: ranks that "
                "communicate with each other must run the same encoder action, but here they "
                "run different actions; use the same degree, or set parallel.tp_comm_fraction "
                "= 0"
            )
            keys = (f"parallel.{smallest}.tensor", "parallel.tensor", key)
            yield Problem(f"parallel.{name}.tensor", size, text, keys)
