"""Balanced encoding across ranks gives the loss and gradients of one process."""

from dataclasses import dataclass, replace

import pytest
import torch.distributed as dist
from launch import run_distributed
from microbatches import composite_model, with_patches
from test_layouts import Case, compare_all

from torchmm.common.batch import Microbatch
from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.exchange import FeatureExchange
from torchmm.recipe.model_section import FreezeConfig


@dataclass(frozen=True)
class CompositeCase(Case):
    """A layout of a model with different encoders."""

    composite: str = ""
    videos: bool = False
    """Whether every second image is a video of two frames."""

    @property
    def batch(self) -> list[Microbatch]:
        batch = [with_patches(microbatch, self.composite) for microbatch in super().batch]
        return [with_videos(microbatch) for microbatch in batch] if self.videos else batch

    def model(self) -> MultimodalModel:
        config = composite_model(self.composite, 3, 4)
        return build_model(config, FreezeConfig(modules=list(self.freeze)))


def with_videos(microbatch: Microbatch) -> Microbatch:
    """Return the microbatch with videos of two frames instead of every second image."""
    samples, grids = [], []
    for sample in microbatch.meta.samples:
        images = sample.images
        if images and len(grids) % 2:
            images = (replace(images[0], frames=2),)
        grids += [(2, 2, 4) if image.frames == 2 else (1, 4, 4) for image in images]
        samples.append(replace(sample, images=images))
    encoders = dict(microbatch.encoders)
    if grids:
        encoders["vision"] = replace(encoders["vision"], grids_thw=grids)
    meta = replace(microbatch.meta, samples=tuple(samples))
    return replace(microbatch, encoders=encoders, meta=meta)


COMPOSITES = [
    CompositeCase("deepstack", shard=2, balance=True, composite="qwen3_vl"),
    CompositeCase("two encoders", shard=2, balance=True, composite="qwen2_5_omni_thinker"),
    CompositeCase(
        "two encoders and deepstack",
        shard=2,
        balance=True,
        composite="qwen3_omni_moe_thinker",
        freeze=("vision",),
    ),
    CompositeCase("audio", shard=2, balance=True, composite="voxtral"),
    CompositeCase("videos", shard=2, balance=True, composite="qwen3_vl", videos=True),
]

CASES_OF_2 = [
    Case("fsdp2", shard=2, balance=True),
    Case("fsdp2, no image anywhere", shard=2, images=(0,) * 8, balance=True),
    Case("fsdp2, images on one rank", shard=2, images=(5, 0, 4, 0), balance=True),
    Case("fsdp2, one image", shard=2, images=(0, 0, 0, 1), balance=True),
    Case("replicate2", replicate=2, balance=True),
    Case("fsdp2, full recomputation", shard=2, recompute="full", balance=True),
    Case("fsdp2, selective recomputation", shard=2, recompute="selective", balance=True),
    Case("fsdp2, tower frozen", shard=2, freeze=("vision",), balance=True),
    Case("fsdp2, LLM frozen", shard=2, freeze=("llm",), balance=True),
    Case("fsdp2, encoder frozen", shard=2, freeze=("vision", "vision.connector"), balance=True),
    Case("fsdp2, adapters", shard=2, adapters=("llm", "vision"), balance=True),
    Case("ep2", shard=2, llm="qwen3_moe", pipeline={"expert": 2}, balance=True),
    Case(
        "fsdp2, gathered once per step",
        shard=2,
        pipeline={"reshard_after_forward": "never"},
        balance=True,
    ),
    Case(
        "fsdp2, reduced per microbatch",
        shard=2,
        pipeline={"gradient_reduction": "microbatch"},
        balance=True,
    ),
    Case("fsdp2, compiled and recomputed", 1, 2, recompute="full", compiled=True, balance=True),
]
CASES_OF_4 = [
    Case("fsdp4", shard=4, balance=True),
    Case("hsdp 2x2", replicate=2, shard=2, balance=True),
    Case("hsdp 2x2, tower frozen", replicate=2, shard=2, freeze=("vision",), balance=True),
    Case("hsdp 2x2, adapters", replicate=2, shard=2, adapters=("vision",), balance=True),
    CompositeCase(
        "hsdp 2x2, two encoders and deepstack",
        replicate=2,
        shard=2,
        balance=True,
        composite="qwen3_omni_moe_thinker",
    ),
    Case("fsdp2 x tp2", shard=2, tensor=2, balance=True),
    Case("fsdp2 x tp2, sequence parallel", 1, 2, 2, True, "full", balance=True),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [*CASES_OF_2[:5], *COMPOSITES[:2]]),
        pytest.param(2, COMPOSITES, marks=pytest.mark.campaign),
        pytest.param(2, CASES_OF_2, marks=pytest.mark.campaign),
        pytest.param(4, CASES_OF_4, marks=pytest.mark.campaign),
    ],
)
def test_balanced_encoders_equal_single_process(ranks, cases):
    for outcomes in zip(*run_distributed(compare_all, ranks, cases), strict=True):
        for name, loss_error, norm_error, gradient_errors in outcomes:
            assert loss_error <= 1e-5, (name, loss_error)
            assert norm_error <= 1e-5, (name, norm_error)
            assert gradient_errors == {}, (name, gradient_errors)


def test_wrong_features_change_the_loss():
    for [(_, loss_error, _, _)], exchanges in run_distributed(_compare_with_wrong_features, 2):
        assert loss_error > 1e-4
        # Two encoders share one exchange per direction and microbatch.
        assert exchanges == 4


def _compare_with_wrong_features():
    right, send = FeatureExchange.exchange_features, dist.all_to_all_single
    exchanges = 0

    def wrong(self, features, row):
        return {n: x_KD.roll(4, 0) for n, x_KD in right(self, features, row).items()}

    def count(*args, **kwargs):
        nonlocal exchanges
        exchanges += 1
        return send(*args, **kwargs)

    FeatureExchange.exchange_features, dist.all_to_all_single = wrong, count
    return compare_all([COMPOSITES[1]]), exchanges
