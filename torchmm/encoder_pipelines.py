"""Which pipelines colocated encoders may have, and recipes that say so (Optimus §4.1, §4.4)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torchmm.config import Recipe
from torchmm.forecast import Forecaster


def encoder_combinations(forecaster: Forecaster) -> Iterator[dict[str, int]]:
    """Pipeline ranks by encoder; of one whose size the recipe gives, that one."""
    parallel, ranks = forecaster.recipe.parallel, forecaster.ranks.pipeline
    choices = {}
    for module in forecaster.modules:
        if module.kind != "encoder":
            continue
        given = parallel.sizes_given(module.name).get("pipeline")
        slices = parallel.slices(module.name) or 1
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        fine = [n for n in divisors if n * slices <= len(module.layers)]
        choices[module.name] = [given] if given else fine
    for sizes in product(*choices.values()):
        yield dict(zip(choices, sizes, strict=True))


def with_pipelines(
    recipe: Recipe, pipelines: dict[str, int], sub_microbatch_images: int | None = None
) -> Recipe:
    """The recipe with pipeline ranks of encoders.

    Args:
        sub_microbatch_images: of all of them; None: as in the recipe.
    """
    content = recipe.model_dump(exclude_unset=True)
    parallel = content.setdefault("parallel", {})
    for name, size in pipelines.items():
        parallel[name] = {**parallel.get(name, {}), "pipeline": size}
        if sub_microbatch_images is not None:
            parallel[name]["sub_microbatch_images"] = sub_microbatch_images
    return Recipe.model_validate(content)
