"""Cost models, device profiles and layer tuning of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.disttrain.orchestration.unit_costs import (
    ModuleCostFunction,
    module_cost_function,
)
from torchmm.balance.pipeweaver.activation_checkpointing.tuning import LayerTuning
from torchmm.balance.simulation.section import SimulationConfig
from torchmm.common.errors import ConfigError
from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import Execution
from torchmm.costs.operators import DeviceProfile
from torchmm.planning.executions import module_executions, recompute_mode
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import limit_bytes


def load_run_profile(recipe: Recipe, device: torch.device) -> DeviceProfile:
    """Return the profile of the device of a run.

    On a CPU this is the profile of a CPU, unless `simulation.device` is a file, such as one from
    scripts/calibrate.py.

    Raises:
        ConfigError: The device of `simulation.device` is unknown.
    """
    name = SimulationConfig.from_parent(recipe).device
    return _load_profile("cpu" if device.type == "cpu" and not Path(name).suffix else name)


def load_simulated_profile(recipe: Recipe) -> DeviceProfile:
    """Return the profile of the device that steps of the recipe are simulated on.

    Raises:
        ConfigError: The device of `simulation.device` is unknown.
    """
    return _load_profile(SimulationConfig.from_parent(recipe).device)


def _load_profile(name: str) -> DeviceProfile:
    try:
        return load_profile(name)
    except ValueError as error:
        raise ConfigError(f"simulation.device: {error}") from error


def build_cost_model(
    run: ResolvedRecipe, modules: Sequence[ModuleDescription], profile: DeviceProfile
) -> CostModel:
    """Return the cost model of the modules of a run.

    Raises:
        ConfigError: The sizes of a module do not fit, or the profile does not have the dtype.
    """
    try:
        executions = module_executions(run, modules, profile.device.type)
        return CostModel(profile, run.recipe.training.dtype, executions)
    except ValueError as error:
        raise ConfigError(f"training.dtype: {error}") from error


def build_unsharded_cost_model(
    recipe: Recipe, module: ModuleDescription, profile: DeviceProfile
) -> CostModel:
    """Return the cost model of an unsharded module with the recomputation of the recipe."""
    device = profile.device.type
    mode = recompute_mode(recipe, module, device)
    compiled = recipe.compile.applies_to(module, device, recipe.parallel)
    executions = {module.name: Execution(recompute=mode, compiled=compiled)}
    return CostModel(profile, recipe.training.dtype, executions)


def build_module_cost_function(
    recipe: Recipe, modules: Sequence[ModuleDescription], profile: DeviceProfile
) -> ModuleCostFunction:
    """Return the function that returns the time of a module on dedicated ranks of a device.

    Raises:
        ValueError: The profile does not have the dtype.
    """
    parallel = recipe.parallel
    device = profile.device.type
    return module_cost_function(
        profile,
        recipe.training.dtype,
        modules,
        sequence_parallel=parallel.sequence_parallel,
        async_tensor=parallel.async_tensor_parallel,
        recompute={m.name: recompute_mode(recipe, m, device) for m in modules},
        compiled=frozenset(
            m.name for m in modules if recipe.compile.applies_to(m, device, parallel)
        ),
    )


def build_layer_tuning(
    recipe: Recipe,
    model: CostModel,
    *,
    layerwise: bool,
    device_bytes: float | None = None,
) -> LayerTuning | None:
    """Return how plans select the layers that recompute, or None if they do not.

    Args:
        recipe: Recipe of the run. With "optimus", plans also select layers of encoders.
        model: Costs of the modules.
        layerwise: Whether FSDP2 all-gathers layer by layer.
        device_bytes: Memory of the device. None for that of the profile.
    """
    names = recipe.tuned_modules
    if not names:
        return None
    checkpointing = recipe.activation_checkpoint
    memory = model.profile.device.memory_bytes if device_bytes is None else device_bytes
    limit = limit_bytes(checkpointing.memory_limit, memory)
    requested = frozenset(
        name for name in names if checkpointing.selects_layers_automatically(name)
    )
    offloads = requested if checkpointing.offload else frozenset()
    return LayerTuning(model, names, limit, layerwise, offloads=offloads, must_fit=bool(requested))


def build_run_layer_tuning(
    run: ResolvedRecipe,
    modules: Sequence[ModuleDescription],
    device: torch.device,
    *,
    layerwise: bool,
) -> LayerTuning | None:
    """Return how the plans of a run select the layers that recompute, or None if they do not.

    Raises:
        ConfigError: The device of `simulation.device` is unknown.
    """
    if not run.recipe.tuned_modules:
        return None
    model = build_cost_model(run, modules, load_run_profile(run.recipe, device))
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return build_layer_tuning(run.recipe, model, layerwise=layerwise, device_bytes=memory)
