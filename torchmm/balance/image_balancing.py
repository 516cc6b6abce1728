"""Assignment of the images of a microbatch to data-parallel ranks (`data.balance = "images"`).

Ranks without a pipeline wait for each other in every layer, so a microbatch takes as long as the
encoder of the slowest rank. All ranks compute the same assignment from the metadata of all ranks.

    images     rank 0: 9 5 4     rank 1: 2        work 18 and 2
    assigned   rank 0: 9         rank 1: 5 4 2    work 9 and 11

**Encoders.** Longest processing time first: images are assigned in descending order of cost, each
to the rank with the least work. By the bound of Graham, the slowest rank has at most 4/3 of the
optimal work. If the rank that trains on an image has as little work as any rank, it encodes the
image, so no features are sent if all ranks have equal images.

**Generators.** Target images are padded to the largest image of the rank
(`torchmm.models.generator`). The work of a rank is the number of images times the cost of the
largest one. Each rank gets consecutive images, in descending order of cost, up to a limit. The
smallest feasible limit is optimal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from torchmm.balance.costs.model import CostModel
from torchmm.balance.numba_utils import Int64s, cached_njit
from torchmm.balance.plan_costs import PlanCosts
from torchmm.common.batch import ImageAssignment, ImageMeta, ImageSizes, MicrobatchMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.common.layers import ModuleDescription
from torchmm.common.module_names import GENERATOR
from torchmm.costs.blocks import stage_blocks
from torchmm.costs.flops import pass_flops
from torchmm.costs.sizes import encoder_sizes, generator_sizes
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph

_TOKEN_BITS, _FRAME_BITS = 24, 16


def assign_images(cost_I: Int64s, home_I: Int64s, ranks: int) -> Int64s:
    """Return the rank that encodes each image.

    Args:
        cost_I: Cost of each image.
        home_I: Rank that trains on each image, ascending.
        ranks: Number of data-parallel ranks.
    """
    if not len(cost_I):
        return np.zeros(0, np.int64)
    counts_R = np.bincount(home_I, minlength=ranks)
    index_in_rank_I = np.arange(len(home_I)) - (np.cumsum(counts_R) - counts_R)[home_I]
    # Among equal costs, the first image of every rank comes first, then the second, and so on.
    rank_of_cost_I = cost_I.max() - cost_I
    key_I = (rank_of_cost_I * counts_R.max() + index_in_rank_I) * ranks + home_I
    owners_I: Int64s = _assign_to_lightest(np.argsort(key_I), home_I, cost_I, ranks)
    return owners_I


def assign_padded_images(cost_I: Int64s, home_I: Int64s, ranks: int) -> Int64s:
    """Return the rank that generates each image. The arguments are those of `assign_images`.

    The assignment of `assign_images` is used if it is not worse, because it moves fewer images.
    """
    owners_I = assign_images(cost_I, home_I, ranks)
    order_I = np.argsort(-cost_I, kind="stable")
    sorted_I = cost_I[order_I]
    # Rank of each image in the sorted order, with the smallest possible limit.
    ranks_I = _fill_ranks(sorted_I, ranks)
    if (
        padded_work_per_rank(cost_I, owners_I, ranks).max()
        > padded_work_per_rank(sorted_I, ranks_I, ranks).max()
    ):
        owners_I[order_I] = ranks_I
    return owners_I


def sum_work_per_rank(cost_I: Int64s, owners_I: Int64s, ranks: int) -> Int64s:
    """Return the work of each rank."""
    return np.bincount(owners_I, cost_I, ranks).astype(np.int64)


def padded_work_per_rank(cost_I: Int64s, owners_I: Int64s, ranks: int) -> Int64s:
    """Return the work of each rank if its images are padded to its largest image."""
    largest_R = np.zeros(ranks, np.int64)
    np.maximum.at(largest_R, owners_I, cost_I)
    work_R: Int64s = largest_R * np.bincount(owners_I, minlength=ranks)
    return work_R


@cached_njit
def _fill_ranks(cost_I: Int64s, ranks: int) -> Int64s:
    """Return the rank of each image with the smallest feasible limit.

    Args:
        cost_I: Cost of each image, descending.
        ranks: Number of data-parallel ranks.
    """
    ranks_I = np.zeros(len(cost_I), np.int64)
    if not len(cost_I):
        return ranks_I
    low = cost_I[0]
    high = cost_I[0] * len(cost_I)
    while low < high:
        limit = (low + high) // 2
        first, used = 0, 0
        while first < len(cost_I) and used < ranks:
            first += limit // cost_I[first]
            used += 1
        if first < len(cost_I):
            low = limit + 1
        else:
            high = limit
    first, rank = 0, 0
    while first < len(cost_I):
        stop = min(len(cost_I), first + low // cost_I[first])
        ranks_I[first:stop] = rank
        first, rank = stop, rank + 1
    return ranks_I


@cached_njit
def _assign_to_lightest(order_I: Int64s, home_I: Int64s, cost_I: Int64s, ranks: int) -> Int64s:
    owners_I = np.empty(len(order_I), np.int64)
    # A binary heap of the ranks by work * ranks + rank, and the index of each rank in the heap.
    heap_R = np.arange(ranks)
    index_R = np.arange(ranks)
    for image in order_I:
        home = home_I[image]
        rank = heap_R[0] % ranks
        if heap_R[index_R[home]] // ranks == heap_R[0] // ranks:
            rank = home
        owners_I[image] = rank
        position = index_R[rank]
        entry = heap_R[position] + cost_I[image] * ranks
        while 2 * position + 1 < ranks:
            child = 2 * position + 1
            if child + 1 < ranks and heap_R[child + 1] < heap_R[child]:
                child += 1
            if heap_R[child] > entry:
                break
            heap_R[position] = heap_R[child]
            index_R[heap_R[position] % ranks] = position
            position = child
        heap_R[position] = entry
        index_R[rank] = position
    return owners_I


@dataclass(frozen=True)
class ImageBalancer:
    """Assignment of the images of one microbatch to data-parallel ranks.

    Attributes:
        modules: Descriptions of all encoders of the model and of its generator.
    """

    modules: tuple[ModuleDescription, ...]
    _costs: dict[str, tuple[Int64s, Int64s]] = field(default_factory=dict, compare=False)
    """Known image sizes, ascending, and their costs by module."""

    @property
    def names(self) -> list[str]:
        """Names of the modules."""
        return [module.name for module in self.modules]

    def owners(self, sizes_I4: Int64s, homes_I: Int64s, ranks: int) -> ImageAssignment:
        """Return the rank that reads each image (`torchmm.data.steps.plan_steps.AssignImages`)."""
        owners_I = np.empty_like(homes_I)
        before, after, total = 0.0, 0.0, 0.0
        for number, module in enumerate(self.modules):
            module_images = np.flatnonzero(sizes_I4[:, 0] == number)
            costs = self.costs(module, sizes_I4[module_images, 1:])
            pads = module.kind == "generator"
            assign, work = (
                (assign_padded_images, padded_work_per_rank)
                if pads
                else (assign_images, sum_work_per_rank)
            )
            owners_I[module_images] = assign(costs, homes_I[module_images], ranks)
            before += float(work(costs, homes_I[module_images], ranks).max())
            after += float(work(costs, owners_I[module_images], ranks).max())
            total += float(costs.sum())
        return ImageAssignment(owners_I, before, after, total / ranks)

    def __call__(self, metas: Sequence[MicrobatchMeta]) -> dict[str, list[int]]:
        """Return the rank that reads each image, by module, in the order of the ranks.

        Args:
            metas: Microbatch of each rank.
        """
        samples = [sample for meta in metas for sample in meta.samples]
        sizes = ImageSizes.from_samples(samples, self.names)
        homes_S = np.repeat(np.arange(len(metas)), [len(meta.samples) for meta in metas])
        homes_I = np.repeat(homes_S, sizes.counts_N)
        owners_I = self.owners(sizes.sizes_I4, homes_I, len(metas)).owners_I
        modules_I = sizes.sizes_I4[:, 0]
        return {name: owners_I[modules_I == n].tolist() for n, name in enumerate(self.names)}

    def costs(self, module: ModuleDescription, sizes_I3: Int64s) -> Int64s:
        """Return the cost of each image (`image_costs`)."""
        patches_I, tokens_I, frames_I = sizes_I3.T
        key_I = (patches_I << _FRAME_BITS | frames_I) << _TOKEN_BITS | tokens_I
        known_K, cost_K = self._costs.get(module.name, (np.zeros(0, np.int64),) * 2)
        index_I = np.searchsorted(known_K, key_I)
        is_new_I = np.append(known_K, -1)[index_I] != key_I
        if is_new_I.any():
            new, first = np.unique(key_I[is_new_I], return_index=True)
            costs = image_costs(module, sizes_I3[is_new_I][first])
            order = np.argsort(all_K := np.append(known_K, new))
            known_K, cost_K = all_K[order], np.append(cost_K, costs)[order]
            self._costs[module.name] = known_K, cost_K
            index_I = np.searchsorted(known_K, key_I)
        cost_I: Int64s = cost_K[index_I]
        return cost_I


def image_costs(module: ModuleDescription, sizes_I3: Int64s) -> list[int]:
    """Return the MFLOPs of the forward pass of each image, rounded, so that all ranks agree.

    Args:
        sizes_I3: Patches, tokens (of a generated image, context tokens) and frames of each image.
    """
    if module.kind == "generator":
        sizes = generator_sizes(
            [
                [GeneratedMeta((frames, 1, patches // frames), context)]
                for patches, context, frames in sizes_I3.tolist()
            ]
        )
    else:
        sizes = encoder_sizes(module, [[ImageMeta(0, 0, *size)] for size in sizes_I3.tolist()])
    flops = pass_flops(stage_blocks(module, 0, len(module.layers)), sizes, False)
    return [max(1, round(value / 1e6)) for value in flops.forward_N.tolist()]


def balance_step_images(
    balance: ImageBalancer, shares: Sequence[Sequence[MicrobatchMeta]]
) -> list[list[MicrobatchMeta]]:
    """Return the task sizes of every rank in a step with balanced images.

    Args:
        balance: Balance of the run.
        shares: Microbatches of each rank.
    """
    columns = [
        balance_microbatch_images(metas, balance(metas)) for metas in zip(*shares, strict=True)
    ]
    return [list(share) for share in zip(*columns, strict=True)]


def balance_microbatch_images(
    metas: Sequence[MicrobatchMeta], owners: Mapping[str, Sequence[int]]
) -> list[MicrobatchMeta]:
    """Return one microbatch of every rank with the images that the rank encodes and generates.

    Args:
        metas: Microbatch of each rank.
        owners: Rank that reads each image, by module, in the order of the ranks.
    """
    following = {name: iter(ranks) for name, ranks in owners.items()}
    read: list[list[ImageMeta]] = [[] for _ in metas]
    targets: list[list[GeneratedMeta]] = [[] for _ in metas]
    for sample in (sample for meta in metas for sample in meta.samples):
        for image in sample.images:
            name = image.encoder or sample.encoder
            assert name is not None
            read[next(following[name])].append(replace(image, encoder=name))
        for generated in sample.generated:
            targets[next(following[GENERATOR])].append(generated)
    return [
        meta.with_images(images, generated)
        for meta, images, generated in zip(metas, read, targets, strict=True)
    ]


def add_feature_exchange(
    costs: PlanCosts,
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    metas: Sequence[MicrobatchMeta],
    model: CostModel,
    ranks: int,
) -> PlanCosts:
    """Return the costs of a plan without a pipeline, with the exchanges of balanced images.

    Features are sent to the LLM and contexts to the generator, and gradients back. An exchange is
    modeled as equal messages to all ranks, without overlap.

    Args:
        costs: Costs of the plan.
        graph: Tasks of the step.
        modules: Descriptions of the complete modules.
        metas: Sizes of the tasks (`balance_microbatch_images`).
        model: Cost model of the run.
        ranks: Number of data-parallel ranks.
    """
    [llm] = [module for module in modules if module.kind == "llm"]
    by_name = {module.name: module for module in modules if module.kind != "llm"}
    link = model.group_link(ranks, model.execution(llm.name).tensor)
    compute_ms = dict(costs.compute_ms)
    for action in costs.compute_ms:
        module = by_name.get(graph.layout.stages[action.stage].module)
        if module is None or action.type not in (ActionType.F, ActionType.B):
            continue
        meta = metas[action.microbatch]
        if module.kind == "generator":
            tokens = sum(image.context for image in meta.generated)
        else:
            tokens = sum(image.tokens for image in meta.images_of_encoder(module.name))
        width = llm.layers[0].hidden_size * (1 + len(module.deepstack_layers))
        sent_bytes = tokens * width * model.element_bytes
        compute_ms[action] += model.transfer_times_ms([sent_bytes * (ranks - 1) / ranks], [link])[0]
    return replace(costs, compute_ms=compute_ms)
