"""Data-aware reordering of a run: which packs of a global batch go to which rank, in which order.

    arrange = arrangement(recipe, descriptions, costs, layout, data_parallel_size)
    deal = dealing(recipe, arrange)

The trainer hands the results to the loader, which knows nothing of costs. All ranks arrange for
themselves, from the same sizes: nothing is sent, and the metadata of a step are known on all ranks
before anything is decoded. What a step sees is the same set of samples, so its loss and gradients
are those without reordering, up to the rounding of sums. With `data.reorder_window` it is a window
of steps that sees the same samples, and what each of them has is in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.reordering.step import OrderedLayout, OrderOfStep, StepReorder
from torchmm.balance.reordering.window import WindowReorder
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.planning.executions import run_costs, run_profile
from torchmm.planning.resolved import Resolved
from torchmm.planning.step import order_step
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import find_schedule


def arrangement(
    recipe: Recipe,
    modules: Sequence[ModuleDescription],
    model: CostModel,
    layout: StageLayout,
    data_parallel_size: int,
) -> StepReorder:
    """What `data.reorder` asks for, which has to be other than "none".

    Args:
        modules: encoders, LLM and generator, whole.
        model: costs of the modules as they are run (`run_costs`).
        layout: how they are cut.
        data_parallel_size: shares of a global batch.
    """
    mode = recipe.data.reorder
    return StepReorder(
        modules,
        model,
        ordered_layout(recipe.parallel, layout),
        data_parallel_size,
        recipe.training.microbatch_size,
        balance=mode in ("intra", "both"),
        order=mode in ("inter", "both"),
    )


def run_arrangement(
    run: Resolved, modules: Sequence[ModuleDescription], layout: StageLayout, device: torch.device
) -> StepReorder | None:
    """`arrangement` of a run on a device; None: packs stay where they are."""
    if run.recipe.data.reorder == "none":
        return None
    costs = run_costs(run, modules, run_profile(run.recipe, device))
    return arrangement(run.recipe, modules, costs, layout, run.shares)


def dealing(recipe: Recipe, reorder: StepReorder | None) -> WindowReorder | None:
    """What `data.reorder_window` asks for; None: steps have the samples that they come with."""
    if reorder is None or recipe.data.reorder_window == 1:
        return None
    return WindowReorder(reorder)


def ordered_layout(parallel: ParallelConfig, layout: StageLayout) -> OrderedLayout:
    """What runs: a layout of the section."""
    known = find_schedule(parallel.schedule)
    order: OrderOfStep | None = None
    # Others are made from the batch, or split backwards.
    if known is not None and known.cut in ("balanced", "megatron") and not known.splits_backward:
        order = partial(order_step, config=parallel)
    return OrderedLayout(layout, parallel.schedule, order)


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
