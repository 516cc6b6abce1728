"""What the orchestrator is asked for a recipe, and a plan as a recipe again.

The data are sampled and the modules profiled (`torchmm.balance.orchestration.unit_costs`) for every
way to recompute that is tried; with every schedule these are the *variants* of
`torchmm.balance.orchestration.space`. DistTrain §3, §5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from torchmm.balance.costs.devices import MEMORY_SHARE
from torchmm.balance.costs.flops import gradients_arrive
from torchmm.balance.costs.layers import learns
from torchmm.balance.costs.operators import Profile
from torchmm.balance.costs.sizes import pack_sizes
from torchmm.balance.orchestration.bounds import SampleSeconds, UnitBound, Waiting
from torchmm.balance.orchestration.problem import OrchestrationProblem
from torchmm.balance.orchestration.search import UnitSizes
from torchmm.balance.orchestration.space import Variant
from torchmm.balance.orchestration.unit_costs import (
    TENSOR_SIZES,
    Profiler,
)
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import LLM
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.executions import parameter_states, trial_runner, whole_costs
from torchmm.planning.first_step import first_microbatches
from torchmm.planning.forecast import StepSample
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import SCHEDULES, schedules_for
from torchmm.recipe.sizes import AXES
from torchmm.recipe.training_section import FixedMode

SAMPLED = 512
"""Sequences of which the data's statistics are taken, at most."""
VIRTUAL_STAGES = (2, 4)
"""Stages of the LLM on each of its ranks that are tried besides 1."""
TUNED = "tuned"
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
            device has no peak for the dtype, trials are of something else, or sizes make no sense.
    """
    training = recipe.training
    sample = StepSample(recipe) if sample is None else sample
    modules = sample.modules
    if len(modules) == 1:
        raise ConfigError("model: has no module besides the LLM, so there is nothing to place")
    packs = sampled_packs(recipe, sample.model) if packs is None else packs
    try:
        run = trial_runner(recipe, modules, profile)
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


def recompute_modes(recipe: Recipe) -> list[str]:
    """Ways to recompute that are tried, the recipe's first: all, as steps give the same numbers
    with each, unless times were measured under one."""
    own = recipe.activation_checkpoint.mode
    if recipe.simulation.trials:
        return [own]
    return [own, *(mode for mode in (*get_args(FixedMode), TUNED) if mode != own)]


def with_recompute(recipe: Recipe, mode: str) -> Recipe:
    """The recipe with another mode for the modules that have none of their own, tuned to no larger
    a share of memory than what is planned may take (`MEMORY_SHARE`)."""
    own = recipe.activation_checkpoint
    limit = own.memory_limit
    if limit.endswith("%") and float(limit[:-1]) > 100 * MEMORY_SHARE:
        limit = f"{MEMORY_SHARE:.0%}"
    section = own.model_copy(update={"mode": mode, "memory_limit": limit})
    return recipe.model_copy(update={"activation_checkpoint": section})


def plan_variants(
    recipe: Recipe, devices: int, profile: Profile, sample: StepSample
) -> list[Variant]:
    """All ways to run the modules apart, with what they cost.

    Raises:
        ConfigError: as `orchestration_problem`.
    """
    found = []
    packs = sampled_packs(recipe, sample.model)
    for mode in recompute_modes(recipe):
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
    model = whole_costs(recipe, module, profile)
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


def sized_recipe(
    recipe: Recipe,
    sizes: Mapping[str, UnitSizes],
    *,
    schedule: str = "1f1b",
    stages: int = 1,
    recompute: str | None = None,
) -> Recipe:
    """The recipe with a plan's sizes; its other keys stay, unless they contradict the placement.

    Data-parallel ranks of a module are one FSDP2 group. Reordering is turned on, as without it the
    encoders' ranks wait for each other.

    Args:
        sizes: by module.
        schedule: with these stages of the LLM per rank.
        recompute: mode of modules that have none of their own; None: the recipe's.
    """
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
    parallel |= {"placement": "disaggregated", "schedule": schedule, "virtual_stages": stages}
    if parallel["reshard_after_forward"] == "always":
        parallel["reshard_after_forward"] = "default"
    parallel["gradient_reduction"] = "step"
    if sizes[LLM].tensor == 1:
        parallel |= {"async_tensor_parallel": False, "async_tensor_backend": "auto"}
    table = recipe.model_dump(exclude_none=True)
    table["parallel"] = parallel
    table["data"]["reorder"] = "both"
    table["simulation"]["gpus"] = sum(size.devices for size in sizes.values())
    found = Recipe.model_validate(table)
    return found if recompute is None else with_recompute(found, recompute)
