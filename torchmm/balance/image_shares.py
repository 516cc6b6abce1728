"""Assignment of the images of a microbatch to data-parallel ranks (`data.balance = "images"`).

Ranks without a pipeline wait for each other in every layer, so a microbatch takes as long as the
encoder of the slowest rank. All ranks compute the same assignment from the metadata of all ranks.

Longest processing time first: images are assigned in the order of decreasing cost, each to the rank
with the least work. Graham's bound holds: the slowest rank has at most 4/3 of the optimal work. If
the rank that trains on an image is as idle as any other rank, it encodes the image itself, so that
no features travel if all ranks have the same images.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from torchmm.balance.compiled import Int64s, compiled
from torchmm.balance.costs.blocks import stage_blocks
from torchmm.balance.costs.flops import pass_flops
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.sizes import encoder_sizes
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.batch import ImageMeta, MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph

ImageSizes = tuple[int, int, int]
"""Patches, frames and tokens of an image, on which its cost depends."""


def assign_images(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank that encodes each image, in the order of the ranks that train on them.

    Args:
        costs: Cost of each image of each rank.
    """
    counts = [len(own) for own in costs]
    cost_N = np.array([cost for own in costs for cost in own], np.int64)
    home_N = np.repeat(np.arange(len(costs)), counts)
    place_N = np.array([index for count in counts for index in range(count)], np.int64)
    # Among equal costs, the first image of every rank comes first, then the second, and so on.
    order_N = np.lexsort((home_N, place_N, -cost_N))
    owners: list[int] = _assign(order_N, home_N, cost_N, len(costs)).tolist()
    return owners


@compiled
def _assign(order_N: Int64s, home_N: Int64s, cost_N: Int64s, ranks: int) -> Int64s:
    owners_N = np.empty(len(order_N), np.int64)
    work_R = np.zeros(ranks, np.int64)
    # A heap of work * ranks + rank. Entries with other work than that of the rank are outdated.
    idlest = [np.int64(rank) for rank in range(ranks)]
    for image in order_N:
        while work_R[idlest[0] % ranks] != idlest[0] // ranks:
            heapq.heappop(idlest)
        rank = idlest[0] % ranks
        if work_R[home_N[image]] == work_R[rank]:
            rank = home_N[image]
        owners_N[image] = rank
        work_R[rank] += cost_N[image]
        heapq.heappush(idlest, work_R[rank] * ranks + rank)
    return owners_N


@dataclass(frozen=True)
class ImageBalance:
    """Assigns the images of one microbatch of all data-parallel ranks.

    Attributes:
        encoders: Descriptions of all encoders of the model.
    """

    encoders: tuple[ModuleDescription, ...]
    _known: dict[str, dict[ImageSizes, int]] = field(default_factory=dict, compare=False)
    """Costs of images by encoder and sizes."""

    def __call__(self, metas: Sequence[MicrobatchMeta]) -> dict[str, list[int]]:
        """Return the rank that encodes each image, by encoder, in the order of the ranks.

        Args:
            metas: Microbatch of each rank.
        """
        return {
            encoder.name: assign_images(self.costs(encoder, metas)) for encoder in self.encoders
        }

    def costs(self, encoder: ModuleDescription, metas: Sequence[MicrobatchMeta]) -> list[list[int]]:
        """Return the cost of each image of each rank (`image_costs`)."""
        known = self._known.setdefault(encoder.name, {})
        of_ranks = [
            [(i.patches, i.frames, i.tokens) for i in meta.images_read_by(encoder.name)]
            for meta in metas
        ]
        new = sorted({sizes for own in of_ranks for sizes in own} - known.keys())
        known.update(zip(new, image_costs(encoder, new), strict=True))
        return [[known[sizes] for sizes in own] for own in of_ranks]


def image_costs(encoder: ModuleDescription, images: Sequence[ImageSizes]) -> list[int]:
    """Return the MFLOPs of the forward pass of each image, rounded, so that all ranks agree."""
    if not images:
        return []
    tasks = [[ImageMeta(0, 0, patches, tokens, frames)] for patches, frames, tokens in images]
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
