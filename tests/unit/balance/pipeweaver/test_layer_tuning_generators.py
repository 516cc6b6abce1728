"""Tests of memory of tuned steps with generators, at every allocation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

import pytest
import torch
from generator_cases import LATENT_VALUES, VAE
from pipeline_cases import LLM
from tuned_steps import SHARES, TunedStep, cut_in_two

from torchmm.common.batch import Microbatch, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta, GeneratorInputs

pytest.importorskip("diffusers")

WIDE_LLM = {**LLM, "hidden_size": 192, "intermediate_size": 512, "tie_word_embeddings": False}
PIXART = {
    "_class_name": "PixArtTransformer2DModel",
    "num_attention_heads": 4,
    "attention_head_dim": 48,
    "num_layers": 4,
    "sample_size": 32,
    "patch_size": 4,
}
VALUES = 3 * 4 * 4
IMAGES = [(1, 8, 8)]
GRIDS = {
    "equal sizes": [(1, 6, 6)],
    "different sizes": [(1, 8, 8), (1, 2, 2), (1, 4, 6), (1, 2, 3)],
    "videos": [(4, 4, 4)],
    "images and videos": [(4, 5, 5), (1, 5, 5), (2, 5, 5)],
}
"""Grids of images and videos, which microbatches use round-robin."""
COUNTS = (3, 1, 5, 2)
"""Number of images or videos per microbatch."""


def generating(freeze: Sequence[str] = (), vae: Mapping | None = None) -> TunedStep:
    """Return a step with an LLM and a generator, of two stages of two layers each.

    Args:
        freeze: Names of frozen modules.
        vae: Settings of an autoencoder. The generator then generates latents, in patches of the
            same number of values.
    """
    generator: dict = {"config": PIXART, "frames": 4}
    if vae is not None:
        latent = {"sample_size": 16, "patch_size": 2}
        generator |= {"config": {**PIXART, **latent}, "vae": {"config": {**VAE, **vae}}}
    config = {"llm": {"config": WIDE_LLM}, "generator": generator}
    return cut_in_two(config, [generation_microbatch(0, 2, IMAGES, equal=True).meta], freeze)


def generation_microbatch(
    seed: int, images: int, grids: Sequence[tuple[int, int, int]], *, equal: bool
) -> Microbatch:
    """Return a microbatch with a sample for each generated image.

    The context of an image is all or some tokens of the sample.

    Args:
        seed: Seed of tokens and images.
        images: Number of images.
        grids: Grids of images, used round-robin.
        equal: Whether contexts have equal lengths.
    """
    lengths = [12 if equal else 5 + (5 * (seed + i)) % 17 for i in range(images)]
    image_grids = [grids[(seed + i) % len(grids)] for i in range(images)]
    metas = [GeneratedMeta(grid, n - 2) for grid, n in zip(image_grids, lengths, strict=True)]
    samples = [
        SampleMeta("generated", i, n, generated=(m,))
        for i, (n, m) in enumerate(zip(lengths, metas, strict=True))
    ]
    ends = [0, *accumulate(lengths)]
    generator = torch.Generator().manual_seed(seed)
    patches = sum(map(prod, image_grids))
    inputs = GeneratorInputs(
        torch.randint(256, (patches, VALUES), generator=generator, dtype=torch.uint8),
        torch.randn(patches, VALUES, generator=generator),
        torch.rand(images, generator=generator).tolist(),
        image_grids,
        torch.cat([torch.arange(b - m.context, b) for b, m in zip(ends[1:], metas, strict=True)]),
        [m.context for m in metas],
        [True] * images,
    )
    ids = torch.randint(5, 64, (ends[-1],), generator=generator)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])
    meta = MicrobatchMeta(tuple(samples), ends[-1])
    return Microbatch(ids, ids.roll(-1), positions, ends, {}, meta, generator=inputs)


def generation_batch(sizes: str, seed: int) -> list[Microbatch]:
    equal = sizes in ("equal sizes", "videos")
    return [
        generation_microbatch(10 * seed + i, count, GRIDS[sizes], equal=equal)
        for i, count in enumerate(COUNTS)
    ]


CASES = (
    ("different sizes", "zero_bubble", ()),
    ("images and videos", "gpipe", ()),
    ("equal sizes", "separated", ("llm",)),
)
LONG_CASES = (
    ("videos", "separated", ()),
    ("different sizes", "separated", ("generator.connector",)),
    ("images and videos", "zero_bubble", ("llm", "generator.connector")),
)


@pytest.mark.parametrize(
    ("sizes", "schedule", "freeze"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.campaign) for case in LONG_CASES)],
)
def test_tuned_generation_step_stays_within_limit(sizes, schedule, freeze):
    step = generating(freeze)
    batch = generation_batch(sizes, 0)
    plan = step.plan(schedule, batch, {"generator": (2, 1, 2, 1)})
    for limit, predicted, measured in step.tuned(plan, batch):
        assert measured <= predicted <= limit, measured / limit
        assert measured >= 0.93 * predicted, measured / predicted


@pytest.mark.parametrize("freeze", [("generator",), ("generator", "generator.connector")])
def test_frozen_generator_step_stays_within_limit(freeze):
    step = generating(freeze)
    batch = generation_batch("different sizes", 0)
    plan = step.plan("gpipe", batch, {"generator": (2, 1, 2, 1)})
    for limit, predicted, measured in step.tuned(plan, batch):
        assert 0.85 * predicted <= measured <= predicted <= limit, measured / predicted


@pytest.mark.parametrize(
    ("schedule", "channels", "count"), [("zero_bubble", [8, 16], 4), ("gpipe", [512, 16], 1)]
)
def test_vae_encoding_step_stays_within_limit(schedule, channels, count):
    """Check both cases: layers determine the peak, or the autoencoder with many channels."""
    step = generating(vae={"block_out_channels": channels})
    batch = []
    for microbatch in generation_batch("different sizes", 0)[-count:]:
        inputs = microbatch.generator
        noise = torch.randn(len(inputs.noise_PV), LATENT_VALUES)
        latents = replace(inputs, noise_PV=noise, latent_values=LATENT_VALUES)
        batch.append(replace(microbatch, generator=latents))
    plan = step.plan(schedule, batch, {"generator": (2, 1, 2, 1)[-count:]})
    shares = SHARES if count > 1 else SHARES[-1:]
    for limit, predicted, measured in step.tuned(plan, batch, shares):
        assert measured <= predicted <= limit, measured / limit
        assert measured >= 0.8 * predicted, measured / predicted
