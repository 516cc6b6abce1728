"""The schedules "optimus" and "searched", which need costs, as entries of the table "schedules".

Schedules of the core depend only on the graph of a step (`torchmm.pipelining.schedules.names`).
These schedules also select the replica that runs each task, by the durations of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple, Protocol

from torchmm.balance.compiled import Uint32s
from torchmm.balance.optimus.choice import StepOrder, bubble_choices
from torchmm.balance.optimus.order import optimus
from torchmm.balance.pipeweaver.order_search.best_order import (
    LEAST_GAIN,
    SearchedOrder,
    StepSearch,
    search_within_memory,
)
from torchmm.balance.pipeweaver.order_search.remembered import RememberedOrders
from torchmm.balance.pipeweaver.order_search.search import Budget, Settings
from torchmm.balance.pipeweaver.recomputation.joint import TunedSearch
from torchmm.balance.pipeweaver.recomputation.tuning import Tuner
from torchmm.balance.section import SearchConfig
from torchmm.balance.step_costs import PlanCosts
from torchmm.pipelining.plan.actions import COMPUTE, Action, ActionType
from torchmm.pipelining.plan.graph import StageGraph, StageLayout
from torchmm.pipelining.plan.plan import ComputeOrder, Durations, Gathering
from torchmm.pipelining.schedules.colocated import colocated_layout
from torchmm.pipelining.schedules.layouts import (
    ModuleLayers,
    megatron_balanced_layout,
    megatron_layout,
    separated_layout,
)
from torchmm.planning.step import PlannedSchedule
from torchmm.recipe.parallel_section import ParallelConfig

EVALUATIONS = 4000
"""Orders tried for a step, where neither the recipe nor the time of a step says how many: a few
seconds for the largest steps of PipeWeaver."""
MOST_ASSIGNMENTS = 256
"""Of encoder tasks to pipelines, tried for each of Optimus' candidates."""


@dataclass(frozen=True)
class RelativeCosts:
    """Costs that compare orders of a step, although nobody knows its seconds and bytes.

    Attributes:
        costs: times are thousandths of the step's whole work, and bytes proportional to them.
        unit: such a thousandth in the unit of the durations it comes from (FLOPs, or milliseconds
            where rates were measured).
    """

    costs: PlanCosts
    unit: float


def relative_costs(graph: StageGraph, durations: Durations) -> RelativeCosts:
    """Costs of compute actions alone.

    Args:
        durations: in any unit; only their ratios count.
    """
    found = {Action(k, *t): float(durations(Action(k, *t))) for t in graph.tasks() for k in COMPUTE}
    total = sum(found.values())
    scale = 1000.0 / total if total > 0 else 1.0
    costs = PlanCosts({action: value * scale for action, value in found.items()})
    return RelativeCosts(costs, 1.0 / scale)


def layout_optimus(config: ParallelConfig, modules: Sequence[ModuleLayers]) -> StageLayout:
    """Encoders in pipelines of their own, in stages of single layers unless the recipe wants
    fewer: a stage is the least that can be put into a bubble.

    Raises:
        ValueError: the modules cannot be cut like this.
    """
    encoders = {module.name: module for module in modules if module.kind == "encoder"}
    pipelines = {name: config.sizes_given(name).get("pipeline", 1) for name in encoders}
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
    """Optimus where only durations are known, as in sketches of a step: encoders in the bubbles of
    the LLM's own schedule, as `config` says.

    Raises:
        ValueError: the layout is not colocated.
    """
    costs = relative_costs(graph, durations).costs
    planned = optimus(
        graph,
        costs,
        llm_schedule=config.llm_schedule,
        granularity=config.bubble_granularity,
    )
    return planned.graph, planned.order


def layout_searched(config: ParallelConfig, modules: Sequence[ModuleLayers]) -> StageLayout:
    """Modality-separated segments, or what [parallel.search] stages says.

    Raises:
        ValueError: a module has fewer layers than stages.
    """
    if SearchConfig.of(config).stages == "megatron":
        return megatron_layout(modules, config.pipeline, config.virtual_stages)
    if SearchConfig.of(config).stages == "balanced":
        return megatron_balanced_layout(modules, config.pipeline, config.virtual_stages)
    segments = {module.name: config.segments(module.name) for module in modules}
    return separated_layout(modules, config.pipeline, segments)


def search_budget(section: SearchConfig, seconds: float | None = None) -> Budget:
    """How long a step's order is searched.

    Args:
        seconds: where the step before takes as long; None: nothing bounds the time.
    """
    evaluations = section.evaluations
    if evaluations is None and seconds is None:
        evaluations = EVALUATIONS
    return Budget(evaluations, seconds)


def search_settings(
    section: SearchConfig, workers: int | None = None, starts: Sequence[Uint32s] = ()
) -> Settings:
    """How a step's order is searched.

    Args:
        workers: threads; None: the recipe's.
        starts: orders that are tried first.
    """
    return Settings(workers=workers or section.workers, starts=starts)


def step_search(
    graph: StageGraph,
    costs: PlanCosts,
    least_gain: float = LEAST_GAIN,
    tuner: Tuner | None = None,
) -> StepSearch | TunedSearch:
    """A step to be searched: what runs, the process beside them and forecasts search alike.

    Args:
        costs: `torchmm.balance.step_plans.searched_costs`.
        least_gain: see `StepSearch`.
        tuner: of the step, where layers are tuned. If no order is found that fits then, ranks may
            use what the separated schedule would.

    Raises:
        SimulationError: a cost is missing or no number.
    """
    if tuner is not None:
        tuned = TunedSearch(graph, costs, tuner, least_gain)
        if tuned.fits:
            return tuned
    return search_within_memory(graph, costs, least_gain)


def search_by_costs(
    config: ParallelConfig,
    graph: StageGraph,
    costs: PlanCosts,
    budget: Budget | None = None,
    tuner: Tuner | None = None,
) -> SearchedOrder:
    """PipeWeaver's schedule of one step, as [parallel.search] says: transfers count, and memory is
    that of the device.

    Args:
        costs: `torchmm.balance.step_plans.searched_costs`, in runs and forecasts alike.
        budget: None: the recipe's.
        tuner: see `step_search`.

    Raises:
        ValueError: nothing fits into memory.
        SimulationError: a cost is missing or no number.
    """
    section = SearchConfig.of(config)
    step = step_search(graph, costs, tuner=tuner)
    return step.search(budget or search_budget(section), search_settings(section))


@dataclass(frozen=True)
class PlannedOrder:
    """The schedule of a step.

    Attributes:
        step: order of the actions.
        statistics: metrics of the search by their names in `torchmm.training.metrics`. The value of
            "predicted_step_ms" does not include all-gathers and reductions of searched schedules.
        refused: Whether the step does not fit into memory even if its layers are tuned.
    """

    step: StepOrder
    statistics: Mapping[str, Any]
    refused: bool = False

    @property
    def predicted_ms(self) -> float:
        """Predicted time of the step."""
        return float(self.statistics["predicted_step_ms"])


def searched_order(graph: StageGraph, found: SearchedOrder) -> PlannedOrder:
    """Return the result of a search with its graph."""
    statistics = {
        "planner": found.planner,
        "predicted_step_ms": found.predicted_ms,
        "speedup_over_default_order": found.speedup_over_default_order,
        "planner_evaluations": found.evaluations,
    }
    return PlannedOrder(StepOrder(graph, found.order), statistics)


def optimus_orders(
    config: ParallelConfig,
    graph: StageGraph,
    costs: PlanCosts,
    sharding: Gathering,
    evaluations: int | None = None,
    tuner: Tuner | None = None,
) -> Iterator[PlannedOrder]:
    """The best after each candidate that was simulated (`bubble_choices`); the last is the best.

    Args:
        costs: `torchmm.balance.step_plans.searched_costs`.
        sharding: as the plan will be lowered.
        evaluations: of each candidate, at most; None: the recipe's. Candidates need few.
        tuner: of the step, where layers are tuned.

    Raises:
        ValueError: the layout is not colocated.
        SimulationError: a cost is missing or no number.
    """
    for best in bubble_choices(
        graph,
        costs,
        llm_schedule=config.llm_schedule,
        granularity=config.bubble_granularity,
        sharding=sharding,
        tensor_share=config.tp_comm_fraction,
        evaluations=_assignments(config, evaluations),
        tuner=tuner,
    ):
        predicted_ms = best.simulated.makespan_ms
        is_known = predicted_ms > 0 and isfinite(best.coarse_ms)
        statistics = {
            "planner": f"optimus {best.bubbles}",
            "predicted_step_ms": predicted_ms,
            "speedup_over_default_order": best.coarse_ms / predicted_ms - 1 if is_known else None,
            "planner_evaluations": best.played,
        }
        refuses = tuner is not None and tuner.tuning.refuses
        yield PlannedOrder(best.step, statistics, refuses and not best.simulated.fits)


def _assignments(config: ParallelConfig, evaluations: int | None) -> int:
    given = (MOST_ASSIGNMENTS, SearchConfig.of(config).evaluations, evaluations)
    return min(most for most in given if most is not None)


def promised_ms(
    config: ParallelConfig, graph: StageGraph, costs: PlanCosts, sharding: Gathering
) -> float:
    """How long the bubble scheduler promises a step of `optimus_orders` to take with everything
    kept. That is neither a bound nor a forecast, but it is had in a tenth of a forecast's time, and
    what it promises to be shorter mostly is.

    Raises:
        As `optimus_orders`.
    """
    step = optimus(
        graph,
        costs,
        llm_schedule=config.llm_schedule,
        granularity=config.bubble_granularity,
        sharding=sharding,
        evaluations=_assignments(config, None),
    )
    return step.schedule.total_ms


def plan_by_costs(
    config: ParallelConfig,
    graph: StageGraph,
    costs: PlanCosts,
    sharding: Gathering,
    budget: Budget | None = None,
    tuner: Tuner | None = None,
) -> PlannedOrder:
    """The schedule of one step of a planner that times orders before it chooses.

    Args:
        costs: as for `search_by_costs`.
        sharding: as the plan will be lowered.
        budget: None: the recipe's. With one evaluation it is the natural order, or the first
            coarse one that is not refused.
        tuner: see `step_search`.

    Raises:
        ValueError: nothing fits into memory.
        SimulationError: a cost is missing or no number.
    """
    if config.schedule == "optimus":
        evaluations = None if budget is None else budget.evaluations
        orders = optimus_orders(config, graph, costs, sharding, evaluations, tuner)
        for best in orders:
            if evaluations == 1 and not best.refused:
                break
        return best
    return searched_order(graph, search_by_costs(config, graph, costs, budget, tuner))


class Improvements(Protocol):
    """Who takes the orders that are found while better ones are looked for."""

    def leave(self, best: PlannedOrder) -> None:
        """Takes one."""

    def seen(self, best_ms: float, make: Callable[[], PlannedOrder]) -> bool:
        """Is told how long the best order so far takes, and how to make it, which it may do to take
        it; whether to go on."""

    def seconds_left(self) -> float | None:
        """For a search; None: as long as all its evaluations take."""


class Search(NamedTuple):
    """How orders are searched beside a run.

    Attributes:
        least_gain, tuner: see `step_search`.
        remembered: orders of steps before.
        workers: threads.
    """

    least_gain: float
    tuner: Tuner | None
    remembered: RememberedOrders
    workers: int


def improve_order(
    config: ParallelConfig,
    graph: StageGraph,
    costs: PlanCosts,
    sharding: Gathering,
    improvements: Improvements,
    search: Search,
) -> PlannedOrder:
    """As `plan_by_costs`, but hands over what it has on the way: at once the first order, static or
    coarse, which takes little time to find, then better ones."""
    if config.schedule == "optimus":
        orders = optimus_orders(config, graph, costs, sharding, tuner=search.tuner)
        left = False
        for best in orders:
            if best.refused:
                continue
            if left and not improvements.seen(best.predicted_ms, partial(_same, best)):
                break
            if not left:
                improvements.leave(best)
            left = True
        return best
    step = step_search(graph, costs, search.least_gain, search.tuner)
    improvements.leave(searched_order(graph, step.best()))

    def seen(best_ms: float, make: Callable[[], SearchedOrder]) -> bool:
        return improvements.seen(best_ms, lambda: searched_order(graph, make()))

    section = SearchConfig.of(config)
    settings = search_settings(section, search.workers, search.remembered.starts(step.dispatcher))
    found = step.search(search_budget(section, improvements.seconds_left()), settings, seen)
    if found.segments is not None:
        search.remembered.add(step.dispatcher, found.segments)
    return searched_order(graph, found)


def _same(order: PlannedOrder) -> PlannedOrder:
    return order


def plan_by_search(
    config: ParallelConfig, graph: StageGraph, durations: Durations
) -> tuple[StageGraph, ComputeOrder]:
    """The same where only durations are known, as in sketches of a step: what a task keeps is then
    proportional to its forward's work, and ranks have the memory of the separated schedule."""
    costs = relative_costs(graph, durations).costs
    # Whole numbers, fine enough to separate tasks that differ by a billionth of the step.
    work = costs.compute_ms
    kept = {task: round(work[Action(ActionType.F, *task)] * 1e6) for task in graph.tasks()}
    return graph, search_by_costs(config, graph, replace(costs, kept_bytes=kept)).order


OPTIMUS_SCHEDULE = PlannedSchedule(layout_optimus, plan_optimus)
SEARCHED_SCHEDULE = PlannedSchedule(layout_searched, plan_by_search)
