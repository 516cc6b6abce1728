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
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchmm.balance.costs.model import CostModel
from torchmm.balance.image_shares import ImageBalance
from torchmm.balance.order_search.dispatcher import Dispatcher
from torchmm.balance.order_search.search import Budget, search
from torchmm.balance.reordering.step import (
    NS_PER_MS,
    SEED,
    OrderedLayout,
    OrderOfStep,
    StepReorder,
)
from torchmm.balance.reordering.window import WindowReorder
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.planning.executions import run_costs, run_profile
from torchmm.planning.resolved import Resolved
from torchmm.planning.step import order_step, searched_costs, step_graph
from torchmm.recipe.parallel_section import ParallelConfig
from torchmm.recipe.recipe import Recipe
from torchmm.recipe.schedules import find_schedule

EVALUATIONS = 400
"""Orders tried for a group's plan, where packs are exchanged between groups."""
MOST_STAGES = 8192
"""Stages times microbatches of a global batch, up to which groups' plans are searched: a second or
two of processor time. Groups of larger batches have many microbatches, and end together anyway."""


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
        ordered_layout(recipe.parallel, layout, SearchedTime.of(recipe, modules, model, layout)),
        data_parallel_size,
        recipe.training.microbatch_size,
        balance=mode in ("intra", "both"),
        order=mode in ("inter", "both"),
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


def dealing(recipe: Recipe, reorder: StepReorder | None) -> WindowReorder | None:
    """What `data.reorder_window` asks for; None: steps have the samples that they come with."""
    if reorder is None or recipe.data.reorder_window == 1:
        return None
    return WindowReorder(reorder)


@dataclass(frozen=True)
class SearchedTime:
    """What the searched plan of a group takes, as far as a short search finds out.

    Times are the device's, without what was measured since: packs are dealt some steps before they
    are trained on. Memory bounds nothing here: groups of equal work need about as much.

    Attributes:
        model: costs of the modules as they are run.
        layout: how they are cut.
        parallel: the section.
    """

    modules: tuple[ModuleDescription, ...]
    model: CostModel
    layout: StageLayout
    parallel: ParallelConfig

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        modules: Sequence[ModuleDescription],
        model: CostModel,
        layout: StageLayout,
    ) -> SearchedTime | None:
        """None where nothing is searched, or where so much has to be planned that it would take
        longer than it gains."""
        parallel = recipe.parallel
        training = recipe.training
        ranks = {rank for stage in layout.stages for rank in stage.ranks}
        stages = training.global_batch_size // training.microbatch_size * len(layout.stages)
        if parallel.schedule != "searched" or len(ranks) == 1 or stages > MOST_STAGES:
            return None
        return cls(tuple(modules), model, layout, parallel)

    def __call__(self, microbatches: Sequence[Sequence[MicrobatchMeta]]) -> float:
        """In nanoseconds.

        Args:
            microbatches: packs of each.
        """
        metas = [_joined(packs) for packs in microbatches]
        graph = step_graph(self.layout, self.parallel, metas)
        costs = searched_costs(graph, self.modules, metas, self.model)
        whole = replace(
            costs,
            compute_ms={action: _whole_ns(ms) for action, ms in costs.compute_ms.items()},
            transfer_ms={message: _whole_ns(ms) for message, ms in costs.transfer_ms.items()},
            memory_limit_bytes=None,
        )
        found = search(Dispatcher(graph, whole), Budget(EVALUATIONS), seed=SEED)
        return round(found.makespan_ms * NS_PER_MS)


def _whole_ns(ms: float) -> float:
    """So that ranks with other processors plan the same."""
    return round(ms * NS_PER_MS) / NS_PER_MS


def ordered_layout(
    parallel: ParallelConfig, layout: StageLayout, searched: SearchedTime | None = None
) -> OrderedLayout:
    """What runs: a layout of the section.

    Args:
        searched: what plans take, where their orders are searched.
    """
    known = find_schedule(parallel.schedule)
    order: OrderOfStep | None = None
    # Others are made from the batch, or split backwards.
    if known is not None and known.cut in ("balanced", "megatron") and not known.splits_backward:
        order = partial(order_step, config=parallel)
    return OrderedLayout(layout, parallel.schedule, order, searched)


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
