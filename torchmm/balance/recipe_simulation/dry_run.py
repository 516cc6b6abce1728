"""Dry run: modules, layout, batch and memory per rank of a run without starting it.

Everything is computed from the recipe on the meta device. This takes seconds, and needs neither
memory for the model nor the cluster. A run logs the same table at its start.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from torchmm.balance.recipe_simulation.first_microbatches import describe_samples
from torchmm.balance.recipe_simulation.host_memory import host_memory_line
from torchmm.balance.recipe_simulation.report import write_timeline
from torchmm.balance.recipe_simulation.step_simulator import SimulatedStepReport, StepSimulator
from torchmm.balance.run_costs import load_simulated_profile
from torchmm.balance.search.recipe_completion import complete_unit_sizes, search_encoder_sizes
from torchmm.balance.search.recipe_plans import needs_encoder_sizes
from torchmm.balance.search.report import describe_optimality
from torchmm.balance.search.result import find_best
from torchmm.common.errors import ConfigError
from torchmm.data.tokenizer import load_tokenizer
from torchmm.parallel.fsdp import needs_fsdp
from torchmm.planning.first_step import training_samples
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.run_length import estimate_pass_steps, resolve_epochs, run_length_lines
from torchmm.planning.summary import run_summary
from torchmm.recipe.data_section import is_address
from torchmm.recipe.recipe import Recipe

HSDP_MIN_GAIN = 0.02
"""Minimum gain of HSDP as a fraction of a step for a recommendation of `--dry-run`."""


def describe_run(
    recipe: Recipe,
    world_size: int,
    picture: Path | None = None,
    arguments: Sequence[str] = (),
    program: str = "train.py",
) -> str:
    """Return the start table of a recipe and its simulated first step as text.

    Args:
        recipe: Recipe of the run.
        world_size: Number of ranks.
        picture: Path of a timeline of the plan (SVG).
        arguments: Arguments of the command that starts the run. If empty, the command is omitted.
        program: Program of this command, as passed to torchrun.

    Raises:
        ConfigError: The model cannot be built or split as in the recipe, the device is unknown, or
            a rank exceeds its memory.
    """
    profile = load_simulated_profile(recipe)
    model = None
    pass_steps = None
    if _reads_local_data(recipe) or recipe.training.epochs is not None:
        model = recipe_model(recipe)
        tokenizer = load_tokenizer(recipe.model)
        recipe = resolve_epochs(recipe, model, tokenizer)
        samples = training_samples(recipe, model, tokenizer)
        if samples is not None:
            pass_steps = estimate_pass_steps(samples, recipe)
    if recipe.parallel.needs_orchestration:
        recipe = complete_unit_sizes(recipe, world_size)
    simulator = StepSimulator(recipe, world_size, profile, model)
    chosen_sizes: dict[str, str] = {}
    if needs_encoder_sizes(recipe):
        result = search_encoder_sizes(simulator)
        best = find_best(result, world_size)
        recipe = best.recipe.model_copy(update={"data": recipe.data})
        simulator = StepSimulator(recipe, world_size, profile, sample=simulator.sample)
        chosen_sizes = {"chosen": f"{best.sizes} ({describe_optimality(result)})"}
    report = simulator.simulate_parallel(recipe.parallel)
    run = simulator.run.with_parallel(recipe.parallel)
    lines = run_summary(run, simulator.model, profile.device.type)
    lines["samples"] = describe_samples(recipe)
    lines |= {key: f"auto: {text}" for key, text in run.choices.items()}
    lines |= chosen_sizes
    other = _with_other_reduction(simulator, recipe)
    lines |= _step_lines(report, other, profile.device.name, profile.device.memory_bytes)
    assert report.step is not None
    lines["host memory"] = host_memory_line(simulator, run, report.step)
    lines |= _reduction_line(recipe, report, other)
    lines |= _hsdp_lines(simulator, report)
    step_s = report.iteration_ms / 1e3
    lines |= run_length_lines(recipe, simulator.model, pass_steps, step_s)
    if picture is not None and report.step is not None:
        write_timeline(picture, recipe.name, report)
        lines["plan"] = str(picture)
    if arguments:
        lines |= _launch_lines(arguments, world_size, profile.device.devices_per_node, program)
    width = max(len(k) for k in lines)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines.items())


def _reads_local_data(recipe: Recipe) -> bool:
    """Return True if the data can be measured without network access."""
    sources = recipe.data.sources
    return bool(sources) and all(
        not source.streaming and not is_address(source.path) and source.format != "hub"
        for source in sources
    )


def _launch_lines(
    arguments: Sequence[str], world_size: int, per_node: int, program: str = "train.py"
) -> dict[str, str]:
    """Return the command that starts the run. In a clone, add that of Slurm for several nodes."""
    ranks = min(world_size, per_node)
    nodes = -(-world_size // ranks)
    fewer = world_size - (nodes - 1) * ranks
    options = f"--nproc-per-node {ranks}"
    if nodes > 1:
        options = f"--nnodes {nodes} {options} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"
    command = shlex.join(arguments)
    lines = {"start with": f"torchrun {options} {program} {command}"}
    if nodes > 1:
        last = "" if fewer == ranks else f", on one of them with --nproc-per-node {fewer}"
        lines["start with"] += f"   (on each of {nodes} nodes{last}; docs/guides/cluster.md)"
    if nodes > 1 and program == "train.py":
        tasks = "" if fewer == ranks else f"--ntasks {world_size} "
        sizes = f"--nodes {nodes} {tasks}--ntasks-per-node {ranks} --gpus-per-node {ranks}"
        lines["or, with Slurm"] = f"sbatch {sizes} scripts/launch/slurm.sh {command}"
    return lines


def _with_other_reduction(simulator: StepSimulator, recipe: Recipe) -> SimulatedStepReport | None:
    """Return the report with the other `parallel.gradient_reduction`, if the recipe supports it.

    None if FSDP2 is not used or does not all-gather layer by layer, or if parameters are bfloat16.
    Also None for a step with one microbatch, for which both settings are equal.
    """
    run = simulator.run
    if recipe.parallel.placement != "interleaved" or not run.unshards_per_layer:
        return None
    if not needs_fsdp(run.llm):
        return None
    if recipe.training.parameter_dtype != "float32" or len(simulator.workload.microbatches) == 1:
        return None
    other = "step" if recipe.parallel.gradient_reduction == "microbatch" else "microbatch"
    return simulator.simulate_parallel(
        recipe.parallel.model_copy(update={"gradient_reduction": other})
    )


def _fits(report: SimulatedStepReport | None) -> bool:
    return report is not None and report.step is not None and report.step.fits


def _reduction_line(
    recipe: Recipe, report: SimulatedStepReport, other: SimulatedStepReport | None
) -> dict[str, str]:
    """Return a line about gradient reduction, with step time and memory of the other setting."""
    if other is None or other.step is None:
        return {}
    names = {"step": "once per step", "microbatch": "in every microbatch"}
    current = recipe.parallel.gradient_reduction
    alternative = "step" if current == "microbatch" else "microbatch"
    line = (
        f'reduced {names[current]}; with parallel.gradient_reduction = "{alternative}": '
        f"{other.iteration_ms:,.1f} ms, {max(other.step.peak_bytes) / 2**30:.2f} GiB"
    )
    if not other.step.fits:
        line += ", does not fit"
    elif other.iteration_ms < report.iteration_ms:
        line += ", faster; set it"
    return {"gradients": line}


def _hsdp_lines(simulator: StepSimulator, report: SimulatedStepReport) -> dict[str, str]:
    """Return a line if replicas of one node each (HSDP) are faster than shards over all nodes."""
    run = simulator.run
    shard = max(1, simulator.profile.device.devices_per_node // run.llm.tensor)
    if run.is_pipelined or run.llm.shard <= shard or run.llm.shard % shard:
        return {}
    if shard % run.recipe.parallel.expert or shard % run.recipe.parallel.context:
        return {}
    replicate = run.llm.replicate * run.llm.shard // shard
    parallel = run.recipe.parallel.model_copy(update={"shard": shard, "replicate": replicate})
    recipe = run.recipe.model_copy(update={"parallel": parallel})
    sample = simulator.sample
    hsdp = StepSimulator(
        recipe, run.world_size, simulator.profile, sample=sample
    ).simulate_schedule()
    if hsdp.step is None or not hsdp.step.fits:
        return {}
    if hsdp.iteration_ms > (1 - HSDP_MIN_GAIN) * report.iteration_ms:
        return {}
    return {
        "faster": f"parallel.replicate = {replicate} and parallel.shard = {shard} (HSDP): "
        f"{hsdp.iteration_ms:,.1f} ms, simulated, and "
        f"{max(hsdp.step.peak_bytes) / 2**30:.2f} GiB"
    }


def _step_lines(
    report: SimulatedStepReport,
    other: SimulatedStepReport | None,
    device: str,
    memory_bytes: float,
) -> dict[str, str]:
    """Return the lines of the predicted first step.

    Args:
        report: First step.
        other: First step with the other `parallel.gradient_reduction`.
        device: Name of the device.
        memory_bytes: Memory of the device.

    Raises:
        ConfigError: The step cannot be planned, or does not fit into memory.
    """
    step = report.step
    hint = 'parallel.gradient_reduction = "microbatch", ' if _fits(other) else ""
    if step is None:
        raise ConfigError(f"parallel: {report.problem}")
    peak_bytes = max(step.peak_bytes)
    if not step.fits:
        rank = step.peak_bytes.index(peak_bytes)
        raise ConfigError(
            f"parallel: pipeline rank {rank} would require {peak_bytes / 2**30:.1f} GiB, but "
            f"{device} has {memory_bytes / 2**30:.1f} ({report.memory_summary}); use "
            f"{hint}more ranks (shard, tensor, pipeline), smaller microbatches or "
            "activation_checkpoint, or set simulation.device"
        )
    timeline = step.timeline
    return {
        "first step": f"{report.iteration_ms:,.1f} ms on {device} (simulation.device), "
        f"simulated (optimizer {report.update_ms:,.1f}): MFU "
        f"{100 * report.mfu:.1f} %, bubbles "
        f"{100 * timeline.bubble_fraction:.1f} %, {report.tokens_per_s:,.0f} "
        "tokens/s",
        "peak memory": f"{peak_bytes / 2**30:.2f} GiB, simulated, of {memory_bytes / 2**30:.1f}: "
        f"{report.memory_summary}",
    }
