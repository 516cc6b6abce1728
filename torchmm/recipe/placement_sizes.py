"""Parallelism degrees of every module under each placement, and their checks.

Interleaved modules have the degrees of `[parallel]`, resolved for the number of ranks.

Colocated encoders have separate degrees on the LLM ranks. The pipeline size of an encoder divides
that of the LLM, and every block of this size among the pipeline ranks has one replica. The same
applies to tensor-parallel ranks, if the encoder has a smaller tensor-parallel size. All remaining
ranks are data-parallel (Optimus section 4.1).

Disaggregated modules have separate ranks. `[parallel]` has the degrees of the LLM, and
`[parallel.NAME]` those of other modules (or of the LLM), with a default of 1. Ranks are assigned to
encoders in recipe order, then to the LLM, then to the generator. Together they must use all ranks.
One degree may be -1, for the remaining ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torchmm.common.errors import ConfigError
from torchmm.common.module_names import GENERATOR, LLM
from torchmm.recipe.explain import NO_VALUE, Problem, Problems
from torchmm.recipe.mesh_sizes import AXES, MeshSizes
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import schedules_for


def encoder_mesh_sizes(parallel: ParallelConfig, name: str, llm: MeshSizes) -> MeshSizes:
    """Return the degrees of a colocated encoder.

    If neither `replicate` nor `shard` is set, the encoder has as many replicas as the LLM. If one
    of them is not set, it uses the remaining ranks.

    Args:
        parallel: Section [parallel] of the recipe.
        name: Name of the encoder.
        llm: Degrees of the LLM on the same ranks.

    Raises:
        ConfigError: The degrees do not divide those of the LLM, or do not match its ranks.
    """
    mismatches = _degree_mismatches(parallel, name, llm.pipeline, llm.tensor)
    if problems := [f"{p.key} = {p.value}: {p.text}" for p in mismatches]:
        raise ConfigError(problems)
    explicit = parallel.explicit_sizes(name)
    pipeline, tensor = explicit.get("pipeline", 1), explicit.get("tensor", llm.tensor)
    ranks = prod(llm)
    remaining = ranks // (pipeline * tensor)
    replicate, shard = explicit.get("replicate", -1), explicit.get("shard", -1)
    if replicate == shard == -1:
        replicate = llm.replicate
    if shard == -1:
        shard = remaining // max(1, replicate)
    elif replicate == -1:
        replicate = remaining // max(1, shard)
    if replicate * shard != remaining:
        raise ConfigError(
            f"parallel.{name}: pipeline {pipeline} x replicate {replicate} x shard {shard} x "
            f"tensor {tensor} is not equal to the {ranks} ranks of the LLM; remove replicate "
            "and shard, or set one of them to -1 (remaining ranks)"
        )
    return MeshSizes(pipeline, replicate, shard, tensor)


def check_colocated(
    parallel: ParallelConfig, encoders: list[str], llm: MeshSizes | None
) -> Problems:
    """Yield problems of the degrees of colocated encoders.

    Args:
        parallel: Section [parallel] of the recipe.
        encoders: Names of the encoders.
        llm: Degrees of the LLM. None if the number of ranks is unknown.
    """
    placement = parallel.placement
    schedule = parallel.schedule
    fitting = schedules_for("colocated")
    if schedule in fitting and placement != "colocated":
        text = 'requires colocated encoders; set parallel.placement = "colocated"'
        yield Problem("parallel.schedule", schedule, text, ("parallel.placement",))
    if placement != "colocated":
        return
    if schedule not in fitting:
        names = " or ".join(f'"{name}"' for name in fitting)
        text = f"requires a schedule that fills bubbles; set parallel.schedule = {names}"
        yield Problem("parallel.placement", placement, text, ("parallel.schedule",))
    if not encoders:
        text = 'the model has no encoders; use "interleaved"'
        yield Problem("parallel.placement", placement, text, ("model",))
    for name in ("llm", GENERATOR):
        for size, value in parallel.explicit_sizes(name).items():
            text = (
                f"with colocated encoders, the {name} uses the parallelism degrees of "
                "[parallel]; remove the key"
            )
            yield Problem(f"parallel.{name}.{size}", value, text, (f"parallel.{size}",))
    for name in encoders:
        problems = list(_degree_mismatches(parallel, name, parallel.pipeline, parallel.tensor))
        yield from problems
        if llm is not None and not problems:
            try:
                encoder_mesh_sizes(parallel, name, llm)
            except ConfigError as error:
                text = error.problems[0].partition(": ")[2]
                explicit_keys = tuple(f"parallel.{name}.{size}" for size in AXES)
                yield Problem(f"parallel.{name}", NO_VALUE, text, explicit_keys)


def check_encoder_layers(parallel: ParallelConfig, counts: Mapping[str, int | None]) -> Problems:
    """Yield a problem for each encoder with fewer layers than stages.

    Args:
        parallel: Section [parallel] of the recipe.
        counts: Number of layers by encoder. None if unknown.
    """
    for name, layers in counts.items():
        ranks = parallel.explicit_sizes(name).get("pipeline", 1)
        slices = parallel.slices(name) or 1
        if layers is not None and layers < ranks * slices:
            key, value = ("pipeline", ranks) if ranks > layers else ("segments", slices)
            text = too_few_layers(f"{name} has", layers, ranks, slices)
            yield Problem(f"parallel.{name}.{key}", value, text, (f"parallel.{name}", "model"))


def too_few_layers(subject: str, layers: int, ranks: int, per_rank: int) -> str:
    """Return the error message of a module with fewer layers than stages.

    Args:
        subject: Start of the message, such as "llm has".
        layers: Number of layers.
        ranks: Number of pipeline ranks.
        per_rank: Number of stages per rank.
    """
    return (
        f"{subject} {layers} layers, but {ranks} pipeline ranks x {per_rank} stages per rank "
        f"= {ranks * per_rank}; use fewer ranks or stages"
    )


def _degree_mismatches(parallel: ParallelConfig, name: str, pipeline: int, tensor: int) -> Problems:
    """Yield degrees of an encoder that do not divide those of the LLM."""
    degrees = parallel.explicit_sizes(name)
    degree = degrees.get("pipeline", 1)
    if pipeline % degree:
        divisors = ", ".join(str(n) for n in range(1, pipeline + 1) if pipeline % n == 0)
        text = f"must divide the {pipeline} pipeline ranks of the LLM; use one of {divisors}"
        yield Problem(f"parallel.{name}.pipeline", degree, text, ("parallel.pipeline",))
    degree = degrees.get("tensor", tensor)
    if degree < 1 or tensor % degree:
        divisors = ", ".join(str(n) for n in range(1, tensor + 1) if tensor % n == 0)
        text = f"must divide the {tensor} tensor-parallel ranks of the LLM; use one of {divisors}"
        yield Problem(f"parallel.{name}.tensor", degree, text, ("parallel.tensor",))


def unit_sizes(parallel: ParallelConfig, name: str) -> dict[str, int]:
    """Return the degrees of a module by key. -1 is the remaining ranks."""
    defaults = {size: getattr(parallel, size) if name == LLM else 1 for size in AXES}
    return defaults | parallel.explicit_sizes(name)


def resolve_units(
    parallel: ParallelConfig, modules: Sequence[str], world_size: int
) -> dict[str, MeshSizes]:
    """Return the degrees of every module, with -1 replaced by the remaining ranks.

    Args:
        parallel: Section [parallel] of the recipe.
        modules: Result of `ModelConfig.modality_modules`.
        world_size: Number of ranks.

    Raises:
        ConfigError: The degrees do not match `world_size`.
    """
    sizes = {name: unit_sizes(parallel, name) for name in modules}
    shown = ", ".join(f"{name} {_shown(degrees)}" for name, degrees in sizes.items())
    open_keys = [
        (name, key) for name, degrees in sizes.items() for key in degrees if degrees[key] == -1
    ]
    if any(0 in degrees.values() for degrees in sizes.values()):
        raise ConfigError(
            f"parallel: {shown}: a parallelism degree is 0; use 1 to disable a dimension"
        )
    if len(open_keys) > 1:
        keys = " and ".join(_key(parallel, name, key) for name, key in open_keys)
        raise ConfigError(
            f"parallel: {shown}: {keys} are -1, but only one key may be -1; set the others"
        )
    fixed = {
        name: prod(size for size in degrees.values() if size > 0) for name, degrees in sizes.items()
    }
    if open_keys:
        name, key = open_keys[0]
        remaining = world_size - sum(ranks for module, ranks in fixed.items() if module != name)
        if remaining < fixed[name] or remaining % fixed[name]:
            raise ConfigError(
                f"parallel: {shown}: {max(remaining, 0)} of {world_size} ranks remain for {name}, "
                f"which requires a multiple of {fixed[name]}; start more ranks or change a "
                "parallelism degree"
            )
        sizes[name][key] = remaining // fixed[name]
    elif sum(fixed.values()) != world_size:
        raise ConfigError(
            f"parallel: {shown} require {sum(fixed.values())} ranks, not {world_size}; start "
            f"{sum(fixed.values())}, or set one key to -1 (remaining ranks)"
        )
    return {name: MeshSizes(**degrees) for name, degrees in sizes.items()}


def resolved_unit_sizes(recipe: Recipe, world_size: int) -> dict[str, MeshSizes]:
    """Return the degrees of every module of a run, or {} unless modules are disaggregated.

    Raises:
        ConfigError: The degrees do not match `world_size`.
    """
    if recipe.parallel.placement != "disaggregated":
        return {}
    return resolve_units(recipe.parallel, recipe.model.modality_modules, world_size)


def format_sizes(layout: MeshSizes) -> str:
    """Return the degrees above 1 as text."""
    return _shown(layout._asdict()).strip("()")


def _shown(sizes: Mapping[str, int]) -> str:
    texts = [f"{key} {size}" for key, size in sizes.items() if size != 1]
    return f"({' x '.join(texts)})" if texts else "(1 rank)"


def _key(parallel: ParallelConfig, name: str, size: str) -> str:
    is_separate = name != LLM or size in parallel.explicit_sizes(name)
    return f"parallel.{name}.{size}" if is_separate else f"parallel.{size}"


def with_placeholder_sizes(recipe: Recipe) -> Recipe:
    """Return the recipe with valid values for the keys that planning of disaggregated modules sets.

    The checks then apply only to the remaining keys.
    """
    if not recipe.parallel.needs_orchestration:
        return recipe
    table = recipe.parallel.model_dump(exclude_unset=True)
    for name in recipe.parallel.modules:
        table[name] = {k: v for k, v in table[name].items() if k not in (*AXES, "segments")}
    table |= dict.fromkeys(AXES, 1)
    table |= {"schedule": "1f1b", "virtual_stages": 1, "async_tensor_parallel": False}
    table |= {"async_tensor_backend": "auto", "reshard_after_forward": "default"}
    return recipe.model_copy(update={"parallel": ParallelConfig.model_validate(table)})


def check_units(parallel: ParallelConfig, modules: Sequence[str]) -> Problems:
    """Yield settings that are not supported with disaggregated modules, for any number of ranks."""
    if parallel.placement != "disaggregated":
        return
    placement = ("parallel.placement",)
    fitting = schedules_for("disaggregated")
    if parallel.schedule not in fitting:
        text = f"does not support disaggregated modules; use one of {', '.join(fitting)}"
        yield Problem("parallel.schedule", parallel.schedule, text, placement)
    if len(modules) == 1:
        text = 'the model has only an LLM; use "interleaved"'
        yield Problem("parallel.placement", parallel.placement, text, ("model",))
    if parallel.reshard_after_forward == "always":
        text = 'is not supported with disaggregated modules; use "default"'
        yield Problem("parallel.reshard_after_forward", "always", text, placement)


def check_planned_units(modules: Sequence[str], world_size: int | None) -> Problems:
    """Yield a problem if there are too few ranks to plan disaggregated modules.

    Args:
        modules: Names of the modules.
        world_size: Number of ranks. None if unknown.
    """
    if world_size is not None and world_size < len(modules):
        text = (
            f"{len(modules)} disaggregated modules require at least as many ranks, but "
            f"there are {world_size}; start more"
        )
        yield Problem("parallel.auto_sizes", True, text, ("parallel.placement", "model"))


def unit_stages(parallel: ParallelConfig, name: str) -> int:
    """Return the number of stages of a module per pipeline rank."""
    if parallel.has_module_segments:
        return parallel.segments(name)
    return parallel.virtual_stages if name == LLM else 1


def check_unit_layers(parallel: ParallelConfig, counts: Mapping[str, int | None]) -> Problems:
    """Yield a problem for each module with fewer layers than stages.

    Args:
        parallel: Section [parallel] of the recipe.
        counts: Number of layers by module. None if unknown.
    """
    for name, layers in counts.items():
        ranks = unit_sizes(parallel, name)["pipeline"]
        per_rank = unit_stages(parallel, name)
        if layers is not None and layers < ranks * per_rank:
            text = too_few_layers(f"{name} has", layers, ranks, per_rank)
            also = ("parallel.virtual_stages", f"parallel.{name}", "model", "parallel.schedule")
            yield Problem(_key(parallel, name, "pipeline"), ranks, text, also)


def resolve_sizes(parallel: ParallelConfig, world_size: int) -> MeshSizes:
    """Return the mesh sizes for `world_size` ranks, with -1 replaced by the remaining ranks.

    Raises:
        ConfigError: The sizes do not match `world_size`.
    """
    sizes: dict[str, int] = {name: getattr(parallel, name) for name in MeshSizes._fields}
    open_keys = [k for k, size in sizes.items() if size == -1]
    fixed = prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{k} {size}" for k, size in sizes.items())
    if 0 in sizes.values():
        raise ConfigError(
            f"parallel: {shown}: a parallelism degree is 0; use 1 to disable a dimension"
        )
    if len(open_keys) > 1:
        raise ConfigError(f"parallel: {shown}: only one key may be -1; set the other to 1")
    if world_size % fixed or (not open_keys and world_size != fixed):
        fix = (
            f"start a multiple of {fixed} ranks or lower a parallelism degree"
            if open_keys
            else f"start {fixed} ranks, or set replicate or shard to -1 (remaining ranks)"
        )
        raise ConfigError(f"parallel: {shown} is not equal to {world_size} ranks; {fix}")
    sizes.update({k: world_size // fixed for k in open_keys})
    return MeshSizes(**sizes)
