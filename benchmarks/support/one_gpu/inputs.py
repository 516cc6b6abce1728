"""Random inputs of modules, from the sizes of samples alone.

Shape legend: T tokens of a microbatch, N images, P patches, K output tokens of one encoder, C
channels, D values of a patch.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import isqrt

import torch

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, ImageMeta, Microbatch, MicrobatchMeta
from torchmm.common.tiles import TileRegion
from torchmm.models.encoders import EncoderModule
from torchmm.models.multimodal import MultimodalModel


def encoder_inputs(
    module: EncoderModule, pack: MicrobatchMeta, device: torch.device
) -> EncoderInputs:
    """Return random images: (N, C, height, width), or (P, D) for variable sizes."""
    images = pack.images_of_encoder(module.name)
    example = module.dummy_inputs(torch.device("meta"))
    spec = module.image_spec()
    if spec.inputs == "fixed":
        shape = (len(images), *example.pixels.shape[1:])
        grids = example.grids_thw * len(images)
    else:
        shape = (sum(image.patches for image in images), example.pixels.shape[-1])
        step = 0 if spec.modality == "audio" else module.merge
        grids = [_grid(image, step) for image in images]
    nowhere = torch.empty(0, dtype=torch.int64, device=device)
    kept = [TileRegion(0, 0, 0, 0, image.tokens) for image in images] if spec.ends_lines else None
    return EncoderInputs(torch.randn(shape, device=device), grids, nowhere, kept)


def _grid(image: ImageMeta, step: int) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of the patches of an image, as square as possible.

    Rows and columns are multiples of `step`. If it is 0 (audio), the grid has one row.
    """
    patches = image.patches // image.frames
    if step == 0:
        return image.frames, 1, patches
    blocks = patches // step**2
    rows = next(n for n in range(isqrt(blocks), 0, -1) if blocks % n == 0)
    return image.frames, rows * step, blocks // rows * step


def text_microbatch(
    model: MultimodalModel, pack: MicrobatchMeta, device: torch.device
) -> Microbatch:
    """Return the samples of a pack as LLM inputs: placeholders, then text, padding at the end.

    Pixels are missing: the outputs of encoders are inputs.
    """
    starts = list(accumulate((sample.tokens for sample in pack.samples), initial=0))
    if starts[-1] < pack.tokens:
        starts.append(pack.tokens)
    ids_T = torch.randint(0, model.llm.text_config.vocab_size, (pack.tokens,))
    targets_T = torch.full((pack.tokens,), IGNORE_TARGET)
    places: dict[str, list[int]] = {}
    for sample, start in zip(pack.samples, starts, strict=False):
        at = start
        for name in model.encoders:
            for image in sample.images_of_encoder(name):
                end = min(at + image.tokens, start + sample.tokens)
                places.setdefault(name, []).extend(range(at, end))
                at = end
        targets_T[at : start + sample.tokens] = ids_T[at : start + sample.tokens]
    nothing = torch.empty(0)
    encoders = {name: EncoderInputs(nothing, [], torch.tensor(own)) for name, own in places.items()}
    positions_T = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])
    mrope = positions_T.expand(3, -1) if model.text.mrope else positions_T
    return Microbatch(ids_T, targets_T, mrope, starts, encoders, pack).to(device)
