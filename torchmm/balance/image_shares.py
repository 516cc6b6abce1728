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

from torchmm.balance.costs.blocks import stage_blocks
from torchmm.balance.costs.devices import Link
from torchmm.balance.costs.flops import pass_flops
from torchmm.balance.costs.model import CostModel
from torchmm.balance.costs.sizes import encoder_sizes
from torchmm.balance.step_costs import PlanCosts
from torchmm.common.batch import ImageMeta, MicrobatchMeta
from torchmm.common.layers import ModuleDescription
from torchmm.pipelining.plan.actions import ActionType
from torchmm.pipelining.plan.graph import StageGraph


def assign_images(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank that encodes each image, in the order of the ranks that train on them.

    Args:
        costs: Cost of each image of each rank.
    """
    ranks = len(costs)
    home = [rank for rank, own in enumerate(costs) for _ in own]
    place = [index for own in costs for index in range(len(own))]
    cost = [cost for own in costs for cost in own]
    # Among equal costs, the first image of every rank comes first, then the second, and so on.
    order = np.lexsort((home, place, -np.array(cost, np.int64))).tolist()
    work = [0] * ranks
    idlest = [(0, rank) for rank in range(ranks)]  # a heap; entries with other work are outdated
    owners = [0] * len(cost)
    for image in order:
        while work[idlest[0][1]] != idlest[0][0]:
            heapq.heappop(idlest)
        least, rank = idlest[0]
        if work[home[image]] == least:
            rank = home[image]
        owners[image] = rank
        work[rank] += cost[image]
        heapq.heappush(idlest, (work[rank], rank))
    return owners


@dataclass(frozen=True)
class ImageBalance:
    """Assigns the images of one microbatch of all data-parallel ranks.

    Attributes:
        encoders: Descriptions of all encoders of the model.
    """

    encoders: tuple[ModuleDescription, ...]
    _costs: dict[tuple[str, ImageMeta], int] = field(default_factory=dict, compare=False)
    """Known costs by encoder and image size."""

    def __call__(self, metas: Sequence[MicrobatchMeta]) -> dict[str, list[int]]:
        """Return the rank that encodes each image, by encoder, in the order of the ranks.

        Args:
            metas: Microbatch of each rank.
        """
        return {
            encoder.name: assign_images(self.costs(encoder, metas)) for encoder in self.encoders
        }

    def costs(self, encoder: ModuleDescription, metas: Sequence[MicrobatchMeta]) -> list[list[int]]:
        """Return the FLOPs of each image of each rank."""
        images = [meta.images_read_by(encoder.name) for meta in metas]
        known = self._costs
        new = [i for i in {i for own in images for i in own} if (encoder.name, i) not in known]
        for image, flops in zip(new, image_flops(encoder, new), strict=True):
            known[encoder.name, image] = flops
        return [[known[encoder.name, image] for image in own] for own in images]


def image_flops(encoder: ModuleDescription, images: Sequence[ImageMeta]) -> list[int]:
    """Return the FLOPs of the forward pass of each image, rounded, so that all ranks agree."""
    if not images:
        return []
    blocks = stage_blocks(encoder, 0, len(encoder.layers))
    flops = pass_flops(blocks, encoder_sizes(encoder, [[image] for image in images]), False)
    return [round(value) for value in flops.forward_N.tolist()]


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

    The exchange is timed as one message to another rank, at the rate of the slower link, and
    nothing hides it. A rank sends the features that it computes to all ranks alike on average.

    Args:
        metas: Sizes of the tasks (`balanced_metas`).
        ranks: Data-parallel ranks.
    """
    [llm] = [module for module in modules if module.kind == "llm"]
    by_name = {module.name: module for module in modules if module.kind == "encoder"}
    spanned = ranks * model.execution(llm.name).tensor
    link: Link = "node" if spanned <= model.profile.device.devices_per_node else "network"
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
