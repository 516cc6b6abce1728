"""From a recipe to costs: the device of a run, how modules run on it, how plans are tuned.

How a module is executed (over how many ranks it is split and sharded, what it recomputes) is
answered here and nowhere else. A run, its forecast, the choice of segments, reordering and layer
tuning therefore price the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.disttrain.orchestration.trials import load_trials, trial_conditions, trials_run
from torchmm.balance.disttrain.orchestration.unit_costs import TrialRunner, cost_model_run
from torchmm.balance.pipeweaver.recomputation.tuning import LayerTuning
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import Execution, States
from torchmm.costs.operators import Profile
from torchmm.planning.resolved import Resolved
from torchmm.recipe.placement_sizes import encoder_mesh_sizes
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import (
    STATE_BLOCK,
    UPDATE_PORTION,
    FixedMode,
    limit_bytes,
)


def run_profile(recipe: Recipe, device: torch.device) -> Profile:
    """The profile of the device that computes: `simulation.device`; on a CPU, a CPU's, unless that
    names a file, such as one that scripts/calibrate.py has written.

    Raises:
        ConfigError: the device of `simulation.device` is unknown.
    """
    name = recipe.simulation.device
    return _profile("cpu" if device.type == "cpu" and not Path(name).suffix else name)


def simulated_profile(recipe: Recipe) -> Profile:
    """The profile of the device that the recipe's steps are simulated on.

    Raises:
        ConfigError: the device of `simulation.device` is unknown.
    """
    return _profile(recipe.simulation.device)


def _profile(name: str) -> Profile:
    try:
        return load_profile(name)
    except ValueError as error:
        raise ConfigError(f"simulation.device: {error}") from error


def recompute_mode(recipe: Recipe, module: ModuleDescription, device: str) -> FixedMode:
    """Return the mode of all tasks of a module, or "none" if plans choose the modes.

    Args:
        recipe: Recipe of the run.
        module: Sizes of the module.
        device: Type of the device that runs the module, "cuda" or "cpu".
    """
    compiles = recipe.compile.concerns(module, device, recipe.parallel)
    return recipe.activation_checkpoint.fixed_mode(
        module.name, is_eager_on_cuda=device == "cuda" and not compiles
    )


def graphs_problem(run: Resolved, module: ModuleDescription, device: str) -> str:
    """Return why the layers of a module are not launched as CUDA graphs, or "" if they are.

    Args:
        run: Recipe with resolved sizes.
        module: Sizes of the module.
        device: Type of the device that runs the module, "cuda" or "cpu".
    """
    recipe = run.recipe
    compiled = recipe.compile.concerns(module, device, recipe.parallel)
    recompute = recipe.activation_checkpoint.mode_of(
        module.name,
        bounded=recipe.parallel.bounds_encoders and module.kind == "encoder",
        is_eager_on_cuda=device == "cuda" and not compiled,
    )
    return recipe.compile.reason_against_graphs(
        module, device, run.world_size, compiled=compiled, recompute=recompute
    )


def module_executions(
    run: Resolved, modules: Sequence[ModuleDescription], device: str
) -> dict[str, Execution]:
    """Return how every module of a run is executed.

    Args:
        run: Recipe with resolved sizes.
        modules: Sizes of the modules.
        device: Type of the device that runs the modules, "cuda" or "cpu".

    Raises:
        ConfigError: own sizes of encoders do not fit.
    """
    parallel = run.recipe.parallel
    found = {}
    for module in modules:
        own = run.units.get(module.name, run.llm)
        if parallel.placement == "colocated" and module.kind == "encoder":
            own = encoder_mesh_sizes(parallel, module.name, own)
        recompute = recompute_mode(run.recipe, module, device)
        found[module.name] = Execution(
            tensor=own.tensor,
            sequence_parallel=parallel.sequence_parallel,
            async_tensor=parallel.async_tensor_parallel,
            shard=own.shard,
            replicate=own.replicate,
            expert=parallel.expert if module.kind == "llm" else 1,
            context=parallel.context if module.kind == "llm" else 1,
            recompute=recompute,
            compiled=run.recipe.compile.concerns(module, device, parallel),
            graphs=not graphs_problem(run, module, device),
            states=parameter_states(run.recipe),
            reduces_each=parallel.gradient_reduction == "microbatch",
        )
    return found


def parameter_states(recipe: Recipe) -> States:
    """What training holds of parameters, as [optimizer] and [training] say.

    8 bits are counted as if all parameters were matrices with full blocks; vectors are few. What
    updates read and write, and what they need meanwhile, was counted in
    `torchmm/training/optimizers`, call by call.
    """
    optimizer = recipe.optimizer
    narrow = recipe.training.parameter_dtype == "bfloat16"
    moment = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / STATE_BLOCK}[optimizer.state_dtype]
    changed = {"float32": 0.0, "bfloat16": 92.0, "int8": 70.0}
    muon = optimizer.name == "muon"
    updated = 28 + 2 * changed[optimizer.state_dtype] + (changed["bfloat16"] + 6) * narrow
    average = 0.0 if recipe.training.ema_decay is None else 4.0
    if average:  # read and written with the parameter, narrow ones twice
        updated += 18 if narrow else 12
    weight = 2.0 if narrow else 4.0
    # Parameter, moments and average once each way, and the gradient.
    fused = 2 * (weight + 2 * moment + average) + 4
    if optimizer.state_dtype == "float32" and not narrow:
        fused += 4  # torch's kernel writes the clipped gradient
    held = 0.0 if optimizer.offload else moment
    rounding = {"float32": 8.0 * narrow, "bfloat16": 8.0, "int8": 12.0}[optimizer.state_dtype]
    packed = optimizer.state_dtype != "float32"
    in_place = not (narrow or muon or optimizer.offload or packed)
    return States(
        weight=weight,
        moments=2 * held,
        layer_moments=(1 if muon else 2) * held,
        average=average,
        updated=updated,
        fused=updated if muon else fused,
        visiting=(1 if muon else 2) * (moment - held),
        orthogonal=muon,
        portion=0 if in_place else UPDATE_PORTION,
        copy=4.0 * narrow,
        moment_copy=4.0 * packed,
        rounding=rounding,
    )


def run_costs(run: Resolved, modules: Sequence[ModuleDescription], profile: Profile) -> CostModel:
    """What the modules of a run cost.

    Raises:
        ConfigError: own sizes do not fit, or nothing is known about the recipe's dtype.
    """
    try:
        executions = module_executions(run, modules, profile.device.type)
        return CostModel(profile, run.recipe.training.dtype, executions)
    except ValueError as error:
        raise ConfigError(f"training.dtype: {error}") from error


def whole_costs(recipe: Recipe, module: ModuleDescription, profile: Profile) -> CostModel:
    """What a module costs that nothing divides, with what the recipe says of recomputation."""
    device = profile.device.type
    mode = recompute_mode(recipe, module, device)
    compiled = recipe.compile.concerns(module, device, recipe.parallel)
    executions = {module.name: Execution(recompute=mode, compiled=compiled)}
    return CostModel(profile, recipe.training.dtype, executions)


def trial_runner(
    recipe: Recipe, modules: Sequence[ModuleDescription], profile: Profile
) -> TrialRunner:
    """What modules take on a device, alone: measured where the recipe has trials, else modelled.

    Raises:
        ValueError: nothing is known about the recipe's dtype, or trials are of something else.
    """
    parallel = recipe.parallel
    dtype = recipe.training.dtype
    recompute = {m.name: recompute_mode(recipe, m, profile.device.type) for m in modules}
    run = cost_model_run(
        profile,
        dtype,
        modules,
        sequence_parallel=parallel.sequence_parallel,
        async_tensor=parallel.async_tensor_parallel,
        recompute=recompute,
        compiled=frozenset(
            m.name
            for m in modules
            if recipe.compile.concerns(m, profile.device.type, recipe.parallel)
        ),
    )
    if not recipe.simulation.trials:
        return run
    conditions = trial_conditions(modules, dtype, recompute, parallel.sequence_parallel)
    return trials_run(load_trials(Path(recipe.simulation.trials)), conditions, run)


def layer_tuning(
    recipe: Recipe,
    modules: Sequence[ModuleDescription],
    model: CostModel,
    *,
    layerwise: bool,
    device_bytes: float | None = None,
) -> LayerTuning | None:
    """How steps are tuned, if [activation_checkpoint] says so; under "optimus" so are those whose
    encoders keep more than there is room for.

    Args:
        layerwise: whether FSDP2 gathers layer by layer.
        device_bytes: memory of the device; None: as the profile says.
    """
    names = _tuned_modules(recipe, modules)
    if not names:
        return None
    checkpointing = recipe.activation_checkpoint
    memory = model.profile.device.memory_bytes if device_bytes is None else device_bytes
    limit = limit_bytes(checkpointing.memory_limit, memory)
    asked = frozenset(name for name in names if checkpointing.tunes(name))
    offloads = asked if checkpointing.offload else frozenset()
    return LayerTuning(model, names, limit, layerwise, offloads=offloads, refuses=bool(asked))


def _tuned_modules(recipe: Recipe, modules: Sequence[ModuleDescription]) -> frozenset[str]:
    """Those for which plans choose what they recompute."""
    checkpointing = recipe.activation_checkpoint
    bounds = recipe.parallel.bounds_encoders
    modes = {
        m.name: checkpointing.mode_of(
            m.name, bounded=bounds and m.kind == "encoder", is_eager_on_cuda=False
        )
        for m in modules
    }
    return frozenset(name for name, mode in modes.items() if mode == "tuned")


def run_tuning(
    run: Resolved,
    modules: Sequence[ModuleDescription],
    device: torch.device,
    *,
    layerwise: bool,
) -> LayerTuning | None:
    """How the steps of a run are tuned; None: not at all.

    Raises:
        ConfigError: the device of `simulation.device` is unknown.
    """
    if not _tuned_modules(run.recipe, modules):
        return None
    model = run_costs(run, modules, run_profile(run.recipe, device))
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return layer_tuning(run.recipe, modules, model, layerwise=layerwise, device_bytes=memory)
