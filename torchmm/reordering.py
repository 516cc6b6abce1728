"""Data-aware reordering of a run: which packs of a global batch go to which rank, in which order.

    arrange = arrangement(recipe, descriptions, layout, data_parallel_size, device)

The trainer hands the result to the loader, which knows nothing of costs. All ranks arrange for
themselves, from the same sizes: nothing is sent, and the metadata of a step are known on all ranks
before anything is decoded. What a step sees is the same set of samples, so its loss and gradients
are those without reordering, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from torchmm.balance.cost_model import CostModel
from torchmm.balance.execution import Execution
from torchmm.balance.profiles import load_profile
from torchmm.balance.reorder_step import StepReorder
from torchmm.batch import ModuleDescription
from torchmm.config import Recipe
from torchmm.data.plan import Arrange
from torchmm.errors import ConfigError
from torchmm.pipelining.graph import StageLayout


def arrangement(
    recipe: Recipe,
    modules: Sequence[ModuleDescription],
    layout: StageLayout,
    data_parallel_size: int,
    device: torch.device,
) -> Arrange | None:
    """What `data.reorder` asks for; None: nothing.

    Args:
        modules: encoders, LLM and generator, whole.
        layout: how they are cut.
        data_parallel_size: shares of a global batch.
        device: that computes. Costs are those of `simulation.device`; on a CPU, those of a CPU,
            unless that names a file, such as one that scripts/calibrate.py has written.

    Raises:
        ConfigError: the device of `simulation.device` is unknown.
    """
    mode = recipe.data.reorder
    if mode == "none":
        return None
    training = recipe.training
    return StepReorder(
        modules,
        _costs(recipe, modules, device),
        layout,
        recipe.parallel.schedule,
        data_parallel_size,
        training.microbatch_size,
        balance=mode in ("intra", "both"),
        order=mode in ("inter", "both"),
    )


def _costs(recipe: Recipe, modules: Sequence[ModuleDescription], device: torch.device) -> CostModel:
    name = recipe.simulation.device
    if device.type == "cpu" and not Path(name).suffix:
        name = "cpu"
    parallel, recompute = recipe.parallel, recipe.activation_checkpoint
    executions = {
        module.name: Execution(
            tensor=parallel.sizes_given(module.name).get("tensor", parallel.tensor),
            sequence_parallel=parallel.sequence_parallel,
            async_tensor=parallel.async_tensor_parallel,
            recompute=recompute.fixed_mode(module.name),
        )
        for module in modules
    }
    try:
        return CostModel(load_profile(name), recipe.training.dtype, executions)
    except ValueError as error:
        raise ConfigError(f"simulation.device: {error}") from error
