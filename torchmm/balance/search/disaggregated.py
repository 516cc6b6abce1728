"""Plans with disaggregated modules: orchestration inputs from a recipe, and plans as recipes.

Data are sampled and modules are profiled (`torchmm.balance.disttrain.orchestration.unit_costs`) for
each recomputation mode. With each schedule, these are the *variants* of
`torchmm.balance.disttrain.orchestration.plan_space` (DistTrain §3, §5):

    recipe --> modes x schedules x stages per rank --> variants --> PlanSpace --> bands of plans
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from torchmm.balance.disttrain.orchestration.bounds import (
    SampleSeconds,
    SavedMicrobatches,
    UnitBounds,
)
from torchmm.balance.disttrain.orchestration.plan_space import PlanEstimate, PlanSpace, PlanVariant
from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem
from torchmm.balance.disttrain.orchestration.search import UnitSizes, orchestrate
from torchmm.balance.disttrain.orchestration.unit_costs import TENSOR_SIZES, profile_units
from torchmm.balance.recipe_simulation.first_microbatches import first_microbatches
from torchmm.balance.recipe_simulation.step_simulator import StepSample
from torchmm.balance.run_costs import build_module_cost_function, build_unsharded_cost_model
from torchmm.balance.search.plan_space import (
    TUNED,
    VIRTUAL_STAGES,
    CandidatePlan,
    Value,
    with_recompute,
)
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import LLM
from torchmm.costs.devices import USABLE_MEMORY_FRACTION
from torchmm.costs.flops import modules_with_trained_sources
from torchmm.costs.layers import has_trained_parameters
from torchmm.costs.operators import DeviceProfile
from torchmm.costs.sizes import sequence_sizes
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.executions import parameter_states
from torchmm.recipe.mesh_sizes import AXES
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import SCHEDULES, schedules_for

MODES = ("none", "full", TUNED)
BAND_GROWTH = 1.15
"""Limit of a band of lower bounds over that of the previous band."""
MAX_LAYOUTS = 400
"""Maximum number of LLM layouts in a band."""
FORMULA_ALTERNATIVES = 2
"""Number of plans of the formula in addition to its best, for each recomputation mode."""
UNLIKELY_FACTOR = 1.5
"""Factor of the estimate of plans that the formula predicts not to fit, or does not model."""
UNORDERED_RATIO = 1.02
"""Expected step time without reordering over that with it."""
MAX_SAMPLED = 512
"""Maximum number of sequences for data statistics."""
SAVED_MICROBATCHES: dict[str, SavedMicrobatches] = {"gpipe": "all"}
"""Saved microbatches of schedules that are not 1F1B."""


def orchestration_problem(
    recipe: Recipe,
    devices: int,
    profile: DeviceProfile,
    sample: StepSample | None = None,
    packs: Sequence[MicrobatchMeta] | None = None,
) -> OrchestrationProblem:
    """Return the orchestration problem of a recipe with costs of its modules on its data.

    Args:
        recipe: Recipe of the run.
        devices: Number of devices of the cluster.
        profile: Profile of one device.
        sample: Sample of the recipe, if it exists.
        packs: Result of `sample_packs`, if it exists.

    Raises:
        ConfigError: The model cannot be built, the data are empty or have no input for a module,
            the device has no peak throughput for the dtype, or parallelism degrees are invalid.
    """
    training = recipe.training
    sample = StepSample(recipe) if sample is None else sample
    modules = sample.modules
    if len(modules) == 1:
        raise ConfigError("model: has only an LLM, so disaggregated placement has no effect")
    packs = sample_packs(recipe, sample.model) if packs is None else packs
    try:
        run = build_module_cost_function(recipe, modules, profile)
        max_size = min(devices, profile.device.devices_per_node)
        sizes = [size for size in TENSOR_SIZES if size <= max_size]
        states = parameter_states(recipe)
        units = profile_units(modules, packs, profile, training.dtype, run, sizes, states)
        return OrchestrationProblem(
            units,
            devices,
            USABLE_MEMORY_FRACTION * profile.device.memory_bytes,
            training.global_batch_size,
            training.microbatch_size,
        )
    except ValueError as error:
        raise ConfigError(f"orchestration: {error}") from error


def sample_packs(recipe: Recipe, model: MultimodalModel) -> list[MicrobatchMeta]:
    """Return a sample of the data of a recipe, with each sequence as a separate microbatch.

    Raises:
        ConfigError: The sample sizes of a streamed source are unknown.
    """
    training = recipe.training
    sampled = max(1, min(MAX_SAMPLED, 4 * training.global_batch_size))
    one_by_one = training.model_copy(update={"global_batch_size": sampled, "microbatch_size": 1})
    return first_microbatches(recipe.model_copy(update={"training": one_by_one}), model, 1)[0]


def plan_variants(
    recipe: Recipe, devices: int, profile: DeviceProfile, sample: StepSample
) -> list[PlanVariant]:
    """Return all variants of disaggregated plans with their costs.

    Raises:
        ConfigError: As for `orchestration_problem`.
    """
    variants = []
    packs = sample_packs(recipe, sample.model)
    for mode in MODES:
        mode_recipe = with_recompute(recipe, mode)
        problem = orchestration_problem(mode_recipe, devices, profile, sample, packs)
        bounds = _unit_bounds(mode_recipe, problem, profile, sample)
        by_stages = {1: problem, **{n: _with_stages(problem, n) for n in VIRTUAL_STAGES}}
        for name in schedules_for("disaggregated"):
            schedule = SCHEDULES[name]
            unsplit_backward = not schedule.splits_backward
            saved_microbatches: SavedMicrobatches = (
                "1f1b" if schedule.one_f_one_b else SAVED_MICROBATCHES.get(name, "some")
            )
            is_modeled = schedule.one_f_one_b and mode != TUNED
            for stages in _stage_counts(name, problem.units[problem.llm].layers):
                stage_problem = by_stages[stages]
                variants.append(
                    PlanVariant(
                        name,
                        stages,
                        mode,
                        unsplit_backward,
                        saved_microbatches,
                        stage_problem,
                        bounds,
                        is_modeled,
                    )
                )
    return variants


def _stage_counts(schedule: str, layers: int) -> list[int]:
    """Return the numbers of LLM stages per rank to try."""
    if schedule != "interleaved_1f1b":
        return [1]
    return [n for n in VIRTUAL_STAGES if 2 * n <= layers]


def _with_stages(problem: OrchestrationProblem, stages: int) -> OrchestrationProblem:
    """Return the problem with a number of LLM stages per rank.

    The problem is unchanged if the LLM has too few layers.
    """
    if stages > problem.units[problem.llm].layers:
        return problem
    units = [
        replace(unit, virtual_stages=stages) if unit.kind == "llm" else unit
        for unit in problem.units
    ]
    return replace(problem, units=tuple(units))


def _unit_bounds(
    recipe: Recipe, problem: OrchestrationProblem, profile: DeviceProfile, sample: StepSample
) -> tuple[UnitBounds, ...]:
    """Return the bounds of all units for the simulated step.

    If a plan selects the layers that recompute, it can select none or all. The bound then uses the
    time without recomputation and the memory with full recomputation.
    """
    metas = _join_microbatches(sample.packs, problem.microbatch_size)
    times = build_module_cost_function(recipe, sample.modules, profile)
    recomputed = recipe
    if recipe.activation_checkpoint.mode == TUNED:
        recomputed = with_recompute(recipe, "full")
    memory = build_module_cost_function(recomputed, sample.modules, profile)
    by_name = {layers.name: layers for layers in sample.layers}
    bounds = []
    for module, unit in zip(sample.modules, problem.units, strict=True):
        indices_with_input = sequence_sizes(module, metas)[0]
        inputs = [metas[i] for i in indices_with_input]
        missing = len(inputs) < len(metas)
        min_layer_fraction = _min_layer_fraction(recipe, module, inputs, sample.modules, profile)
        kept_share = _min_layer_fraction(
            recomputed, module, inputs, sample.modules, profile, of_activations=True
        )
        seconds, saved = {}, {}
        for tensor in unit.seconds:
            trial = times(module, tensor, inputs)
            count = len(metas) * problem.microbatch_size
            forward_N = trial.seconds_N - trial.backward_N
            seconds[tensor] = SampleSeconds(
                float(trial.seconds_N.sum()) / count,
                0.0 if missing else float(forward_N.min()) / problem.microbatch_size,
                0.0 if missing else float(trial.backward_N.min()) / problem.microbatch_size,
                min_layer_fraction,
            )
            kept_N = memory(module, tensor, inputs).kept_bytes_N
            waits = unit.has_backward and not missing
            saved[tensor] = float(kept_N.min()) / problem.microbatch_size if waits else 0.0
        layers = by_name[module.name].costs_with_ends
        bounds.append(
            UnitBounds(layers, seconds, unit.replica_bytes, unit.sharded_bytes, saved, kept_share)
        )
    return tuple(bounds)


def _join_microbatches(packs: Sequence[MicrobatchMeta], size: int) -> list[MicrobatchMeta]:
    """Join consecutive packs into microbatches."""
    groups = [packs[i : i + size] for i in range(0, len(packs), size)]
    return [
        MicrobatchMeta(
            tuple(s for pack in group for s in pack.samples), sum(p.tokens for p in group)
        )
        for group in groups
    ]


def _min_layer_fraction(
    recipe: Recipe,
    module: ModuleDescription,
    metas: Sequence[MicrobatchMeta],
    modules: Sequence[ModuleDescription],
    profile: DeviceProfile,
    *,
    of_activations: bool = False,
) -> float:
    """Return the minimum fraction of the module time that an inner layer uses.

    The minimum is over forward and backward. With `of_activations`, the fraction is that of saved
    activations.
    """
    inner = {layer: i for i, layer in enumerate(module.layers[:-1]) if i > 0}
    sizes = sequence_sizes(module, metas)[1]
    if not inner or sizes is None:
        return 0.0
    model = build_unsharded_cost_model(recipe, module, profile)
    needs_input_grad_N = np.array(
        [modules_with_trained_sources(modules, meta)[module.name] for meta in metas], bool
    )
    total_costs = model.stage_costs(module, 0, len(module.layers), sizes, needs_input_grad_N)
    shares = []
    for index in inner.values():
        stage_needs_input_grad_N = needs_input_grad_N | has_trained_parameters(module)
        layer_costs = model.stage_costs(module, index, index + 1, sizes, stage_needs_input_grad_N)
        pairs = [(layer_costs.forward.total_ms, total_costs.forward.total_ms)]
        pairs += [(layer_costs.backward.total_ms, total_costs.backward.total_ms)]
        pairs = [(layer_costs.saved_bytes, total_costs.saved_bytes)] if of_activations else pairs
        shares += [
            layer_sum.sum() / module_sum.sum()
            for layer_sum, module_sum in pairs
            if module_sum.sum() > 0
        ]
    return float(min(shares, default=0.0))


RankedPlan = tuple[CandidatePlan, float, float]
"""Plan, its lower bound in ms, and its estimate in ms. For siblings, the estimate is relative to
their plan."""


class DisaggregatedPlans:
    """Plans with disaggregated modules, in the order of the DistTrain formula.

    Args:
        recipe: Plain recipe.
        devices: Number of devices in the cluster.
        profile: Profile of one device.
        sample: Model and first step of the recipe.
        exact: Whether plans must use all devices.
        schedules: Schedules to use; None for all.
        limits: Maximum number of devices by module.

    Raises:
        ConfigError: The recipe has no plans of this kind (`orchestration_problem`).
    """

    def __init__(
        self,
        recipe: Recipe,
        devices: int,
        profile: DeviceProfile,
        sample: StepSample,
        *,
        exact: bool,
        schedules: Sequence[str] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._recipe = recipe
        self._limits = limits
        self._variants = [
            variant
            for variant in plan_variants(recipe, devices, profile, sample)
            if schedules is None or variant.schedule in schedules
        ]
        if not self._variants:
            raise ConfigError(f"none of the schedules {schedules} supports disaggregated modules")
        # Plans that use all devices are few and rarely worse, so they are listed first.
        spaces = [PlanSpace(self._variants, exact=True, limits=limits)]
        if not exact:
            spaces.append(PlanSpace(self._variants, limits=limits))
        self._spaces = spaces
        self._rest_s = [space.lower_bound_s for space in spaces]
        self._limits_s = list(self._rest_s)
        self._open_s = inf
        self._estimates: dict[str, PlanEstimate] = {}

    @property
    def open_ms(self) -> float:
        """Lower bound of the plans that are not listed. Infinite if all are listed."""
        return 1e3 * min(self._rest_s[-1], self._open_s)

    def formula_plans(self) -> Iterator[RankedPlan]:
        """Yield the best plans of the DistTrain formula.

        With many devices, bands reach these plans late.
        """
        for index, variant in enumerate(self._variants):
            if variant.recompute == TUNED or (variant.schedule, variant.stages) != ("1f1b", 1):
                continue
            try:
                plans = orchestrate(
                    variant.problem, alternatives=FORMULA_ALTERNATIVES, limits=self._limits
                )
            except ValueError:  # no plan fits with this recomputation
                continue
            for plan in plans:
                estimate = self._spaces[-1].estimate_plan(
                    index, tuple(unit.sizes for unit in plan.units)
                )
                if estimate is not None:
                    yield self._to_ranked_plan(estimate)

    def next_band(self) -> Iterator[RankedPlan]:
        """Yield the plans in the next band of lower bounds."""
        index = next((i for i, rest_s in enumerate(self._rest_s) if rest_s < inf), None)
        if index is None:
            self._open_s = inf
            return
        space = self._spaces[index]
        self._limits_s[index] = max(
            BAND_GROWTH * self._limits_s[index], self._rest_s[index] * (1 + 1e-9)
        )
        band = space.next_band(self._limits_s[index], MAX_LAYOUTS)
        self._rest_s[index] = band.remaining_bound_s
        if index == len(self._spaces) - 1:
            self._open_s = min(self._open_s, band.open_s)
        for estimate in band.plans:
            yield self._to_ranked_plan(estimate)

    def related_plans(self, plan: CandidatePlan) -> Iterator[RankedPlan]:
        """Yield a plan with other schedules and with layers tuned to memory."""
        estimate = self._estimates[plan.text]
        if plan.changes["data.reorder"] == "both":
            unordered = plan.with_changes(data__reorder="none")
            self._estimates[unordered.text] = estimate
            yield unordered, 1e3 * estimate.bound_s, UNORDERED_RATIO
        current = self._variants[estimate.variant]
        for index, variant in enumerate(self._variants):
            is_alike = variant.schedule == current.schedule and variant.stages == current.stages
            mode = TUNED if is_alike else current.recompute
            if variant.recompute == mode and index != estimate.variant:
                sibling = self._spaces[-1].estimate_plan(index, estimate.sizes)
                if sibling is not None:
                    yield (
                        *self._to_ranked_plan(sibling)[:2],
                        sibling.estimate_s / estimate.estimate_s,
                    )

    def _to_ranked_plan(self, estimate: PlanEstimate) -> RankedPlan:
        variant = self._variants[estimate.variant]
        names = [unit.name for unit in variant.problem.units]
        sizes = dict(zip(names, estimate.sizes, strict=True))
        plan = build_sized_plan(self._recipe, sizes, variant)
        self._estimates.setdefault(plan.text, estimate)
        penalty = 1.0 if estimate.is_likely else UNLIKELY_FACTOR
        return (
            plan,
            1e3 * estimate.bound_s,
            1e3 * penalty * max(estimate.estimate_s, estimate.bound_s),
        )


def build_sized_plan(
    recipe: Recipe, sizes: Mapping[str, UnitSizes], variant: PlanVariant
) -> CandidatePlan:
    """Return a plan with separate ranks for every module."""
    changes: dict[str, Value] = {
        "parallel.placement": "disaggregated",
        "parallel.schedule": variant.schedule,
        "parallel.virtual_stages": variant.stages,
        "parallel.sequence_parallel": recipe.parallel.sequence_parallel,
        "activation_checkpoint.mode": variant.recompute,
        "training.microbatch_size": recipe.training.microbatch_size,
        "data.reorder": "both",
    }
    for name, size in sizes.items():
        prefix = "parallel" if name == LLM else f"parallel.{name}"
        values = dict(zip(AXES, (size.pipeline, 1, size.data, size.tensor), strict=True))
        changes |= {f"{prefix}.{key}": value for key, value in values.items()}
    return CandidatePlan("disaggregated", sum(size.devices for size in sizes.values()), changes)
