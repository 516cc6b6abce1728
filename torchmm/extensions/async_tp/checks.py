"""Check the keys `parallel.async_tensor_*`."""

from __future__ import annotations

from torchmm.recipe.explain import Problem, Problems
from torchmm.recipe.placement_sizes import unit_sizes
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import find_schedule


def check_async_tensor(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of overlapped tensor-parallel communication."""
    parallel = recipe.parallel
    if not parallel.async_tensor_parallel:
        return
    key = "parallel.async_tensor_parallel"
    needed = ("parallel.tensor", "parallel.sequence_parallel")
    if unit_sizes(parallel, "llm")["tensor"] == 1 or not parallel.sequence_parallel:
        text = "requires parallel.tensor > 1 and parallel.sequence_parallel = true; set both"
        yield Problem(key, True, text, needed)
    if recipe.adapters:
        text = "is not supported with adapters; set it to false"
        yield Problem(key, True, text, ("adapters",))
    schedule = find_schedule(parallel.schedule)
    if parallel.pipeline > 1 and schedule and schedule.splits_backward:
        text = (
            f"overlaps communication with weight gradients, which {parallel.schedule} "
            "computes separately; use another parallel.schedule"
        )
        yield Problem(key, True, text, ("parallel.schedule", "parallel.pipeline"))
    if parallel.async_tensor_backend == "symmetric_memory" and recipe.training.device == "cpu":
        text = 'requires CUDA, but training.device is "cpu"; use "auto"'
        yield Problem(
            "parallel.async_tensor_backend", "symmetric_memory", text, ("training.device",)
        )
