"""The ways of training that `head_to_head` compares, each as a function of a recipe.

All of them may recompute: a step is simulated with what the recipe says of recomputation, and with
layers tuned to memory (PipeWeaver §6.3): that fits where the recipe's step does not, and recomputes
less where there is room. The faster one that fits counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from support.models.kernel_steps import SEARCHED, optimus_kernels
from torchmm.balance.bubbles.optimus import optimus
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import Profile
from torchmm.balance.costs.step_costs import plan_costs
from torchmm.balance.orchestration.search import OrchestrationPlan, orchestrate
from torchmm.balance.recomputation.costs import costs_of_plan
from torchmm.balance.recomputation.tuning import tune_layers
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.errors import ConfigError, PlanError
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import Gathering
from torchmm.planning.apart.problem import orchestration_problem, sized_recipe
from torchmm.planning.encoder_sizes import encoder_combinations, with_pipelines
from torchmm.planning.executions import layer_tuning, module_executions
from torchmm.planning.forecast import Forecast, Forecaster
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import ActivationCheckpointConfig

TUNED = ActivationCheckpointConfig(mode="tuned", memory_limit="97%")
EVALUATIONS, ALTERNATIVES = 32, 5
ROUNDS = 2
"""Of orders found and layers tuned."""
IMAGES = (None, 2)
"""Of an encoder at once; None: as the recipe says."""
SCHEDULES_APART = (("interleaved_1f1b", 2), ("zero_bubble", 1), ("separated", 1))
"""Of modules on devices of their own, other than 1F1B, and LLM stages per rank."""
TRIED = 2
"""Plans that are tuned, and tried under other schedules: the fastest ones."""


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
        changes = {"placement": "colocated", "schedule": "optimus"}
        parallel = recipe.parallel.model_copy(
            update={**changes, "pipeline": forecaster.run.llm.pipeline}
        )
        modules, metas = forecaster.modules, forecaster.workload.microbatches
        colocated = recipe.model_copy(update={"parallel": parallel})
        run = replace(forecaster.run, recipe=colocated, units={})
        executions = module_executions(run, modules)
        sharded = any(execution.shard > 1 for execution in executions.values())
        graph = step_graph(plan_layout(parallel, modules, metas), parallel, metas)
        model = CostModel(forecaster.profile, recipe.training.dtype, executions)
        costs = plan_costs(graph, modules, metas, model)
        return cls(forecaster, parallel, graph, model, costs, "step" if sharded else "none")

    def whole(self, recipe: Recipe) -> SimulatedStep | None:
        """Whole actions in bubbles; None: nothing fits."""
        planned = optimus(self.graph, self.costs, sharding=self.sharding, evaluations=EVALUATIONS)
        plan = lower_plan(planned.order, planned.graph, {}, sharding=self.sharding)
        modules, metas = self.forecaster.modules, self.forecaster.workload.microbatches
        tuning = layer_tuning(recipe, modules, self.model, layerwise=False)
        if tuning is None:
            return simulate(plan, self.costs)
        try:
            plan = tune_layers(plan, modules, metas, tuning).plan
        except PlanError:
            return None
        return simulate(plan, costs_of_plan(plan, modules, metas, self.model))

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


def optimus_results(
    recipe: Recipe,
    gpus: int,
    profile: Profile,
    llm_schedule: str | None = "interleaved_1f1b",
    images: Sequence[int | None] = IMAGES,
) -> Result | None:
    """The best encoder plan, planned with the costs that time it; the fastest ones tuned too.

    Args:
        llm_schedule: of the LLM, with kernels in bubbles; None: whole actions.
        images: of an encoder at once, to be tried; None: as the recipe says.
    """
    forecaster = Forecaster(recipe, gpus, profile)

    def tried(pipelines: dict[str, int], count: int | None, own: Recipe) -> Result | None:
        changed = with_pipelines(own, pipelines, sub_microbatch_images=count)
        one = Colocated.of(forecaster, changed)
        whole = one.whole(changed) if llm_schedule is None else None
        made = (whole, 0.0) if whole else None
        if llm_schedule is not None:
            made = one.kernels(changed, llm_schedule)
        if made is None:
            return None
        sizes = ", ".join(f"{name} {size}" for name, size in pipelines.items())
        words = [f"pipeline ranks: {sizes}", f"{count} images at once" if count else ""]
        words += ["layers tuned" if own is not recipe else ""]
        mfu = forecaster.rate("optimus", made[0]).mfu
        return Result("Optimus", made[0], mfu, "; ".join(filter(None, words)), made[1])

    plain = [
        (found, pipelines, count)
        for pipelines in encoder_combinations(forecaster)
        for count in images
        if (found := tried(pipelines, count, recipe)) is not None
    ]
    plain.sort(key=lambda each: each[0].step_s)
    lean = tuned(recipe)
    again = [tried(pipelines, count, lean) for _, pipelines, count in plain[:TRIED]]
    return best([*(found for found, *_ in plain), *again], "Optimus")


def disttrain(recipe: Recipe, gpus: int, profile: Profile) -> tuple[Result | None, Result | None]:
    """The fastest of its planner's best plans under 1F1B, and under any schedule.

    Plans are looked for with what the recipe says of recomputation, and with everything recomputed,
    which leaves room for more in one place; the fastest ones are then tuned, too.
    """
    plans: list[OrchestrationPlan] = []
    full = ActivationCheckpointConfig(mode="full")
    for lean in (recipe, recipe.model_copy(update={"activation_checkpoint": full})):
        try:
            problem = orchestration_problem(lean, gpus, profile)
            found = orchestrate(problem, alternatives=ALTERNATIVES)
        except (ConfigError, ValueError):
            continue
        plans += [found.best, *found.alternatives]
    first = [
        (made, plan)
        for plan in plans
        if (made := _apart(recipe, plan, profile, ("1f1b", 1))) is not None
    ]
    first.sort(key=lambda each: each[0].step_s)
    plain: list[Result | None] = [made for made, _ in first]
    every = list(plain)
    for _, plan in first[:TRIED]:
        plain.append(_apart(tuned(recipe), plan, profile, ("1f1b", 1)))
        for schedule in SCHEDULES_APART:
            every += [_apart(own, plan, profile, schedule) for own in (recipe, tuned(recipe))]
    return best(plain, "DistTrain"), best([*plain, *every], "modules apart, any schedule")


def _apart(
    recipe: Recipe, plan: OrchestrationPlan, profile: Profile, schedule: tuple[str, int]
) -> Result | None:
    """A step of modules on devices of their own; None: it cannot be run."""
    own = sized_recipe(recipe, {unit.name: unit.sizes for unit in plan.units})
    changes = {"schedule": schedule[0], "virtual_stages": schedule[1]}
    try:
        forecaster = Forecaster(own, plan.devices, profile)
        made = forecaster.forecast_parallel(own.parallel.model_copy(update=changes))
    except ConfigError:  # a model cannot be cut for every plan
        return None
    sizes = ", ".join(
        f"{unit.name} {s.pipeline} x {s.data} x {s.tensor}"
        for unit in plan.units
        for s in [unit.sizes]
    )
    words = [f"pipeline x data x tensor: {sizes}; {plan.devices} devices"]
    words += [schedule[0]] if schedule[0] != "1f1b" else []
    words += ["layers tuned"] if recipe.activation_checkpoint == TUNED else []
    return result("DistTrain", made, "; ".join(words))


def combined(
    recipe: Recipe, gpus: int, profile: Profile, others: Sequence[Result | None]
) -> Result | None:
    """The best combination of the three: encoder plans of Optimus, searched or other orders of the
    LLM, microbatches reordered over and inside of data-parallel groups, layers tuned.

    Args:
        others: further candidates, each with its name in `method`.
    """
    data = recipe.data.model_copy(update={"reorder": "both"})
    reordered = recipe.model_copy(update={"data": data})
    found = [each for each in others if each is not None]
    for name in (SEARCHED, "interleaved_1f1b", "zero_bubble"):
        try:
            each = optimus_results(reordered, gpus, profile, name, (None,))
        except (ConfigError, PlanError, ValueError):  # an order the model or its memory cannot have
            continue
        if each is not None:
            found.append(each._replace(method=f"Optimus' encoders, LLM {name}, reordered"))
    each = forecast("searched, reordered", reordered, gpus, profile, "searched")
    found += [each] if each is not None else []
    least = min(found, key=key)
    words = "; ".join(word for word in (least.method, least.note) if word)
    return least._replace(method="best combination", note=words)
