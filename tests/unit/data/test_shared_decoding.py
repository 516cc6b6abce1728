"""Ranks that process the same samples: which images each rank decodes, and corrupt samples."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from data_cases import CLIP, NAFLEX, QWEN, caption, data_config, png, training, write_jsonl
from installed import needs_extension

from torchmm.common.batch import EncoderInputs, Microbatch
from torchmm.common.generated import GeneratorSpec
from torchmm.common.sequence_slices import DecodeAssignment, RankShare
from torchmm.data.build import build_loader
from torchmm.data.loader import Loader, StepBatch
from torchmm.recipe.data_section import SourceConfig

pytestmark = needs_extension("extensions.generation")
ALL = None
NOTHING = DecodeAssignment({})
HALVES = [
    DecodeAssignment({"vision": RankShare(part, 2), "generator": RankShare(part, 2)})
    for part in range(2)
]
GENERATOR = GeneratorSpec(size_px=16, patch_size_px=8)
CORRUPT = (0, 3, 11, 13, 17, 19)
"""Indices of corrupt images: in captions, in documents, and target images."""


@pytest.fixture
def make(tmp_path, tokenizer, text_spec):
    """Return a function that builds a loader of captions, documents and target images.

    Documents have two images each. Each image is a separate file and is in a step at most once.
    """
    for number in range(24):
        (tmp_path / f"{number}.png").write_bytes(png(20 + number, 24, number))
    captions = [{"image": f"{n}.png", "text": caption(n)} for n in range(10)]
    documents = [
        {"images": [f"{n}.png", None, f"{n + 1}.png", None], "texts": [None, "one", None, "two"]}
        for n in range(10, 16, 2)
    ]
    target_images = [{"image": f"{n}.png", "text": caption(n)} for n in range(16, 24)]
    read = write_jsonl(tmp_path / "a.jsonl", captions + documents)
    write = write_jsonl(tmp_path / "b.jsonl", target_images)
    sources = [
        SourceConfig(path=str(read), name="a"),
        SourceConfig(path=str(write), name="b", target_image_column="image"),
    ]

    def build(reads: DecodeAssignment | None, spec=CLIP, positions="1d", workers=0) -> Loader:
        return build_loader(
            data_config(tmp_path, *sources, shuffle=False, workers=workers),
            training(global_batch_size=4, microbatch_size=2, sequence_length=64),
            text_spec=replace(text_spec, positions=positions),
            image_specs={"vision": spec},
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
            generator_spec=GENERATOR,
            reads=reads,
        )

    return build


def first(loader: Loader) -> StepBatch:
    """Return the first batch that a trainer receives."""
    [batch] = islice(loader.batches(), 1)
    assert batch is not None
    return batch


def truncate_images(tmp_path) -> None:
    for number in CORRUPT:
        file = tmp_path / f"{number}.png"
        file.write_bytes(file.read_bytes()[:-700])


def assert_equal(actual: Microbatch, expected: Microbatch) -> None:
    """Check that two microbatches are equal, except for pixels that were not decoded."""
    for key in ("input_ids_T", "targets_T", "position_ids", "target_positions_L"):
        assert torch.equal(getattr(actual, key), getattr(expected, key)), key
    assert actual.cu_seqlens == expected.cu_seqlens and actual.meta == expected.meta
    assert actual.encoders.keys() == expected.encoders.keys()
    for name, full in expected.encoders.items():
        encoder_inputs = actual.encoders[name]
        assert torch.equal(encoder_inputs.positions_K, full.positions_K)
        assert (encoder_inputs.grids_thw, encoder_inputs.tile_regions) == (
            full.grids_thw,
            full.tile_regions,
        )
        images = (
            range(len(full.grids_thw))
            if encoder_inputs.local_images is None
            else encoder_inputs.local_images
        )
        assert torch.equal(encoder_inputs.pixels, pixels_of(full, images))
    if expected.generator is not None:
        assert actual.generator is not None
        for key in ("times", "grids_thw", "contexts", "in_loss"):
            assert getattr(actual.generator, key) == getattr(expected.generator, key), key
        places = actual.generator.context_positions_K
        assert torch.equal(places, expected.generator.context_positions_K)
        local_images = actual.generator.local_images
        for image in (
            range(len(actual.generator.grids_thw)) if local_images is None else local_images
        ):
            one = range(image, image + 1)
            ours, theirs = actual.generator.select(one), expected.generator.select(one)
            assert torch.equal(ours.patches_PV, theirs.patches_PV)
            assert torch.equal(ours.noise_PV, theirs.noise_PV)


def pixels_of(inputs: EncoderInputs, images) -> torch.Tensor:
    parts = [inputs.select(range(image, image + 1)).pixels for image in images]
    return torch.cat([inputs.pixels[:0], *parts])


def images_in(batch: StepBatch) -> int:
    return sum(m.meta.image_count + len(m.meta.generated) for m in batch.microbatches)


@pytest.mark.parametrize("spec", [CLIP, NAFLEX], ids=["fixed", "patches"])
def test_ranks_share_images_of_step(make, spec):
    full = first(make(ALL, spec))
    halves = [first(make(reads, spec)) for reads in HALVES]
    for half in halves:
        for actual, expected in zip(half.microbatches, full.microbatches, strict=True):
            assert_equal(actual, expected)
    for number, microbatch in enumerate(full.microbatches):
        inputs = [half.microbatches[number] for half in halves]
        held = [image for m in inputs for image in m.encoders["vision"].local_images]
        assert held == list(range(len(microbatch.encoders["vision"].grids_thw)))
    counts = [half.decoded_media for half in halves]
    assert sum(counts) == images_in(full) == full.decoded_media and min(counts) > 0
    full_counts = [first(make(ALL, spec)).decoded_media for _ in halves]
    assert sum(full_counts) == 2 * images_in(full), "the counter does not depend on the rank"


def test_ranks_without_pixels_open_no_files(make, tmp_path):
    full = first(make(ALL))
    for file in tmp_path.glob("*.png"):
        file.unlink()
    actual = first(make(NOTHING))
    assert not actual.corrupt and actual.decoded_media == 0
    for actual_microbatch, expected in zip(actual.microbatches, full.microbatches, strict=True):
        assert_equal(actual_microbatch, expected)
        assert actual_microbatch.encoders["vision"].pixels.shape == (0, 3, 16, 16)
    assert 0 < actual.read_bytes < full.read_bytes
    assert len(first(make(HALVES[0])).corrupt) > 0, "the files still exist"


def test_context_parallel_ranks_share_images(make):
    """Check two ranks for each half of every sequence."""
    full = first(make(ALL))
    reads = [
        DecodeAssignment({"vision": RankShare(part, 2)}, RankShare(context, 2))
        for context in range(2)
        for part in range(2)
    ]
    batches = [first(make(own)) for own in reads]
    for number, microbatch in enumerate(full.microbatches):
        local_images = [
            i for b in batches for i in b.microbatches[number].encoders["vision"].local_images
        ]
        assert sorted(local_images) == list(range(len(microbatch.encoders["vision"].grids_thw)))


@pytest.mark.parametrize(
    ("spec", "positions"), [(CLIP, "1d"), (QWEN, "mrope")], ids=["fixed", "mrope"]
)
def test_all_ranks_blank_the_same_sample(make, tmp_path, spec, positions):
    clean = first(make(ALL, spec, positions))
    truncate_images(tmp_path)
    loaders = [make(reads, spec, positions) for reads in (ALL, *HALVES, NOTHING)]
    batches = [first(loader) for loader in loaders]
    full, *halves, without = batches
    assert not without.corrupt and {name[0] for name in full.corrupt} == {"a", "b"}
    assert all(set() < half.corrupt.keys() < full.corrupt.keys() for half in halves)
    corrupt = {name: why for half in halves for name, why in half.corrupt.items()}
    assert corrupt == full.corrupt
    settled = [
        loader.mask_corrupt(batch, corrupt) for loader, batch in zip(loaders, batches, strict=True)
    ]
    for batch in settled:
        assert sorted(batch.skipped) == sorted(f"{name}: {why}" for name, why in corrupt.items())
        for actual, expected in zip(batch.microbatches, settled[0].microbatches, strict=True):
            assert_equal(actual, expected)
    counts = [sum(m.target_count for m in b.microbatches) for b in (clean, settled[0])]
    assert counts[0] > counts[1] > 0
    target_counts = [sum(m.generated_count for m in b.microbatches) for b in (clean, settled[0])]
    assert target_counts[0] > target_counts[1] > 0
    metas = [[m.meta for m in batch.microbatches] for batch in (clean, *settled)]
    assert all(rank_metas == metas[0] for rank_metas in metas)


def test_unreported_corrupt_sample_differs_between_ranks(make, tmp_path):
    truncate_images(tmp_path)
    full, without = first(make(ALL)), first(make(NOTHING))
    counts = [sum(m.target_count for m in b.microbatches) for b in (full, without)]
    assert counts[0] < counts[1]


def test_settled_batch_equals_batch_with_corruption(make, tmp_path):
    """Check that a batch with reported corrupt samples equals the batch that detected them."""
    loader = make(ALL, QWEN, "mrope")
    clean = first(loader)
    truncate_images(tmp_path)
    corrupt = first(make(ALL, QWEN, "mrope"))
    settled = loader.mask_corrupt(clean, corrupt.corrupt)
    for actual, expected in zip(settled.microbatches, corrupt.microbatches, strict=True):
        assert_equal(actual, expected)
