"""Entries "optimus" and "searched" of the registry "schedules", which need costs.

Schedules of the core depend only on the graph of a step (`torchmm.pipelining.schedules.registry`).
These schedules also select the replica that runs each task, by the durations of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple, Protocol

from torchmm.balance.numba_utils import Uint32s
from torchmm.balance.optimus.action_order import best_optimus_step
from torchmm.balance.optimus.schedule_selection import StepOrder, select_schedules
from torchmm.balance.pipeweaver.activation_checkpointing.memory_aware_search import (
    MemoryAwareSearch,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuner
from torchmm.balance.pipeweaver.schedule_search.search import SearchBudget, SearchSettings
from torchmm.balance.pipeweaver.schedule_search.step_search import (
    MIN_GAIN,
    SearchedOrder,
    StepSearch,
    build_limited_search,
)
from torchmm.balance.pipeweaver.schedule_search.warm_start import WarmStart
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.section import SearchConfig
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import ComputeOrder, Durations, UnshardMode
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.pipelining.schedules.layouts import (
    ModuleLayers,
    megatron_balanced_layout,
    megatron_layout,
    separated_layout,
)
from torchmm.planning.step import PlannedSchedule
from torchmm.recipe.parallel_section import ParallelConfig

DEFAULT_EVALUATIONS = 4000
"""Default number of evaluated orders per step if neither the recipe nor the step time limits it. A
few seconds for the largest steps of PipeWeaver."""
MAX_ASSIGNMENTS = 256
"""Maximum number of assignments of encoder tasks to pipelines per Optimus candidate."""


@dataclass(frozen=True)
class RelativeCosts:
    """Costs that compare orders of a step without known seconds and bytes.

    Attributes:
        costs: Times in thousandths of the total work of the step, and bytes proportional to them.
        unit: One thousandth of the total work in the unit of the input durations (FLOPs, or
            milliseconds if rates were measured).
    """

    costs: PlanCosts
    unit: float


def relative_costs(graph: StageGraph, durations: Durations) -> RelativeCosts:
    """Return the costs of compute actions only.

    Args:
        graph: Tasks of the step.
        durations: Durations in any unit. Only their ratios matter.
    """
    durations_by_action = {
        Action(k, *t): float(durations(Action(k, *t))) for t in graph.tasks() for k in COMPUTE
    }
    total = sum(durations_by_action.values())
    scale = 1000.0 / total if total > 0 else 1.0
    costs = PlanCosts({action: value * scale for action, value in durations_by_action.items()})
    return RelativeCosts(costs, 1.0 / scale)


def build_optimus_layout(config: ParallelConfig, modules: Sequence[ModuleLayers]) -> StageLayout:
    """Return a layout with encoders in separate pipelines.

    Encoder stages have one layer unless the recipe sets fewer stages, because a bubble holds at
    least one stage.

    Raises:
        ValueError: The modules cannot be split like this.
    """
    encoders = {module.name: module for module in modules if module.kind == "encoder"}
    pipelines = {name: config.explicit_sizes(name).get("pipeline", 1) for name in encoders}
    slices = {
        name: config.slices(name) or max(1, len(module.costs) // pipelines[name])
        for name, module in encoders.items()
    }
    return colocated_layout(
        modules,
        config.pipeline,
        config.virtual_stages,
        pipelines=pipelines,
        slices=slices,
        mirrors=config.mirrors,
        encoder_mirrors={name: config.encoder_mirrors(name) for name in encoders},
    )


def plan_optimus(
    config: ParallelConfig, graph: StageGraph, durations: Durations
) -> tuple[StageGraph, ComputeOrder]:
    """Return an Optimus step from durations only, as in sketches of a step.

    Raises:
        ValueError: The layout is not colocated.
    """
    costs = relative_costs(graph, durations).costs
    planned = best_optimus_step(
        graph,
        costs,
        llm_schedule=config.llm_schedule,
        granularity=config.bubble_granularity,
    )
    return planned.graph, planned.order


def build_searched_layout(config: ParallelConfig, modules: Sequence[ModuleLayers]) -> StageLayout:
    """Return a layout with modality-separated segments, or as set by `stages` in [parallel.search].

    Raises:
        ValueError: A module has fewer layers than stages.
    """
    if SearchConfig.from_parent(config).stages == "megatron":
        return megatron_layout(modules, config.pipeline, config.virtual_stages)
    if SearchConfig.from_parent(config).stages == "balanced":
        return megatron_balanced_layout(modules, config.pipeline, config.virtual_stages)
    segments = {module.name: config.segments(module.name) for module in modules}
    return separated_layout(modules, config.pipeline, segments)


def build_search_budget(section: SearchConfig, seconds: float | None = None) -> SearchBudget:
    """Return the limits of the search for the order of a step.

    Args:
        section: [parallel.search] section.
        seconds: Duration of the previous step. None for no time limit.
    """
    evaluations = section.evaluations
    if evaluations is None and seconds is None:
        evaluations = DEFAULT_EVALUATIONS
    return SearchBudget(evaluations, seconds)


def build_search_settings(
    section: SearchConfig, workers: int | None = None, starts: Sequence[Uint32s] = ()
) -> SearchSettings:
    """Return the settings of the search for the order of a step.

    Args:
        section: [parallel.search] section.
        workers: Number of threads. None for the value of the recipe.
        starts: Orders that are evaluated first.
    """
    return SearchSettings(workers=workers or section.workers, starts=starts)


def build_step_search(
    graph: StageGraph,
    costs: PlanCosts,
    min_gain: float = MIN_GAIN,
    tuner: LayerTuner | None = None,
) -> StepSearch | MemoryAwareSearch:
    """Return the search for the order of a step.

    Runs, background processes and simulations use the same search.

    Args:
        graph: Tasks of the step.
        costs: Costs of `torchmm.balance.step_plans.compute_search_costs`.
        min_gain: Minimum gain of `StepSearch`.
        tuner: Tuner of the step if layers are tuned. If no order fits then, ranks may use as much
            memory as the separated schedule.

    Raises:
        SimulationError: A cost is missing or invalid.
    """
    if tuner is not None:
        tuned = MemoryAwareSearch(graph, costs, tuner, min_gain)
        if tuned.fits:
            return tuned
    return build_limited_search(graph, costs, min_gain)


def search_schedule(
    config: ParallelConfig,
    graph: StageGraph,
    costs: PlanCosts,
    budget: SearchBudget | None = None,
    tuner: LayerTuner | None = None,
) -> SearchedOrder:
    """Return the PipeWeaver order of one step, with transfers and device memory.

    Args:
        config: [parallel] section.
        graph: Tasks of the step.
        costs: Costs of `torchmm.balance.step_plans.compute_search_costs`, in runs and simulations.
        budget: Search limits. None for those of the recipe.
        tuner: Tuner of the step. See `build_step_search`.

    Raises:
        ValueError: No order fits into memory.
        SimulationError: A cost is missing or invalid.
    """
    section = SearchConfig.from_parent(config)
    step = build_step_search(graph, costs, tuner=tuner)
    return step.search(budget or build_search_budget(section), build_search_settings(section))


@dataclass(frozen=True)
class PlannedOrder:
    """Order of a step with search metrics.

    Attributes:
        step: Order of the actions.
        statistics: Metrics of the search by their names in `torchmm.training.metrics`. The value of
            "predicted_step_ms" does not include all-gathers and reductions of searched schedules.
        exceeds_memory: Whether the step does not fit into memory even if its layers are tuned.
    """

    step: StepOrder
    statistics: Mapping[str, Any]
    exceeds_memory: bool = False

    @property
    def predicted_ms(self) -> float:
        """Predicted step time in ms."""
        return float(self.statistics["predicted_step_ms"])


def to_planned_order(graph: StageGraph, searched: SearchedOrder) -> PlannedOrder:
    """Return the result of a search with its graph."""
    statistics = {
        "planner": searched.planner,
        "predicted_step_ms": searched.predicted_ms,
        "speedup_over_default_order": searched.speedup_over_default_order,
        "planner_evaluations": searched.evaluations,
    }
    return PlannedOrder(StepOrder(graph, searched.order), statistics)


def search_optimus_orders(
    config: ParallelConfig,
    graph: StageGraph,
    costs: PlanCosts,
    sharding: UnshardMode,
    evaluations: int | None = None,
    tuner: LayerTuner | None = None,
) -> Iterator[PlannedOrder]:
    """Yield the best Optimus order after each simulated candidate (`select_schedules`).

    Args:
        config: [parallel] section.
        graph: Tasks of the step.
        costs: Costs of `torchmm.balance.step_plans.compute_search_costs`.
        sharding: Collectives with which the plan will be lowered.
        evaluations: Maximum number of evaluations per candidate. None for that of the recipe.
        tuner: Tuner of the step if layers are tuned.

    Raises:
        ValueError: The layout is not colocated.
        SimulationError: A cost is missing or invalid.
    """
    for best in select_schedules(
        graph,
        costs,
        llm_schedule=config.llm_schedule,
        granularity=config.bubble_granularity,
        sharding=sharding,
        tp_comm_fraction=config.tp_comm_fraction,
        evaluations=_max_assignments(config, evaluations),
        tuner=tuner,
    ):
        predicted_ms = best.simulated.makespan_ms
        is_known = predicted_ms > 0 and isfinite(best.coarse_ms)
        statistics = {
            "planner": f"optimus {best.mode}",
            "predicted_step_ms": predicted_ms,
            "speedup_over_default_order": best.coarse_ms / predicted_ms - 1 if is_known else None,
            "planner_evaluations": best.simulated_count,
        }
        must_fit = tuner is not None and tuner.tuning.must_fit
        yield PlannedOrder(best.step, statistics, must_fit and not best.simulated.fits)


def _max_assignments(config: ParallelConfig, evaluations: int | None) -> int:
    limits = (MAX_ASSIGNMENTS, SearchConfig.from_parent(config).evaluations, evaluations)
    return min(limit for limit in limits if limit is not None)


def estimate_step_ms(
    config: ParallelConfig, graph: StageGraph, costs: PlanCosts, sharding: UnshardMode
) -> float:
    """Return the bubble scheduler estimate of the step time without recomputation.

    The estimate is neither a bound nor a simulation, but needs a tenth of the time of a simulation.
    Steps with a lower estimate are usually faster.

    Raises:
        ValueError: The layout is not colocated.
        SimulationError: A cost is missing or invalid.
    """
    step = best_optimus_step(
        graph,
        costs,
        llm_schedule=config.llm_schedule,
        granularity=config.bubble_granularity,
        sharding=sharding,
        evaluations=_max_assignments(config, None),
    )
    return step.schedule.total_ms


def plan_with_costs(
    config: ParallelConfig,
    graph: StageGraph,
    costs: PlanCosts,
    sharding: UnshardMode,
    budget: SearchBudget | None = None,
    tuner: LayerTuner | None = None,
) -> PlannedOrder:
    """Return the order of one step of a schedule that is planned by costs.

    Args:
        config: [parallel] section.
        graph: Tasks of the step.
        costs: Costs as for `search_schedule`.
        sharding: Collectives with which the plan will be lowered.
        budget: Search limits. None for those of the recipe. With one evaluation, the result is the
            default order, or the first coarse order that fits.
        tuner: Tuner of the step. See `build_step_search`.

    Raises:
        ValueError: No order fits into memory.
        SimulationError: A cost is missing or invalid.
    """
    if config.schedule == "optimus":
        evaluations = None if budget is None else budget.evaluations
        orders = search_optimus_orders(config, graph, costs, sharding, evaluations, tuner)
        for best in orders:
            if evaluations == 1 and not best.exceeds_memory:
                break
        return best
    return to_planned_order(graph, search_schedule(config, graph, costs, budget, tuner))


class PlanCallback(Protocol):
    """Receiver of orders while the search for better orders continues."""

    def on_plan(self, best: PlannedOrder) -> None:
        """Receive an order."""

    def on_improvement(self, best_ms: float, make: Callable[[], PlannedOrder]) -> bool:
        """Report the best step time so far, with a function that builds its order.

        Returns:
            Whether the search should continue.
        """

    def remaining_s(self) -> float | None:
        """Return the remaining seconds of a search. None for no time limit."""


class BackgroundSearch(NamedTuple):
    """Settings of a background search for orders.

    Attributes:
        min_gain: Minimum gain. See `build_step_search`.
        tuner: Tuner of the step. See `build_step_search`.
        warm_start: Orders of previous steps.
        workers: Number of threads.
    """

    min_gain: float
    tuner: LayerTuner | None
    warm_start: WarmStart
    workers: int


def improve_order(
    config: ParallelConfig,
    graph: StageGraph,
    costs: PlanCosts,
    sharding: UnshardMode,
    callback: PlanCallback,
    search: BackgroundSearch,
) -> PlannedOrder:
    """Return the order of `plan_with_costs`, and report intermediate orders.

    The first order, static or coarse, is fast to compute and is reported at once. Better orders
    follow.
    """
    if config.schedule == "optimus":
        orders = search_optimus_orders(config, graph, costs, sharding, tuner=search.tuner)
        is_reported = False
        for best in orders:
            if best.exceeds_memory:
                continue
            if is_reported and not callback.on_improvement(
                best.predicted_ms, partial(_identity, best)
            ):
                break
            if not is_reported:
                callback.on_plan(best)
            is_reported = True
        return best
    step = build_step_search(graph, costs, search.min_gain, search.tuner)
    callback.on_plan(to_planned_order(graph, step.best()))

    def seen(best_ms: float, make: Callable[[], SearchedOrder]) -> bool:
        return callback.on_improvement(best_ms, lambda: to_planned_order(graph, make()))

    section = SearchConfig.from_parent(config)
    settings = build_search_settings(
        section, search.workers, search.warm_start.starts(step.dispatcher)
    )
    result = step.search(build_search_budget(section, callback.remaining_s()), settings, seen)
    if result.segments is not None:
        search.warm_start.add(step.dispatcher, result.segments)
    return to_planned_order(graph, result)


def _identity(order: PlannedOrder) -> PlannedOrder:
    return order


def plan_with_search(
    config: ParallelConfig, graph: StageGraph, durations: Durations
) -> tuple[StageGraph, ComputeOrder]:
    """Return a searched step from durations only, as in sketches of a step.

    Activations of a task are proportional to its forward work, and ranks have the memory of the
    separated schedule.
    """
    costs = relative_costs(graph, durations).costs
    # Integers with a resolution of a billionth of the step.
    work = costs.compute_ms
    saved_bytes = {task: round(work[Action(ActionType.F, *task)] * 1e6) for task in graph.tasks()}
    return graph, search_schedule(config, graph, replace(costs, saved_bytes=saved_bytes)).order


OPTIMUS_SCHEDULE = PlannedSchedule(build_optimus_layout, plan_optimus)
SEARCHED_SCHEDULE = PlannedSchedule(build_searched_layout, plan_with_search)
