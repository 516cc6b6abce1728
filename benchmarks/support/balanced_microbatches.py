"""Balanced microbatches of decoded ones, without a loader."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch

from torchmm.common.batch import EncoderInputs, ImageSizes, Microbatch
from torchmm.common.row_slices import BalancedMicrobatch
from torchmm.data.items import Item
from torchmm.data.steps.balanced import assign_images
from torchmm.data.steps.step_packs import Balance


def balanced_microbatch(
    microbatches: Sequence[Microbatch], balance: Balance, rank: int
) -> BalancedMicrobatch:
    """Return the microbatch of a rank with the images that it encodes.

    Args:
        microbatches: Microbatch of each rank, with all pixels.
    """
    items = [Item(0, home, s) for home, m in enumerate(microbatches) for s in m.meta.samples]
    sizes = ImageSizes.of([item.meta for item in items], balance.names)
    homes_S = np.array([item.epoch for item in items], np.int64)
    assigned = assign_images(sizes, homes_S, balance, len(microbatches))
    encoded = assigned.of_rank(rank, lambda chosen: [items[i] for i in chosen])
    read = {}
    for number, name in enumerate(balance.names):
        of_images = assigned.owners_I[assigned.encoders_I == number]
        every = [
            microbatch.encoders[name].select(range(image, image + 1))
            for microbatch in microbatches
            for image in range(microbatch.meta.images_of(name))
        ]
        own = [image for image, owner in zip(every, of_images, strict=True) if owner == rank]
        if own:
            read[name] = _joined(own)
    microbatch = microbatches[rank]
    values = {f.name: getattr(microbatch, f.name) for f in fields(Microbatch)}
    shown = {name: inputs.without_pixels() for name, inputs in microbatch.encoders.items()}
    return BalancedMicrobatch(
        **values | {"encoders": shown},
        read=read,
        read_for=encoded.read_for,
        read_by=encoded.read_by,
        balanced_meta=encoded.task_meta(microbatch.meta),
    )


def _joined(images: Sequence[EncoderInputs]) -> EncoderInputs:
    kept = [kept for image in images for kept in image.kept or ()]
    return replace(
        images[0],
        pixels=torch.cat([image.pixels for image in images]),
        grids_thw=[grid for image in images for grid in image.grids_thw],
        positions_K=torch.cat([image.positions_K for image in images]),
        kept=kept or None,
    )
