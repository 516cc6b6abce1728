"""What a run is, in a few lines: sizes of modules, memory, layout; for its start and for
`--dry-run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torchmm.balance.costs.rough_memory import MemoryEstimate, OwnSizes, estimate_memory
from torchmm.common.layers import ModuleDescription
from torchmm.models.hf.pairs import exported_as
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.float8 import float8_linears
from torchmm.planning.executions import graphs_problem, parameter_states, recompute_mode
from torchmm.planning.resolved import Resolved
from torchmm.recipe.placement_sizes import show_sizes
from torchmm.recipe.sizes import MeshSizes

MILLIONS_FROM = 100_000
"""Parameters that are counted in millions; fewer would be 0.0."""


def run_memory(run: Resolved, model: MultimodalModel, device: str) -> MemoryEstimate:
    """Return the estimated bytes per rank.

    If modules have separate ranks, the estimate is that of the module with the highest memory use.
    Every token of a microbatch is assumed to belong to an image to read, and every `context_tokens`
    of them to the context of an image (or longest video) to generate.

    Args:
        run: Recipe with resolved sizes.
        model: Model on the meta device.
        device: Type of the device that runs the model, "cuda" or "cpu".
    """
    modules = [m.describe() for m in model.modality_modules()]
    if not run.units:
        return _memory(run, model, modules, run.llm, device)
    depth = 0
    estimates = []
    for module in reversed(modules):
        own = run.units[module.name]
        depth += own.pipeline  # ranks from here to the end: waves in flight, under 1F1B
        waves = -(-run.llm.data_parallel // own.data_parallel)
        estimates.append(_memory(run, model, [module], own, device, depth * waves))
    return max(estimates, key=lambda estimate: estimate.total_bytes)


def _memory(
    run: Resolved,
    model: MultimodalModel,
    modules: Sequence[ModuleDescription],
    sizes: MeshSizes,
    device: str,
    in_flight: int | None = None,
) -> MemoryEstimate:
    """Estimate for a rank with these modules."""
    recipe = run.recipe
    training = recipe.training
    llm_tokens = -(-training.microbatch_size * training.sequence_length // recipe.parallel.context)
    checkpointing = recipe.activation_checkpoint
    ranks = sizes.data_parallel // recipe.parallel.context * training.microbatch_size
    own = _colocated_sizes(run, model)
    return estimate_memory(
        modules,
        {m.name: _units(m, model, llm_tokens) for m in modules},
        shard=sizes.shard,
        tensor=sizes.tensor,
        compute_bytes=2 if training.dtype == "bfloat16" else 4,
        microbatches=max(1, training.global_batch_size // ranks),
        recompute={
            # Of what is tuned, the least.
            m.name: "full" if checkpointing.tunes(m.name) else recompute_mode(recipe, m, device)
            for m in modules
        },
        pipeline=sizes.pipeline,
        sequence_parallel=recipe.parallel.sequence_parallel,
        own={name: OwnSizes(found.pipeline, found.shard) for name, found in own.items()},
        in_flight=in_flight,
        states=parameter_states(recipe),
        reduces_each=recipe.parallel.gradient_reduction == "microbatch",
    )


def _colocated_sizes(run: Resolved, model: MultimodalModel) -> dict[str, MeshSizes]:
    """Sizes of colocated encoders by name."""
    colocated = run.recipe.parallel.placement == "colocated"
    return {name: run.encoder(name) for name in model.encoders} if colocated else {}


def _units(module: ModuleDescription, model: MultimodalModel, llm_tokens: int) -> int:
    """Tokens or patches that a module may have to process in a microbatch."""
    if module.kind == "generator":
        spec = model.generator_spec()
        assert spec is not None
        images = max(1, llm_tokens // spec.context_tokens)
        return images * prod(spec.grid(spec.frames))
    return llm_tokens * module.patches_per_token


def run_summary(
    run: Resolved, model: MultimodalModel, device: str, *, simulated: bool = False
) -> dict[str, str]:
    """Return the label and the value of each line of the start table.

    Args:
        run: Recipe with resolved sizes.
        model: Model on the meta device.
        device: Type of the device that runs the model, "cuda" or "cpu".
        simulated: Whether the caller appends a simulated peak of memory, which replaces the bound.
    """
    training = run.recipe.training
    memory = run_memory(run, model, device)
    lines = {}
    for name, (total, trainable) in model.parameter_counts().items():
        state = "frozen" if trainable == 0 else "trained"
        if 0 < trainable < total:
            state = f"of which {trainable / 1e6:,.2f} M are trained"
        count = f"{total / 1e6:,.1f} M" if total >= MILLIONS_FROM else f"{total:,}"
        lines[name] = f"{count} parameters, {state}"
    lines |= _rank_lines(run, model)
    lines["batch"] = (
        f"{training.global_batch_size} sequences of {training.sequence_length} tokens, "
        f"{training.microbatch_size} per microbatch"
    )
    lines["memory per rank"] = _memory_line(memory, simulated)
    lines["exported as"] = exported_as(model)
    lines |= _compiled_line(run, model, device) | _graphs_line(run, model, device)
    return lines | _float8_line(run, model)


def _compiled_line(run: Resolved, model: MultimodalModel, device: str) -> dict[str, str]:
    """Return which modules have compiled layers, and why the others have not."""
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
        if mode != recompute_mode(recipe, module, device) and mode != "tuned":
            part += ', so "selective" recomputation is "full"'
        parts.append(part)
    return {"compiled layers": ", ".join(parts)}


def _graphs_line(run: Resolved, model: MultimodalModel, device: str) -> dict[str, str]:
    """Return which encoders launch their layers as CUDA graphs, and why the others do not."""
    if not run.recipe.compile.cuda_graphs:
        return {}
    encoders = [m.describe() for m in model.modality_modules() if m.kind == "encoder"]
    reasons = {module.name: graphs_problem(run, module, device) for module in encoders}
    parts = [f"{name} no ({why})" if why else f"{name} yes" for name, why in reasons.items()]
    return {"CUDA graphs": ", ".join(parts) or "no encoders"}


def _float8_line(run: Resolved, model: MultimodalModel) -> dict[str, str]:
    float8 = run.recipe.float8
    counts = {
        module.name: len(float8_linears(module, float8))
        for module in model.modality_modules()
        if float8.concerns(module.name)
    }
    if not counts:
        return {}
    how = f"{float8.recipe} scales" + (", emulated" if float8.emulate else "")
    parts = ", ".join(f"{count} linears of {name}" for name, count in counts.items())
    return {"float8": f"{how}: {parts}"}


def _memory_line(memory: MemoryEstimate, simulated: bool) -> str:
    """States, and what activations take at most, unless a simulation knows better."""
    gib = 1 / 2**30
    states = (
        f"weights {memory.weight_bytes * gib:.2f}, gradients {memory.gradient_bytes * gib:.2f}, "
        f"optimizer {memory.optimizer_bytes * gib:.2f}"
    )
    if simulated:
        held_bytes = memory.total_bytes - memory.activation_bytes
        return f"about {held_bytes * gib:.2f} GiB before activations: {states}"
    return (
        f"at most about {memory.total_bytes * gib:.2f} GiB: {states}, activations "
        f"{memory.activation_bytes * gib:.2f}"
    )


def _rank_lines(run: Resolved, model: MultimodalModel) -> dict[str, str]:
    """How ranks share the work."""
    world_size = run.world_size
    llm = run.llm
    if units := run.units:
        parts = " + ".join(f"{own.ranks} for {name}" for name, own in units.items())
        each = ", ".join(f"{own.data_parallel // run.shares} of {n}" for n, own in units.items())
        return {
            "ranks": f"{world_size} = {parts}",
            **{f"ranks of {name}": show_sizes(own) for name, own in units.items()},
            "replica groups": f"{run.shares} with replicas: {each}",
        }
    pipeline = f"pipeline {llm.pipeline} x " if llm.pipeline > 1 else ""
    lines = {
        "ranks": f"{world_size} = {pipeline}replicate {llm.replicate} x shard {llm.shard} "
        f"x tensor {llm.tensor}"
    }
    context = run.recipe.parallel.context
    if context > 1:
        lines["context"] = f"{context} of the shard ranks share the LLM's tokens, and the images"
    for name, own in _colocated_sizes(run, model).items():
        pipelines = llm.pipeline // own.pipeline
        lines[f"ranks of {name}"] = (
            f"pipeline {own.pipeline} x replicate {own.replicate} x shard {own.shard} x tensor "
            f"{own.tensor}, {pipelines} pipeline{'s' * (pipelines > 1)} per pipeline of the LLM"
        )
    return lines
