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
from dataclasses import dataclass, field

import numpy as np

from torchmm.balance.costs.blocks import stage_blocks
from torchmm.balance.costs.flops import pass_flops
from torchmm.balance.costs.sizes import encoder_sizes
from torchmm.common.batch import ImageMeta, MicrobatchMeta
from torchmm.common.layers import ModuleDescription


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


def balanced_image_costs(
    image_costs: Mapping[str, Sequence[Sequence[int]]],
) -> dict[str, float]:
    """Return the cost of the slowest rank if the images of a microbatch are balanced, by encoder.

    Args:
        image_costs: Cost of each image of each rank, by encoder.
    """
    found = {}
    for name, costs in image_costs.items():
        work = [0] * len(costs)
        values = [cost for own in costs for cost in own]
        for owner, cost in zip(assign_images(costs), values, strict=True):
            work[owner] += cost
        found[name] = float(max(work, default=0))
    return found
