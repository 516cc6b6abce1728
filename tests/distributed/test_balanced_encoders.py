"""Ranks that encode images of each other give the loss and gradients of one process."""

import pytest
from launch import run_distributed
from test_layouts import Case, compare_all

from torchmm.parallel.exchange import FeatureRanks

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
]
CASES_OF_4 = [
    Case("fsdp4", shard=4, balance=True),
    Case("hsdp 2x2", replicate=2, shard=2, balance=True),
    Case("hsdp 2x2, tower frozen", replicate=2, shard=2, freeze=("vision",), balance=True),
    Case("fsdp2 x tp2", shard=2, tensor=2, balance=True),
    Case("fsdp2 x tp2, sequence parallel", 1, 2, 2, True, "full", balance=True),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, CASES_OF_2[:5]),
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


def test_features_of_other_tokens_are_found():
    for [(_, loss_error, _, _)] in run_distributed(_compare_with_wrong_features, 2):
        assert loss_error > 1e-4


def _compare_with_wrong_features():
    right = FeatureRanks.features
    FeatureRanks.features = lambda self, found_KD, route: right(self, found_KD, route).roll(4, 0)
    return compare_all(CASES_OF_2[:1])
