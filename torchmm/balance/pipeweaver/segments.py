"""Segments and sub-microbatches of a searched pipeline where the recipe leaves them open.

    parallel = chosen_segments(recipe, parallel, descriptions, shares, costs)

What the recipe gives stays: `segments` and `sub_microbatch_images` of [parallel.NAME], and
`virtual_stages` other than 1, which are the LLM's segments. The rest begins as PipeWeaver's rule
has it (`balance.pipeweaver.partition`); then all numbers of segments together, and every number
alone, are doubled, halved or moved by one as long as the first step, searched and simulated with
the costs of a run, becomes faster. The rule alone compares latencies of modules: more segments
shorten the pipeline's ramps, more images save starts of operators, and how much depends on the
data.

With `stages = "auto"` the step is also searched on the stages of static planners, which on few
ranks may be faster: fewer, larger tasks.

A pure function of the recipe and the first step's microbatches, in numbers of tries and not in
seconds, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from torchmm.balance.costs.model import CostModel
from torchmm.balance.forecasts.first_microbatches import heaviest
from torchmm.balance.pipeweaver.order_search.best_order import StepSearch
from torchmm.balance.pipeweaver.order_search.search import Budget, Settings
from torchmm.balance.pipeweaver.partition import MOST_SEGMENTS, Partition, partition
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
"""What "auto" chooses from; of equally fast ones the first."""
EVALUATIONS, MOST_TRIED = 200, 64
"""Orders and microbatches with which they are compared."""
MOST_PARTITIONS = 24
"""Compared; of each the first step is searched, in some tenths of a second."""
MOST_TUNED = 12
"""The same where layers are tuned, which takes seconds for the largest models."""
WORTH = 0.995
"""Share of the time before that a change has to reach: smaller gains are those of a search that was
cut short."""

Divided = dict[tuple[str, str], int]
"""Segments and images of sub-microbatches, by module and key."""


def leaves_segments_open(parallel: ParallelConfig) -> bool:
    """Whether the partitioner decides anything."""
    return parallel.schedule == "searched" and parallel.pipeline > 1


def chosen_segments(
    recipe: Recipe,
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    shares: Sequence[list[MicrobatchMeta]],
    model: CostModel,
) -> ParallelConfig:
    """The section as it runs, in runs and forecasts of them: with what it leaves open.

    Args:
        recipe: the rest of it.
        modules: encoders, LLM and generator, whole.
        shares: the first step's microbatches, by share of the global batch; the one with most work
            counts.
        model: costs of the modules as they are run (`run_costs`).

    Raises:
        ConfigError: a module has fewer layers than ranks.
    """
    if not leaves_segments_open(parallel):
        return parallel
    # By the profile's memory, which all ranks know alike.
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
    """The recipe's section with every module's segments and sub-microbatches.

    Args:
        parallel: one that `leaves_segments_open`.
        modules: encoders, LLM and generator, whole.
        microbatches: of one pipeline, the one with most work.
        model: costs of the modules as they are run (`run_costs`).
        tuning: how plans choose what layers recompute; None: they do not.

    Raises:
        ConfigError: a module has fewer layers than ranks.
    """
    try:
        ruled = _partition(parallel, modules, microbatches, model)
    except ValueError as error:
        raise ConfigError(f'[parallel] schedule = "searched": {error}') from error

    def predicted_ms(tried: ParallelConfig) -> float:
        return _predicted_ms(tried, modules, microbatches, model, tuning)

    most = MOST_PARTITIONS if tuning is None else MOST_TUNED
    found = _improved(parallel, modules, microbatches, _divided(ruled), predicted_ms, most)
    if SearchConfig.of(parallel).stages != "auto":
        return found
    searches = [SearchConfig.of(found).model_copy(update={"stages": stages}) for stages in STAGES]
    return min(
        (found.model_copy(update={"search": search}) for search in searches), key=predicted_ms
    )


def _improved(
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    divided: Divided,
    predicted_ms: Callable[[ParallelConfig], float],
    tries: int,
) -> ParallelConfig:
    """The section with what is the fastest of some ways to divide modules, `tries` at most."""
    most = _most(parallel, modules, microbatches, divided)
    best = _filled(parallel, divided)
    if not most:
        return best
    best_ms = predicted_ms(best)
    seen = {tuple(divided.items())}
    better = True
    while better:
        better = False
        for tried in _neighbours(divided, most):
            if tuple(tried.items()) in seen or len(seen) >= tries:
                continue
            seen.add(tuple(tried.items()))
            candidate = _filled(parallel, tried)
            if (ms := predicted_ms(candidate)) < WORTH * best_ms:
                divided, best, best_ms, better = tried, candidate, ms, True
                break  # from there on
    return best


def _neighbours(divided: Divided, most: Divided) -> Iterator[Divided]:
    """What is tried next."""
    segments = [key for key in most if key[1] == "segments"]
    for change in (lambda n: 2 * n, lambda n: n // 2, lambda n: n + 1, lambda n: n - 1):
        for keys in ([segments] if len(segments) > 1 else []) + [[key] for key in most]:
            tried = divided | {key: change(divided[key]) for key in keys}
            if all(1 <= tried[key] <= most[key] for key in keys):
                yield tried


def _most(
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    divided: Divided,
) -> Divided:
    """How large each number may become; without those that the recipe gives."""
    found = {}
    for name, key in divided:
        own = parallel.modules.get(name)
        given = own is not None and bool(getattr(own, key))
        if given or (key == "segments" and name == "llm" and parallel.virtual_stages > 1):
            continue
        if key == "segments":
            layers = next(len(module.layers) for module in modules if module.name == name)
            found[name, key] = min(layers // parallel.pipeline, MOST_SEGMENTS)
        else:
            found[name, key] = max(meta.images_of(name) for meta in microbatches)
    return found


def _divided(found: Partition) -> Divided:
    images = {(n, "sub_microbatch_images"): c for n, c in found.sub_microbatch_images.items()}
    return {(name, "segments"): count for name, count in found.segments.items()} | images


def _partition(
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
) -> Partition:
    given = parallel.modules
    segments = {name: own.segments for name, own in given.items() if own.segments}
    if parallel.virtual_stages > 1:
        segments.setdefault("llm", parallel.virtual_stages)
    images = {
        name: own.sub_microbatch_images for name, own in given.items() if own.sub_microbatch_images
    }
    return partition(
        modules,
        microbatches,
        model,
        parallel.pipeline,
        images_given=images,
        segments_given=segments,
    )


def _predicted_ms(
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    tuning: LayerTuning | None = None,
) -> float:
    """Time of the first step in searched order; infinite where modules cannot be cut like this, or
    the step does not fit into the device's memory."""
    own = list(microbatches[:MOST_TRIED])
    budget = Budget(
        evaluations=min(EVALUATIONS, SearchConfig.of(parallel).evaluations or EVALUATIONS)
    )
    settings = Settings()
    try:
        layout = plan_layout(parallel, modules, own)
        graph = step_graph(layout, parallel, own)
        costs = searched_costs(graph, modules, own, model)
        if tuning is not None:
            return TunedSearch(graph, costs, Tuner(graph, modules, own, tuning)).estimate_ms(
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
