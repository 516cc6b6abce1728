"""What the orchestrator is asked for a recipe, and a plan as a recipe again.

The data are sampled and the modules profiled (`torchmm.balance.disttrain.orchestration.unit_costs`)
for every way to recompute that is tried; with every schedule these are the *variants* of
`torchmm.balance.disttrain.orchestration.space`. DistTrain §3, §5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from torchmm.balance.disttrain.orchestration.bounds import SampleSeconds, UnitBound, Waiting
from torchmm.balance.disttrain.orchestration.problem import OrchestrationProblem
from torchmm.balance.disttrain.orchestration.search import UnitSizes, orchestrate
from torchmm.balance.disttrain.orchestration.space import PlanGuess, PlanSpace, Variant
from torchmm.balance.disttrain.orchestration.unit_costs import TENSOR_SIZES, profile_units
from torchmm.balance.forecasts.first_microbatches import first_microbatches
from torchmm.balance.forecasts.forecast import StepSample
from torchmm.balance.run_costs import trial_runner, unsharded_costs
from torchmm.balance.search.space import (
    TUNED,
    VIRTUAL_STAGES,
    Plan,
    Value,
    with_recompute,
)
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import LLM
from torchmm.costs.devices import MEMORY_SHARE
from torchmm.costs.flops import gradients_arrive
from torchmm.costs.layers import learns
from torchmm.costs.operators import Profile
from torchmm.costs.sizes import pack_sizes
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.executions import parameter_states
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import SCHEDULES, schedules_for
from torchmm.recipe.sizes import AXES

MODES = ("none", "full", TUNED)
WIDER = 1.15
"""Limit of a band of lower bounds over that of the band before."""
LAYOUTS = 400
"""Layouts of the LLM in a band."""
FAVORITES = 2
"""Plans of the formula besides its best, for each recomputation mode."""
UNLIKELY = 1.5
"""Factor of the estimate of plans that the formula expects not to fit, or is not made for."""
UNORDERED = 1.02
"""Expected step time without reordering over that with it."""
SAMPLED = 512
"""Sequences of which the data's statistics are taken, at most."""
WAITING: dict[str, Waiting] = {"gpipe": "all"}
"""Of schedules that are no 1F1B: what is known."""


def orchestration_problem(
    recipe: Recipe,
    devices: int,
    profile: Profile,
    sample: StepSample | None = None,
    packs: Sequence[MicrobatchMeta] | None = None,
) -> OrchestrationProblem:
    """What the recipe asks for, with costs of its modules on its data.

    Args:
        devices: of the cluster.
        profile: of one of them.
        sample: of the recipe, if it has been made before.
        packs: `sampled_packs`, likewise.

    Raises:
        ConfigError: the model cannot be built, the data are empty or have nothing for a module, the
            device has no peak for the dtype, or sizes make no sense.
    """
    training = recipe.training
    sample = StepSample(recipe) if sample is None else sample
    modules = sample.modules
    if len(modules) == 1:
        raise ConfigError("model: has only an LLM, so disaggregated placement has no effect")
    packs = sampled_packs(recipe, sample.model) if packs is None else packs
    try:
        run = trial_runner(recipe, modules, profile)
        most = min(devices, profile.device.devices_per_node)
        sizes = [size for size in TENSOR_SIZES if size <= most]
        states = parameter_states(recipe)
        units = profile_units(modules, packs, profile, training.dtype, run, sizes, states)
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


def plan_variants(
    recipe: Recipe, devices: int, profile: Profile, sample: StepSample
) -> list[Variant]:
    """All ways to run the modules apart, with what they cost.

    Raises:
        ConfigError: as `orchestration_problem`.
    """
    found = []
    packs = sampled_packs(recipe, sample.model)
    for mode in MODES:
        own = with_recompute(recipe, mode)
        problem = orchestration_problem(own, devices, profile, sample, packs)
        bounds = _bounds(own, problem, profile, sample)
        by_stages = {1: problem, **{n: _with_stages(problem, n) for n in VIRTUAL_STAGES}}
        for name in schedules_for("disaggregated"):
            schedule = SCHEDULES[name]
            whole = not schedule.splits_backward
            waiting: Waiting = "1f1b" if schedule.one_f_one_b else WAITING.get(name, "some")
            guessed = schedule.one_f_one_b and mode != TUNED
            for stages in _stages(name, problem.units[problem.llm].layers):
                of_stages = by_stages[stages]
                found.append(
                    Variant(name, stages, mode, whole, waiting, of_stages, bounds, guessed)
                )
    return found


def _stages(schedule: str, layers: int) -> list[int]:
    """Of the LLM per rank: what is tried."""
    if schedule != "interleaved_1f1b":
        return [1]
    return [n for n in VIRTUAL_STAGES if 2 * n <= layers]


def _with_stages(problem: OrchestrationProblem, stages: int) -> OrchestrationProblem:
    """The problem with so many stages of the LLM per rank, or as it is where layers are too few."""
    if stages > problem.units[problem.llm].layers:
        return problem
    units = [
        replace(unit, virtual_stages=stages) if unit.kind == "llm" else unit
        for unit in problem.units
    ]
    return replace(problem, units=tuple(units))


def _bounds(
    recipe: Recipe, problem: OrchestrationProblem, profile: Profile, sample: StepSample
) -> tuple[UnitBound, ...]:
    """Of all units, of the step that is simulated.

    Where a plan chooses what to recompute, it may be nothing, or all: the bound has the time of the
    one and the memory of the other.
    """
    metas = _microbatches(sample.packs, problem.microbatch_size)
    times = trial_runner(recipe, sample.modules, profile)
    least = recipe
    if recipe.activation_checkpoint.mode == TUNED:
        least = with_recompute(recipe, "full")
    memory = trial_runner(least, sample.modules, profile)
    by_name = {layers.name: layers for layers in sample.layers}
    found = []
    for module, unit in zip(sample.modules, problem.units, strict=True):
        at = pack_sizes(module, metas)[0]
        own = [metas[i] for i in at]
        missing = len(own) < len(metas)
        layer_share = _layer_share(recipe, module, own, sample.modules, profile)
        kept_share = _layer_share(least, module, own, sample.modules, profile, kept=True)
        seconds, kept = {}, {}
        for tensor in unit.seconds:
            trial = times(module, tensor, own)
            count = len(metas) * problem.microbatch_size
            forward_N = trial.seconds_N - trial.backward_N
            seconds[tensor] = SampleSeconds(
                float(trial.seconds_N.sum()) / count,
                0.0 if missing else float(forward_N.min()) / problem.microbatch_size,
                0.0 if missing else float(trial.backward_N.min()) / problem.microbatch_size,
                layer_share,
            )
            kept_N = memory(module, tensor, own).kept_bytes_N
            waits = unit.has_backward and not missing
            kept[tensor] = float(kept_N.min()) / problem.microbatch_size if waits else 0.0
        layers = by_name[module.name].costs_with_ends
        found.append(
            UnitBound(layers, seconds, unit.replica_bytes, unit.sharded_bytes, kept, kept_share)
        )
    return tuple(found)


def _microbatches(packs: Sequence[MicrobatchMeta], size: int) -> list[MicrobatchMeta]:
    """Packs joined to microbatches, as they come."""
    groups = [packs[i : i + size] for i in range(0, len(packs), size)]
    return [
        MicrobatchMeta(tuple(s for pack in own for s in pack.samples), sum(p.tokens for p in own))
        for own in groups
    ]


def _layer_share(
    recipe: Recipe,
    module: ModuleDescription,
    metas: Sequence[MicrobatchMeta],
    modules: Sequence[ModuleDescription],
    profile: Profile,
    *,
    kept: bool = False,
) -> float:
    """What the least inner layer takes of the whole module, forward or backward, at least; or of
    what is kept for the backward."""
    inner = {layer: i for i, layer in enumerate(module.layers[:-1]) if i > 0}
    sizes = pack_sizes(module, metas)[1]
    if not inner or sizes is None:
        return 0.0
    model = unsharded_costs(recipe, module, profile)
    arrives_N = np.array([gradients_arrive(modules, meta)[module.name] for meta in metas], bool)
    whole = model.stage_costs(module, 0, len(module.layers), sizes, arrives_N)
    shares = []
    for place in inner.values():
        reaches_N = arrives_N | learns(module)
        own = model.stage_costs(module, place, place + 1, sizes, reaches_N)
        pairs = [(own.forward.total_ms, whole.forward.total_ms)]
        pairs += [(own.backward.total_ms, whole.backward.total_ms)]
        pairs = [(own.kept_bytes, whole.kept_bytes)] if kept else pairs
        shares += [part.sum() / total.sum() for part, total in pairs if total.sum() > 0]
    return float(min(shares, default=0.0))


Guess = tuple[Plan, float, float]
"""A plan, its lower bound in ms, and its estimate in ms (for siblings: relative to their plan)."""


class DisaggregatedPlans:
    """Plans of modules on separate ranks, in the order of DistTrain's formula.

    Args:
        recipe: Plain recipe.
        devices: Number of devices in the cluster.
        profile: Profile of one device.
        sample: Model and first step of the recipe.
        exact: Whether plans have to use all devices.
        schedules: Schedules to use; None for all.
        limits: Largest number of devices by module.

    Raises:
        ConfigError: The recipe has no plans of this kind (`orchestration_problem`).
    """

    def __init__(
        self,
        recipe: Recipe,
        devices: int,
        profile: Profile,
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
        self._rest_s = [space.least_s for space in spaces]
        self._limits_s = list(self._rest_s)
        self._open_s = inf
        self._guesses: dict[str, PlanGuess] = {}

    @property
    def open_ms(self) -> float:
        """Lower bound of the plans that are not listed; infinite if all are."""
        return 1e3 * min(self._rest_s[-1], self._open_s)

    def favorites(self) -> Iterator[Guess]:
        """Yield the best plans of DistTrain's formula, which bands reach late on many devices."""
        for index, variant in enumerate(self._variants):
            if variant.recompute == TUNED or (variant.schedule, variant.stages) != ("1f1b", 1):
                continue
            try:
                found = orchestrate(variant.problem, alternatives=FAVORITES, limits=self._limits)
            except ValueError:  # no plan fits with this recomputation
                continue
            for plan in found:
                guess = self._spaces[-1].plan(index, tuple(unit.sizes for unit in plan.units))
                if guess is not None:
                    yield self._listed(guess)

    def next_band(self) -> Iterator[Guess]:
        """Yield the plans in the next band of lower bounds."""
        index = next((i for i, rest_s in enumerate(self._rest_s) if rest_s < inf), None)
        if index is None:
            self._open_s = inf
            return
        space = self._spaces[index]
        self._limits_s[index] = max(WIDER * self._limits_s[index], self._rest_s[index] * (1 + 1e-9))
        band = space.band(self._limits_s[index], LAYOUTS)
        self._rest_s[index] = band.beyond_s
        if index == len(self._spaces) - 1:
            self._open_s = min(self._open_s, band.open_s)
        for guess in band.plans:
            yield self._listed(guess)

    def siblings(self, plan: Plan) -> Iterator[Guess]:
        """Yield the sizes of a plan under other schedules and with layers tuned to memory."""
        guess = self._guesses[plan.text]
        if plan.changes["data.reorder"] == "both":
            unordered = plan.changed(data__reorder="none")
            self._guesses[unordered.text] = guess
            yield unordered, 1e3 * guess.bound_s, UNORDERED
        own = self._variants[guess.variant]
        for index, variant in enumerate(self._variants):
            is_alike = variant.schedule == own.schedule and variant.stages == own.stages
            mode = TUNED if is_alike else own.recompute
            if variant.recompute == mode and index != guess.variant:
                found = self._spaces[-1].plan(index, guess.sizes)
                if found is not None:
                    yield (*self._listed(found)[:2], found.estimate_s / guess.estimate_s)

    def _listed(self, guess: PlanGuess) -> Guess:
        variant = self._variants[guess.variant]
        names = [unit.name for unit in variant.problem.units]
        sizes = dict(zip(names, guess.sizes, strict=True))
        plan = sized_plan(self._recipe, sizes, variant)
        self._guesses.setdefault(plan.text, guess)
        doubt = 1.0 if guess.likely else UNLIKELY
        return plan, 1e3 * guess.bound_s, 1e3 * doubt * max(guess.estimate_s, guess.bound_s)


def sized_plan(recipe: Recipe, sizes: Mapping[str, UnitSizes], variant: Variant) -> Plan:
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
    return Plan("disaggregated", sum(size.devices for size in sizes.values()), changes)
