"""Choice of segments and sub-microbatches of a searched pipeline.

Values of `segments` and `sub_microbatch_images` of [parallel.NAME] in the recipe are not changed. A
value of `virtual_stages` other than 1 is the number of LLM segments. The remaining numbers start
from the rule of PipeWeaver (`balance.pipeweaver.partition`), which only compares latencies of
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
from torchmm.balance.forecasts.first_microbatches import heaviest
from torchmm.balance.pipeweaver.order_search.best_order import StepSearch
from torchmm.balance.pipeweaver.order_search.search import Budget, Settings
from torchmm.balance.pipeweaver.partition import MOST_SEGMENTS, partition
from torchmm.balance.pipeweaver.recomputation.joint import TunedSearch
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning, Tuner
from torchmm.balance.run_costs import layer_tuning
from torchmm.balance.section import SearchConfig
from torchmm.balance.step_plans import searched_costs
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import without_collection
from torchmm.costs.devices import MEMORY_SHARE
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe

STAGES = ("separated", "megatron", "balanced")
"""Stages that "auto" compares. The first of equally fast stages is used."""
EVALUATIONS, MOST_TRIED = 200, 64
"""Maximum number of orders and microbatches of a search that compares partitions."""
MOST_PARTITIONS = 24
"""Maximum number of partitions that are compared. A search takes some tenths of a second."""
MOST_TUNED = 12
"""Maximum number with tuned layers. A search takes seconds for the largest models."""
WORTH = 0.995
"""Maximum ratio of the times after and before a change. Smaller gains may be noise of a search that
was not finished."""

Divided = dict[tuple[str, str], int]
"""Numbers of segments and of images of sub-microbatches, by module and key."""


def leaves_segments_open(parallel: ParallelConfig) -> bool:
    """Return True if the partitioner selects segments."""
    return parallel.schedule == "searched" and parallel.pipeline > 1


def chosen_segments(
    recipe: Recipe,
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    shares: Sequence[list[MicrobatchMeta]],
    model: CostModel,
) -> ParallelConfig:
    """Return the section with segments and sub-microbatches, for runs and forecasts.

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
    if not leaves_segments_open(parallel):
        return parallel
    # The memory of the profile is the same on all ranks.
    tuning = layer_tuning(recipe, model, layerwise=False)
    metas = heaviest(modules, shares).microbatches
    return with_segments(parallel, modules, metas, model, tuning)


@without_collection()
def with_segments(
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    tuning: LayerTuning | None = None,
) -> ParallelConfig:
    """Return the section with the segments and sub-microbatches of every module.

    Args:
        parallel: Section for which `leaves_segments_open` is true.
        modules: Encoders, LLM and generator, unsharded.
        microbatches: Microbatches of the pipeline with the most work.
        model: Costs of the modules in the run (`run_costs`).
        tuning: Selection of the layers that recompute. If None, plans do not select layers.

    Raises:
        ConfigError: A module has fewer layers than ranks.
    """
    segments = {name: own.segments for name, own in parallel.modules.items() if own.segments}
    if parallel.virtual_stages > 1:
        segments.setdefault("llm", parallel.virtual_stages)
    images = {
        name: own.sub_microbatch_images
        for name, own in parallel.modules.items()
        if own.sub_microbatch_images
    }
    try:
        initial = partition(
            modules,
            microbatches,
            model,
            parallel.pipeline,
            images_given=images,
            segments_given=segments,
        )
    except ValueError as error:
        raise ConfigError(f'[parallel] schedule = "searched": {error}') from error

    def predicted_ms(candidate: ParallelConfig) -> float:
        return _predicted_ms(candidate, modules, microbatches, model, tuning)

    divided: Divided = {(name, "segments"): count for name, count in initial.segments.items()}
    for name, count in initial.sub_microbatch_images.items():
        divided[name, "sub_microbatch_images"] = count
    limits: Divided = {}
    for module in modules:
        if module.name not in segments:
            max_value = min(len(module.layers) // parallel.pipeline, MOST_SEGMENTS)
            limits[module.name, "segments"] = max_value
    for name in initial.sub_microbatch_images:
        if name not in images:
            max_value = max(meta.images_of(name) for meta in microbatches)
            limits[name, "sub_microbatch_images"] = max_value
    tries = MOST_PARTITIONS if tuning is None else MOST_TUNED
    improved = _improved(parallel, divided, limits, predicted_ms, tries)
    if SearchConfig.from_parent(parallel).stages != "auto":
        return improved
    searches = [
        SearchConfig.from_parent(improved).model_copy(update={"stages": stages})
        for stages in STAGES
    ]
    return min(
        (improved.model_copy(update={"search": search}) for search in searches), key=predicted_ms
    )


def _improved(
    parallel: ParallelConfig,
    divided: Divided,
    limits: Divided,
    predicted_ms: Callable[[ParallelConfig], float],
    tries: int,
) -> ParallelConfig:
    """Return the section with the fastest of at most `tries` partitions.

    Args:
        parallel: Section of the recipe.
        divided: Numbers to start from.
        limits: Maximum of each number that may change.
        predicted_ms: Returns the time of the first step.
        tries: Maximum number of partitions.
    """
    best = _filled(parallel, divided)
    if not limits:
        return best
    best_ms = predicted_ms(best)
    seen = {tuple(divided.items())}
    better = True
    while better:
        better = False
        for neighbor in _neighbors(divided, limits):
            if tuple(neighbor.items()) in seen or len(seen) >= tries:
                continue
            seen.add(tuple(neighbor.items()))
            candidate = _filled(parallel, neighbor)
            if (ms := predicted_ms(candidate)) < WORTH * best_ms:
                divided, best, best_ms, better = neighbor, candidate, ms, True
                break
    return best


def _neighbors(divided: Divided, limits: Divided) -> Iterator[Divided]:
    """Yield partitions in which one number, or all numbers of segments, are changed."""
    segments = [key for key in limits if key[1] == "segments"]
    for change in (lambda n: 2 * n, lambda n: n // 2, lambda n: n + 1, lambda n: n - 1):
        for keys in ([segments] if len(segments) > 1 else []) + [[key] for key in limits]:
            changed = divided | {key: change(divided[key]) for key in keys}
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
    metas = list(microbatches[:MOST_TRIED])
    budget = Budget(
        evaluations=min(EVALUATIONS, SearchConfig.from_parent(parallel).evaluations or EVALUATIONS)
    )
    settings = Settings()
    try:
        layout = plan_layout(parallel, modules, metas)
        graph = step_graph(layout, parallel, metas)
        costs = searched_costs(graph, modules, metas, model)
        if tuning is not None:
            return TunedSearch(graph, costs, Tuner(graph, modules, metas, tuning)).estimate_ms(
                budget, settings
            )
        limit_bytes = round(MEMORY_SHARE * model.profile.device.memory_bytes)
        limited = StepSearch(graph, replace(costs, memory_limit_bytes=limit_bytes))
        return limited.search(budget, settings).predicted_ms
    except (ConfigError, ValueError):
        return inf


def _filled(parallel: ParallelConfig, divided: Divided) -> ParallelConfig:
    values = parallel.model_dump(exclude_none=True)
    for (name, key), value in divided.items():
        values.setdefault(name, {})[key] = value
    return ParallelConfig.model_validate(values)
