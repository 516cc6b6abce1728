"""Lower bound of the host memory of a run per node, computed from the recipe.

Python processes, libraries, image decoding and the page cache need additional memory. The dry run
therefore prints "at least".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchmm.balance.plan_costs import PlanCosts
from torchmm.balance.recipe_simulation.step_simulator import StepSimulator
from torchmm.balance.simulation.simulator import SimulatedStep, memory_changes
from torchmm.common.module_names import LLM
from torchmm.models.multimodal import MultimodalModel
from torchmm.planning.executions import parameter_states
from torchmm.planning.resolved_recipe import ResolvedRecipe

_ID_BYTES = 8
"""Size of a token id, a target and a position (int64)."""


def host_memory_line(simulator: StepSimulator, run: ResolvedRecipe, step: SimulatedStep) -> str:
    """Return the line about host memory for a dry run.

    Args:
        simulator: Model, samples of the first step and device.
        run: Sizes of the run.
        step: Simulated first step.
    """
    device = simulator.profile.device
    ranks = min(run.world_size, device.devices_per_node)
    terms = host_memory_bytes(simulator, run, step)
    parts = [f"{_format_size(size)} {name}" for name, size in terms.items() if size]
    line = f"at least {_format_size(sum(terms.values()))} on a node of {ranks} ranks"
    if device.host_memory_bytes:
        line += f", of {_format_size(ranks * device.host_memory_bytes)}"
    return f"{line}: {', '.join(parts)}; processes and page cache require more"


def _format_size(size_bytes: float) -> str:
    gib = size_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{1024 * gib:,.1f} MiB"


def host_memory_bytes(
    simulator: StepSimulator, run: ResolvedRecipe, step: SimulatedStep
) -> dict[str, float]:
    """Return a lower bound of the host memory of a node by use.

    Terms are means over all nodes, so the node with the largest use needs at least as much.
    """
    device = simulator.profile.device
    data = run.recipe.data
    ranks = min(run.world_size, device.devices_per_node)
    batch_bytes = _batch_bytes(simulator, run) * ranks / run.world_size
    prefetched = data.workers * data.prefetch
    terms = {
        f"prefetched batches in /dev/shm ({prefetched} steps per rank)": prefetched * batch_bytes,
        "batch of the current step": batch_bytes,
    }
    if device.asynchronous:  # a device with separate memory
        terms["pinned batches"] = terms.pop("batch of the current step")
        terms["pinned inputs of recomputed layers"] = ranks * _offloaded_bytes(simulator, run, step)
    if run.recipe.optimizer.offload:
        states = sum(_state_bytes(simulator.model, run)) * ranks / run.world_size
        terms["optimizer states"] = states
    return terms


def _batch_bytes(simulator: StepSimulator, run: ResolvedRecipe) -> float:
    """Return the bytes of one step in the memory of all ranks.

    Every rank of a pipeline stores the tokens. Pixels are included for one rank of each
    data-parallel replica, with one byte per value: ranks without an encoder store no pixels.
    Context-parallel ranks are one rank, and so are ranks of disaggregated modules.
    """
    ranks = run.world_size // (run.data_parallel_size * run.recipe.parallel.context)
    copies = 1 if run.units else ranks
    positions = 3 if simulator.model.text.mrope else 1
    specs = simulator.model.image_specs()
    values = {  # per patch; audio is small and not included
        name: 3 * spec.patch_size_px**2
        for name, spec in specs.items()
        if spec.modality == "image" and spec.patch_size_px
    }
    total = 0.0
    for microbatch in (meta for share in simulator.shares for meta in share):
        total += copies * (2 + positions) * _ID_BYTES * microbatch.tokens
        total += sum(
            image.patches * values.get(image.encoder or sample.encoder or "", 0)
            for sample in microbatch.samples
            for image in sample.images
        )
    return total


def _state_bytes(model: MultimodalModel, run: ResolvedRecipe) -> Iterator[float]:
    """Yield the bytes of offloaded optimizer states of all ranks, for each module."""
    states = parameter_states(run.recipe)
    for module in model.modality_modules():
        sizes = run.encoder(module.name) if module.name in model.encoders else run.llm
        if run.units:
            sizes = run.units[module.name]
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        yield states.offloaded_moments * trained * sizes.replicate


def _offloaded_bytes(simulator: StepSimulator, run: ResolvedRecipe, step: SimulatedStep) -> float:
    """Return the mean over ranks of the largest size of inputs in host memory, of LLM layers."""
    hidden = simulator.model.llm.text_config.hidden_size
    tokens = min(meta.tokens for share in simulator.shares for meta in share)
    split = run.llm.tensor * run.recipe.parallel.context
    input_bytes = 2 * hidden * tokens // split
    llm = {stage.index for stage in step.plan.graph.layout.stages if stage.module == LLM}
    waiting = {
        task: modes.count("offload") * input_bytes
        for task, modes in step.plan.recompute.items()
        if task.stage in llm and "offload" in modes
    }
    if not waiting:
        return 0.0
    changes = memory_changes(step.plan, PlanCosts({}, saved_bytes=waiting))
    peaks = [int(np.cumsum(changes_of_rank).max(initial=0)) for changes_of_rank in changes]
    return sum(peaks) / len(peaks)
