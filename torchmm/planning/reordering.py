"""Data-aware reordering of a run: which packs of a global batch go to which rank, in which order.

    arrange = arrangement(recipe, descriptions, costs, layout, data_parallel_size)

The trainer hands the result to the loader, which knows nothing of costs. All ranks arrange for
themselves, from the same sizes: nothing is sent, and the metadata of a step are known on all ranks
before anything is decoded. What a step sees is the same set of samples, so its loss and gradients
are those without reordering, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchmm.balance.costs.model import CostModel
from torchmm.balance.reordering.step import StepReorder
from torchmm.common.batch import MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.graph import StageLayout
from torchmm.recipe.recipe import Recipe


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
