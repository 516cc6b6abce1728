"""Plans with the parallelism degrees of a recipe.

    for plan in recipe_plans("colocated", recipe, devices, sample): ...

The search uses them to complete a recipe (`parallel.auto_sizes` with colocated encoders) and to
compare its schedules (`scripts/simulate.py --schedule all`). Values that the recipe sets are not
changed. For colocated encoders, all combinations of pipeline sizes that divide those of the LLM are
tried, with one tensor-parallel size for all encoders (Optimus, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

from torchmm.balance.pipeweaver.segment_search import needs_partitioner
from torchmm.balance.recipe_simulation.step_simulator import StepSample, StepSimulator
from torchmm.balance.search.plan_space import (
    FIRST_SCHEDULES,
    RECIPE_PARALLEL_KEYS,
    CandidatePlan,
    Value,
    describe_sizes,
    neighbors,
    strip_parallelism,
)
from torchmm.balance.search.result import SimulatedPlan
from torchmm.common.errors import ConfigError
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.costs.operators import DeviceProfile
from torchmm.planning.resolved_recipe import resolve_recipe
from torchmm.recipe.check import find_problems
from torchmm.recipe.mesh_sizes import AXES
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import schedules_for

OPEN_KEYS = ("pipeline", "tensor", "sub_microbatch_images", "segments")
"""Keys of [parallel.NAME] that are searched if the recipe does not set them."""
DATA_KEYS = ("reorder", "balance")
ASYNC_KEYS = ("async_tensor_parallel", "async_tensor_backend")


def needs_encoder_sizes(recipe: Recipe) -> bool:
    """Return True if a recipe requests parallelism degrees of colocated encoders."""
    return recipe.parallel.auto_sizes and recipe.parallel.placement == "colocated"


def base_recipe(recipe: Recipe, method: str) -> Recipe:
    """Return the recipe that plans of a method change, with all other keys of the recipe."""
    if recipe.parallel.placement == method:
        parallel = recipe.parallel.model_copy(update={"auto_sizes": False})
    else:
        parallel = strip_parallelism(recipe).parallel
    return recipe.model_copy(update={"parallel": parallel})


def recipe_methods(recipe: Recipe, devices: int, sample: StepSample) -> tuple[str, ...]:
    """Return the methods that a recipe supports with its parallelism degrees."""
    run = resolve_recipe(recipe, devices)
    if run.units:
        return ("disaggregated",)
    if recipe.parallel.placement == "colocated" or run.llm.pipeline > 1:
        has_encoders = any(module.kind == "encoder" for module in sample.modules)
        return ("chain", "separated", *(["colocated"] if has_encoders else []))
    return ("fsdp",)


def recipe_candidate(
    recipe: Recipe, devices: int, profile: DeviceProfile, sample: StepSample
) -> SimulatedPlan | None:
    """Return the plan of the unchanged recipe. None if it leaves degrees open or does not fit."""
    parallel = recipe.parallel
    if (
        parallel.needs_orchestration
        or needs_encoder_sizes(recipe)
        or find_problems(recipe, devices)
    ):
        return None
    try:
        simulator = StepSimulator(recipe, devices, profile, sample=sample)
        report = simulator.simulate_schedule()
    except ConfigError:
        return None
    sizes = simulator.run.llm
    method: str = parallel.placement
    if method == "interleaved":
        method = "separated" if parallel.has_module_segments else "chain"
        method = method if sizes.pipeline > 1 else "fsdp"
    changes: dict[str, Value] = {
        **{f"parallel.{name}": getattr(sizes, name) for name in AXES},
        **{f"parallel.{name}": getattr(parallel, name) for name in RECIPE_PARALLEL_KEYS},
        "training.microbatch_size": recipe.training.microbatch_size,
        "activation_checkpoint.mode": recipe.activation_checkpoint.mode,
    }
    data = recipe.data
    changes |= {
        f"data.{key}": getattr(data, key) for key in DATA_KEYS if getattr(data, key) != "auto"
    }
    if parallel.context > 1:
        changes["parallel.llm.context"] = parallel.context
    if needs_partitioner(parallel):
        for name, module in simulator.with_segments(parallel).modules.items():
            numbers = module.model_dump(include={"segments", "sub_microbatch_images"})
            changes |= {f"parallel.{name}.{key}": n for key, n in numbers.items() if n}
    plan = CandidatePlan(method, devices, changes)
    words = f"as in the recipe: {describe_sizes(plan)}"
    candidate = SimulatedPlan(method, recipe, devices, words, report, False, plan)
    return candidate if candidate.step_ms < inf else None


def open_keys(method: str, recipe: Recipe, sample: StepSample) -> frozenset[str]:
    """Return the keys that are searched, such as "parallel.vision.tensor"."""
    modules = recipe.parallel.modules
    keys = {
        f"parallel.{module.name}.{key}"
        for module in sample.modules
        for key in OPEN_KEYS
        if module.name not in modules or getattr(modules[module.name], key) is None
    }
    if method != "colocated":
        keys |= {"parallel.schedule", "parallel.virtual_stages"}
    return frozenset(keys)


def recipe_plans(
    method: str, recipe: Recipe, devices: int, sample: StepSample
) -> Iterator[CandidatePlan]:
    """Yield a plan for each schedule of a method, and for each combination of encoder degrees.

    Args:
        method: One of `recipe_methods`.
        recipe: Recipe with parallelism degrees.
        devices: Number of devices in the cluster.
        sample: Model of the recipe.

    Raises:
        ConfigError: The parallelism degrees of the recipe do not fit the number of devices.
    """
    changes = _recipe_changes(method, recipe, devices)
    if method == "disaggregated":
        for name in schedules_for("disaggregated"):
            stages = 1 if name == "1f1b" else recipe.parallel.virtual_stages
            schedule: dict[str, Value] = {
                "parallel.schedule": name,
                "parallel.virtual_stages": stages,
            }
            yield CandidatePlan(method, devices, {**changes, **schedule})
        return
    first = CandidatePlan(method, devices, changes)
    if method == "colocated":
        for sizes in _encoder_sizes(first, recipe, sample):
            yield CandidatePlan(method, devices, {**changes, **sizes})
        return
    yield first
    if method == "separated":
        yield first.with_changes(parallel__schedule="searched")
    changeable = open_keys(method, recipe, sample)
    for other in neighbors(first, recipe, sample):
        if changed_keys(first, other) <= changeable:
            yield other


def _recipe_changes(method: str, recipe: Recipe, devices: int) -> dict[str, Value]:
    """Return the recipe values that plans of a method contain, with the first schedule."""
    parallel = recipe.parallel
    changes: dict[str, Value] = {
        "training.microbatch_size": recipe.training.microbatch_size,
        "activation_checkpoint.mode": recipe.activation_checkpoint.mode,
    }
    if method == "disaggregated":
        return changes
    llm = resolve_recipe(recipe, devices).llm
    changes |= {f"parallel.{axis}": getattr(llm, axis) for axis in AXES}
    changes |= {f"parallel.{key}": getattr(parallel, key) for key in RECIPE_PARALLEL_KEYS}
    changes["parallel.schedule"] = FIRST_SCHEDULES.get(method, "1f1b")
    if parallel.context > 1:
        changes["parallel.llm.context"] = parallel.context
    if method in ("separated", "colocated"):
        keys = OPEN_KEYS if method == "colocated" else OPEN_KEYS[2:]
        for name, module in parallel.modules.items():
            if method == "colocated" and name in (LLM, GENERATOR):
                continue
            values = module.model_dump(include=set(keys), exclude_none=True)
            changes |= {f"parallel.{name}.{key}": value for key, value in values.items()}
    if method == "colocated":
        return {**changes, "parallel.placement": "colocated"}
    changes |= {f"parallel.{key}": getattr(parallel, key) for key in ASYNC_KEYS}
    return {**changes, "parallel.virtual_stages": 1}


def changed_keys(plan: CandidatePlan, other: CandidatePlan) -> set[str]:
    """Return the keys whose values differ in another plan."""
    return {key for key, value in other.changes.items() if plan.changes.get(key) != value}


def _encoder_sizes(
    plan: CandidatePlan, recipe: Recipe, sample: StepSample
) -> Iterator[dict[str, int]]:
    """Yield all combinations of open pipeline and tensor-parallel sizes of encoders.

    Args:
        plan: Plan with the parallelism degrees of the LLM.
        recipe: Recipe with parallelism degrees.
        sample: Model of the recipe.
    """
    pipeline = plan.size("pipeline")
    tensor = plan.size("tensor")
    changeable = open_keys("colocated", recipe, sample)
    encoders = [module for module in sample.modules if module.kind == "encoder"]
    pipelines: dict[str, list[int]] = {}
    heads: dict[str, set[int]] = {}
    for module in encoders:
        prefix = f"parallel.{module.name}"
        if f"{prefix}.pipeline" in changeable:
            slices = recipe.parallel.slices(module.name) or 1
            divisors = [n for n in range(1, pipeline + 1) if pipeline % n == 0]
            fitting = [n for n in divisors if n * slices <= len(module.layers)]
            pipelines[f"{prefix}.pipeline"] = fitting
        if f"{prefix}.tensor" in changeable:
            heads[f"{prefix}.tensor"] = {layer.heads for layer in module.layers}
    counts = {count for head_counts in heads.values() for count in head_counts}
    tensors = [
        n
        for n in range(tensor, 0, -1)
        if tensor % n == 0 and (n == tensor or not any(count % n for count in counts))
    ]
    for size in tensors if heads else [tensor]:
        for sizes in product(*pipelines.values()):
            yield {**dict(zip(pipelines, sizes, strict=True)), **dict.fromkeys(heads, size)}
