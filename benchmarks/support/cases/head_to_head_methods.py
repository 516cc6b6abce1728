"""The ways of training that `head_to_head` compares, each as a function of a recipe.

All of them may recompute: a step is simulated with what the recipe says of recomputation, and with
layers tuned to memory (PipeWeaver §6.3): that fits where the recipe's step does not, and recomputes
less where there is room. The faster one that fits counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from support.models.kernel_steps import SEARCHED, optimus_kernels
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import Profile
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.recomputation.costs import costs_of_plan
from torchmm.balance.recomputation.tuning import tune_layers
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.errors import ConfigError, PlanError
from torchmm.common.processes import without_collection
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import Gathering
from torchmm.planning.executions import layer_tuning, module_executions
from torchmm.planning.forecast import Forecast, Forecaster, StepSample
from torchmm.planning.search.encoder_sizes import Tried, choose_encoders, least_promise_ms
from torchmm.planning.search.search import search_plans
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import ActivationCheckpointConfig

TUNED = ActivationCheckpointConfig(mode="tuned", memory_limit="97%")
EVALUATIONS = 32
ROUNDS = 2
"""Of orders found and layers tuned."""
OPTIMUS = "Optimus"
KERNELS_LEAST = 0.9
"""Of what whole actions are promised to take, kernels take at least this (0.91 with printed sizes):
what is bounded by it is not tried. A margin, no bound."""
EFFORT = 1_000_000.0
"""Actions that DistTrain's planner simulates at most."""
TRIED = 2
"""Sizes of encoders that kernels begin with, for each way to recompute."""


class Result(NamedTuple):
    """A method's step."""

    method: str
    step: SimulatedStep
    mfu: float
    note: str = ""
    hidden: float = 0.0
    """Computation inside of the LLM's actions, as a share of all ranks' step."""

    @property
    def step_s(self) -> float:
        """Duration."""
        return self.step.makespan_ms / 1e3

    @property
    def idle(self) -> float:
        """Share of the step without computation, mean of the ranks."""
        return self.step.timeline.bubble_fraction - self.hidden

    @property
    def peak_gib(self) -> float:
        """Memory of the rank that needs most."""
        return max(self.step.peak_bytes) / 2**30


def key(found: Result) -> tuple[bool, float]:
    """Sorts: what fits first, then by time."""
    return not found.step.fits, found.step_s


def best(found: Sequence[Result | None], method: str) -> Result | None:
    """The best of some, as one method's."""
    least = min((each for each in found if each is not None), key=key, default=None)
    return None if least is None else least._replace(method=method)


def tuned(recipe: Recipe) -> Recipe:
    """The recipe with layers tuned to memory."""
    return recipe.model_copy(update={"activation_checkpoint": TUNED})


def colocated(recipe: Recipe, **changes: object) -> Recipe:
    """The recipe with encoders in the LLM's bubbles."""
    changes = {"placement": "colocated", "schedule": "optimus", **changes}
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=changes)})


def memory_ways(recipe: Recipe) -> Iterator[tuple[Recipe, str]]:
    """The recipe as it is, and tuned, with words for a note."""
    yield recipe, ""
    yield tuned(recipe), "layers tuned"


def forecast(
    method: str, recipe: Recipe, gpus: int, profile: Profile, schedule: str | None = None
) -> Result | None:
    """The better of both ways; None where the method cannot run the model with these sizes."""
    found = []
    for own, note in memory_ways(recipe):
        made = Forecaster(own, gpus, profile).forecast(schedule)
        found.append(result(method, made, note))
    return best(found, method)


def result(method: str, made: Forecast, note: str = "") -> Result | None:
    """None where there is no step."""
    return None if made.step is None else Result(method, made.step, made.mfu, note)


class Colocated(NamedTuple):
    """One step of encoders on the LLM's ranks."""

    forecaster: Forecaster
    parallel: ParallelConfig
    graph: StageGraph
    model: CostModel
    costs: PlanCosts
    sharding: Gathering

    @classmethod
    def of(cls, forecaster: Forecaster, recipe: Recipe) -> Colocated:
        """The recipe's first step."""
        own = colocated(recipe, pipeline=forecaster.run.llm.pipeline)
        parallel = own.parallel
        modules, metas = forecaster.modules, forecaster.workload.microbatches
        run = replace(forecaster.run, recipe=own, units={})
        executions = module_executions(run, modules, forecaster.profile.device.type)
        sharded = any(execution.shard > 1 for execution in executions.values())
        graph = step_graph(plan_layout(parallel, modules, metas), parallel, metas)
        model = CostModel(forecaster.profile, recipe.training.dtype, executions)
        costs = plan_costs(graph, modules, metas, model)
        return cls(forecaster, parallel, graph, model, costs, "step" if sharded else "none")

    def kernels(self, recipe: Recipe, llm_schedule: str) -> tuple[SimulatedStep, float] | None:
        """Kernels in bubbles; the step, and the share of it that they hide. None: nothing fits.

        Where layers are tuned, they are for the order found without, and another order is looked
        for with what they then take; the better of both counts.
        """
        modules, metas = self.forecaster.modules, self.forecaster.workload.microbatches
        tuning = layer_tuning(recipe, modules, self.model, layerwise=False)
        found: list[tuple[SimulatedStep, float]] = []
        costs = self.costs
        for _ in range(ROUNDS):
            planned = optimus_kernels(
                self.graph, costs, modules, llm_schedule=llm_schedule, sharding=self.sharding,
                evaluations=EVALUATIONS,
            )  # fmt: skip
            inside = sum(
                max(0.0, ms - costs.tensor_ms.get(action, 0.0))
                for action, ms in planned.hidden_ms.items()
            )
            plan = lower_plan(planned.order, planned.graph, {}, sharding=self.sharding)
            if tuning is not None:
                try:
                    plan = tune_layers(plan, modules, metas, tuning).plan
                except PlanError:  # not even with everything recomputed
                    break
                costs = costs_of_plan(plan, modules, metas, self.model)
            step = simulate(plan, planned.costs(costs))
            found.append((step, inside / len(step.peak_bytes) / step.makespan_ms))
            if not plan.recompute:  # the next round would be the same
                break
        return min(found, key=lambda each: (not each[0].fits, each[0].makespan_ms), default=None)


class Start(NamedTuple):
    """Encoders with sizes, from which kernels in bubbles begin."""

    recipe: Recipe
    note: str


class Filled(NamedTuple):
    """Encoders in bubbles by whole actions."""

    whole: Result | None
    starts: tuple[Start, ...]
    """The fastest sizes, as a run has them and otherwise."""


def whole_actions(recipe: Recipe, gpus: int, profile: Profile) -> Filled:
    """As a run plans them: sizes, stages and images at once of encoders by `choose_encoders`."""
    found: list[Result | None] = []
    starts: list[Start] = []
    for own, note in memory_ways(colocated(recipe)):
        try:
            choice = choose_encoders(Forecaster(own, gpus, profile))
        except ConfigError:  # nothing fits
            continue
        first, *others = (_start(tried, note) for tried in choice.tried[:TRIED])
        starts += [first, *others]
        made = choice.tried[0].forecast
        words = first.note
        if choice.refined is not None:
            made = choice.refined.forecast
            words = "; ".join([first.note, *choice.refined.words])
            starts.append(Start(choice.recipe, words))
        found.append(result(OPTIMUS, made, words))
    return Filled(best(found, OPTIMUS), tuple(starts))


def _start(tried: Tried, note: str) -> Start:
    """With sizes that were tried."""
    words = [f"pipeline ranks: {tried.sizes}", note]
    return Start(tried.recipe, "; ".join(filter(None, words)))


class Bubbles(NamedTuple):
    """Encoders in bubbles, with the fastest sizes that fit."""

    whole: Result | None
    """By whole actions."""
    kernels: Result | None
    """By kernels, or by whole actions where those are no longer."""
    starts: tuple[Start, ...]
    """Of the latter."""


def in_bubbles(recipes: Sequence[Recipe], gpus: int, profile: Profile) -> Bubbles:
    """Of recipes that differ in sizes, those of the shortest promises first (`promised_ms`), until
    what was found is faster than what is promised.

    Sizes are told in notes where there is more than one recipe.
    """
    promises_ms: list[tuple[float, int]] = []
    for index, recipe in enumerate(recipes if len(recipes) > 1 else ()):
        try:  # with all that is kept: recomputing takes longer
            lean = tuned(colocated(recipe))
            promises_ms.append((least_promise_ms(Forecaster(lean, gpus, profile)), index))
        except ConfigError:  # its states do not fit
            continue
    found = Bubbles(None, None, ())
    for promise_ms, index in sorted(promises_ms) or [(0.0, 0)]:
        limits_ms = (found.whole, promise_ms), (found.kernels, KERNELS_LEAST * promise_ms)
        if all(own and own.step.fits and own.step_s * 1e3 < ms for own, ms in limits_ms):
            break
        recipe = recipes[index]
        filled = whole_actions(recipe, gpus, profile)
        kernels = best([kernels_in_bubbles(filled.starts, gpus, profile), filled.whole], OPTIMUS)
        sized = [
            made and made._replace(note=noted(recipe, made.note) if len(recipes) > 1 else made.note)
            for made in (filled.whole, kernels)
        ]
        starts = filled.starts
        if found.kernels is not None and (kernels is None or key(kernels) >= key(found.kernels)):
            starts = found.starts
        found = Bubbles(
            best([found.whole, sized[0]], OPTIMUS), best([found.kernels, sized[1]], OPTIMUS), starts
        )
    return found


def noted(recipe: Recipe, note: str) -> str:
    """A note that begins with sizes."""
    parallel = recipe.parallel
    sizes = f"pipeline {parallel.pipeline}, tensor {parallel.tensor}"
    if parallel.virtual_stages > 1:
        sizes += f", {parallel.virtual_stages} stages per rank"
    return f"{sizes}; {note}" if note else sizes


@without_collection()
def kernels_in_bubbles(
    starts: Sequence[Start], gpus: int, profile: Profile, llm_schedule: str = "interleaved_1f1b"
) -> Result | None:
    """The best of some encoder plans with kernels in bubbles, planned with the costs that time it.

    Args:
        llm_schedule: of the LLM.
    """
    found: list[Result | None] = []
    for start in starts:
        forecaster = Forecaster(start.recipe, gpus, profile)
        made = Colocated.of(forecaster, start.recipe).kernels(start.recipe, llm_schedule)
        if made is not None:
            mfu = forecaster.rate("optimus", made[0]).mfu
            found.append(Result(OPTIMUS, made[0], mfu, start.note, made[1]))
    return best(found, OPTIMUS)


def disttrain(
    recipe: Recipe, gpus: int, profile: Profile, effort: float = EFFORT
) -> tuple[Result | None, Result | None]:
    """The fastest plan of modules apart under 1F1B, as in the paper, and under any schedule.

    Args:
        effort: of each search, as of `search_plans`.
    """
    sample = StepSample(recipe)
    try:
        under_1f1b, under_any = (
            _apart(recipe, gpus, profile, sample, some, effort) for some in (("1f1b",), None)
        )
    except ConfigError:
        return None, None
    either = best([under_1f1b, under_any], "modules apart, any schedule")
    return best([under_1f1b], "DistTrain"), either


def _apart(
    recipe: Recipe,
    gpus: int,
    profile: Profile,
    sample: StepSample,
    schedules: Sequence[str] | None,
    effort: float,
) -> Result | None:
    judged = search_plans(
        recipe,
        gpus,
        profile,
        methods=("disaggregated",),
        budget_s=inf,
        effort=effort,
        schedules=schedules,
        sample=sample,
    )
    found = judged.best
    if found is None:
        return None
    parallel, mode = found.recipe.parallel, found.recipe.activation_checkpoint.mode
    words = [f"pipeline x data x tensor: {found.sizes}; {found.devices} devices"]
    words += [parallel.schedule] if parallel.schedule != "1f1b" else []
    words += ["layers tuned" if mode == TUNED.mode else f"recomputation: {mode}"]
    return result("DistTrain", found.forecast, "; ".join(words))


def combined(
    recipe: Recipe,
    gpus: int,
    profile: Profile,
    starts: Sequence[Start],
    others: Sequence[Result | None],
) -> Result | None:
    """The best combination of the three: encoder plans of Optimus, searched or other orders of the
    LLM, microbatches reordered over and inside of data-parallel groups, layers tuned.

    Args:
        starts: encoder plans.
        others: further candidates, each with its name in `method`.
    """
    data = recipe.data.model_copy(update={"reorder": "both"})
    reordered = recipe.model_copy(update={"data": data})
    own = [
        start._replace(recipe=start.recipe.model_copy(update={"data": data})) for start in starts
    ]
    found = [each for each in others if each is not None]
    for name in (SEARCHED, "interleaved_1f1b", "zero_bubble"):
        try:
            each = kernels_in_bubbles(own, gpus, profile, name)
        except (ConfigError, PlanError, ValueError):  # an order the model or its memory cannot have
            continue
        if each is not None:
            words = noted(starts[0].recipe, each.note)
            method = f"Optimus' encoders, LLM {name}, reordered"
            found.append(each._replace(method=method, note=words))
    each = forecast("searched, reordered", reordered, gpus, profile, "searched")
    found += [each._replace(note=noted(recipe, each.note))] if each is not None else []
    least = min(found, key=key)
    words = "; ".join(word for word in (least.method, least.note) if word)
    return least._replace(method="best combination", note=words)
