"""Recipe checks of balanced images."""

from __future__ import annotations

from torchmm.recipe.explain import Problem, Problems
from torchmm.recipe.recipe import Recipe


def check_image_balancing(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield keys that `data.balance` = "images" does not support."""
    data = recipe.data
    parallel = recipe.parallel
    if data.balance != "images":
        return
    key = "data.balance"
    value = data.balance
    if parallel.pipeline > 1:
        text = f'parallel.pipeline = {parallel.pipeline} is not supported; use 1, or "none"'
        yield Problem(key, value, text, ("parallel.pipeline",))
    if parallel.placement != "interleaved":
        text = f'parallel.placement = "{parallel.placement}" is not supported; use "interleaved"'
        yield Problem(key, value, text + ', or "none"', ("parallel.placement",))
    if parallel.context > 1:
        text = f'parallel.llm.context = {parallel.context} is not supported; use 1, or "none"'
        yield Problem(key, value, text, ("parallel.llm.context",))
    producers = data.producers
    if producers.addresses or producers.registry is not None:
        text = 'is not supported with data.producers; decode on the ranks, or use "none"'
        yield Problem(key, value, text, ("data.producers",))
