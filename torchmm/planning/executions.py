"""Execution of each module in a run: parallelism, recomputation and optimizer states.

Training, simulation, the choice of segments, reordering and layer tuning all use these functions,
so they compute the costs of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchmm.common.layers import ModuleDescription
from torchmm.costs.execution import Execution, ParameterStates
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.recipe.placement_sizes import encoder_mesh_sizes
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.training_section import STATE_BLOCK, UPDATE_CHUNK, FixedMode


def recompute_mode(recipe: Recipe, module: ModuleDescription, device: str) -> FixedMode:
    """Return the mode of all tasks of a module, or "none" if plans choose the modes.

    Args:
        recipe: Recipe of the run.
        module: Sizes of the module.
        device: Type of the device that runs the module, "cuda" or "cpu".
    """
    compiles = recipe.compile.applies_to(module, device, recipe.parallel)
    return recipe.activation_checkpoint.fixed_mode(
        module.name, is_eager_on_cuda=device == "cuda" and not compiles
    )


def cuda_graphs_problem(run: ResolvedRecipe, module: ModuleDescription, device: str) -> str:
    """Return why the layers of a module are not launched as CUDA graphs, or "" if they are.

    Args:
        run: Recipe with resolved sizes.
        module: Sizes of the module.
        device: Type of the device that runs the module, "cuda" or "cpu".
    """
    recipe = run.recipe
    compiled = recipe.compile.applies_to(module, device, recipe.parallel)
    recompute = recipe.activation_checkpoint.mode_of(
        module.name,
        bounded=recipe.parallel.bounds_encoders and module.kind == "encoder",
        is_eager_on_cuda=device == "cuda" and not compiled,
    )
    return recipe.compile.reason_against_graphs(
        module, device, run.world_size, compiled=compiled, recompute=recompute
    )


def module_executions(
    run: ResolvedRecipe, modules: Sequence[ModuleDescription], device: str
) -> dict[str, Execution]:
    """Return the execution of each module of a run.

    Args:
        run: Recipe with resolved sizes.
        modules: Sizes of the modules.
        device: Type of the device that runs the modules, "cuda" or "cpu".

    Raises:
        ConfigError: Parallelism degrees of an encoder are invalid.
    """
    parallel = run.recipe.parallel
    executions = {}
    for module in modules:
        sizes = run.units.get(module.name, run.llm)
        if parallel.placement == "colocated" and module.kind == "encoder":
            sizes = encoder_mesh_sizes(parallel, module.name, sizes)
        recompute = recompute_mode(run.recipe, module, device)
        executions[module.name] = Execution(
            tensor=sizes.tensor,
            sequence_parallel=parallel.sequence_parallel,
            async_tensor=parallel.async_tensor_parallel,
            shard=sizes.shard,
            replicate=sizes.replicate,
            expert=parallel.expert if module.kind == "llm" else 1,
            context=parallel.context if module.kind == "llm" else 1,
            recompute=recompute,
            compiled=run.recipe.compile.applies_to(module, device, parallel),
            graphs=not cuda_graphs_problem(run, module, device),
            states=parameter_states(run.recipe),
            reduces_every_microbatch=parallel.gradient_reduction == "microbatch",
        )
    return executions


def parameter_states(recipe: Recipe) -> ParameterStates:
    """Return the bytes of parameters and optimizer states in training.

    8-bit states are estimated as if all parameters were matrices with complete blocks, because
    vectors are few. Memory traffic and temporary memory of updates were counted per operator in
    `torchmm/training/optimizers`.
    """
    optimizer = recipe.optimizer
    is_bfloat16 = recipe.training.parameter_dtype == "bfloat16"
    moment_bytes = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / STATE_BLOCK}[
        optimizer.state_dtype
    ]
    conversion_bytes = {"float32": 0.0, "bfloat16": 92.0, "int8": 70.0}
    muon = optimizer.name == "muon"
    update_bytes = (
        28
        + 2 * conversion_bytes[optimizer.state_dtype]
        + (conversion_bytes["bfloat16"] + 6) * is_bfloat16
    )
    average_bytes = 0.0 if recipe.training.ema_decay is None else 4.0
    if average_bytes:  # read and written with the parameter, twice for narrow parameters
        update_bytes += 18 if is_bfloat16 else 12
    weight = 2.0 if is_bfloat16 else 4.0
    # Read and write of parameter, moments and average, and read of the gradient.
    fused_update_bytes = 2 * (weight + 2 * moment_bytes + average_bytes) + 4
    if optimizer.state_dtype == "float32" and not is_bfloat16:
        fused_update_bytes += 4  # the fused kernel of torch writes the clipped gradient
    device_moment = 0.0 if optimizer.offload else moment_bytes
    rounding_bytes = {"float32": 8.0 * is_bfloat16, "bfloat16": 8.0, "int8": 12.0}[
        optimizer.state_dtype
    ]
    is_low_precision = optimizer.state_dtype != "float32"
    in_place = not (is_bfloat16 or muon or optimizer.offload or is_low_precision)
    return ParameterStates(
        weight=weight,
        moments=2 * device_moment,
        layer_moments=(1 if muon else 2) * device_moment,
        moving_average=average_bytes,
        update_traffic=update_bytes,
        fused_update_traffic=update_bytes if muon else fused_update_bytes,
        offloaded_moments=(1 if muon else 2) * (moment_bytes - device_moment),
        uses_muon=muon,
        update_chunk=0 if in_place else UPDATE_CHUNK,
        float32_copy=4.0 * is_bfloat16,
        float32_moment_copy=4.0 * is_low_precision,
        rounding_buffer=rounding_bytes,
    )
