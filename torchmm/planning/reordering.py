"""Data-aware reordering of a run: which packs of a global batch go to which rank, in which order.

    arrange = arrangement(recipe, descriptions, costs, layout, data_parallel_size)

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
from torchmm.balance.image_shares import ImageBalance
from torchmm.balance.reordering.step import OrderedLayout, OrderOfStep, StepReorder
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import LLM
from torchmm.parallel.apply import reshards_after_forward
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
        synchronized=synchronized_shares(recipe.parallel, model),
    )


def run_arrangement(
    run: Resolved,
    modules: Sequence[ModuleDescription],
    parallel: ParallelConfig,
    layout: StageLayout,
    device: torch.device,
) -> StepReorder | None:
    """`arrangement` of a run on a device; None: packs stay where they are.

    Args:
        parallel: the recipe's section, with what it leaves open chosen.
        layout: how modules are cut.
    """
    if run.recipe.data.reorder == "none":
        return None
    costs = run_costs(run, modules, run_profile(run.recipe, device))
    recipe = run.with_parallel(parallel).recipe
    return arrangement(recipe, modules, costs, layout, run.shares)


def image_balance(recipe: Recipe, modules: Sequence[ModuleDescription]) -> ImageBalance | None:
    """Return what `data.balance` requests; None: each rank encodes its own images."""
    if recipe.data.balance == "none":
        return None
    return ImageBalance(tuple(module for module in modules if module.kind == "encoder"))


def synchronized_shares(parallel: ParallelConfig, model: CostModel) -> int:
    """Return the number of consecutive shares whose ranks synchronize in every layer.

    FSDP2 synchronizes the shards if it gathers layer by layer. In a pipeline it gathers once per
    step by default, so only ranks that exchange tokens of experts synchronize. Replicas of HSDP
    synchronize once per step. Disaggregated modules run different tasks and are not included.

    Args:
        parallel: The section [parallel], with the number of pipeline ranks.
        model: Costs of the modules as executed.
    """
    if parallel.placement == "disaggregated":
        return 1
    llm = model.execution(LLM)
    ranks = llm.shard if reshards_after_forward(parallel) else llm.expert
    return max(1, ranks // llm.context)


def ordered_layout(parallel: ParallelConfig, layout: StageLayout) -> OrderedLayout:
    """Return a layout of the section with its schedule."""
    known = find_schedule(parallel.schedule)
    order: OrderOfStep | None = None
    # Others are made from the batch, or split backwards.
    if known is not None and known.cut in ("balanced", "megatron") and not known.splits_backward:
        order = partial(order_step, config=parallel)
    return OrderedLayout(layout, parallel.schedule, order)


def dealt(
    recipe: Recipe,
    modules: Sequence[ModuleDescription],
    model: CostModel,
    layout: StageLayout,
    packs: Sequence[MicrobatchMeta],
    data_parallel_size: int,
) -> list[list[MicrobatchMeta]]:
    """What `arrangement` makes of a global batch: microbatches of each share.

    Args:
        packs: as of `reordered`.
    """
    reorder = arrangement(recipe, modules, model, layout, data_parallel_size)
    return reordered(reorder, packs)


def reordered(reorder: StepReorder, packs: Sequence[MicrobatchMeta]) -> list[list[MicrobatchMeta]]:
    """Microbatches of each share of a global batch.

    Args:
        packs: of the global batch, each as a microbatch of its own.
    """

    return [[_joined([packs[i] for i in members]) for members in share] for share in reorder(packs)]


def _joined(packs: Sequence[MicrobatchMeta]) -> MicrobatchMeta:
    """A microbatch of packs."""
    samples = tuple(sample for pack in packs for sample in pack.samples)
    return MicrobatchMeta(samples, sum(pack.tokens for pack in packs))
