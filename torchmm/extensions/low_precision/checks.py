"""Check the sections `[float8]` and `[quantization]`."""

from __future__ import annotations

from torchmm.common.module_names import GENERATOR, LLM
from torchmm.extensions.low_precision.section import Float8Config, QuantizationConfig
from torchmm.recipe.check import check_names
from torchmm.recipe.check_parallel import tensor_size
from torchmm.recipe.explain import Problem, Problems
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import find_schedule


def check_float8(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of `[float8]`: casts must be independent of the parallelism."""
    float8 = Float8Config.from_parent(recipe)
    yield from check_names(recipe, "float8.modules", float8.modules)
    parallel = recipe.parallel
    key = "float8.scaling"
    if float8.scaling == "none":
        return
    if recipe.training.dtype != "bfloat16" and not float8.emulate:
        text = 'requires bfloat16 outputs; set training.dtype = "bfloat16" or float8.emulate'
        yield Problem(key, float8.scaling, text, ("training.dtype", "float8.emulate"))
    is_split = parallel.placement != "interleaved" or parallel.pipeline > 1
    colocated = parallel.placement == "colocated"
    order = parallel.llm_schedule if colocated else parallel.schedule
    schedule = find_schedule(order)
    if is_split and schedule is not None and schedule.splits_backward:
        text = (
            f'"{order}" splits each backward pass in two, which float8 matmuls do not support; '
            "use another schedule"
        )
        yield Problem(key, float8.scaling, text, ("parallel.schedule", "parallel.llm_schedule"))
    for name in float8.modules:
        _, tensor = tensor_size(parallel, name)
        if tensor > 1 and float8.scaling != "rowwise":
            text = (
                f"ranks share one scale in {name!r}, which is not supported; use 1, or scaling "
                '"rowwise"'
            )
            yield Problem("parallel.tensor", tensor, text, (key, f"parallel.{name}.tensor"))
        elif tensor > 1 and parallel.async_tensor_parallel:
            text = (
                f"float8 is not supported for the linear layers of {name!r} in this case; set it "
                "to false"
            )
            yield Problem("parallel.async_tensor_parallel", True, text, (key, "float8.modules"))
        if name == LLM and parallel.context > 1 and float8.scaling != "rowwise":
            text = (
                "ranks share the sequences of one scale, which is not supported; use 1, or "
                'scaling "rowwise"'
            )
            yield Problem("parallel.llm.context", parallel.context, text, (key,))
        if name != LLM and is_split:
            text = (
                f"the images that share a scale in {name!r} depend on the plan; remove the module"
            )
            yield Problem("float8.modules", name, text, ("parallel.pipeline", "parallel.placement"))
        if name in recipe.freeze.modules or name in recipe.adapted_modules:
            text = (
                f"{name!r} is frozen or has an adapter, but float8 would compute its weight "
                "gradients; remove the module"
            )
            yield Problem("float8.modules", name, text, ("freeze.modules", "adapters"))


def check_quantization(recipe: Recipe, world_size: int | None) -> Problems:
    """Yield problems of `[quantization]`: only frozen weights can be quantized."""
    config = QuantizationConfig.from_parent(recipe)
    yield from check_names(recipe, "quantization.modules", config.modules)
    if config.quant_type == "none":
        return
    key = "quantization.modules"
    with_magnitudes = {
        module
        for adapter in recipe.adapters.values()
        if adapter.method == "dora"
        for module in adapter.modules
    }
    for name in config.modules:
        if name == GENERATOR or name.endswith(".connector"):
            yield Problem(key, name, "has no layers that can be quantized; remove it from the list")
        elif name not in recipe.freeze.modules and name not in recipe.adapted_modules:
            text = (
                "is trained, but only frozen weights can be quantized; add the module to an "
                "adapter or to freeze.modules"
            )
            yield Problem(key, name, text, ("adapters", "freeze.modules"))
        elif name in with_magnitudes:
            text = 'has an adapter with method "dora", which requires full weights; use "lora"'
            yield Problem(key, name, text, ("adapters",))
        _, tensor = tensor_size(recipe.parallel, name)
        if tensor > 1 and recipe.parallel.async_tensor_parallel:
            text = f"is not supported for the quantized linear layers of {name!r}; set it to false"
            yield Problem("parallel.async_tensor_parallel", True, text, (key,))
