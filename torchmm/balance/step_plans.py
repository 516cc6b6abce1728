"""Costs and plans of training steps whose schedule uses a cost model or measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import mean

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.online_calibration import (
    ActionKind,
    ActionTimeFit,
    ActionTotals,
    RankKind,
    scale_durations,
)
from torchmm.balance.optimus.launches import add_launches
from torchmm.balance.optimus.schedule_selection import StepOrder
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning, tune_layers
from torchmm.balance.pipeweaver.schedule_search.step_search import inflight_limited_orders
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.transfer_times import RankPair
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import PlanError
from torchmm.common.layers import ModuleDescription
from torchmm.common.processes import gc_disabled
from torchmm.costs.flops import task_durations
from torchmm.pipelining.checks.validate import validate_plan
from torchmm.pipelining.plan.actions import Action
from torchmm.pipelining.plan.graph import Message, StageGraph, StageLayout
from torchmm.pipelining.plan.plan import (
    ComputeOrder,
    Durations,
    MessageSpecs,
    PipelinePlan,
    UnshardMode,
)
from torchmm.planning.step import order_step, plan_step, step_graph
from torchmm.recipe.parallel_section import ParallelConfig

ALL_RANKS = -1
"""Rank of a `RankKind` that means every rank."""


def compute_search_costs(
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    model: CostModel,
    *,
    layerwise: bool = False,
    rates: Mapping[ActionKind, float] | None = None,
    fits: Mapping[RankKind, ActionTimeFit] | None = None,
    rank_pair_ms: Mapping[RankPair, float] | None = None,
) -> PlanCosts:
    """Return the costs of a searched schedule: times, transfers and memory of the device.

    Runs, their planning processes and simulations use the same costs.

    Args:
        graph: Tasks of the step.
        modules: Descriptions of the complete modules.
        microbatches: Microbatches of the step.
        model: Cost model of the device of the run.
        layerwise: Whether FSDP2 all-gathers layer by layer.
        rates: Measured milliseconds per FLOP by action kind. They scale the modeled times of all
            actions of a kind to the measured sum. If None or empty, times are modeled.
        fits: Measured times of the actions of a rank, used instead of the rates: a constant for
            each action and a rate.
        rank_pair_ms: Measured times of a mean message between two ranks. Other messages differ from
            it by the modeled difference.
    """
    costs = compute_plan_costs(graph, modules, microbatches, model, layerwise=layerwise)
    if not rates:
        return costs
    flops = task_durations(graph, modules, microbatches)
    costs = _apply_action_times(costs, graph, flops, rates, fits or {})
    return _apply_transfer_times(costs, graph, rank_pair_ms) if rank_pair_ms else costs


def _apply_transfer_times(
    costs: PlanCosts, graph: StageGraph, rank_pair_ms: Mapping[RankPair, float]
) -> PlanCosts:
    """Return costs with measured transfer times."""
    pairs: dict[tuple[Message, bool], RankPair] = {}
    modeled_ms: dict[RankPair, list[float]] = defaultdict(list)
    for key, ms in costs.transfer_ms.items():
        message, _ = key
        ends = graph.rank(graph.producer(message)), graph.rank(graph.consumer(message))
        pair = pairs[key] = min(ends), max(ends)
        modeled_ms[pair].append(ms)
    more_ms = {
        pair: rank_pair_ms[pair] - mean(pair_ms)
        for pair, pair_ms in modeled_ms.items()
        if pair in rank_pair_ms
    }
    transfer_ms = {
        key: max(0.0, ms + more_ms.get(pairs[key], 0.0)) for key, ms in costs.transfer_ms.items()
    }
    return replace(costs, transfer_ms=transfer_ms)


def _apply_action_times(
    costs: PlanCosts,
    graph: StageGraph,
    flops: Durations,
    rates: Mapping[ActionKind, float],
    fits: Mapping[RankKind, ActionTimeFit],
) -> PlanCosts:
    """Return costs with the measured times described in `compute_search_costs`."""
    stages = graph.layout.stages
    modeled_ms: dict[RankKind, float] = defaultdict(float)
    work: dict[RankKind, float] = defaultdict(float)
    groups: dict[Action, RankKind] = {}
    for action, ms in costs.compute_ms.items():
        stage = stages[action.stage]
        is_assigned = bool(graph.replica) or len(stage.ranks) == 1
        rank_kind = (
            graph.rank(action.task) if is_assigned else ALL_RANKS,
            stage.module,
            action.type,
        )
        group = groups[action] = (
            rank_kind if rank_kind in fits else (ALL_RANKS, stage.module, action.type)
        )
        modeled_ms[group] += ms
        work[group] += flops(action)
    factors: dict[RankKind, float] = {}
    for group, ms in modeled_ms.items():
        rate = fits[group].ms_per_flop if group in fits else rates.get(group[1:])
        factors[group] = 1.0
        if rate is not None and ms > 0 and work[group] > 0:
            factors[group] = rate * work[group] / ms
    constants_ms = {group: fit.constant_ms for group, fit in fits.items()}
    compute_ms = {
        action: ms * factors[groups[action]] + (ms > 0) * constants_ms.get(groups[action], 0.0)
        for action, ms in costs.compute_ms.items()
    }
    tp_comm_ms = {action: ms * factors[groups[action]] for action, ms in costs.tp_comm_ms.items()}
    return replace(costs, compute_ms=compute_ms, tp_comm_ms=tp_comm_ms)


def modeled_totals(
    graph: StageGraph, costs: PlanCosts, flops: Durations
) -> dict[ActionKind, ActionTotals]:
    """Return the modeled time and the FLOPs of all actions of each kind."""
    owners = [stage.module for stage in graph.layout.stages]
    totals: dict[ActionKind, ActionTotals] = {}
    for action, action_ms in costs.compute_ms.items():
        kind = owners[action.stage], action.type
        totals[kind] = totals.get(kind, ActionTotals(0.0, 0.0)).plus(
            ActionTotals(action_ms, flops(action))
        )
    return totals


@gc_disabled()
def plan_step_with_costs(  # noqa: PLR0913 - those of `plan_step` and three of cost models
    layout: StageLayout,
    config: ParallelConfig,
    modules: Sequence[ModuleDescription],
    microbatches: Sequence[MicrobatchMeta],
    targets: Sequence[int] | None = None,
    *,
    specs: Callable[[StageGraph], MessageSpecs] = lambda graph: {},
    sharding: UnshardMode = "step",
    reduces_early: bool = False,
    factors: Mapping[ActionKind, float] | None = None,
    search: Callable[[StageGraph, Durations], StepOrder] | None = None,
    tuning: LayerTuning | None = None,
) -> PipelinePlan:
    """Return the plan of a training step with measured times, a searched order or tuned layers.

    The search compares work and not bytes. If a searched order does not fit into memory with tuned
    layers, the plan has the first separated schedule that fits.

    Args:
        layout: Stages, as in `plan_step`.
        config: [parallel] section, as in `plan_step`.
        modules: Descriptions of the complete modules.
        microbatches: Microbatches of the step.
        targets: Number of targets of each microbatch, as in `plan_step`.
        specs: Returns the tensors of each message of a graph.
        sharding: Collectives, as in `plan_step`.
        reduces_early: Whether reductions overlap, as in `plan_step`.
        factors: Measured factors on FLOPs by action kind.
        search: Returns the order for a graph and durations. None for the schedule of the recipe.
        tuning: Selection of the layers that recompute. None if the plan does not select layers.

    Raises:
        PlanError: The schedule does not support the microbatches, or they do not fit into memory.
    """
    step: StepOrder | None = None
    if layout.rank_count > 1:
        graph = step_graph(layout, config, microbatches, sharding)
        costs = scale_durations(
            task_durations(graph, modules, microbatches, targets), graph, factors
        )
        step = search(graph, costs) if search else StepOrder(*order_step(graph, config, costs))

    def make_plan(order: tuple[StageGraph, ComputeOrder] | None) -> PipelinePlan:
        plan = plan_step(
            layout, config, modules, microbatches, targets,
            specs=specs, sharding=sharding, reduces_early=reduces_early, order=order,
        )  # fmt: skip
        if step is not None and step.launches:
            plan = add_launches(plan, step.launches)
            validate_plan(plan).raise_for_problems()
        if tuning is not None:
            plan = tune_layers(plan, modules, microbatches, tuning, targets).plan
        return plan

    if step is None:
        return make_plan(None)
    try:
        return make_plan((step.graph, step.order))
    except PlanError:
        if tuning is None or config.schedule != "searched":
            raise
        for _, order in inflight_limited_orders(step.graph, costs):
            with suppress(PlanError):
                return make_plan((step.graph, order))
        raise
