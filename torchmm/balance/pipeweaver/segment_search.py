"""Choice of segments and sub-microbatches of a searched pipeline.

Values of `segments` and `sub_microbatch_images` of [parallel.NAME] in the recipe are not changed. A
value of `virtual_stages` other than 1 is the number of LLM segments. The remaining numbers start
from the rule of PipeWeaver (`balance.pipeweaver.partitioner`), which only compares latencies of
modules. More segments shorten the ramps of the pipeline, and more images reduce the number of
operator launches. Both effects depend on the data. The segments of all modules, and then each
number, are therefore doubled, halved or changed by one, as long as the searched and simulated first
step becomes faster.

With `stages = "auto"`, the step is also searched on the stages of static planners, which have fewer
and larger tasks. They can be faster on few ranks.

The result depends only on the recipe and the microbatches of the first step. The number of tries is
limited instead of the time, so all ranks choose the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from torchmm.balance.costs.model import CostModel
from torchmm.balance.pipeweaver.activation_checkpointing.memory_aware_search import (
    MemoryAwareSearch,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuner, LayerTuning
from torchmm.balance.pipeweaver.partitioner import MAX_SEGMENTS, partition_modules
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, SearchSettings
from torchmm.balance.pipeweaver.schedule_search.step_search import StepSearch
from torchmm.balance.recipe_simulation.first_microbatches import most_loaded_rank
from torchmm.balance.run_costs import build_layer_tuning
from torchmm.balance.section import SearchConfig
from torchmm.balance.step_plans import compute_search_costs
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import gc_disabled
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe

AUTO_STAGES = ("separated", "megatron", "balanced")
"""Stages that "auto" compares. The first of equally fast stages is used."""
EVALUATIONS, MAX_MICROBATCHES = 200, 64
"""Maximum number of orders and microbatches of a search that compares partitions."""
MAX_PARTITIONS = 24
"""Maximum number of partitions that are compared. A search takes some tenths of a second."""
MAX_TUNED_PARTITIONS = 12
"""Maximum number with tuned layers. A search takes seconds for the largest models."""
MAX_TIME_RATIO = 0.995
"""Maximum ratio of the times after and before a change. Smaller gains may be noise of a search that
was not finished."""

PartitionSizes = dict[tuple[str, str], int]
"""Numbers of segments and of images of sub-microbatches, by module and key."""


def needs_partitioner(parallel: ParallelConfig) -> bool:
    """Return True if the partitioner selects segments."""
    return parallel.schedule == "searched" and parallel.pipeline > 1


def choose_segments(
    recipe: Recipe,
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    shares: Sequence[list[MicrobatchMeta]],
    model: CostModel,
) -> ParallelConfig:
    """Return the section with segments and sub-microbatches, for runs and simulations.

    Args:
        recipe: Recipe of the run.
        parallel: Section of the recipe.
        modules: Encoders, LLM and generator, unsharded.
        shares: Microbatches of the first step by data-parallel rank. The rank with the most work
            is used.
        model: Costs of the modules in the run (`run_costs`).

    Raises:
        ConfigError: A module has fewer layers than ranks.
    """
    if not needs_partitioner(parallel):
        return parallel
    # The memory of the profile is the same on all ranks.
    tuning = build_layer_tuning(recipe, model, layerwise=False)
    metas = most_loaded_rank(modules, shares).microbatches
    return search_segments(parallel, modules, metas, model, tuning)


@gc_disabled()
def search_segments(
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    tuning: LayerTuning | None = None,
) -> ParallelConfig:
    """Return the section with the segments and sub-microbatches of every module.

    Args:
        parallel: Section for which `needs_partitioner` is true.
        modules: Encoders, LLM and generator, unsharded.
        microbatches: Microbatches of the pipeline with the most work.
        model: Costs of the modules in the run (`run_costs`).
        tuning: Selection of the layers that recompute. If None, plans do not select layers.

    Raises:
        ConfigError: A module has fewer layers than ranks.
    """
    segments = {
        name: section.segments for name, section in parallel.modules.items() if section.segments
    }
    if parallel.virtual_stages > 1:
        segments.setdefault("llm", parallel.virtual_stages)
    images = {
        name: section.sub_microbatch_images
        for name, section in parallel.modules.items()
        if section.sub_microbatch_images
    }
    try:
        initial = partition_modules(
            modules,
            microbatches,
            model,
            parallel.pipeline,
            fixed_images=images,
            fixed_segments=segments,
        )
    except ValueError as error:
        raise ConfigError(f'[parallel] schedule = "searched": {error}') from error

    def predicted_ms(candidate: ParallelConfig) -> float:
        return _predicted_ms(candidate, modules, microbatches, model, tuning)

    sizes: PartitionSizes = {(name, "segments"): count for name, count in initial.segments.items()}
    for name, count in initial.sub_microbatch_images.items():
        sizes[name, "sub_microbatch_images"] = count
    limits: PartitionSizes = {}
    for module in modules:
        if module.name not in segments:
            max_value = min(len(module.layers) // parallel.pipeline, MAX_SEGMENTS)
            limits[module.name, "segments"] = max_value
    for name in initial.sub_microbatch_images:
        if name not in images:
            max_value = max(meta.module_image_count(name) for meta in microbatches)
            limits[name, "sub_microbatch_images"] = max_value
    tries = MAX_PARTITIONS if tuning is None else MAX_TUNED_PARTITIONS
    improved = _search_partitions(parallel, sizes, limits, predicted_ms, tries)
    if SearchConfig.from_parent(parallel).stages != "auto":
        return improved
    searches = [
        SearchConfig.from_parent(improved).model_copy(update={"stages": stages})
        for stages in AUTO_STAGES
    ]
    return min(
        (improved.model_copy(update={"search": search}) for search in searches), key=predicted_ms
    )


def _search_partitions(
    parallel: ParallelConfig,
    sizes: PartitionSizes,
    limits: PartitionSizes,
    predicted_ms: Callable[[ParallelConfig], float],
    tries: int,
) -> ParallelConfig:
    """Return the section with the fastest of at most `tries` partitions.

    Args:
        parallel: Section of the recipe.
        sizes: Numbers to start from.
        limits: Maximum of each number that may change.
        predicted_ms: Returns the time of the first step.
        tries: Maximum number of partitions.
    """
    best = _apply_sizes(parallel, sizes)
    if not limits:
        return best
    best_ms = predicted_ms(best)
    seen = {tuple(sizes.items())}
    better = True
    while better:
        better = False
        for neighbor in _neighbors(sizes, limits):
            if tuple(neighbor.items()) in seen or len(seen) >= tries:
                continue
            seen.add(tuple(neighbor.items()))
            candidate = _apply_sizes(parallel, neighbor)
            if (ms := predicted_ms(candidate)) < MAX_TIME_RATIO * best_ms:
                sizes, best, best_ms, better = neighbor, candidate, ms, True
                break
    return best


def _neighbors(sizes: PartitionSizes, limits: PartitionSizes) -> Iterator[PartitionSizes]:
    """Yield partitions in which one number, or all numbers of segments, are changed."""
    segments = [key for key in limits if key[1] == "segments"]
    for change in (lambda n: 2 * n, lambda n: n // 2, lambda n: n + 1, lambda n: n - 1):
        for keys in ([segments] if len(segments) > 1 else []) + [[key] for key in limits]:
            changed = sizes | {key: change(sizes[key]) for key in keys}
            if all(1 <= changed[key] <= limits[key] for key in keys):
                yield changed


def _predicted_ms(
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    tuning: LayerTuning | None = None,
) -> float:
    """Return the time of the first step with a searched schedule.

    Returns infinity if modules cannot be split, or the step does not fit into device memory.
    """
    metas = list(microbatches[:MAX_MICROBATCHES])
    budget = SearchBudget(
        evaluations=min(EVALUATIONS, SearchConfig.from_parent(parallel).evaluations or EVALUATIONS)
    )
    settings = SearchSettings()
    try:
        layout = plan_layout(parallel, modules, metas)
        graph = step_graph(layout, parallel, metas)
        costs = compute_search_costs(graph, modules, metas, model)
        if tuning is not None:
            return MemoryAwareSearch(
                graph, costs, LayerTuner(graph, modules, metas, tuning)
            ).estimate_ms(budget, settings)
        limit_bytes = round(USABLE_MEMORY_FRACTION * model.profile.device.memory_bytes)
        limited = StepSearch(graph, replace(costs, memory_limit_bytes=limit_bytes))
        return limited.search(budget, settings).predicted_ms
    except (ConfigError, ValueError):
        return inf


def _apply_sizes(parallel: ParallelConfig, sizes: PartitionSizes) -> ParallelConfig:
    values = parallel.model_dump(exclude_none=True)
    for (name, key), value in sizes.items():
        values.setdefault(name, {})[key] = value
    return ParallelConfig.model_validate(values)
