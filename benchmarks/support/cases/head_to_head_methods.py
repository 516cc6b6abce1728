"""The ways of training that `head_to_head` compares, each as a function of a recipe.

All pipelines tune what layers recompute to the memory (PipeWeaver §6.3), except the static plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from support.cases.plain_methods import (
    PLANNED,
    best_plain,
    describe,
    fits,
    recomputing,
    with_values,
)
from support.models.kernel_steps import optimus_kernels
from support.papers.paper_cells import in_one_chain
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import DeviceProfile
from torchmm.balance.costs.step_costs import compute_plan_costs
from torchmm.balance.pipeweaver.activation_checkpointing.recompute_costs import (
    compute_plan_costs_with_recompute,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import tune_layers
from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.recipe_simulation.step_simulator import (
    SimulatedStepReport,
    StepSample,
    StepSimulator,
)
from torchmm.balance.run_costs import build_layer_tuning
from torchmm.balance.search.plan_search import search_plans
from torchmm.balance.search.plan_space import METHODS
from torchmm.balance.search.result import SimulatedPlan
from torchmm.balance.simulation.simulator import SimulatedStep, simulate
from torchmm.common.errors import ConfigError, PlanError
from torchmm.common.processes import gc_disabled
from torchmm.pipelining.plan.graph import StageGraph
from torchmm.pipelining.plan.lowering import lower_plan
from torchmm.pipelining.plan.plan import UnshardMode
from torchmm.planning.executions import module_executions
from torchmm.planning.step import plan_layout, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.read import check_recipe
from torchmm.recipe.recipe import Recipe

MEGATRON, CHAIN, STATIC = "Megatron-LM", "Megatron-LM balanced", "static plan (nnScaler*)"
WHOLE, KERNELS = "Optimus, whole actions", "Optimus, kernels"
SEARCHED, SEPARATE = "PipeWeaver", "DistTrain"
EVALUATIONS = 32
"""Number of orders that the kernel scheduler evaluates."""
ROUNDS = 2
"""Number of rounds of the kernel scheduler and layer tuning."""
STATIC_MODES = ("none", "selective", "encoders", "full")
"""Recomputation of static plans; "encoders": "full" for encoders, "selective" for the LLM."""


class Result(NamedTuple):
    """A method and the forecast of its step.

    Attributes:
        method: Name of the method.
        forecast: Forecast with a step.
        note: Parallel sizes in words.
        hidden: Computation inside of LLM actions, as a fraction of the step of all ranks.
    """

    method: str
    report: SimulatedStepReport
    note: str = ""
    hidden: float = 0.0

    @property
    def step(self) -> SimulatedStep:
        """The simulated step."""
        assert self.report.step is not None
        return self.report.step

    @property
    def step_s(self) -> float:
        """Time of the step and the optimizer update in seconds."""
        return self.report.iteration_ms / 1e3

    @property
    def fits(self) -> bool:
        """True if all ranks have enough memory."""
        return fits(self.step)

    @property
    def idle(self) -> float:
        """Fraction of the step without computation, as mean of the ranks."""
        return self.step.timeline.bubble_fraction - self.hidden

    @property
    def peak_gib(self) -> float:
        """Memory of the rank with the highest memory use in GiB."""
        return max(self.step.peak_bytes) / 2**30


def key(result: Result) -> tuple[bool, float]:
    """Return the sort key: results that fit first, then by time."""
    return not result.fits, result.step_s


def best(results: Sequence[Result | None]) -> Result | None:
    """Return the best of several results of one method; None if there is none."""
    return min((each for each in results if each is not None), key=key, default=None)


class Comparison:
    """Comparison of all methods on one model, batch and cluster.

    Each pipeline method has the faster of two sizes: those that its paper prints for the model, if
    any, and those that the planner chooses.

    Args:
        recipe: Recipe of the model and the batch.
        gpus: Number of GPUs.
        profile: Profile of one GPU.
        budget_s: Time limit of the planner in seconds.
    """

    def __init__(self, recipe: Recipe, gpus: int, profile: DeviceProfile, budget_s: float) -> None:
        self.recipe = with_values(recipe, "data", reorder="none", balance="none")
        self.gpus, self.profile = gpus, profile
        self.sample = StepSample(recipe)
        self.printed = self.recipe
        if recipe.parallel.placement != "interleaved":
            self.printed = in_one_chain(self.recipe)
        self.chosen = self._choose(budget_s)

    def _choose(self, budget_s: float) -> dict[str, SimulatedPlan]:
        """Return the fastest plan of each method, each found in the same time.

        Plans may reorder sequences over ranks. Plans without a pipeline may also balance images.
        """
        reordered = with_values(self.recipe, "data", reorder="both")
        candidates: dict[str, SimulatedPlan | str] = {}
        for method in METHODS:
            result = search_plans(
                reordered if method == "disaggregated" else self.recipe,
                self.gpus,
                self.profile,
                methods=(method,),
                budget_s=budget_s / len(METHODS),
                sample=self.sample,
            )
            candidates |= result.best_by_method
        return {name: each for name, each in candidates.items() if isinstance(each, SimulatedPlan)}

    def results(self) -> Iterator[Result]:
        """Yield the result of each method that can run the model."""
        plain = best_plain(self.recipe, self.gpus, self.profile, self.sample)
        for method, option in plain.items():
            if option is not None:
                yield Result(method, option.report, describe(option.recipe))
        chains = [self.printed] if self.printed.parallel.pipeline > 1 else []
        if "chain" in self.chosen:
            chains.append(self.chosen["chain"].recipe)
        forecasts = (
            [self._planned(PLANNED, "fsdp")],
            [self.forecast(MEGATRON, chain, "megatron", stages=1) for chain in chains],
            [
                *(self.forecast(CHAIN, chain, "megatron_balanced") for chain in chains),
                self._planned(CHAIN, "chain"),
            ],
            [self._static(chains)],
            [*self._printed_colocated(), self._planned(WHOLE, "colocated")],
            list(self._kernels()),
            [*self._printed_searched(), self._planned(SEARCHED, "separated")],
            [self._planned(SEPARATE, "disaggregated")],
        )
        yield from (each for each in map(best, forecasts) if each is not None)

    def forecast(
        self, method: str, recipe: Recipe, schedule: str, stages: int | None = None
    ) -> Result | None:
        """Return the result of shared ranks with layers tuned to memory; None without a plan.

        Args:
            method: Name of the result.
            recipe: Recipe with parallel sizes.
            schedule: Schedule instead of the recipe's.
            stages: Stages per rank instead of the recipe's.
        """
        stages = stages or recipe.parallel.virtual_stages
        changes = {"schedule": schedule, "placement": "interleaved", "virtual_stages": stages}
        sized = with_values(recomputing(recipe, "auto"), "parallel", **changes)
        return self._simulated(method, sized)

    def _simulated(self, method: str, recipe: Recipe) -> Result | None:
        if check_recipe(recipe, self.gpus):
            return None
        try:
            forecaster = StepSimulator(recipe, self.gpus, self.profile, sample=self.sample)
            forecast = forecaster.simulate_parallel(recipe.parallel)
        except ConfigError:
            return None
        return None if forecast.step is None else Result(method, forecast, sizes(recipe))

    def _planned(self, method: str, name: str) -> Result | None:
        """Return the plan of the planner."""
        if name not in self.chosen:
            return None
        candidate = self.chosen[name]
        schedule = candidate.recipe.parallel.schedule
        return Result(
            method, candidate.report, f"{candidate.sizes}, {schedule}; sizes of the planner"
        )

    def _static(self, chains: Sequence[Recipe]) -> Result | None:
        """Return the step of a plan that was made for another batch.

        PipeWeaver's strongest baseline, nnScaler*, generates one static plan with a representative
        batch before training. Stages, sizes and recomputation are the fastest of the representative
        batch that fit, and are then used for the batch of the comparison.
        """
        seed = self.recipe.simulation.seed + 1
        sample = StepSample(with_values(self.recipe, "simulation", seed=seed), self.sample.model)
        tried: list[tuple[bool, float, Recipe, StepSimulator]] = []
        for chain in chains:
            for mode in STATIC_MODES:
                changed = static_recomputation(chain, mode, self.sample)
                changed = with_values(changed, "parallel", schedule="megatron_balanced")
                representative = with_values(changed, "simulation", seed=seed)
                forecaster = StepSimulator(representative, self.gpus, self.profile, sample=sample)
                result = forecaster.simulate_parallel(changed.parallel)
                if result.step is not None:
                    tried.append((not fits(result.step), result.iteration_ms, changed, forecaster))
        if not tried:
            return None
        *_, recipe, planned = min(tried, key=lambda each: each[:2])
        forecaster = StepSimulator(recipe, self.gpus, self.profile, sample=self.sample)
        forecaster.layout = planned.layout  # type: ignore[method-assign]  # of the other batch
        forecast = forecaster.simulate_parallel(recipe.parallel)
        if forecast.step is None:
            return None
        return Result(STATIC, forecast, sizes(recipe))

    def _printed_searched(self) -> Iterator[Result | None]:
        """Yield the recipe as it is, if it describes modules in separate segments."""
        parallel = self.recipe.parallel
        if parallel.placement == "interleaved" and parallel.has_module_segments:
            yield self.forecast(SEARCHED, self.printed, "searched")

    def _printed_colocated(self) -> Iterator[Result | None]:
        """Yield the recipe as it is, if it describes encoders in bubbles with their sizes."""
        if self.recipe.parallel.placement == "colocated":
            yield self._simulated(WHOLE, self.recipe)
            yield self._simulated(WHOLE, recomputing(self.recipe, "auto"))

    @gc_disabled()
    def _kernels(self) -> Iterator[Result | None]:
        """Yield encoder kernels inside of LLM layers: a bound, which no torchmm plan executes."""
        starts = [self.recipe] if self.recipe.parallel.placement == "colocated" else []
        if "colocated" in self.chosen:
            starts.append(self.chosen["colocated"].recipe)
        elif not starts and any(module.kind == "encoder" for module in self.sample.modules):
            starts = [colocated(self.printed)]
        for start in starts:
            recomputed = recomputing(start, "auto")
            if check_recipe(recomputed, self.gpus):
                continue
            try:
                forecaster = StepSimulator(recomputed, self.gpus, self.profile, sample=self.sample)
                step = Colocated.of(forecaster, recomputed).kernels(recomputed, "interleaved_1f1b")
            except (ConfigError, PlanError):
                continue
            if step is not None:
                forecast = forecaster.make_report("optimus", step[0])
                yield Result(KERNELS, forecast, sizes(recomputed), step[1])


def sizes(recipe: Recipe) -> str:
    """Return pipeline and tensor-parallel sizes and stages per rank, in words."""
    parallel = recipe.parallel
    words = [f"pipeline {parallel.pipeline}, tensor {parallel.tensor}"]
    if parallel.virtual_stages > 1:
        words.append(f"{parallel.virtual_stages} stages per rank")
    if parallel.placement == "colocated":
        for name, module in parallel.modules.items():
            words.append(f"{name}: pipeline {module.pipeline or 1}, tensor {module.tensor or 1}")
    return ", ".join([*words, f"recomputation {recipe.activation_checkpoint.mode}"])


def static_recomputation(recipe: Recipe, mode: str, sample: StepSample) -> Recipe:
    """Return the recipe with one of `STATIC_MODES`."""
    if mode != "encoders":
        return recomputing(recipe, mode)
    names = [module.name for module in sample.modules if module.kind == "encoder"]
    modules = dict.fromkeys(names, "full")
    return with_values(recipe, "activation_checkpoint", mode="selective", modules=modules)


def colocated(recipe: Recipe, **changes: object) -> Recipe:
    """Return the recipe with encoders in the bubbles of the LLM."""
    changes = {"placement": "colocated", "schedule": "optimus", **changes}
    return with_values(recipe, "parallel", **changes)


class Colocated(NamedTuple):
    """Step of encoders on the ranks of the LLM."""

    forecaster: StepSimulator
    parallel: ParallelConfig
    graph: StageGraph
    model: CostModel
    costs: PlanCosts
    sharding: UnshardMode

    @classmethod
    def of(cls, forecaster: StepSimulator, recipe: Recipe) -> Colocated:
        """Return the first step of the recipe."""
        colocated_recipe = colocated(recipe, pipeline=forecaster.run.llm.pipeline)
        parallel = colocated_recipe.parallel
        modules, metas = forecaster.modules, forecaster.workload.microbatches
        run = replace(forecaster.run, recipe=colocated_recipe, units={})
        executions = module_executions(run, modules, forecaster.profile.device.type)
        sharded = any(execution.shard > 1 for execution in executions.values())
        graph = step_graph(plan_layout(parallel, modules, metas), parallel, metas)
        model = CostModel(forecaster.profile, recipe.training.dtype, executions)
        costs = compute_plan_costs(graph, modules, metas, model)
        return cls(forecaster, parallel, graph, model, costs, "step" if sharded else "none")

    def kernels(self, recipe: Recipe, llm_schedule: str) -> tuple[SimulatedStep, float] | None:
        """Return the step with kernels in bubbles and its hidden fraction; None if nothing fits.

        If layers are tuned, they are tuned for the first order. A second order is then scheduled
        with the new times, and the better of both is returned.
        """
        modules, metas = self.forecaster.modules, self.forecaster.workload.microbatches
        tuning = build_layer_tuning(recipe, self.model, layerwise=False)
        steps: list[tuple[SimulatedStep, float]] = []
        costs = self.costs
        for _ in range(ROUNDS):
            planned = optimus_kernels(
                self.graph, costs, modules, llm_schedule=llm_schedule, sharding=self.sharding,
                evaluations=EVALUATIONS,
            )  # fmt: skip
            inside = sum(
                max(0.0, ms - costs.tp_comm_ms.get(action, 0.0))
                for action, ms in planned.hidden_ms.items()
            )
            plan = lower_plan(planned.order, planned.graph, {}, sharding=self.sharding)
            if tuning is not None:
                try:
                    plan = tune_layers(plan, modules, metas, tuning).plan
                except PlanError:  # too large even if all layers recompute
                    break
                costs = compute_plan_costs_with_recompute(plan, modules, metas, self.model)
            step = simulate(plan, planned.costs(costs))
            steps.append((step, inside / len(step.peak_bytes) / step.makespan_ms))
            if not plan.recompute:  # the next round would be equal
                break
        return min(steps, key=lambda each: (not each[0].fits, each[0].makespan_ms), default=None)
