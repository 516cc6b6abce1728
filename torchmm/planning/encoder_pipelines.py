"""Which sizes colocated encoders may have, and recipes that say so (Optimus §4.1, §4.4)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torchmm.planning.forecast import Forecaster
from torchmm.recipe.recipe import Recipe


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


def encoder_tensors(forecaster: Forecaster) -> list[int]:
    """Tensor-parallel sizes that all encoders can have, the LLM's first: divisors of it that divide
    their heads; if the recipe gives one to an encoder, the recipe's."""
    parallel, most = forecaster.recipe.parallel, forecaster.ranks.tensor
    encoders = [module for module in forecaster.modules if module.kind == "encoder"]
    if any("tensor" in parallel.sizes_given(module.name) for module in encoders):
        return [most // parallel.mirrors]
    heads = {layer.heads for module in encoders for layer in module.layers}
    divisors = [n for n in range(most, 0, -1) if most % n == 0]
    return [n for n in divisors if n == most or not any(count % n for count in heads)]


def with_pipelines(
    recipe: Recipe,
    pipelines: dict[str, int],
    sub_microbatch_images: int | None = None,
    tensor: int | None = None,
) -> Recipe:
    """The recipe with pipeline ranks of encoders.

    Args:
        sub_microbatch_images: of all of them; None: as in the recipe.
        tensor: tensor-parallel ranks of all of them; None: as in the recipe.

    Raises:
        ValidationError: the recipe has sizes that contradict these.
    """
    content = recipe.model_dump(exclude_unset=True)
    parallel = content.setdefault("parallel", {})
    for name, size in pipelines.items():
        parallel[name] = {**parallel.get(name, {}), "pipeline": size}
        if sub_microbatch_images is not None:
            parallel[name]["sub_microbatch_images"] = sub_microbatch_images
        if tensor is not None:
            parallel[name]["tensor"] = tensor
    return Recipe.model_validate(content)
