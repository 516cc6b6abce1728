"""The plan of a step: from what microbatches contain to actions that have been checked.

    layout = plan_layout(recipe.parallel, descriptions, metas)      once per run
    plan = plan_step(layout, recipe.parallel, descriptions, metas)  every step

Pure: the trainer executes these plans, `scripts/simulate.py` and dry runs time them for clusters
that are not at hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import mean
from typing import Literal, TypedDict, Unpack

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.optimus.choice import StepOrder
from torchmm.balance.optimus.launches import with_launches
from torchmm.balance.pipeweaver.order_search.best_order import bounded_orders
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning, tune_layers
from torchmm.balance.rates import ActionFit, ActionKind, RankKind, Total, scaled
from torchmm.balance.schedules import PLANNERS
from torchmm.balance.step_costs import PlanCosts
from torchmm.balance.transfer_times import Pair
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError, PlanError
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import GENERATOR
from torchmm.common.processes import without_collection
from torchmm.common.row_slices import most_images
from torchmm.costs.flops import module_layers, task_durations
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import Message, StageGraph, StageLayout
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import (
    ComputeOrder,
    Durations,
    Gathering,
    MessageSpecs,
    PipelinePlan,
)
from torchmm.pipelining.plan.slices import TensorRanks
from torchmm.pipelining.schedules.classic import forward_only, one_f_one_b
from torchmm.pipelining.schedules.colocated import spread_replicas
from torchmm.pipelining.schedules.disaggregated import (
    UnitSize,
    deal_tasks,
    disaggregated_layout,
    disaggregated_order,
)
from torchmm.pipelining.schedules.layouts import ModuleLayers, megatron_layout
from torchmm.pipelining.schedules.names import order_named, schedule_layout
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.placement_sizes import unit_stages
from torchmm.recipe.sizes import MeshSizes, replica_groups

ALL_RANKS = -1
"""In the place of a rank: whichever it is."""
Search = Callable[[StageGraph, Durations], StepOrder]
"""Finds the order of a step from its graph and FLOPs (or anything proportional to times)."""


class Choices(TypedDict, total=False):
    """How the plan of a training step is chosen; what is left out is not."""

    factors: Mapping[ActionKind, float] | None
    """On FLOPs, by kind of action, where they were measured."""
    search: Search | None
    """Finds the order, instead of the recipe's schedule."""
    tuning: LayerTuning | None
    """How to choose what layers recompute, where plans do."""
    reduces_early: bool
    """Whether gradients of a stage are reduced after its last backward, where ranks compute beside
    that: on CUDA. Over gloo ranks wait in reductions, and others for them; left out, these come
    after all computation."""


Purpose = Literal["training", "losses", "text", "drawing"]
"""What a step is for: all but "training" are forwards only. For text the generator has nothing to
do; for drawing it runs every microbatch as a whole."""


def plan_layout(
    config: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    units: Mapping[str, MeshSizes] | None = None,
    layers: Sequence[ModuleLayers] | None = None,
) -> StageLayout:
    """How the recipe's schedule cuts the modules.

    Args:
        modules: encoders, LLM and generator, whole.
        microbatches: typical ones, from which costs follow.
        units: sizes by module, where modules have ranks of their own.
        layers: what `module_layers` makes of modules and microbatches, if it has been made before.

    Raises:
        ConfigError: the modules cannot be cut like this.
    """
    layers = module_layers(modules, microbatches) if layers is None else layers
    if config.pipeline * config.mirrors == 1 and units is None:
        return megatron_layout(layers, 1)
    sizes = None
    if units is not None:
        groups = replica_groups(units)
        sizes = {n: UnitSize(u.pipeline, u.data_parallel // groups) for n, u in units.items()}
    try:
        layout = cut_modules(config, layers, sizes)
    except ValueError as error:
        raise ConfigError(f"[parallel] schedule = {config.schedule!r}: {error}") from error
    return replace(layout, tensor=_tensor_ranks(config, modules, units))


def _tensor_ranks(
    config: ParallelConfig,
    modules: Sequence[ModuleDescription],
    units: Mapping[str, MeshSizes] | None,
) -> dict[str, TensorRanks]:
    """By module."""
    sliced = config.sequence_parallel
    found = {}
    for module in modules:
        size = config.tensor
        if units is not None:
            size = units[module.name].tensor
        elif module.kind == "encoder" and config.placement == "colocated":
            size = config.encoder_tensor(module.name)
        found[module.name] = TensorRanks(size, sliced, sliced and module.keeps_slices)
    return found if any(ranks.size > 1 for ranks in found.values()) else {}


def cut_modules(
    config: ParallelConfig, layers: Sequence[ModuleLayers], units: Mapping[str, UnitSize] | None
) -> StageLayout:
    """The layout of a schedule, for modules whose costs are known.

    Args:
        layers: encoders, LLM and generator.
        units: by module, where modules have ranks of their own.

    Raises:
        ValueError: there is no such schedule, or the modules cannot be cut like this.
    """
    if units is not None:
        stages = {name: unit_stages(config, name) for name in units}
        return disaggregated_layout(layers, units, stages)
    if config.schedule in PLANNERS:
        return PLANNERS[config.schedule].layout(config, layers)
    segments = {module.name: config.segments(module.name) for module in layers}
    return schedule_layout(
        config.schedule,
        layers,
        config.pipeline,
        config.virtual_stages,
        segments if config.separates_modules else None,
    )


def step_graph(
    layout: StageLayout,
    config: ParallelConfig,
    microbatches: Sequence[MicrobatchMeta],
    sharding: Gathering = "step",
    purpose: Purpose = "training",
) -> StageGraph:
    """Tasks of a step: its microbatches, and parts of each by encoder, and of the generator."""

    def parts(module: str, meta: MicrobatchMeta) -> int:
        if module == GENERATOR and purpose in ("text", "drawing"):
            return int(purpose == "drawing")  # in one piece, as losses add up and velocities do not
        if meta.balanced:
            return 1  # all data-parallel ranks exchange features and contexts in every microbatch
        if sharding == "layer" and purpose != "text":
            return 1  # what all replicas do, whatever images they have; text is the same on all
        images = meta.images_of(module)
        if config.context > 1:
            images = most_images(meta, module, config.context)
        if layout.rank_count == 1:
            return min(images, 1)  # groups of images only fill pipelines
        size = config.sub_microbatch_images(module) or max(images, 1)
        return ceil(images / size)

    counts = {
        name: tuple(parts(name, meta) for meta in microbatches) for name in layout.sub_microbatched
    }
    return StageGraph(layout, len(microbatches), counts, context=config.context)


def searched_costs(
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    *,
    layerwise: bool = False,
    rates: Mapping[ActionKind, float] | None = None,
    fits: Mapping[RankKind, ActionFit] | None = None,
    between_ms: Mapping[Pair, float] | None = None,
) -> PlanCosts:
    """What a searched schedule is planned with, in a run, beside it, and in forecasts of it: the
    device's times, transfers and bytes.

    Args:
        model: of the run's device.
        layerwise: whether FSDP2 gathers layer by layer.
        rates: measured milliseconds per FLOP, by kind of action: all actions of a kind together
            then take what was measured, and the model says how these differ; None, or empty: as
            the model says.
        fits: measured times of a rank's actions, in place of the rates where there are some: a
            constant for each, and what they take beyond together, which differs as the model says.
        between_ms: measured time of a mean message between two ranks, from which others differ by
            as much as the model says.
    """
    costs = plan_costs(graph, modules, microbatches, model, layerwise=layerwise)
    if not rates:
        return costs
    flops = task_durations(graph, modules, microbatches)
    costs = _measured(costs, graph, flops, rates, fits or {})
    return _with_transfers(costs, graph, between_ms) if between_ms else costs


def _with_transfers(
    costs: PlanCosts, graph: StageGraph, between_ms: Mapping[Pair, float]
) -> PlanCosts:
    """Costs with measured times of messages."""
    pairs: dict[tuple[Message, bool], Pair] = {}
    modelled_ms: dict[Pair, list[float]] = defaultdict(list)
    for key, ms in costs.transfer_ms.items():
        message, _ = key
        ends = graph.rank(graph.producer(message)), graph.rank(graph.consumer(message))
        pair = pairs[key] = min(ends), max(ends)
        modelled_ms[pair].append(ms)
    more_ms = {
        pair: between_ms[pair] - mean(own)
        for pair, own in modelled_ms.items()
        if pair in between_ms
    }
    transfer_ms = {
        key: max(0.0, ms + more_ms.get(pairs[key], 0.0)) for key, ms in costs.transfer_ms.items()
    }
    return replace(costs, transfer_ms=transfer_ms)


def _measured(
    costs: PlanCosts,
    graph: StageGraph,
    flops: Durations,
    rates: Mapping[ActionKind, float],
    fits: Mapping[RankKind, ActionFit],
) -> PlanCosts:
    """Costs with times as `searched_costs` says."""
    stages = graph.layout.stages
    modelled_ms: dict[RankKind, float] = defaultdict(float)
    work: dict[RankKind, float] = defaultdict(float)
    groups: dict[Action, RankKind] = {}
    for action, ms in costs.compute_ms.items():
        stage = stages[action.stage]
        known = bool(graph.replica) or len(stage.ranks) == 1
        own = (graph.rank(action.task) if known else ALL_RANKS, stage.module, action.type)
        group = groups[action] = own if own in fits else (ALL_RANKS, stage.module, action.type)
        modelled_ms[group] += ms
        work[group] += flops(action)
    factors: dict[RankKind, float] = {}
    for group, ms in modelled_ms.items():
        rate = fits[group].ms_per_flop if group in fits else rates.get(group[1:])
        factors[group] = 1.0
        if rate is not None and ms > 0 and work[group] > 0:
            factors[group] = rate * work[group] / ms
    constants_ms = {group: fit.constant_ms for group, fit in fits.items()}
    compute_ms = {
        action: ms * factors[groups[action]] + (ms > 0) * constants_ms.get(groups[action], 0.0)
        for action, ms in costs.compute_ms.items()
    }
    tensor_ms = {action: ms * factors[groups[action]] for action, ms in costs.tensor_ms.items()}
    return replace(costs, compute_ms=compute_ms, tensor_ms=tensor_ms)


def modelled_totals(
    graph: StageGraph, costs: PlanCosts, flops: Durations
) -> dict[ActionKind, Total]:
    """What all actions of each kind take together by a model, and their FLOPs."""
    owners = [stage.module for stage in graph.layout.stages]
    found: dict[ActionKind, Total] = {}
    for action, action_ms in costs.compute_ms.items():
        kind = owners[action.stage], action.type
        found[kind] = found.get(kind, Total(0.0, 0.0)).plus(Total(action_ms, flops(action)))
    return found


@without_collection()
def plan_step(
    layout: StageLayout,
    config: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int] | None = None,
    *,
    specs: Callable[[StageGraph], MessageSpecs] = lambda graph: {},
    sharding: Gathering = "step",
    purpose: Purpose = "training",
    **choices: Unpack[Choices],
) -> PipelinePlan:
    """The plan of a step with these microbatches.

    Args:
        layout: from `plan_layout`.
        config: the recipe's section.
        modules: encoders, LLM and generator, whole.
        targets: positions that count in the loss, by microbatch; None: all text.
        specs: tensors of the graph's messages; none for plans that do not run.
        sharding: when parameters are gathered.
        purpose: what the step is for.

    Raises:
        PlanError: the schedule cannot run them, or they do not fit into memory.
    """
    graph = step_graph(layout, config, microbatches, sharding, purpose)
    training = purpose == "training"
    search = choices.get("search")
    tuning = choices.get("tuning")
    step = None
    if not training:
        graph = spread_replicas(graph)
        order = forward_only(graph)
    elif layout.rank_count == 1:
        order = one_f_one_b(graph)
    else:
        flops = task_durations(graph, modules, microbatches, targets)
        costs = scaled(flops, graph, choices.get("factors"))
        search = search or partial(_by_work, config)
        step = search(graph, costs)
        graph = step.graph
        order = step.order
    # Ranks with parts of the experts meet in every layer: the same places have to be certain.
    early = choices.get("reduces_early", False) and config.expert == 1

    def lowered(order: ComputeOrder) -> PipelinePlan:
        plan = lower_plan(order, graph, specs(graph), sharding, training, reduces_early=early)
        if step is not None:
            plan = with_launches(plan, step.launches)
        validate_plan(plan).raise_for_problems()
        if tuning is not None and training:
            plan = tune_layers(plan, modules, microbatches, tuning, targets).plan
        return plan

    if tuning is None or not training or layout.rank_count == 1 or config.schedule != "searched":
        return lowered(order)
    return _first_that_fits(lowered, order, bounded_orders(graph, costs))


def _by_work(config: ParallelConfig, graph: StageGraph, costs: Durations) -> StepOrder:
    """The recipe's schedule, by FLOPs."""
    return StepOrder(*order_step(graph, config, costs))


def _first_that_fits(
    lowered: Callable[[ComputeOrder], PipelinePlan],
    order: ComputeOrder,
    others: Iterable[tuple[str, ComputeOrder]],
) -> PipelinePlan:
    """The plan of an order, or of the first other one that stays within memory. Searched orders may
    need more of it than others: the search counts in work, not in bytes."""
    try:
        return lowered(order)
    except PlanError:
        for _, other in others:
            try:
                return lowered(other)
            except PlanError:
                continue
        raise


def order_step(
    graph: StageGraph, config: ParallelConfig, costs: Durations | None = None
) -> tuple[StageGraph, ComputeOrder]:
    """The graph with replicas chosen, and the order of every rank.

    Args:
        costs: None: all tasks take the same, which no planner takes.

    Raises:
        ValueError: the schedule is not for this graph.
    """
    if config.schedule in PLANNERS:
        assert costs is not None
        return PLANNERS[config.schedule].plan(config, graph, costs)
    order = order_named(config.schedule)
    if config.placement != "disaggregated":
        return graph, order(graph, costs)
    graph = deal_tasks(graph, costs)
    if config.separates_modules:
        return graph, order(graph, costs)
    return graph, disaggregated_order(graph, order)
