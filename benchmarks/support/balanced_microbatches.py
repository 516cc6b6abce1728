"""Balanced microbatches of decoded ones, without a loader."""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from torchmm.common.batch import EncoderInputs, Microbatch
from torchmm.common.row_slices import BalancedMicrobatch
from torchmm.data.items import Item
from torchmm.data.steps.balanced import encoded_images
from torchmm.data.steps.step_packs import Balance


def balanced_microbatch(
    microbatches: Sequence[Microbatch], balance: Balance, rank: int
) -> BalancedMicrobatch:
    """Return the microbatch of a rank with the images that it encodes.

    Args:
        microbatches: Microbatch of each rank, with all pixels.
    """
    metas = [microbatch.meta for microbatch in microbatches]
    packs = [[[Item(0, home, s) for s in meta.samples]] for home, meta in enumerate(metas)]
    owners = balance(metas)
    encoded = encoded_images(packs, metas, owners, rank)
    read = {}
    for name, of_images in owners.items():
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
