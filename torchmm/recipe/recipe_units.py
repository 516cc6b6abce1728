"""Modules on ranks of their own: sizes and value checks.

`[parallel]` has the LLM's sizes, `[parallel.NAME]` those of other modules (or the LLM's), which are
1 where none is given. Ranks go to encoders in the recipe's order, then to the LLM, then to the
generator. Together they must be all ranks there are; one size may be -1, for what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from torchmm.common.errors import ConfigError
from torchmm.recipe.explain import Problem
from torchmm.recipe.model_section import GENERATOR
from torchmm.recipe.recipe import MODULE_SIZES, ParallelConfig, Recipe
from torchmm.recipe.sizes import Layout

Found = Iterator[Problem]

LLM = "llm"
DISAGGREGATED_SCHEDULES = ("separated", "1f1b", "interleaved_1f1b", "gpipe", "zero_bubble")
"""Schedules of modules on ranks of their own."""


def modality_modules(recipe: Recipe) -> list[str]:
    """Names of encoders, LLM and generator, in the order in which they take ranks."""
    model = recipe.model
    composite = model.source is not None or model.config is not None
    encoders = ["vision"] if composite else list(model.encoders)
    return [*encoders, LLM, *([GENERATOR] if model.generator else [])]


def unit_sizes(parallel: ParallelConfig, name: str) -> dict[str, int]:
    """A module's sizes by key; -1 for what is left."""
    own = {size: getattr(parallel, size) if name == LLM else 1 for size in MODULE_SIZES}
    return own | parallel.sizes_given(name)


def resolve_units(
    parallel: ParallelConfig, modules: Sequence[str], world_size: int
) -> dict[str, Layout]:
    """Sizes of every module, with a -1 among them replaced by what is left.

    Args:
        modules: from `modality_modules`.

    Raises:
        ConfigError: the sizes cannot make up `world_size`.
    """
    sizes = {name: unit_sizes(parallel, name) for name in modules}
    shown = ", ".join(f"{name} {_shown(own)}" for name, own in sizes.items())
    given = [(name, key) for name, own in sizes.items() for key in own if own[key] == -1]
    if any(0 in own.values() for own in sizes.values()):
        raise ConfigError(f"parallel: {shown}: a size is 0; use 1 for a dimension not wanted")
    if len(given) > 1:
        keys = " and ".join(_key(parallel, name, key) for name, key in given)
        raise ConfigError(f"parallel: {shown}: {keys} are -1, only one size may be; set the others")
    fixed = {name: prod(size for size in own.values() if size > 0) for name, own in sizes.items()}
    if given:
        name, key = given[0]
        left = world_size - sum(ranks for module, ranks in fixed.items() if module != name)
        if left < fixed[name] or left % fixed[name]:
            raise ConfigError(
                f"parallel: {shown}: of {world_size} ranks, {max(left, 0)} are left for {name}, "
                f"which takes a multiple of {fixed[name]}; start more ranks or change a size"
            )
        sizes[name][key] = left // fixed[name]
    elif sum(fixed.values()) != world_size:
        raise ConfigError(
            f"parallel: {shown} make {sum(fixed.values())} ranks, not {world_size}; start "
            f"{sum(fixed.values())}, or set one size to -1 (what is left)"
        )
    return {name: Layout(**own) for name, own in sizes.items()}


def units_of(recipe: Recipe, world_size: int) -> dict[str, Layout]:
    """Sizes of every module of a run; none where modules do not have ranks of their own.

    Raises:
        ConfigError: the sizes cannot make up `world_size`.
    """
    if recipe.parallel.placement != "disaggregated":
        return {}
    return resolve_units(recipe.parallel, modality_modules(recipe), world_size)


def show_layout(layout: Layout) -> str:
    """Sizes above 1, for people."""
    return _shown(layout._asdict()).strip("()")


def _shown(sizes: Mapping[str, int]) -> str:
    every = [f"{key} {size}" for key, size in sizes.items() if size != 1]
    return f"({' x '.join(every)})" if every else "(1 rank)"


def _key(parallel: ParallelConfig, name: str, size: str) -> str:
    own = name != LLM or size in parallel.sizes_given(name)
    return f"parallel.{name}.{size}" if own else f"parallel.{size}"


def check_units(parallel: ParallelConfig, modules: Sequence[str]) -> Found:
    """What does not go with modules on ranks of their own, whatever the number of ranks."""
    if parallel.placement != "disaggregated":
        return
    placement = ("parallel.placement",)
    if parallel.schedule not in DISAGGREGATED_SCHEDULES:
        known = ", ".join(DISAGGREGATED_SCHEDULES)
        text = f"is not for modules on ranks of their own; use one of {known}"
        yield Problem("parallel.schedule", parallel.schedule, text, placement)
    if len(modules) == 1:
        text = 'but the model has no module beside the LLM; use "interleaved"'
        yield Problem("parallel.placement", parallel.placement, text, ("model",))
    if parallel.reshard_after_forward == "always":
        text = "needs replicas that run the same tasks, which those of modules apart do not"
        yield Problem(
            "parallel.reshard_after_forward", "always", f'{text}; use "default"', placement
        )


def unit_stages(parallel: ParallelConfig, name: str) -> int:
    """Stages of a module per pipeline rank."""
    if parallel.separates_modules:
        return parallel.segments(name)
    return parallel.virtual_stages if name == LLM else 1


def check_unit_layers(parallel: ParallelConfig, counts: Mapping[str, int | None]) -> Found:
    """Every stage needs a layer.

    Args:
        counts: layers by module; None where they are not known.
    """
    for name, layers in counts.items():
        ranks = unit_sizes(parallel, name)["pipeline"]
        per_rank = unit_stages(parallel, name)
        if layers is not None and layers < ranks * per_rank:
            text = (
                f"{name} has {layers} layers, fewer than its {ranks} pipeline ranks x {per_rank} "
                f"stages per rank = {ranks * per_rank}; use fewer ranks or stages"
            )
            also = ("parallel.virtual_stages", f"parallel.{name}", "model", "parallel.schedule")
            yield Problem(_key(parallel, name, "pipeline"), ranks, text, also)
