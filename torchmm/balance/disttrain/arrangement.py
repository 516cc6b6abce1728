"""Data-aware reordering of a run: which packs of a global batch go to which rank, in which order.

    arrange = arrangement(run, descriptions, costs, layout)

The trainer passes the result to the loader, which has no access to costs. All ranks arrange the
step locally from the same sizes, so nothing is sent, and the metadata of a step are known on all
ranks before decoding. The samples of a step do not change, so its loss and gradients are those
without reordering, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.disttrain.reordering.step import OrderedLayout, OrderOfStep, StepReorder
from torchmm.balance.image_shares import ImageBalance
from torchmm.balance.run_costs import run_costs, run_profile
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.planning.resolved import Resolved
from torchmm.planning.step import order_step
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import find_schedule


def arrangement(
    run: Resolved,
    modules: Sequence[ModuleDescription],
    model: CostModel,
    layout: StageLayout,
) -> StepReorder:
    """Return what `data.reorder` requests: "intra", "inter" or "both".

    Args:
        run: Recipe and parallel sizes.
        modules: Complete encoders, LLM and generator.
        model: Costs of the modules as executed (`run_costs`).
        layout: Stages of the modules.
    """
    mode = run.recipe.data.reorder
    shares_images = run.recipe.data.balance == "images"
    return StepReorder(
        modules,
        model,
        ordered_layout(run.recipe.parallel, layout)._replace(shares_images=shares_images),
        run.shares,
        run.recipe.training.microbatch_size,
        balance=mode in ("intra", "both"),
        order=mode in ("inter", "both"),
        synchronized=run.lockstep_shares,
    )


def run_arrangement(
    run: Resolved,
    modules: Sequence[ModuleDescription],
    parallel: ParallelConfig,
    layout: StageLayout,
    device: torch.device,
) -> StepReorder | None:
    """Return the `arrangement` of a run on a device; None if packs keep their order.

    Args:
        parallel: Section of the recipe, with all open choices made.
        layout: Stages of the modules.
    """
    if not run.recipe.data.is_reordered:
        return None
    costs = run_costs(run, modules, run_profile(run.recipe, device))
    return arrangement(run.with_parallel(parallel), modules, costs, layout)


def run_balance(
    run: Resolved,
    modules: Sequence[ModuleDescription],
    parallel: ParallelConfig,
    layout: StageLayout,
    device: torch.device,
) -> ImageBalance | None:
    """Return the `image_balance` of a run. Parameters are those of `run_arrangement`."""
    return image_balance(run.recipe, modules)


def image_balance(recipe: Recipe, modules: Sequence[ModuleDescription]) -> ImageBalance | None:
    """Return the balance that `data.balance` requests; None: each rank reads its own images."""
    if recipe.data.balance != "images":
        return None
    return ImageBalance(tuple(module for module in modules if module.kind != "llm"))


def ordered_layout(parallel: ParallelConfig, layout: StageLayout) -> OrderedLayout:
    """Return a layout of the section with its schedule."""
    known = find_schedule(parallel.schedule)
    order: OrderOfStep | None = None
    # Others are made from the batch, or split backwards.
    if known is not None and known.cut in ("balanced", "megatron") and not known.splits_backward:
        order = partial(order_step, config=parallel)
    return OrderedLayout(layout, parallel.schedule, order)


def dealt(
    run: Resolved,
    modules: Sequence[ModuleDescription],
    model: CostModel,
    layout: StageLayout,
    packs: Sequence[MicrobatchMeta],
) -> list[list[MicrobatchMeta]]:
    """Return the microbatches of each share of a global batch after `arrangement`.

    Args:
        packs: as of `reordered`.
    """
    return reordered(arrangement(run, modules, model, layout), packs)


def reordered(reorder: StepReorder, packs: Sequence[MicrobatchMeta]) -> list[list[MicrobatchMeta]]:
    """Microbatches of each share of a global batch.

    Args:
        packs: of the global batch, each as a microbatch of its own.
    """

    return [
        [join_packs([packs[i] for i in members]) for members in share]
        for share in reorder(packs).places
    ]


def join_packs(packs: Sequence[MicrobatchMeta]) -> MicrobatchMeta:
    """Return the microbatch of several packs."""
    samples = tuple(sample for pack in packs for sample in pack.samples)
    return MicrobatchMeta(samples, sum(pack.tokens for pack in packs))
