"""Planning of a step: from the sizes of microbatches to validated actions.

    layout = plan_layout(recipe.parallel, descriptions, metas)      once per run
    plan = plan_step(layout, recipe.parallel, descriptions, metas)  every step

The functions are pure. Runs execute the plans, and dry runs simulate them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Literal, NamedTuple

from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.extensions import find_entry
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import GENERATOR
from torchmm.common.processes import gc_disabled
from torchmm.common.sequence_slices import max_images_per_rank
from torchmm.costs.flops import module_layers, task_durations
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import (
    ComputeOrder,
    Durations,
    MessageSpecs,
    PipelinePlan,
    UnshardMode,
)
from torchmm.pipelining.plan.slices import TensorParallelism
from torchmm.pipelining.schedules.classic import forward_only, one_f_one_b
from torchmm.pipelining.schedules.colocated import assign_round_robin
from torchmm.pipelining.schedules.disaggregated import (
    ModuleGroupSize,
    assign_replicas,
    disaggregated_layout,
    disaggregated_order,
)
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout
from torchmm.pipelining.schedules.registry import find_order, schedule_layout
from torchmm.recipe.mesh_sizes import MeshSizes, replica_groups
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import unit_stages

Purpose = Literal["training", "losses", "text", "drawing"]
"""Purpose of a step. All except "training" have only forward passes. The generator does not run for
"text", and processes each microbatch in one task for "drawing"."""


class PlannedSchedule(NamedTuple):
    """Functions of a schedule that needs a cost model."""

    layout: Callable[[ParallelConfig, Sequence[ModuleLayers]], StageLayout]
    """Function that splits the modules into stages."""
    plan: Callable[[ParallelConfig, StageGraph, Durations], tuple[StageGraph, ComputeOrder]]
    """Function that returns the graph with assigned replicas, and the compute order."""


def find_planned_schedule(config: ParallelConfig) -> PlannedSchedule | None:
    """Return the functions of the schedule of a recipe, or None for a schedule of the core.

    Entries of the table "schedules" have the names of schedules with `Schedule.planned`, and their
    targets are of type `PlannedSchedule`.
    """
    entry = find_entry("schedules", config.schedule)
    return None if entry is None else entry.load()


def plan_layout(
    config: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    units: Mapping[str, MeshSizes] | None = None,
    layers: Sequence[ModuleLayers] | None = None,
) -> StageLayout:
    """Split the modules into stages for the schedule of the recipe.

    Args:
        config: Parallelism of the recipe.
        modules: Complete encoders, LLM and generator.
        microbatches: Typical microbatches, which define the costs.
        units: Parallelism degrees of disaggregated modules, or None.
        layers: Result of `module_layers` for modules and microbatches, if already computed.

    Raises:
        ConfigError: The modules cannot be split for this schedule.
    """
    layers = module_layers(modules, microbatches) if layers is None else layers
    if config.pipeline * config.mirrors == 1 and units is None:
        return megatron_layout(layers, 1)
    sizes = None
    if units is not None:
        groups = replica_groups(units)
        sizes = {
            n: ModuleGroupSize(u.pipeline, u.data_parallel // groups) for n, u in units.items()
        }
    try:
        layout = split_modules(config, layers, sizes)
    except ValueError as error:
        raise ConfigError(f"[parallel] schedule = {config.schedule!r}: {error}") from error
    return replace(layout, tensor_parallel=_tensor_parallelism(config, modules, units))


def _tensor_parallelism(
    config: ParallelConfig,
    modules: Sequence[ModuleDescription],
    units: Mapping[str, MeshSizes] | None,
) -> dict[str, TensorParallelism]:
    """Return the tensor parallelism of each module."""
    sends_token_slices = config.sequence_parallel
    tensor_parallelism = {}
    for module in modules:
        size = config.tensor
        if units is not None:
            size = units[module.name].tensor
        elif module.kind == "encoder" and config.placement == "colocated":
            size = config.encoder_tensor(module.name)
        tensor_parallelism[module.name] = TensorParallelism(
            size, sends_token_slices, sends_token_slices and module.is_sequence_sharded
        )
    return (
        tensor_parallelism if any(ranks.size > 1 for ranks in tensor_parallelism.values()) else {}
    )


def split_modules(
    config: ParallelConfig,
    layers: Sequence[ModuleLayers],
    units: Mapping[str, ModuleGroupSize] | None,
) -> StageLayout:
    """Return the stage layout of a schedule for modules with known costs.

    Args:
        config: Parallelism of the recipe.
        layers: Layers of encoders, LLM and generator.
        units: Sizes of disaggregated modules, or None.

    Raises:
        ValueError: The schedule is unknown, or the modules cannot be split for it.
    """
    if units is not None:
        stages = {name: unit_stages(config, name) for name in units}
        return disaggregated_layout(layers, units, stages)
    if (planned := find_planned_schedule(config)) is not None:
        return planned.layout(config, layers)
    segments = {module.name: config.segments(module.name) for module in layers}
    return schedule_layout(
        config.schedule,
        layers,
        config.pipeline,
        config.virtual_stages,
        segments if config.has_module_segments else None,
    )


def step_graph(
    layout: StageLayout,
    config: ParallelConfig,
    microbatches: Sequence[MicrobatchMeta],
    sharding: UnshardMode = "step",
    purpose: Purpose = "training",
) -> StageGraph:
    """Return the task graph of a step, with sub-microbatches of encoders and generator."""

    def parts(module: str, meta: MicrobatchMeta) -> int:
        if module == GENERATOR and purpose in ("text", "drawing"):
            return int(purpose == "drawing")  # one task, because velocities are not additive
        if meta.balanced:
            return 1  # all data-parallel ranks exchange features and contexts in every microbatch
        if sharding == "layer" and purpose != "text":
            return 1  # all replicas run the same tasks, with or without images
        images = meta.module_image_count(module)
        if config.context > 1:
            images = max_images_per_rank(meta, module, config.context)
        if layout.rank_count == 1:
            return min(images, 1)  # groups of images are useful only in pipelines
        size = config.sub_microbatch_images(module) or max(images, 1)
        return ceil(images / size)

    counts = {
        name: tuple(parts(name, meta) for meta in microbatches) for name in layout.sub_microbatched
    }
    return StageGraph(layout, len(microbatches), counts, context=config.context)


@gc_disabled()
def plan_step(  # noqa: PLR0913 - keyword arguments describe the run and the step
    layout: StageLayout,
    config: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int] | None = None,
    *,
    specs: Callable[[StageGraph], MessageSpecs] = lambda graph: {},
    sharding: UnshardMode = "step",
    purpose: Purpose = "training",
    reduces_early: bool = False,
    order: tuple[StageGraph, ComputeOrder] | None = None,
) -> PipelinePlan:
    """Return the validated plan of a step.

    Args:
        layout: Stages from `plan_layout`.
        config: Section [parallel] of the recipe.
        modules: Descriptions of the complete encoders, LLM and generator.
        microbatches: Microbatches of the step.
        targets: Number of tokens in the loss, by microbatch. If None, all text tokens.
        specs: Function that returns the message tensors of a graph. Plans that are not executed
            need none.
        sharding: Time at which parameters are all-gathered.
        purpose: Purpose of the step.
        reduces_early: Whether the gradients of a stage are reduced after its last backward pass. On
            CUDA, reductions overlap with computation. With gloo, ranks block in reductions, so they
            follow after all computation.
        order: Graph and compute order of a training step from the planner of an extension. If None,
            the schedule of the recipe uses FLOPs as costs.

    Raises:
        PlanError: The schedule does not support the microbatches.
    """
    training = purpose == "training"
    if order is not None:
        graph, actions = order
    else:
        graph = step_graph(layout, config, microbatches, sharding, purpose)
        if not training:
            graph = assign_round_robin(graph)
            actions = forward_only(graph)
        elif layout.rank_count == 1:
            actions = one_f_one_b(graph)
        else:
            flops = task_durations(graph, modules, microbatches, targets)
            graph, actions = order_step(graph, config, flops)
    # Expert-parallel ranks communicate in every layer, so that they need the same order of
    # collectives.
    early = reduces_early and config.expert == 1
    plan = lower_plan(actions, graph, specs(graph), sharding, training, reduces_early=early)
    validate_plan(plan).raise_for_problems()
    return plan


def order_step(
    graph: StageGraph, config: ParallelConfig, costs: Durations | None = None
) -> tuple[StageGraph, ComputeOrder]:
    """Return the graph with assigned replicas, and the compute order.

    Args:
        graph: Task graph of the step.
        config: Parallelism of the recipe.
        costs: Durations of tasks. If None, all tasks have the same duration, which schedules that
            need a cost model do not support.

    Raises:
        ValueError: The schedule does not support this graph.
    """
    if (planned := find_planned_schedule(config)) is not None:
        assert costs is not None
        return planned.plan(config, graph, costs)
    order = find_order(config.schedule)
    if config.placement != "disaggregated":
        return graph, order(graph, costs)
    graph = assign_replicas(graph, costs)
    if config.has_module_segments:
        return graph, order(graph, costs)
    return graph, disaggregated_order(graph, order)
