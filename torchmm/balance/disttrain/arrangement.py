"""Data reordering of a run: assignment of the packs of a global batch to ranks and microbatches.

    arrange = arrangement(run, descriptions, costs, layout)

The trainer passes the result to the data loader, which has no access to costs. All ranks compute
the same arrangement from the same sizes without communication. The metadata of a step are available
on all ranks before decoding. A step has the same samples as without reordering, so loss and
gradients differ only by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.disttrain.reordering.step_reorder import (
    ScheduledLayout,
    StepOrderFunction,
    StepReorder,
)
from torchmm.balance.image_balancing import ImageBalancer
from torchmm.balance.run_costs import build_cost_model, load_run_profile
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.planning.resolved_recipe import ResolvedRecipe
from torchmm.planning.step import order_step
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import find_schedule


def build_step_reorder(
    run: ResolvedRecipe,
    modules: Sequence[ModuleDescription],
    model: CostModel,
    layout: StageLayout,
) -> StepReorder:
    """Return the reordering that `data.reorder` requests: "intra", "inter" or "both".

    Args:
        run: Recipe and parallelism degrees.
        modules: Encoders, LLM and generator with all layers.
        model: Costs of the modules as executed (`build_cost_model`).
        layout: Stages of the modules.
    """
    mode = run.recipe.data.reorder
    balances_images = run.recipe.data.balance == "images"
    return StepReorder(
        modules,
        model,
        layout_with_schedule(run.recipe.parallel, layout)._replace(balances_images=balances_images),
        run.data_parallel_size,
        run.recipe.training.microbatch_size,
        balance=mode in ("intra", "both"),
        order=mode in ("inter", "both"),
        synchronized=run.lockstep_size,
    )


def build_run_reorder(
    run: ResolvedRecipe,
    modules: Sequence[ModuleDescription],
    parallel: ParallelConfig,
    layout: StageLayout,
    device: torch.device,
) -> StepReorder | None:
    """Return the `build_step_reorder` of a run on a device. None if packs are not reordered.

    Args:
        run: Recipe and parallelism degrees.
        modules: Encoders, LLM and generator with all layers.
        parallel: Resolved [parallel] section.
        layout: Stages of the modules.
        device: Device of the run.
    """
    if not run.recipe.data.is_reordered:
        return None
    costs = build_cost_model(run, modules, load_run_profile(run.recipe, device))
    return build_step_reorder(run.with_parallel(parallel), modules, costs, layout)


def build_run_image_balancer(
    run: ResolvedRecipe,
    modules: Sequence[ModuleDescription],
    parallel: ParallelConfig,
    layout: StageLayout,
    device: torch.device,
) -> ImageBalancer | None:
    """Return the image balancer of a run. The parameters are those of `build_run_reorder`."""
    return build_image_balancer(run.recipe, modules)


def build_image_balancer(
    recipe: Recipe, modules: Sequence[ModuleDescription]
) -> ImageBalancer | None:
    """Return the balance that `data.balance` requests. None if each rank reads its local images."""
    if recipe.data.balance != "images":
        return None
    return ImageBalancer(tuple(module for module in modules if module.kind != "llm"))


def layout_with_schedule(parallel: ParallelConfig, layout: StageLayout) -> ScheduledLayout:
    """Return a layout with the schedule of [parallel]."""
    schedule = find_schedule(parallel.schedule)
    order: StepOrderFunction | None = None
    # Other schedules depend on the batch, or split backward passes.
    if (
        schedule is not None
        and schedule.cut in ("balanced", "megatron")
        and not schedule.splits_backward
    ):
        order = partial(order_step, config=parallel)
    return ScheduledLayout(layout, parallel.schedule, order)


def reorder_first_step(
    run: ResolvedRecipe,
    modules: Sequence[ModuleDescription],
    model: CostModel,
    layout: StageLayout,
    packs: Sequence[MicrobatchMeta],
) -> list[list[MicrobatchMeta]]:
    """Return the microbatches of each data-parallel rank after `build_step_reorder`.

    Args:
        run: Recipe and parallelism degrees.
        modules: Encoders, LLM and generator with all layers.
        model: Costs of the modules as executed.
        layout: Stages of the modules.
        packs: Packs of the global batch, each as a separate microbatch.
    """
    return apply_reorder(build_step_reorder(run, modules, model, layout), packs)


def apply_reorder(
    reorder: StepReorder, packs: Sequence[MicrobatchMeta]
) -> list[list[MicrobatchMeta]]:
    """Return the microbatches of each data-parallel rank of a global batch.

    Args:
        reorder: Reordering of the run.
        packs: Packs of the global batch, each as a separate microbatch.
    """

    return [
        [join_packs([packs[i] for i in members]) for members in share]
        for share in reorder(packs).places
    ]


def join_packs(packs: Sequence[MicrobatchMeta]) -> MicrobatchMeta:
    """Join several packs into one microbatch."""
    samples = tuple(sample for pack in packs for sample in pack.samples)
    return MicrobatchMeta(samples, sum(pack.tokens for pack in packs))
