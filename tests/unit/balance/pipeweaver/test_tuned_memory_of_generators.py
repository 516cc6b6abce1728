"""Tuned steps with generators never use more than their limit, at any allocation."""

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
    "clips": [(4, 4, 4)],
    "images and clips": [(4, 5, 5), (1, 5, 5), (2, 5, 5)],
}
"""Of images and clips in turn."""
COUNTS = (3, 1, 5, 2)
"""Of them by microbatch."""


def generating(freeze: Sequence[str] = (), vae: Mapping | None = None) -> TunedStep:
    """An LLM and a generator, of two and two layers each.

    Args:
        vae: settings of an autoencoder whose latents are drawn, in patches of as many pixels.
    """
    generator: dict = {"config": PIXART, "frames": 4}
    if vae is not None:
        latent = {"sample_size": 16, "patch_size": 2}
        generator |= {"config": {**PIXART, **latent}, "vae": {"config": {**VAE, **vae}}}
    config = {"llm": {"config": WIDE_LLM}, "generator": generator}
    return cut_in_two(config, [drawn_microbatch(0, 2, IMAGES, equal=True).meta], freeze)


def drawn_microbatch(
    seed: int, images: int, grids: Sequence[tuple[int, int, int]], *, equal: bool
) -> Microbatch:
    """A sample for each image, which is drawn from some or all of its tokens.

    Args:
        equal: whether contexts are equally long.
    """
    lengths = [12 if equal else 5 + (5 * (seed + i)) % 17 for i in range(images)]
    own = [grids[(seed + i) % len(grids)] for i in range(images)]
    metas = [GeneratedMeta(grid, n - 2) for grid, n in zip(own, lengths, strict=True)]
    samples = [
        SampleMeta("drawn", i, n, generated=(m,))
        for i, (n, m) in enumerate(zip(lengths, metas, strict=True))
    ]
    ends = [0, *accumulate(lengths)]
    generator = torch.Generator().manual_seed(seed)
    patches = sum(map(prod, own))
    inputs = GeneratorInputs(
        torch.randint(256, (patches, VALUES), generator=generator, dtype=torch.uint8),
        torch.randn(patches, VALUES, generator=generator),
        torch.rand(images, generator=generator).tolist(),
        own,
        torch.cat([torch.arange(b - m.context, b) for b, m in zip(ends[1:], metas, strict=True)]),
        [m.context for m in metas],
        [True] * images,
    )
    ids = torch.randint(5, 64, (ends[-1],), generator=generator)
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])
    meta = MicrobatchMeta(tuple(samples), ends[-1])
    return Microbatch(ids, ids.roll(-1), places, ends, {}, meta, generator=inputs)


def drawn_batch(sizes: str, seed: int) -> list[Microbatch]:
    equal = sizes in ("equal sizes", "clips")
    return [
        drawn_microbatch(10 * seed + i, count, GRIDS[sizes], equal=equal)
        for i, count in enumerate(COUNTS)
    ]


CASES = (
    ("different sizes", "zero_bubble", ()),
    ("images and clips", "gpipe", ()),
    ("equal sizes", "separated", ("llm",)),
)
LONG_CASES = (
    ("clips", "separated", ()),
    ("different sizes", "separated", ("generator.connector",)),
    ("images and clips", "zero_bubble", ("llm", "generator.connector")),
)


@pytest.mark.parametrize(
    ("sizes", "schedule", "freeze"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.campaign) for case in LONG_CASES)],
)
def test_a_step_that_draws_never_uses_more_than_its_limit(sizes, schedule, freeze):
    step = generating(freeze)
    batch = drawn_batch(sizes, 0)
    plan = step.plan(schedule, batch, {"generator": (2, 1, 2, 1)})
    for limit, predicted, measured in step.tuned(plan, batch):
        assert measured <= predicted <= limit, measured / limit
        assert measured >= 0.93 * predicted, measured / predicted


@pytest.mark.parametrize("freeze", [("generator",), ("generator", "generator.connector")])
def test_nor_does_one_whose_generator_is_frozen(freeze):
    step = generating(freeze)
    batch = drawn_batch("different sizes", 0)
    plan = step.plan("gpipe", batch, {"generator": (2, 1, 2, 1)})
    for limit, predicted, measured in step.tuned(plan, batch):
        assert 0.85 * predicted <= measured <= predicted <= limit, measured / predicted


@pytest.mark.parametrize(
    ("schedule", "channels", "count"), [("zero_bubble", [8, 16], 4), ("gpipe", [512, 16], 1)]
)
def test_nor_does_one_that_encodes_what_it_draws(schedule, channels, count):
    """With few channels layers need the most, with many the autoencoder does."""
    step = generating(vae={"block_out_channels": channels})
    batch = []
    for microbatch in drawn_batch("different sizes", 0)[-count:]:
        drawn = microbatch.generator
        noise = torch.randn(len(drawn.noise_PV), LATENT_VALUES)
        latents = replace(drawn, noise_PV=noise, latent_values=LATENT_VALUES)
        batch.append(replace(microbatch, generator=latents))
    plan = step.plan(schedule, batch, {"generator": (2, 1, 2, 1)[-count:]})
    shares = SHARES if count > 1 else SHARES[-1:]
    for limit, predicted, measured in step.tuned(plan, batch, shares):
        assert measured <= predicted <= limit, measured / limit
        assert measured >= 0.8 * predicted, measured / predicted
