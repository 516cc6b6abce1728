"""Summary of a run for its start and for `--dry-run`: module sizes, memory, parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchmm.common.layers import ModuleDescription
from torchmm.costs.layers import StageParameters, trained_parameters
from torchmm.models.hf.pair_classes import describe_export_class
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.converters import find_converters
from torchmm.planning.executions import cuda_graphs_problem, parameter_states, recompute_mode
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.recipe.mesh_sizes import MeshSizes
from torchmm.recipe.placement_sizes import format_sizes

MIN_COUNT_IN_MILLIONS = 100_000
"""Minimum number of parameters that is shown in millions."""


class StateBytes(NamedTuple):
    """Bytes on one rank before activations, without temporary buffers and fragmentation."""

    weights: int
    """Sharded weights, and weights that FSDP2 all-gathers in compute dtype: a layer and the next
    one, or all weights of the rank in a pipeline."""
    gradients: int
    optimizer: int


def estimate_state_bytes(run: ResolvedRecipe, model: MultimodalModel) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer states per rank.

    If modules have separate ranks, the bytes are those of the module with the most.

    Args:
        run: Recipe with resolved sizes.
        model: Model on the meta device.
    """
    modules = [m.describe() for m in model.modality_modules()]
    if run.units:
        return max((_rank_state_bytes(run, [m], {}, run.units[m.name]) for m in modules), key=sum)
    return _rank_state_bytes(run, modules, _colocated_sizes(run, model), run.llm)


def _rank_state_bytes(
    run: ResolvedRecipe,
    modules: Sequence[ModuleDescription],
    colocated: Mapping[str, MeshSizes],
    sizes: MeshSizes,
) -> StateBytes:
    """Return the bytes of a rank with these modules.

    Args:
        run: Recipe with resolved sizes.
        modules: Modules of the rank.
        colocated: Parallelism degrees of colocated encoders, by name.
        sizes: Parallelism degrees of all other modules.
    """
    recipe = run.recipe
    training = recipe.training
    states = parameter_states(recipe)
    tensor = sizes.tensor
    ranks = sizes.data_parallel // recipe.parallel.context * training.microbatch_size
    has_single_microbatch = training.global_batch_size // ranks <= 1
    once_per_step = sizes.pipeline > 1 or bool(run.units)
    reduces_every_microbatch = recipe.parallel.gradient_reduction == "microbatch"
    weights = gradients = optimizer = 0.0
    for module in modules:
        module_sizes = colocated.get(module.name, sizes)
        parameters = module.parameters // (tensor * module_sizes.pipeline)
        layer_parameters = [
            trained_parameters(module, n, tensor) / module_sizes.pipeline for n in module.layers
        ]
        counted_layers = zip(module.layers, layer_parameters, strict=True)
        adapter_parameters = sum(count for layer, count in counted_layers if layer.adapters)
        module_parameters = parameters - sum(module.autoencoder_parameters) // module_sizes.pipeline
        trained = module_parameters * module.trainable + adapter_parameters
        if module.token_rows_trainable:
            rows = module.embedding_parameters + module.head_parameters * (not module.tied)
            trained += rows // (tensor * module_sizes.pipeline)
        quantized = [linear for layer in module.layers for linear in layer.quantized]
        counts = [linear.local_weights(tensor) / module_sizes.pipeline for linear in quantized]
        state = StageParameters(
            parameters,
            trained,
            min(trained, sum(layer_parameters)),
            states,
            sum(counts),
            sum(n * linear.value_bytes for n, linear in zip(counts, quantized, strict=True)),
        )
        fraction = 1.0 if once_per_step else 2 / max(1, len(module.layers))
        gathered = fraction * state.compute_bytes(2 if training.dtype == "bfloat16" else 4)
        weights += state.weight_bytes // module_sizes.shard + (module_sizes.shard > 1) * gathered
        # Between the microbatches of a step, gradients are not sharded.
        sharded = (has_single_microbatch or reduces_every_microbatch) and not once_per_step
        gradients += state.gradient_bytes // (module_sizes.shard if sharded else 1)
        optimizer += state.optimizer_bytes // module_sizes.shard
    return StateBytes(round(weights), round(gradients), round(optimizer))


def _colocated_sizes(run: ResolvedRecipe, model: MultimodalModel) -> dict[str, MeshSizes]:
    """Return the sizes of colocated encoders by name."""
    colocated = run.recipe.parallel.placement == "colocated"
    return {name: run.encoder(name) for name in model.encoders} if colocated else {}


def run_summary(run: ResolvedRecipe, model: MultimodalModel, device: str) -> dict[str, str]:
    """Return the label and the value of each line of the start table.

    Args:
        run: Recipe with resolved sizes.
        model: Model on the meta device.
        device: Type of the device that runs the model, "cuda" or "cpu".
    """
    training = run.recipe.training
    lines = {}
    for name, (total, trainable) in model.parameter_counts().items():
        state = "frozen" if trainable == 0 else "trained"
        if 0 < trainable < total:
            state = f"of which {trainable / 1e6:,.2f} M are trained"
        count = f"{total / 1e6:,.1f} M" if total >= MIN_COUNT_IN_MILLIONS else f"{total:,}"
        lines[name] = f"{count} parameters, {state}"
    lines |= _rank_lines(run, model)
    lines["batch"] = (
        f"{training.global_batch_size} sequences of {training.sequence_length} tokens, "
        f"{training.microbatch_size} per microbatch"
    )
    lines["memory per rank"] = _memory_line(estimate_state_bytes(run, model))
    lines["exported as"] = describe_export_class(model)
    lines |= _compiled_line(run, model, device) | _graphs_line(run, model, device)
    for converter in find_converters(run.recipe):
        lines |= converter.summary_lines(model)
    return lines


def _compiled_line(run: ResolvedRecipe, model: MultimodalModel, device: str) -> dict[str, str]:
    """Return the line on compiled layers, with reasons for modules without them."""
    recipe = run.recipe
    compile_config = recipe.compile
    if compile_config.enabled is False or (compile_config.enabled == "auto" and device != "cuda"):
        return {}
    parts = []
    for layered in model.modality_modules():
        module = layered.describe()
        reason = compile_config.reason_for_eager(module, device, recipe.parallel)
        part = f"{module.name} no ({reason})" if reason else f"{module.name} yes"
        mode = recipe.activation_checkpoint.modules.get(
            module.name, recipe.activation_checkpoint.mode
        )
        if mode != recompute_mode(recipe, module, device) and mode != "auto":
            part += ', so "selective" recomputation is "full"'
        parts.append(part)
    return {"compiled layers": ", ".join(parts)}


def _graphs_line(run: ResolvedRecipe, model: MultimodalModel, device: str) -> dict[str, str]:
    """Return the line on CUDA graphs of encoders, with reasons for encoders without them."""
    if not run.recipe.compile.cuda_graphs:
        return {}
    encoders = [m.describe() for m in model.modality_modules() if m.kind == "encoder"]
    reasons = {module.name: cuda_graphs_problem(run, module, device) for module in encoders}
    parts = [f"{name} no ({why})" if why else f"{name} yes" for name, why in reasons.items()]
    return {"CUDA graphs": ", ".join(parts) or "there are no encoders"}


def _memory_line(states: StateBytes) -> str:
    weights, gradients, optimizer = (nbytes / 2**30 for nbytes in states)
    return (
        f"about {sum(states) / 2**30:.2f} GiB before activations: weights {weights:.2f}, gradients "
        f"{gradients:.2f}, optimizer {optimizer:.2f}"
    )


def _rank_lines(run: ResolvedRecipe, model: MultimodalModel) -> dict[str, str]:
    """Return the lines on the parallelism of the ranks."""
    world_size = run.world_size
    llm = run.llm
    if units := run.units:
        parts = " + ".join(f"{sizes.ranks} for {name}" for name, sizes in units.items())
        each = ", ".join(
            f"{sizes.data_parallel // run.data_parallel_size} of {n}" for n, sizes in units.items()
        )
        return {
            "ranks": f"{world_size} = {parts}",
            **{f"ranks of {name}": format_sizes(sizes) for name, sizes in units.items()},
            "replica groups": f"{run.data_parallel_size} with replicas: {each}",
        }
    pipeline = f"pipeline {llm.pipeline} x " if llm.pipeline > 1 else ""
    lines = {
        "ranks": f"{world_size} = {pipeline}replicate {llm.replicate} x shard {llm.shard} "
        f"x tensor {llm.tensor}"
    }
    context = run.recipe.parallel.context
    if context > 1:
        lines["context"] = (
            f"{context} of the shard ranks share the tokens of the LLM, and the images"
        )
    for name, sizes in _colocated_sizes(run, model).items():
        pipelines = llm.pipeline // sizes.pipeline
        lines[f"ranks of {name}"] = (
            f"pipeline {sizes.pipeline} x replicate {sizes.replicate} x shard {sizes.shard} x "
            f"tensor {sizes.tensor}, {pipelines} pipeline{'s' * (pipelines > 1)} per LLM "
            "pipeline"
        )
    return lines
