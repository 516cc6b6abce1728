"""Assignment of the images of a microbatch to data-parallel ranks (`data.balance = "images"`).

Ranks without a pipeline wait for each other in every layer, so a microbatch takes as long as the
encoder of the slowest rank. All ranks compute the same assignment from the metadata of all ranks.

Longest processing time first: images are assigned in the order of decreasing cost, each to the rank
with the least work. Graham's bound holds: the slowest rank has at most 4/3 of the optimal work. If
the rank that trains on an image is as idle as any other rank, it encodes the image itself, so that
no features travel if all ranks have the same images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from torchmm.balance.compiled import Int64s, compiled
from torchmm.balance.costs.blocks import stage_blocks
from torchmm.balance.costs.flops import pass_flops
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.sizes import encoder_sizes
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.batch import ImageMeta, ImageSizes, MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph

_TOKEN_BITS, _FRAME_BITS = 24, 16


def assign_images(cost_I: Int64s, home_I: Int64s, ranks: int) -> Int64s:
    """Return the rank that encodes each image.

    Args:
        cost_I: Cost of each image.
        home_I: Rank that trains on each image, ascending.
    """
    if not len(cost_I):
        return np.zeros(0, np.int64)
    counts_R = np.bincount(home_I, minlength=ranks)
    place_I = np.arange(len(home_I)) - (np.cumsum(counts_R) - counts_R)[home_I]
    # Among equal costs, the first image of every rank comes first, then the second, and so on.
    rank_of_cost_I = cost_I.max() - cost_I
    key_I = (rank_of_cost_I * counts_R.max() + place_I) * ranks + home_I
    owners_I: Int64s = _assign(np.argsort(key_I), home_I, cost_I, ranks)
    return owners_I


@compiled
def _assign(order_I: Int64s, home_I: Int64s, cost_I: Int64s, ranks: int) -> Int64s:
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
        at = index_R[rank]
        entry = heap_R[at] + cost_I[image] * ranks
        while 2 * at + 1 < ranks:
            child = 2 * at + 1
            if child + 1 < ranks and heap_R[child + 1] < heap_R[child]:
                child += 1
            if heap_R[child] > entry:
                break
            heap_R[at] = heap_R[child]
            index_R[heap_R[at] % ranks] = at
            at = child
        heap_R[at] = entry
        index_R[rank] = at
    return owners_I


@dataclass(frozen=True)
class ImageBalance:
    """Assigns the images of one microbatch of all data-parallel ranks.

    Attributes:
        encoders: Descriptions of all encoders of the model.
    """

    encoders: tuple[ModuleDescription, ...]
    _costs: dict[str, tuple[Int64s, Int64s]] = field(default_factory=dict, compare=False)
    """Known image sizes, ascending, and their costs by encoder."""

    @property
    def names(self) -> list[str]:
        """Names of the encoders."""
        return [encoder.name for encoder in self.encoders]

    def owners(self, sizes_I4: Int64s, homes_I: Int64s, ranks: int) -> Int64s:
        """Return the rank that encodes each image (`torchmm.data.steps.step_packs.Balance`)."""
        owners_I = np.empty_like(homes_I)
        for number, encoder in enumerate(self.encoders):
            own = np.flatnonzero(sizes_I4[:, 0] == number)
            costs = self.costs(encoder, sizes_I4[own, 1:])
            owners_I[own] = assign_images(costs, homes_I[own], ranks)
        return owners_I

    def __call__(self, metas: Sequence[MicrobatchMeta]) -> dict[str, list[int]]:
        """Return the rank that encodes each image, by encoder, in the order of the ranks.

        Args:
            metas: Microbatch of each rank.
        """
        samples = [sample for meta in metas for sample in meta.samples]
        sizes = ImageSizes.of(samples, self.names)
        homes = np.repeat(np.arange(len(metas)), [meta.image_count for meta in metas])
        owners_I = self.owners(sizes.sizes_I4, homes, len(metas))
        encoders_I = sizes.sizes_I4[:, 0]
        return {name: owners_I[encoders_I == n].tolist() for n, name in enumerate(self.names)}

    def costs(self, encoder: ModuleDescription, sizes_I3: Int64s) -> Int64s:
        """Return the cost of each image (`image_costs`)."""
        patches_I, tokens_I, frames_I = sizes_I3.T
        key_I = (patches_I << _FRAME_BITS | frames_I) << _TOKEN_BITS | tokens_I
        known_K, cost_K = self._costs.get(encoder.name, (np.zeros(0, np.int64),) * 2)
        index_I = np.searchsorted(known_K, key_I)
        is_new_I = np.append(known_K, -1)[index_I] != key_I
        if is_new_I.any():
            new, first = np.unique(key_I[is_new_I], return_index=True)
            costs = image_costs(encoder, sizes_I3[is_new_I][first])
            order = np.argsort(all_K := np.append(known_K, new))
            known_K, cost_K = all_K[order], np.append(cost_K, costs)[order]
            self._costs[encoder.name] = known_K, cost_K
            index_I = np.searchsorted(known_K, key_I)
        found: Int64s = cost_K[index_I]
        return found


def image_costs(encoder: ModuleDescription, sizes_I3: Int64s) -> list[int]:
    """Return the MFLOPs of the forward pass of each image, rounded, so that all ranks agree.

    Args:
        sizes_I3: Patches, tokens and frames of each image.
    """
    tasks = [[ImageMeta(0, 0, *sizes)] for sizes in sizes_I3.tolist()]
    blocks = stage_blocks(encoder, 0, len(encoder.layers))
    flops = pass_flops(blocks, encoder_sizes(encoder, tasks), False)
    return [max(1, round(value / 1e6)) for value in flops.forward_N.tolist()]


def balanced_shares(
    balance: ImageBalance, shares: Sequence[Sequence[MicrobatchMeta]]
) -> list[list[MicrobatchMeta]]:
    """Return the sizes of the tasks of every rank in a step.

    Args:
        shares: Microbatches of each rank.
    """
    columns = [balanced_metas(metas, balance(metas)) for metas in zip(*shares, strict=True)]
    return [list(share) for share in zip(*columns, strict=True)]


def balanced_metas(
    metas: Sequence[MicrobatchMeta], owners: Mapping[str, Sequence[int]]
) -> list[MicrobatchMeta]:
    """Return one microbatch of every rank with the images that the rank encodes.

    Args:
        owners: Rank that encodes each image, by encoder, in the order of the ranks.
    """
    following = {name: iter(of_images) for name, of_images in owners.items()}
    read: list[list[ImageMeta]] = [[] for _ in metas]
    for sample in (sample for meta in metas for sample in meta.samples):
        for image in sample.images:
            name = image.encoder or sample.encoder
            assert name is not None
            read[next(following[name])].append(replace(image, encoder=name))
    return [meta.with_images(images) for meta, images in zip(metas, read, strict=True)]


def with_feature_exchange(
    costs: PlanCosts,
    graph: StageGraph,
    modules: Sequence[ModuleDescription],
    metas: Sequence[MicrobatchMeta],
    model: CostModel,
    ranks: int,
) -> PlanCosts:
    """Return the costs of a plan without a pipeline, with the exchange of features and gradients.

    The exchange is timed as messages to all ranks evenly, and nothing hides it.

    Args:
        metas: Sizes of the tasks (`balanced_metas`).
        ranks: Data-parallel ranks.
    """
    [llm] = [module for module in modules if module.kind == "llm"]
    by_name = {module.name: module for module in modules if module.kind == "encoder"}
    link = model.group_link(ranks, model.execution(llm.name).tensor)
    compute_ms = dict(costs.compute_ms)
    for action in costs.compute_ms:
        encoder = by_name.get(graph.layout.stages[action.stage].module)
        if encoder is None or action.type not in (ActionType.F, ActionType.B):
            continue
        images = metas[action.microbatch].images_read_by(encoder.name)
        width = llm.layers[0].hidden_size * (1 + len(encoder.taps))
        sent_bytes = sum(image.tokens for image in images) * width * model.element_bytes
        compute_ms[action] += model.transfers_ms([sent_bytes * (ranks - 1) / ranks], [link])[0]
    return replace(costs, compute_ms=compute_ms)
