"""Balanced microbatches from decoded microbatches, without a data loader."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch

from torchmm.common.batch import EncoderInputs, ImageSizes, Microbatch
from torchmm.common.generated import GeneratorInputs
from torchmm.common.module_names import GENERATOR
from torchmm.common.sequence_slices import BalancedMicrobatch
from torchmm.data.items import Item
from torchmm.data.steps.image_balance import assign_images
from torchmm.data.steps.plan_steps import AssignImages


def balanced_microbatch(
    microbatches: Sequence[Microbatch], balance: AssignImages, rank: int
) -> BalancedMicrobatch:
    """Return the microbatch of a rank with the images that it encodes and generates.

    Args:
        microbatches: Microbatch of each rank, with all pixels.
    """
    items = [Item(0, home, s) for home, m in enumerate(microbatches) for s in m.meta.samples]
    sizes = ImageSizes.from_samples([item.meta for item in items], balance.names)
    homes_S = np.array([item.epoch for item in items], np.int64)
    assigned = assign_images(sizes, homes_S, balance, len(microbatches))
    encoded = assigned.of_rank(rank, lambda chosen: [items[i] for i in chosen])
    read: dict[str, EncoderInputs] = {}
    drawn: GeneratorInputs | None = None
    for number, name in enumerate(balance.names):
        of_images = assigned.owners.owners_I[assigned.modules_I == number]
        images = [
            (m.generator if name == GENERATOR else m.encoders[name]).select(range(i, i + 1))
            for m in microbatches
            for i in range(m.meta.module_image_count(name))
        ]
        assigned_images = [
            image for image, owner in zip(images, of_images, strict=True) if owner == rank
        ]
        if assigned_images and name == GENERATOR:
            drawn = _joined_drawings(assigned_images)
        elif assigned_images:
            read[name] = _joined(assigned_images)
    microbatch = microbatches[rank]
    values = {f.name: getattr(microbatch, f.name) for f in fields(Microbatch)}
    shown = {name: inputs.without_pixels() for name, inputs in microbatch.encoders.items()}
    generator = microbatch.generator and microbatch.generator.without_pixels()
    return BalancedMicrobatch(
        **values | {"encoders": shown, "generator": generator},
        rank_encoders=read,
        rank_generator=drawn,
        image_sources=encoded.read_for,
        image_owners=encoded.read_by,
        rank_meta=encoded.task_meta(microbatch.meta),
    )


def _joined(images: Sequence[EncoderInputs]) -> EncoderInputs:
    regions = [region for image in images for region in image.tile_regions or ()]
    return replace(
        images[0],
        pixels=torch.cat([image.pixels for image in images]),
        grids_thw=[grid for image in images for grid in image.grids_thw],
        positions_K=torch.cat([image.positions_K for image in images]),
        tile_regions=regions or None,
    )


def _joined_drawings(images: Sequence[GeneratorInputs]) -> GeneratorInputs:
    return replace(
        images[0],
        patches_PV=torch.cat([image.patches_PV for image in images]),
        noise_PV=torch.cat([image.noise_PV for image in images]),
        times=[time for image in images for time in image.times],
        grids_thw=[grid for image in images for grid in image.grids_thw],
        context_positions_K=torch.cat([image.context_positions_K for image in images]),
        contexts=[context for image in images for context in image.contexts],
        in_loss=[in_loss for image in images for in_loss in image.in_loss],
    )
