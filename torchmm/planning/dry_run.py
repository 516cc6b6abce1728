"""What a run would be, without starting it: modules, layout, batch and memory per rank.

Built from the recipe alone on the meta device, so it costs seconds and no memory for models and
clusters that are not at hand. Also the content of the table a run shows at its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

from torchmm.balance.costs.profiles import load_profile
from torchmm.balance.costs.rough_memory import MemoryEstimate, OwnSizes, estimate_memory
from torchmm.common.batch import ModuleDescription
from torchmm.common.errors import ConfigError
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.encoder_sizes import choose_encoders, leaves_encoders_open
from torchmm.planning.forecast import Forecast, Forecaster
from torchmm.planning.placement import leaves_units_open, orchestrated_units
from torchmm.planning.report import write_picture
from torchmm.recipe.placement_sizes import encoder_layout, show_layout, units_of
from torchmm.recipe.read import Layout, resolve_layout
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.sizes import replica_groups


def run_memory(recipe: Recipe, model: MultimodalModel, world_size: int) -> MemoryEstimate:
    """Estimated bytes per rank; of the module that needs most where each has ranks of its own.

    Every token of a microbatch is assumed to be an image's, and every `context_tokens` of them the
    context of one more image (or longest clip) that is drawn.
    """
    modules = [m.describe() for m in model.modality_modules()]
    if units := units_of(recipe, world_size):
        behind, estimates = 0, []
        for module in reversed(modules):
            own = units[module.name]
            behind += own.pipeline  # with its own ranks: waves in flight, under 1F1B
            waves = -(-units["llm"].data_parallel // own.data_parallel)
            estimates.append(_memory(recipe, model, [module], own, behind * waves))
        return max(estimates, key=lambda estimate: estimate.total_bytes)
    return _memory(recipe, model, modules, resolve_layout(recipe.parallel, world_size))


def _memory(
    recipe: Recipe,
    model: MultimodalModel,
    modules: Sequence[ModuleDescription],
    layout: Layout,
    in_flight: int | None = None,
) -> MemoryEstimate:
    """Of a rank with these modules."""
    training = recipe.training
    llm_tokens = training.microbatch_size * training.sequence_length
    checkpointing = recipe.activation_checkpoint
    ranks = layout.data_parallel * training.microbatch_size
    own = _own_layouts(recipe, model, layout)
    return estimate_memory(
        modules,
        {m.name: _units(m, model, llm_tokens) for m in modules},
        shard=layout.shard,
        tensor=layout.tensor,
        compute_bytes=2 if training.dtype == "bfloat16" else 4,
        microbatches=max(1, training.global_batch_size // ranks),
        recompute={
            # Of what is tuned, the least.
            m.name: "full" if checkpointing.tunes(m.name) else checkpointing.fixed_mode(m.name)
            for m in modules
        },
        pipeline=layout.pipeline,
        sequence_parallel=recipe.parallel.sequence_parallel,
        own={name: OwnSizes(found.pipeline, found.shard) for name, found in own.items()},
        in_flight=in_flight,
    )


def _own_layouts(recipe: Recipe, model: MultimodalModel, layout: Layout) -> dict[str, Layout]:
    """Sizes of colocated encoders by name."""
    if recipe.parallel.placement != "colocated":
        return {}
    return {name: encoder_layout(recipe.parallel, name, layout) for name in model.encoders}


def _units(module: ModuleDescription, model: MultimodalModel, llm_tokens: int) -> int:
    """Tokens or patches that a module may have to process in a microbatch."""
    if module.kind == "generator":
        spec = model.generator_spec()
        assert spec is not None
        images = max(1, llm_tokens // spec.context_tokens)
        return images * prod(spec.grid(spec.frames))
    return llm_tokens * (1 if module.kind == "llm" else module.merge**2)


def run_summary(
    recipe: Recipe, model: MultimodalModel, world_size: int, *, simulated: bool = False
) -> dict[str, str]:
    """Label and value of each line of the start table.

    Args:
        simulated: whether a peak of memory follows, so that no bound on it is needed.
    """
    training = recipe.training
    memory = run_memory(recipe, model, world_size)
    lines = {}
    for name, (total, trainable) in model.parameter_counts().items():
        state = "frozen" if trainable == 0 else "trained"
        lines[name] = f"{total / 1e6:,.1f} M parameters, {state}"
    lines |= _rank_lines(recipe, model, world_size)
    lines["batch"] = (
        f"{training.global_batch_size} sequences of {training.sequence_length} tokens, "
        f"{training.microbatch_size} per microbatch"
    )
    lines["memory per rank"] = _memory_line(memory, simulated)
    return lines


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


def _rank_lines(recipe: Recipe, model: MultimodalModel, world_size: int) -> dict[str, str]:
    """How ranks share the work."""
    if units := units_of(recipe, world_size):
        shares = " + ".join(f"{own.ranks} for {name}" for name, own in units.items())
        groups = replica_groups(units)
        each = ", ".join(f"{own.data_parallel // groups} of {n}" for n, own in units.items())
        return {
            "ranks": f"{world_size} = {shares}",
            **{f"ranks of {name}": show_layout(own) for name, own in units.items()},
            "replica groups": f"{groups} with replicas: {each}",
        }
    layout = resolve_layout(recipe.parallel, world_size)
    pipeline = f"pipeline {layout.pipeline} x " if layout.pipeline > 1 else ""
    lines = {
        "ranks": f"{world_size} = {pipeline}replicate {layout.replicate} x shard {layout.shard} "
        f"x tensor {layout.tensor}"
    }
    for name, own in _own_layouts(recipe, model, layout).items():
        pipelines = layout.pipeline // own.pipeline
        lines[f"ranks of {name}"] = (
            f"pipeline {own.pipeline} x replicate {own.replicate} x shard {own.shard} x tensor "
            f"{own.tensor}, {pipelines} pipeline{'s' * (pipelines > 1)} beside one of the LLM"
        )
    return lines


def describe_run(recipe: Recipe, world_size: int, picture: Path | None = None) -> str:
    """The start table of `recipe` on `world_size` ranks and its first step, simulated, as text.

    Args:
        picture: where to draw the step's plan (SVG).

    Raises:
        ConfigError: the model cannot be built or cut as the recipe says, the device is unknown, or
            a rank needs more memory than it has.
    """
    try:
        profile = load_profile(recipe.simulation.device)
    except ValueError as error:
        raise ConfigError(f"simulation.device: {error}") from error
    if leaves_units_open(recipe):
        recipe = orchestrated_units(recipe, world_size)
    forecaster = Forecaster(recipe, world_size, profile)
    chosen: list[str] = []
    if leaves_encoders_open(recipe):
        choice = choose_encoders(forecaster)
        recipe, chosen = choice.recipe, list(choice.lines())
    forecast = forecaster.forecast_parallel(recipe.parallel)
    lines = run_summary(recipe, forecaster.model, world_size, simulated=True)
    lines |= {f"choice {index}": text for index, text in enumerate(chosen, 1)}
    lines |= _step_lines(forecast, profile.device.name, profile.device.memory_bytes)
    if picture is not None and forecast.step is not None:
        write_picture(picture, recipe.name, forecast)
        lines["plan"] = str(picture)
    width = max(len(k) for k in lines)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines.items())


def _step_lines(forecast: Forecast, device: str, memory_bytes: float) -> dict[str, str]:
    """What is predicted of the first step."""
    step = forecast.step
    if step is None:
        raise ConfigError(f"parallel: {forecast.problem}")
    peak_bytes = max(step.peak_bytes)
    if not step.fits:
        rank = step.peak_bytes.index(peak_bytes)
        raise ConfigError(
            f"parallel: pipeline rank {rank} would need {peak_bytes / 2**30:.1f} GiB, {device} has "
            f"{memory_bytes / 2**30:.1f}; use more ranks (shard, tensor, pipeline), smaller "
            "microbatches or activation_checkpoint, or set simulation.device"
        )
    timeline = step.timeline
    return {
        "first step": f"{forecast.iteration_ms:,.1f} ms on {device}, simulated (of it the "
        f"optimizer {forecast.update_ms:,.1f}): MFU "
        f"{100 * forecast.mfu:.1f} %, bubbles {100 * timeline.bubble_fraction:.1f} %, "
        f"{forecast.tokens_per_s:,.0f} tokens/s",
        "peak memory": f"{peak_bytes / 2**30:.2f} GiB, simulated, of {memory_bytes / 2**30:.1f}",
    }
