"""Groups of context-parallel ranks that follow sample lengths equal one process."""

import json
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from launch import run_distributed
from microbatches import IMAGE_TOKENS, VOCAB
from test_context_parallel import LONGROPE
from test_layouts import Case, _compare, compare_all
from test_train import run
from tiny_recipe import records, tiny_recipe, weights

from torchmm.common import sequence_slices
from torchmm.common.batch import (
    IGNORE_TARGET,
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
)
from torchmm.parallel.context import ContextParallelRanks
from torchmm.training import pipeline

TWO, FOUR = ({"llm": {"context": size, "dynamic_context": True}} for size in (2, 4))
LENGTHS = (
    (16, 16, 16, 16),
    (16, 32, 16),
    (33, 31),
    (64,),
    (9, 7, 8, 8, 16, 16),
    (40, 12, 12),
    (15, 17, 32),
    (24, 8, 32),
)
"""Tokens of the samples of each sequence. With four ranks, one, two or four share a sample."""
PADDED = 5
"""Sequence whose last segment is padding."""


def mixed_microbatch(seed: int, lengths: tuple[int, ...]) -> Microbatch:
    """Build a packed sequence. Every second sample has an image at a random position."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    starts = list(accumulate(lengths, initial=0))
    ids = torch.randint(5, VOCAB, (tokens,), generator=generator)
    targets = torch.full((tokens,), IGNORE_TARGET)
    samples, positions = [], []
    for index, length in enumerate(lengths):
        start = starts[index]
        if seed == PADDED and index == len(lengths) - 1:
            continue
        images: tuple[ImageMeta, ...] = ()
        if index % 2 == seed % 2:
            offset = int(torch.randint(0, length - IMAGE_TOKENS - 2, (), generator=generator))
            positions += range(start + offset, start + offset + IMAGE_TOKENS)
            images = (ImageMeta(16, 16, IMAGE_TOKENS, IMAGE_TOKENS),)
        targets[start + length // 2 : start + length - 1] = ids[
            start + length // 2 + 1 : start + length
        ]
        samples.append(SampleMeta("mixed", index, length, images, "vision" if images else None))
    encoders = {}
    if positions:
        count = len(positions) // IMAGE_TOKENS
        pixels = torch.randn(count, 3, 16, 16, generator=generator)
        encoders["vision"] = EncoderInputs(pixels, [(1, 2, 2)] * count, torch.tensor(positions))
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    meta = MicrobatchMeta(tuple(samples), tokens)
    return Microbatch(ids, targets, position_ids, starts, encoders, meta)


@dataclass(frozen=True)
class MixedCase(Case):
    """A layout with sequences of short and long samples."""

    @property
    def batch(self) -> list[Microbatch]:
        return [mixed_microbatch(seed, lengths) for seed, lengths in enumerate(LENGTHS)]


FIRST = MixedCase("cp4", shard=4, pipeline=FOUR)
LIMITED = {**LONGROPE, "original_max_position_embeddings": 20}
"""Samples of 32 tokens or more have other rotary frequencies than shorter samples."""
CASES_OF_4 = [
    FIRST,
    MixedCase("cp4, full recomputation", shard=4, recompute="full", pipeline=FOUR),
    MixedCase("cp4, experts", shard=4, llm="qwen3_moe", pipeline={**FOUR, "expert": 4}),
    MixedCase("cp4, longrope", shard=4, llm="phi3", llm_config=LIMITED, pipeline=FOUR),
    MixedCase("cp4, delta nets", shard=4, llm="qwen3_5_text", pipeline=FOUR),
    MixedCase("cp4, delta nets with experts", shard=4, llm="qwen3_next", pipeline=FOUR),
    MixedCase("cp4, short convolutions", shard=4, llm="lfm2", pipeline=FOUR),
    MixedCase("cp2 x fsdp2", shard=4, pipeline=TWO),
    MixedCase("cp2 x replicate2", replicate=2, shard=2, chunked_loss=True, pipeline=TWO),
    MixedCase("cp2 x tp2, sequence parallel", 1, 2, 2, True, pipeline=TWO),
    MixedCase("cp2 x pp2", shard=2, pipeline={**TWO, "pipeline": 2}),
    MixedCase(
        "cp2 x pp2, zero bubble",
        shard=2,
        pipeline={**TWO, "pipeline": 2, "schedule": "zero_bubble"},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [CASES_OF_4[:1], pytest.param(CASES_OF_4, marks=pytest.mark.campaign)]
)
def test_dynamic_context_equals_single_process(cases):
    for sizes, outcomes in run_distributed(_compare_and_record, 4, cases):
        assert sizes == {1, 2, 4}  # numbers of ranks that share a sequence
        for name, loss_error, norm_error, gradient_errors in outcomes:
            assert loss_error <= 1e-5, (name, loss_error)
            assert norm_error <= 1e-5, (name, norm_error)
            assert gradient_errors == {}, (name, gradient_errors)


def _compare_and_record(cases):
    """Return the numbers of ranks that share a sequence with this rank, and the errors."""
    original = ContextParallelRanks.heads
    sizes = set()

    def heads(self, tokens, ranks):
        sizes.add(ranks)
        return original(self, tokens, ranks)

    ContextParallelRanks.heads = heads
    return sizes, compare_all(cases)


def test_wrong_groups_change_gradients():
    for unmoved, joined in run_distributed(_compare_wrong_groups, 2):
        for _, loss_error, _, gradient_errors in (unmoved, joined):
            assert loss_error > 1e-5
            assert any("self_attn.q_proj" in name for name in gradient_errors)


def _compare_wrong_groups():
    """Compare with features at unsorted positions, and with attention between samples."""
    sort_segments, slice_microbatch = sequence_slices.sort_segments, pipeline.slice_microbatch
    case = MixedCase("cp2", shard=2, pipeline=TWO)

    def without_positions(microbatch, order):
        return replace(sort_segments(microbatch, order), encoders=microbatch.encoders)

    def without_samples(*arguments):
        part = slice_microbatch(*arguments)
        return replace(part, cu_seqlens=[0, part.cu_seqlens[-1]])

    sequence_slices.sort_segments = without_positions
    [unmoved] = compare_all([case])
    sequence_slices.sort_segments = sort_segments
    pipeline.slice_microbatch = without_samples
    joined = _compare(case)  # the process group exists
    return unmoved, joined


RUN = {
    "training__steps": 4,
    "training__global_batch_size": 2,
    "training__sequence_length": 256,
    "parallel__llm.context": 2,
    "parallel__llm.dynamic_context": "true",
}


@pytest.mark.slow
def test_run_equals_single_process_and_resumes_exactly(tmp_path, real_data):
    one = {key: value for key, value in RUN.items() if not key.startswith("parallel")}
    evaluated = {
        "validation__interval": 4,
        "validation__batches": 1,
        "validation__num_samples": 2,
        "validation__max_new_tokens": 3,
    }
    saved = {"checkpoint__interval": 2}
    run(1, tiny_recipe(tmp_path / "one", real_data, 1, **one, **evaluated))
    straight, halves = (
        tiny_recipe(tmp_path / name, real_data, 2, **{**RUN, **evaluated, **saved, **steps})
        for name, steps in (("straight", {}), ("halves", {"training__steps": 2}))
    )
    run(2, straight, halves)
    run(2, tiny_recipe(tmp_path / "halves", real_data, 2, **RUN, **evaluated, **saved))
    names = ("one", "straight", "halves")
    for single, two, resumed in zip(*(records(tmp_path / n) for n in names), strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert two[key] == (single[key] and pytest.approx(single[key], rel=1e-4)), key
        assert [two[key] for key in ("step", "loss", "grad_norm")] == [
            resumed[key] for key in ("step", "loss", "grad_norm")
        ]
    texts = [json.loads((tmp_path / name / "samples.json").read_text()) for name in names[:2]]
    assert texts[0] and texts[0] == texts[1]
    expected, actual = weights(tmp_path / "straight"), weights(tmp_path / "halves")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected if "rng" not in name)
