"""Data-aware reordering of a run: which packs of a global batch go to which rank, in which order.

    arrange = arrangement(recipe, descriptions, layout, data_parallel_size, device)

The trainer hands the result to the loader, which knows nothing of costs. All ranks arrange for
themselves, from the same sizes: nothing is sent, and the metadata of a step are known on all ranks
before anything is decoded. What a step sees is the same set of samples, so its loss and gradients
are those without reordering, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.parts import Execution
from torchmm.balance.reordering.step import StepReorder
from torchmm.common.batch import MicrobatchMeta, ModuleDescription
from torchmm.common.errors import ConfigError
from torchmm.common.module_names import LLM
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.planning.executions import run_profile
from torchmm.recipe.placement_sizes import unit_sizes
from torchmm.recipe.recipe import Recipe


def arrangement(
    recipe: Recipe,
    modules: Sequence[ModuleDescription],
    layout: StageLayout,
    data_parallel_size: int,
    device: torch.device,
) -> StepReorder | None:
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
    if recipe.data.reorder == "none":
        return None
    model = _costs(recipe, modules, device)
    return step_reorder(recipe, modules, model, layout, data_parallel_size)


def step_reorder(
    recipe: Recipe,
    modules: Sequence[ModuleDescription],
    model: CostModel,
    layout: StageLayout,
    data_parallel_size: int,
) -> StepReorder:
    """The same with given costs."""
    mode = recipe.data.reorder
    return StepReorder(
        modules,
        model,
        layout,
        recipe.parallel.schedule,
        data_parallel_size,
        recipe.training.microbatch_size,
        balance=mode in ("intra", "both"),
        order=mode in ("inter", "both"),
    )


def reordered(reorder: StepReorder, packs: Sequence[MicrobatchMeta]) -> list[list[MicrobatchMeta]]:
    """Microbatches of each share of a global batch.

    Args:
        packs: of the global batch, each as a microbatch of its own.
    """

    def joined(members: Sequence[int]) -> MicrobatchMeta:
        own = [packs[i] for i in members]
        samples = tuple(sample for pack in own for sample in pack.samples)
        return MicrobatchMeta(samples, sum(pack.tokens for pack in own))

    return [[joined(members) for members in share] for share in reorder(packs)]


def _costs(recipe: Recipe, modules: Sequence[ModuleDescription], device: torch.device) -> CostModel:
    parallel, recompute = recipe.parallel, recipe.activation_checkpoint
    apart = parallel.placement == "disaggregated"
    executions = {
        module.name: Execution(
            tensor=unit_sizes(parallel, module.name if apart else LLM)["tensor"],
            sequence_parallel=parallel.sequence_parallel,
            async_tensor=parallel.async_tensor_parallel,
            recompute=recompute.fixed_mode(module.name),
        )
        for module in modules
    }
    profile = run_profile(recipe, device)
    try:
        return CostModel(profile, recipe.training.dtype, executions)
    except ValueError as error:
        raise ConfigError(f"simulation.device: {error}") from error
