"""Tests of task sizes against hand-computed values."""

import pytest

from torchmm.common.batch import ImageMeta, MicrobatchMeta, SampleMeta
from torchmm.common.generated import GeneratedMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.costs.sizes import (
    encoder_sizes,
    generator_sizes,
    llm_sizes,
    sequence_sizes,
    text_tokens,
)

LAYER = LayerDescription(8, 2, 2, 4, 16, gated_ffn=False, causal=False)


def encoder(**settings: object) -> ModuleDescription:
    return ModuleDescription("eye", "encoder", (LAYER,), 0, 0, 0, patches_per_token=4, **settings)  # type: ignore[arg-type]


def test_images_and_frames_are_separate_segments() -> None:
    image, video = ImageMeta(1, 1, 16, 4), ImageMeta(1, 1, 24, 6, frames=3)
    sizes = encoder_sizes(encoder(extra_tokens=1), [[image, image], [video]])
    assert sizes.inputs_N.tolist() == [32, 24]
    assert sizes.outputs_N.tolist() == [8, 6]
    assert sizes.images_N.tolist() == [2, 1]
    assert sizes.units_N.tolist() == [34, 27]  # each segment has a class token
    assert sizes.pairs_N(None, in_blocks=True).tolist() == [2 * 17**2, 3 * 9**2]
    assert sizes.pairs_N(10, in_blocks=True).tolist() == [2 * (10**2 + 7**2), 3 * 9**2]
    assert sizes.pairs_N(10, in_blocks=False).tolist() == [2 * 17 * 10, 3 * 9**2]


def test_encoder_without_images_uses_dummy() -> None:
    sizes = encoder_sizes(encoder(dummy_patches=36), [[]])
    assert (sizes.units_N.tolist(), sizes.outputs_N.tolist()) == ([36], [9])


def test_padding_is_computed_as_a_segment() -> None:
    meta = MicrobatchMeta((SampleMeta("s", 0, 30), SampleMeta("s", 1, 30)), 100)
    full = MicrobatchMeta((SampleMeta("s", 2, 100),), 100)
    sizes = llm_sizes([meta, full], [50, 99], padding=True)
    assert sizes.units_N.tolist() == [100, 100]
    assert sizes.outputs_N.tolist() == [50, 99]
    assert sizes.pairs_N(None, in_blocks=False).tolist() == [2 * 900 + 1600, 10_000]
    useful = llm_sizes([meta, full], [50, 99], padding=False)
    assert useful.units_N.tolist() == [60, 100]


def test_calls_count_runs_of_equal_segments() -> None:
    lengths = [[5, 5, 7], [7, 7], [7, 5, 7]]
    metas = [
        MicrobatchMeta(tuple(SampleMeta("s", 0, n) for n in task), sum(task)) for task in lengths
    ]
    sizes = llm_sizes(metas, [1, 1, 1], padding=True)
    assert sizes.calls_N(None).tolist() == [2, 1, 3]
    assert sizes.calls_N(5).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("length", "pairs"), [(100, 100 * 100), (1000, 1000 * (1000 + 512) / 2)])
def test_causal_kernels_skip_complete_blocks(length: int, pairs: float) -> None:
    meta = MicrobatchMeta((SampleMeta("s", 0, length),), length)
    assert llm_sizes([meta], [1], padding=True).causal_pairs_N(None, 512) == pytest.approx([pairs])


def test_generator_attends_to_its_context() -> None:
    sizes = generator_sizes([[GeneratedMeta((1, 4, 4), 10), GeneratedMeta((2, 4, 4), 3)], []])
    assert sizes.units_N.tolist() == sizes.outputs_N.tolist() == [48, 0]
    assert sizes.contexts_N.tolist() == [13, 0]
    assert sizes.cross_pairs_N.tolist() == [16 * 10 + 32 * 3, 0]


def test_sequence_sizes_sum_generated_images() -> None:
    """Compare with a generator batch, which pads images. Single images are not padded."""
    small, large = GeneratedMeta((1, 2, 2), 10), GeneratedMeta((1, 4, 5), 3)
    packs = [
        MicrobatchMeta((SampleMeta("s", i, 30, generated=images),), 30)
        for i, images in enumerate([(small, large, small), (), (small,), (large, large)])
    ]
    dit = ModuleDescription("generator", "generator", (), 0, 0, 0)
    at, sizes = sequence_sizes(dit, packs)
    assert at.tolist() == [0, 2, 3] and sizes is not None
    assert sizes.units_N.tolist() == [4 + 20 + 4, 4, 2 * 20]
    assert sizes.contexts_N.tolist() == [23, 10, 6]
    batched = generator_sizes([[small, large, small], [small]], padding=True)
    assert batched.units_N.tolist() == [3 * 20, 4]
    assert batched.contexts_N.tolist() == [3 * 10, 10]
    assert sizes.context_inputs_N.tolist() == [23, 10, 6]


def test_image_tokens_are_not_targets() -> None:
    image = ImageMeta(1, 1, 16, 4)
    meta = MicrobatchMeta((SampleMeta("s", 0, 30, (image, image), "eye"),), 64)
    assert text_tokens(meta) == 22
