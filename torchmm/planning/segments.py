"""Segments and sub-microbatches of a searched pipeline where the recipe leaves them open.

    if leaves_segments_open(parallel):
        parallel = with_segments(parallel, descriptions, microbatches, costs)

What the recipe gives stays: `segments` and `sub_microbatch_images` of [parallel.NAME], and
`virtual_stages` other than 1, which are the LLM's segments. With `stages = "auto"` the first step
is also searched on the stages of static planners, which on few ranks may be faster: fewer, larger
tasks. A pure function of the recipe and the first step's microbatches, so every rank finds the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from torchmm.balance.costs.devices import MEMORY_SHARE
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.order_search.best_order import plan_searched
from torchmm.balance.order_search.search import Budget
from torchmm.balance.segments import Partition, partition
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig

STAGES = ("separated", "megatron", "balanced")
"""What "auto" chooses from; of equally fast ones the first."""
EVALUATIONS, MOST_TRIED = 200, 64
"""Orders and microbatches with which they are compared."""


def leaves_segments_open(parallel: ParallelConfig) -> bool:
    """Whether the partitioner decides anything."""
    return parallel.schedule == "searched" and parallel.pipeline > 1


def with_segments(
    parallel: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
) -> ParallelConfig:
    """The recipe's section with every module's segments and sub-microbatches.

    Args:
        parallel: one that `leaves_segments_open`.
        modules: encoders, LLM and generator, whole.
        microbatches: typical ones.
        model: costs of the modules as they are run (`run_costs`).

    Raises:
        ConfigError: a module has fewer layers than ranks.
    """
    try:
        found = _filled(parallel, modules, _partition(parallel, modules, microbatches, model))
    except ValueError as error:
        raise ConfigError(f'[parallel] schedule = "searched": {error}') from error
    if parallel.search.stages != "auto":
        return found
    searches = [found.search.model_copy(update={"stages": stages}) for stages in STAGES]
    return min(
        (found.model_copy(update={"search": search}) for search in searches),
        key=lambda tried: _predicted_ms(tried, modules, microbatches, model),
    )


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
) -> float:
    """Time of the first step in searched order; infinite where modules cannot be cut like this, or
    the step does not fit into the device's memory."""
    own = list(microbatches[:MOST_TRIED])
    try:
        layout = plan_layout(parallel, modules, own)
        graph = step_graph(layout, parallel, own)
        costs = plan_costs(graph, modules, own, model)
        budget = Budget(evaluations=min(EVALUATIONS, parallel.search.evaluations))
        limit_bytes = round(MEMORY_SHARE * model.profile.device.memory_bytes)
        limited = replace(costs, memory_limit_bytes=limit_bytes)
        found = plan_searched(graph, limited, budget, seed=parallel.search.seed)
    except (ConfigError, ValueError):
        return inf
    return found.predicted_ms


def _filled(
    parallel: ParallelConfig, modules: Sequence[ModuleDescription], found: Partition
) -> ParallelConfig:
    values = parallel.model_dump(exclude_none=True)
    for module in modules:
        own = values.setdefault(module.name, {})
        own["segments"] = found.segments[module.name]
        if module.name in found.sub_microbatch_images:
            own["sub_microbatch_images"] = found.sub_microbatch_images[module.name]
    return ParallelConfig.model_validate(values)
