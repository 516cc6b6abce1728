"""From a recipe to parallel sizes of its modules on devices of their own, and back to a recipe.

    planned = plan_recipe(recipe, devices=1296, profile=load_profile("a800"))
    recipe = planned_recipe(recipe, planned.found.best)

The data are sampled, the modules profiled (`torchmm.balance.orchestration.unit_costs`) and the
sizes searched (`torchmm.balance.orchestration.search`). The result is an ordinary recipe, which
says what was found and can be changed by hand. `choose_placement` also simulates the schedules of
the other placements and takes the fastest of all. DistTrain §3, §5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from torchmm.balance.costs.devices import MEMORY_SHARE
from torchmm.balance.costs.operators import Profile
from torchmm.balance.orchestration.baselines import ratio_plan, rigid_plan
from torchmm.balance.orchestration.problem import OrchestrationProblem
from torchmm.balance.orchestration.search import Orchestration, OrchestrationPlan, orchestrate
from torchmm.balance.orchestration.trials import load_trials, trial_conditions, trials_run
from torchmm.balance.orchestration.unit_costs import TENSOR_SIZES, Profiler, cost_model_run
from torchmm.balance.simulation.simulator import SimulatedStep
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.module_names import LLM
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.encoder_sizes import (
    VIRTUAL_STAGES,
    Colocated,
    encoder_combinations,
    refined,
    with_pipelines,
)
from torchmm.planning.executions import parameter_states, simulated_profile
from torchmm.planning.forecast import Forecast, Forecaster, first_microbatches
from torchmm.planning.resolved import recipe_model
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import schedules_for
from torchmm.recipe.sizes import AXES

SAMPLED = 512
"""Sequences of which the data's statistics are taken, at most."""
RIGID_TENSOR = 8
EXACT_ALTERNATIVES = 63
"""Next-best plans among which one that uses all ranks is looked for."""


@dataclass(frozen=True)
class PlannedRun:
    """What was found for a recipe.

    Attributes:
        problem: that was solved.
        found: the best plan, its bound and the next-best ones.
        baselines: what other ways of placing modules give, by name; a text where nothing fits.
        peak_flops: of a device, per second.
    """

    problem: OrchestrationProblem
    found: Orchestration
    baselines: Mapping[str, OrchestrationPlan | str]
    peak_flops: float

    def mfu(self, plan: OrchestrationPlan) -> float:
        """MFU on the devices that a plan uses, 0..1."""
        return plan.mfu(self.problem, self.peak_flops)


def orchestration_problem(recipe: Recipe, devices: int, profile: Profile) -> OrchestrationProblem:
    """What the recipe asks for, with costs of its modules on its data.

    Args:
        devices: of the cluster.
        profile: of one of them.

    Raises:
        ConfigError: the model cannot be built, the data are empty or have nothing for a module, the
            device has no peak for the dtype, trials are of something else, or sizes make no sense.
    """
    training = recipe.training
    parallel = recipe.parallel
    model = recipe_model(recipe)
    modules = [module.describe() for module in model.modality_modules()]
    if len(modules) == 1:
        raise ConfigError("model: has no module besides the LLM, so there is nothing to place")
    packs = sampled_packs(recipe, model)
    recompute = {m.name: recipe.activation_checkpoint.fixed_mode(m.name) for m in modules}
    try:
        run = cost_model_run(
            profile,
            training.dtype,
            modules,
            sequence_parallel=parallel.sequence_parallel,
            async_tensor=parallel.async_tensor_parallel,
            recompute=recompute,
        )
        if recipe.simulation.trials:
            conditions = trial_conditions(
                modules, training.dtype, recompute, parallel.sequence_parallel
            )
            run = trials_run(load_trials(Path(recipe.simulation.trials)), conditions, run)
        most = min(devices, profile.device.devices_per_node)
        sizes = [size for size in TENSOR_SIZES if size <= most]
        states = parameter_states(recipe)
        units = Profiler(modules, packs, profile, training.dtype, run, sizes, states).units()
        return OrchestrationProblem(
            units,
            devices,
            MEMORY_SHARE * profile.device.memory_bytes,
            training.global_batch_size,
            training.microbatch_size,
        )
    except ValueError as error:
        raise ConfigError(f"orchestration: {error}") from error


def sampled_packs(recipe: Recipe, model: MultimodalModel) -> list[MicrobatchMeta]:
    """A sample of the recipe's data, each sequence as a microbatch of its own.

    Raises:
        ConfigError: a streamed source does not know its samples' sizes.
    """
    training = recipe.training
    sampled = max(1, min(SAMPLED, 4 * training.global_batch_size))
    one_by_one = training.model_copy(update={"global_batch_size": sampled, "microbatch_size": 1})
    return first_microbatches(recipe.model_copy(update={"training": one_by_one}), model, 1)[0]


def plan_recipe(
    recipe: Recipe, devices: int, profile: Profile, *, alternatives: int = 5
) -> PlannedRun:
    """The fastest parallel sizes of a recipe's modules on devices of their own.

    Args:
        devices: of the cluster.
        profile: of one of them.
        alternatives: how many next-best plans to find.

    Raises:
        ConfigError: as `orchestration_problem`; nothing fits.
    """
    problem = orchestration_problem(recipe, devices, profile)
    try:
        found = orchestrate(problem, alternatives=alternatives)
    except ValueError as error:
        raise ConfigError(f"orchestration: {error}") from error
    peak = profile.device.peak_flops[recipe.training.dtype]
    return PlannedRun(problem, found, _baselines(recipe, problem), peak)


def _baselines(recipe: Recipe, problem: OrchestrationProblem) -> dict[str, OrchestrationPlan | str]:
    common = set.intersection(*(set(unit.seconds) for unit in problem.units))
    tensor = max(size for size in common if size <= RIGID_TENSOR)
    pipeline = recipe.parallel.pipeline
    found: dict[str, OrchestrationPlan | str] = {}
    for name, plan in {
        f"rigid, tensor {tensor}, LLM pipeline {pipeline}": lambda: rigid_plan(
            problem, tensor, pipeline
        ),
        f"rigid, tensor {tensor}, best pipeline": lambda: rigid_plan(problem, tensor),
        "FLOP ratio": lambda: ratio_plan(problem),
    }.items():
        try:
            found[name] = plan()
        except ValueError as error:
            found[name] = str(error)
    return found


def planned_recipe(recipe: Recipe, plan: OrchestrationPlan) -> Recipe:
    """The recipe with a plan's sizes; its other keys stay, unless they contradict the placement.

    Data-parallel ranks of a module are one FSDP2 group. Reordering is turned on, as without it the
    encoders' ranks wait for each other.
    """
    sizes = {unit.name: unit.sizes for unit in plan.units}
    own = {
        name: dict(zip(AXES, (size.pipeline, 1, size.data, size.tensor), strict=True))
        for name, size in sizes.items()
    }
    parallel = recipe.parallel.model_dump(exclude_none=True)
    for name in own:
        parallel.setdefault(name, {})
        parallel[name].pop("segments", None)
    parallel |= own.pop(LLM)
    for name, size in own.items():
        parallel[name] |= size
    parallel.pop(LLM, None)
    parallel |= {"placement": "disaggregated", "schedule": "1f1b", "virtual_stages": 1}
    if parallel["reshard_after_forward"] == "always":
        parallel["reshard_after_forward"] = "default"
    if sizes[LLM].tensor == 1:
        parallel |= {"async_tensor_parallel": False, "async_tensor_backend": "auto"}
    table = recipe.model_dump(exclude_none=True)
    table["parallel"] = parallel
    table["data"]["reorder"] = "both"
    table["simulation"]["gpus"] = plan.devices
    return Recipe.model_validate(table)


def leaves_units_open(recipe: Recipe) -> bool:
    """Whether a recipe asks for sizes of modules on ranks of their own."""
    return recipe.parallel.orchestrate and recipe.parallel.placement == "disaggregated"


def orchestrated_units(recipe: Recipe, world_size: int) -> Recipe:
    """The recipe with sizes of all modules on ranks of their own that use exactly these ranks.

    The fastest of the best plans that leave no rank idle: a rank that is started is meant to work.

    Raises:
        ConfigError: as `plan_recipe`; no good plan uses all ranks.
    """
    profile = simulated_profile(recipe)
    found = plan_recipe(recipe, world_size, profile, alternatives=EXACT_ALTERNATIVES).found
    plans = [found.best, *found.alternatives]
    for plan in plans:
        if plan.devices == world_size:
            own = planned_recipe(recipe, plan)
            done = own.parallel.model_copy(update={"orchestrate": False})
            return own.model_copy(update={"parallel": done})
    counts = sorted({plan.devices for plan in plans}, reverse=True)
    raise ConfigError(
        f"parallel.orchestrate: none of the best plans uses all {world_size} ranks; start "
        f"{counts[0]} ranks, or give sizes in [parallel] and [parallel.NAME]"
    )


@dataclass(frozen=True)
class Candidate:
    """One way of placing modules, simulated on the recipe's first step.

    Attributes:
        placement: as in recipes.
        recipe: that says so.
        devices: that it uses.
        sizes: tensor x data x pipeline, in words.
    """

    placement: str
    recipe: Recipe
    devices: int
    sizes: str
    forecast: Forecast

    @property
    def step_ms(self) -> float:
        """Time of the first step; infinite where none fits."""
        step = self.forecast.step
        return float("inf") if step is None or not fits(step) else step.makespan_ms


def fits(step: SimulatedStep) -> bool:
    """Whether every rank keeps to `MEMORY_SHARE` of its memory."""
    limit = step.costs.memory_limit_bytes
    return limit is None or max(step.peak_bytes) <= MEMORY_SHARE * limit


def simulated_plans(recipe: Recipe, planned: PlannedRun, profile: Profile) -> list[Candidate]:
    """The best plans, simulated on the recipe's data, the fastest first.

    A formula knows the mean and the spread of samples, a simulation which one comes when: plans
    that the formula sees close together may be several per cent apart. Each is tried with 1F1B and
    with several stages of the LLM per rank, the fastest also under all other schedules.

    Raises:
        ConfigError: a plan's recipe cannot be run.
    """
    found = planned.found
    candidates = []
    model = recipe_model(recipe)
    for plan in (found.best, *found.alternatives):
        own = planned_recipe(recipe, plan)
        forecaster = Forecaster(own, plan.devices, profile, model)
        for stages in VIRTUAL_STAGES:
            tried = own
            if stages > 1:
                changes = {"schedule": "interleaved_1f1b", "virtual_stages": stages}
                tried = _with_parallel(own, **changes)
            forecast = forecaster.forecast_parallel(tried.parallel)
            if forecast.step is not None or stages == 1:
                candidates.append(
                    Candidate("disaggregated", tried, plan.devices, _sizes(plan), forecast)
                )
    candidates.sort(key=lambda candidate: candidate.step_ms)
    best = candidates[0]
    forecaster = Forecaster(best.recipe, best.devices, profile, model)
    for name in schedules_for("disaggregated"):
        if not name.endswith("1f1b"):
            changed = _with_parallel(best.recipe, schedule=name, virtual_stages=1)
            forecast = forecaster.forecast_parallel(changed.parallel)
            candidates.append(replace(best, recipe=changed, forecast=forecast))
    return sorted(candidates, key=lambda candidate: candidate.step_ms)


def choose_placement(recipe: Recipe, planned: PlannedRun, profile: Profile) -> list[Candidate]:
    """All placements, the fastest first: the plans that were found, and every schedule of others,
    colocated encoders in all of their pipelines.

    Those share all ranks among all modules: with the recipe's sizes, or with better ones, which
    1F1B tells. Candidates that cannot be planned or do not fit come last.

    Args:
        planned: for the recipe.

    Raises:
        ConfigError: none can be run.
    """
    candidates = simulated_plans(recipe, planned, profile)
    together = _best_together(recipe, planned, profile)
    usable = 0 if together is None else usable_devices(together, planned.problem.devices)
    if together is not None:
        forecaster = Forecaster(together, usable, profile)
        alone = together.parallel.pipeline == 1  # then all schedules do the same
        ranks = forecaster.run.llm
        sizes = f"{ranks.tensor}x{ranks.data_parallel}x{ranks.pipeline}"
        for forecast in [forecaster.forecast()] if alone else forecaster.forecast_all():
            if forecast.schedule in schedules_for("colocated"):
                candidates += _colocated(together, forecaster, usable, sizes, forecast.schedule)
                continue
            changes = {"schedule": forecast.schedule, "placement": "interleaved"}
            changed = _with_parallel(together, **changes)
            candidates.append(Candidate("interleaved", changed, usable, sizes, forecast))
    candidates.sort(key=lambda candidate: candidate.step_ms)
    if candidates[0].step_ms == float("inf"):
        raise ConfigError(
            "parallel: no placement fits into memory: "
            + "; ".join(f"{c.placement} {c.forecast.schedule}" for c in candidates)
        )
    return candidates


def _sizes(plan: OrchestrationPlan) -> str:
    sizes = [(unit.name, unit.sizes) for unit in plan.units]
    return ", ".join(f"{name} {s.tensor}x{s.data}x{s.pipeline}" for name, s in sizes)


def _best_together(recipe: Recipe, planned: PlannedRun, profile: Profile) -> Recipe | None:
    """The recipe with the best sizes for all modules on the same ranks; None if none can be run."""
    layers = min(unit.layers for unit in planned.problem.units)
    tensors = set.intersection(*(set(unit.seconds) for unit in planned.problem.units))
    pipelines = [2**n for n in range(layers.bit_length()) if 2**n <= layers]
    found: list[tuple[float, int, Recipe]] = []
    model = recipe_model(recipe)
    plain = _with_parallel(recipe, placement="interleaved", schedule="1f1b", virtual_stages=1)
    tried = [plain] + [
        _with_parallel(plain, tensor=tensor, pipeline=pipeline, replicate=1, shard=-1)
        for tensor in sorted(tensors)
        for pipeline in pipelines
    ]
    for number, candidate in enumerate(tried):
        usable = usable_devices(candidate, planned.problem.devices)
        if not usable or (number and 2 * usable < planned.problem.devices):
            continue
        simulation = candidate.simulation.model_copy(update={"gpus": usable})
        sized = candidate.model_copy(update={"simulation": simulation})
        step = Forecaster(sized, usable, profile, model).forecast().step
        if step is not None:
            found.append((step.makespan_ms if fits(step) else float("inf"), number, sized))
    return min(found)[2] if found else None


def _colocated(
    recipe: Recipe, forecaster: Forecaster, devices: int, sizes: str, schedule: str
) -> Iterator[Candidate]:
    """Encoders on the LLM's ranks, in all pipelines that they may have there, and the best of them
    with what else can be chosen (`refined`)."""
    own = _with_parallel(recipe, schedule=schedule, placement="colocated")
    made: list[Candidate] = []
    for pipelines in encoder_combinations(forecaster):
        changed = with_pipelines(own, pipelines)
        words = [f"{name} pipeline {size}" for name, size in pipelines.items()]
        forecast = forecaster.forecast_parallel(changed.parallel)
        candidate = Candidate("colocated", changed, devices, ", ".join([sizes, *words]), forecast)
        made.append(candidate)
        yield candidate
    first = min(made, key=lambda candidate: candidate.step_ms)
    found = refined(forecaster, Colocated(first.recipe, first.forecast))
    if found.words:
        words = [first.sizes, *found.words]
        yield Candidate("colocated", found.recipe, devices, ", ".join(words), found.forecast)


def _with_parallel(recipe: Recipe, **changes: object) -> Recipe:
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=changes)})


def usable_devices(recipe: Recipe, devices: int) -> int:
    """How many of these devices the recipe's [parallel] can use at most; 0: none."""
    parallel = recipe.parallel
    training = recipe.training
    sizes = {name: getattr(parallel, name) for name in AXES}
    fixed = prod(size for size in sizes.values() if size > 0)
    own = sizes["replicate"] * sizes["shard"]
    fixed_data = prod(sizes[name] for name in ("replicate", "shard") if sizes[name] > 0)
    if own > 0:
        return fixed if fixed <= devices else 0
    for count in range(devices // fixed, 0, -1):
        chunk = count * fixed_data * training.microbatch_size
        if training.global_batch_size % chunk == 0:
            return count * fixed
    return 0
