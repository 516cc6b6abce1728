"""Loaders of ranks that encode images of other ranks: pixels, routes, corrupt samples, resume."""

import logging
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from data_cases import (
    CLIP,
    NAFLEX,
    QWEN,
    caption,
    data_config,
    planned_shares,
    png,
    training,
    write_jsonl,
)
from installed import needs_extension

from torchmm.common import step_process
from torchmm.common.batch import EncoderInputs, ImageAssignment, ImageSizes
from torchmm.common.generated import GeneratorInputs, GeneratorSpec
from torchmm.common.sequence_slices import (
    BalancedMicrobatch,
    DecodeAssignment,
    RankShare,
    slice_balanced_microbatch,
)
from torchmm.data.build import build_loader
from torchmm.data.loader import Loader, StepBatch
from torchmm.data.sources.index.length_index import LengthIndex, Shard, ShardSizes
from torchmm.data.steps import background_steps
from torchmm.data.steps.feeds import FeedOptions, IndexFeed, Mixture, MixtureStage
from torchmm.data.steps.plan_steps import StepPacks, StepPlanner
from torchmm.recipe.data_section import SourceConfig

pytestmark = needs_extension("extensions.generation")
RANKS = 2
CORRUPT = (0, 3, 11, 13, 17)
"""Indices of corrupt images: in captions, in documents, and one target image."""


class Alternate:
    """Image assignment that alternates between the last and the first rank."""

    names = ("vision", "generator")

    def owners(self, sizes_I4: np.ndarray, homes_I: np.ndarray, ranks: int) -> ImageAssignment:
        owners_I = (ranks - 1 - np.arange(len(homes_I))) % ranks
        work_2R = [np.bincount(of, sizes_I4[:, 1], ranks) for of in (homes_I, owners_I)]
        return ImageAssignment(owners_I, *map(np.max, work_2R), sizes_I4[:, 1].sum() / ranks)


ALTERNATE = Alternate()


@pytest.fixture
def make(tmp_path, tokenizer, text_spec):
    """Return a function that builds a loader of captions, documents, text and target images."""
    for number in range(24):
        (tmp_path / f"{number}.png").write_bytes(png(20 + number, 24 + 3 * (number % 5), number))
    captions = [{"image": f"{n}.png", "text": caption(n)} for n in range(10)]
    documents = [
        {"images": [f"{n}.png", None, f"{n + 1}.png", None], "texts": [None, "one", None, "two"]}
        for n in range(10, 16, 2)
    ]
    texts = [{"text": caption(n) + " and no image at all"} for n in range(6)]
    target_images = [{"image": f"{n}.png", "text": caption(n)} for n in range(16, 24)]
    sources = [
        SourceConfig(path=str(write_jsonl(tmp_path / "a.jsonl", captions + documents)), name="a"),
        SourceConfig(
            path=str(write_jsonl(tmp_path / "b.jsonl", target_images)),
            name="b",
            target_image_column="image",
        ),
        SourceConfig(path=str(write_jsonl(tmp_path / "c.jsonl", texts)), name="c"),
    ]

    def build(
        rank: int = 0, ranks: int = RANKS, balance=ALTERNATE, spec=CLIP, positions="1d", **options
    ) -> Loader:
        return build_loader(
            data_config(tmp_path, *sources, shuffle=False, workers=options.pop("workers", 0)),
            training(global_batch_size=4, microbatch_size=1, sequence_length=64),
            text_spec=replace(text_spec, positions=positions),
            image_specs={"vision": spec},
            tokenizer=tokenizer,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            state=options.pop("state", None),
            generator_spec=GeneratorSpec(size_px=16, patch_size_px=8),
            balance=balance,
            **options,
        )

    return build


def batches_of(loader: Loader, count: int = 1) -> list[StepBatch]:
    received = list(islice(loader.batches(), count))
    assert all(batch is not None for batch in received)
    return received


def values_per_image(inputs: EncoderInputs | GeneratorInputs | None) -> list[torch.Tensor]:
    """Return the values of each image; for target images also noise, timestep and loss mask."""
    if inputs is None:
        return []
    values = inputs.values()
    images = [values.select(range(i, i + 1)) for i in range(len(inputs.grids_thw))]
    if isinstance(inputs, EncoderInputs):
        return [image.pixels for image in images]
    parts = [(i.patches_PV, i.noise_PV, i.times, i.in_loss, i.contexts) for i in images]
    return [torch.cat([torch.as_tensor(x).float().flatten() for x in part]) for part in parts]


def read_of(microbatch: BalancedMicrobatch, module: str) -> EncoderInputs | GeneratorInputs | None:
    return (
        microbatch.rank_generator if module == "generator" else microbatch.rank_encoders.get(module)
    )


def received_images(
    balanced: list[StepBatch], number: int, rank: int, module: str = "vision"
) -> list[torch.Tensor]:
    """Return the images of a rank's microbatch, collected from the ranks that read them."""
    received = []
    for batch in balanced:
        microbatch = batch.microbatches[number]
        images = values_per_image(read_of(microbatch, module))
        homes = microbatch.image_sources[module]
        received += [image for image, home in zip(images, homes, strict=True) if home == rank]
    return received


def assert_same_work(balanced: list[StepBatch], plain: list[StepBatch]) -> None:
    """Check that balanced batches of all ranks have the samples and images of default batches."""
    for rank, (ours, theirs) in enumerate(zip(balanced, plain, strict=True)):
        for number, (ours_microbatch, full) in enumerate(
            zip(ours.microbatches, theirs.microbatches, strict=True)
        ):
            for key in ("input_ids_T", "targets_T", "position_ids", "target_positions_L"):
                assert torch.equal(getattr(ours_microbatch, key), getattr(full, key)), key
            assert (
                ours_microbatch.meta == full.meta and ours_microbatch.cu_seqlens == full.cu_seqlens
            )
            assert ours_microbatch.generated_count == full.generated_count
            row = slice_balanced_microbatch(ours_microbatch, len(balanced), {"vision": 1})
            order = sorted(
                range(len(ours_microbatch.image_owners["vision"])),
                key=ours_microbatch.image_owners["vision"].__getitem__,
            )
            expected = values_per_image(full.encoders.get("vision"))
            received = received_images(balanced, number, rank)
            assert len(received) == len(expected) == len(order)
            for image, place in zip(received, order, strict=True):
                assert torch.equal(image, expected[place])
            owners = ours_microbatch.image_owners["generator"]
            target_values = values_per_image(full.generator)
            expected = [
                target_values[i] for i in sorted(range(len(owners)), key=owners.__getitem__)
            ]
            received = received_images(balanced, number, rank, "generator")
            assert len(received) == len(expected)
            assert all(torch.equal(*pair) for pair in zip(received, expected, strict=True))
            contexts = [image.context for image in full.meta.generated]
            assert (
                sum(row.slice_context.contexts.sent)
                == len(row.slice_context.contexts.rows_K)
                == sum(contexts)
            )
            assert sum(row.slice_context.contexts.received) == sum(
                image.context for image in ours_microbatch.task_meta.generated
            )
            if full.generator is not None:
                assert torch.equal(
                    row.for_llm().generator.context_positions_K,
                    full.generator.context_positions_K,
                )
            tokens = [image.tokens for image in full.meta.images_of_encoder("vision")]
            if full.encoders:
                places = full.encoders["vision"].positions_K.split(tokens)
                arrived = torch.cat([places[image] for image in order])
                assert torch.equal(row.for_llm().encoders["vision"].positions_K, arrived)
            assert sum(row.slice_context.routes["vision"].received) == sum(tokens)
            assert len(row.slice_context.routes["vision"].rows_K) == sum(
                image.tokens for image in ours_microbatch.task_meta.images_of_encoder("vision")
            )


@pytest.mark.parametrize(
    ("spec", "positions"),
    [(CLIP, "1d"), (NAFLEX, "1d"), (QWEN, "mrope")],
    ids=["fixed", "patches", "mrope"],
)
def test_balanced_ranks_decode_each_image_once(make, spec, positions):
    options = {"spec": spec, "positions": positions}
    plain = [batches_of(make(r, balance=None, **options))[0] for r in range(RANKS)]
    balanced = [batches_of(make(r, **options))[0] for r in range(RANKS)]
    assert_same_work(balanced, plain)
    counts = [sum(len(m.meta.samples) > 0 for m in b.microbatches) for b in plain]
    assert min(counts) > 0
    assert sum(b.decoded_media for b in balanced) == sum(b.decoded_media for b in plain)
    for module in ALTERNATE.names:
        moved = [
            home != rank
            for rank, batch in enumerate(balanced)
            for microbatch in batch.microbatches
            for home in microbatch.image_sources[module]
        ]
        assert any(moved)


def test_balanced_loader_predicts_its_tasks(make):
    loader = make(1)
    metas = loader.next_metas()
    [batch] = batches_of(loader)
    assert metas is not None
    assert metas[1] == [microbatch.task_meta for microbatch in batch.microbatches]
    assert all(meta.balanced for meta in metas[1])
    plain = make(1, balance=None).next_metas()
    assert plain is not None
    for number, task_meta in enumerate(metas[1]):
        of_ranks = [share[number] for share in plain]
        turns = cycle(reversed(range(RANKS)))
        images, generated = [], []
        for sample in (s for meta in of_ranks for s in meta.samples):
            images += [
                replace(image, encoder="vision") for image in sample.images if next(turns) == 1
            ]
            generated += [image for image in sample.generated if next(turns) == 1]
        assert of_ranks[1].with_images(images, generated) == task_meta
    for microbatch in batch.microbatches:
        images = microbatch.task_meta.module_image_count("vision")
        assert images == len(microbatch.image_sources["vision"])
        assert microbatch.task_meta.used_tokens == microbatch.meta.used_tokens


@pytest.mark.parametrize(
    ("spec", "positions"), [(CLIP, "1d"), (QWEN, "mrope")], ids=["fixed", "mrope"]
)
def test_balanced_ranks_blank_the_same_samples(make, tmp_path, spec, positions):
    options = {"spec": spec, "positions": positions}
    for number in CORRUPT:
        file = tmp_path / f"{number}.png"
        file.write_bytes(file.read_bytes()[:-700])
    plain = [next(iter(make(r, balance=None, **options))) for r in range(RANKS)]
    loaders = [make(r, **options) for r in range(RANKS)]
    balanced = [batches_of(loader)[0] for loader in loaders]
    corrupt = {name: why for batch in balanced for name, why in batch.corrupt.items()}
    assert corrupt
    settled = [loader.mask_corrupt(b, corrupt) for loader, b in zip(loaders, balanced, strict=True)]
    assert_same_work(settled, plain)
    for ours, theirs in zip(settled, plain, strict=True):
        assert sorted(ours.skipped) == sorted(theirs.skipped)
    with pytest.raises(AssertionError):
        # A rank without the list of corrupt samples uses different samples.
        fresh = [batches_of(make(r, **options))[0] for r in range(RANKS)]
        assert_same_work(fresh, plain)


def test_balanced_inputs_move_to_device(make):
    microbatches = [
        microbatch
        for rank in range(RANKS)
        for batch in batches_of(make(rank), 3)
        for microbatch in batch.microbatches
    ]
    assert {microbatch.rank_generator is None for microbatch in microbatches} == {True, False}
    for microbatch in microbatches:
        moved = microbatch.to("meta")
        assert {inputs.pixels.is_meta for inputs in moved.rank_encoders.values()} <= {True}
        assert moved.rank_encoders.keys() == microbatch.rank_encoders.keys()
        if microbatch.rank_generator is None:
            assert moved.rank_generator is None
        else:
            assert moved.rank_generator.patches_PV.is_meta


def test_balanced_loader_resumes_exactly(make):
    first, second, third = batches_of(make(1), 3)
    [again] = batches_of(make(1, state=second.state))
    assert first.state != second.state
    for ours, theirs in zip(again.microbatches, third.microbatches, strict=True):
        assert torch.equal(ours.input_ids_T, theirs.input_ids_T)
        assert ours.task_meta == theirs.task_meta
        for module in ALTERNATE.names:
            pairs = (values_per_image(read_of(m, module)) for m in (ours, theirs))
            assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_balanced_loader_resumes_with_different_world_size(make):
    state = batches_of(make(1), 2)[1].state
    balanced = [batches_of(make(r, ranks=4, state=state))[0] for r in range(4)]
    plain = [batches_of(make(r, balance=None), 3)[2] for r in range(RANKS)]
    single_microbatches = [replace(b, microbatches=[m]) for b in plain for m in b.microbatches]
    assert_same_work(balanced, single_microbatches)


def make_index(seed: int, samples: int, shard: int) -> LengthIndex:
    """Return an index of several shards with images of two encoders and target images."""
    rng = np.random.default_rng(seed)
    sizes = []
    for count in (min(shard, samples - first) for first in range(0, samples, shard)):
        images_N = rng.integers(0, 4, count)
        rows_D8 = rng.integers(1, 9, (5, 8)).astype("<i4")
        rows_D8[:, 5] %= 2
        images_M = rng.integers(0, 5, images_N.sum()).astype("<u2")
        starts_N1 = np.append(0, np.cumsum(images_N)).astype("<u4")
        targets_N = rng.integers(0, 3, count)
        targets_M = rng.integers(0, 4, targets_N.sum()).astype("<u2")
        target_starts_N1 = np.append(0, np.cumsum(targets_N)).astype("<u4")
        targets = target_starts_N1, targets_M, rng.integers(1, 9, (4, 4)).astype("<i4")
        tokens_N = rng.integers(1, 9, count).astype("<u4")
        sizes.append(ShardSizes(tokens_N, starts_N1, images_M, rows_D8, *targets))
    shards = [
        Shard(shard * n, len(each.tokens_N), 0, 1, 9, f"{n}", "", 0, {})
        for n, each in enumerate(sizes)
    ]
    return LengthIndex(shards, sizes.__getitem__, lambda number: {})


def test_image_sizes_of_steps_match_samples():
    encoders = ("vision", "audio")
    feeds = [
        IndexFeed(
            FeedOptions(n, f"s{n}", 1, shuffle=True, one_epoch=False),
            make_index(n, 50, 8),
            encoders,
        )
        for n in range(2)
    ]
    options = training(global_batch_size=8, microbatch_size=1, sequence_length=64)
    steps = StepPlanner(Mixture(feeds, [MixtureStage([1.0, 2.0])]), options, 4, 4, 0, None)
    for packs in (step.pack for step in islice(steps, 3)):
        assert isinstance(packs, StepPacks)
        metas = [item.meta for item in packs.items(slice(None))]
        for names in (encoders, encoders[::-1], ("generator", *encoders)):
            received, expected = (
                packs.image_sizes(packs.samples, names),
                ImageSizes.from_samples(metas, names),
            )
            assert len(expected.sizes_I4) > 20
            assert np.array_equal(received.counts_N, expected.counts_N)
            assert np.array_equal(received.sizes_I4, expected.sizes_I4)


def test_tensor_parallel_ranks_share_balanced_images(make):
    [full] = batches_of(make(1))
    shares = [{module: RankShare(p, 2) for module in ALTERNATE.names} for p in range(2)]
    parts = [batches_of(make(1, reads=DecodeAssignment(share)))[0] for share in shares]
    for number, microbatch in enumerate(full.microbatches):
        for module in ALTERNATE.names:
            inputs = [read_of(part.microbatches[number], module) for part in parts]
            held = [image for each in inputs if each is not None for image in each.local_images]
            assert held == list(range(len(microbatch.image_sources[module])))
            values = "patches_PV" if module == "generator" else "pixels"
            rows = [getattr(each, values) for each in inputs if each is not None]
            if rows:
                assert torch.equal(torch.cat(rows), getattr(read_of(microbatch, module), values))


def test_step_bytes_of_balanced_share_match(make):
    loader = make(0)
    [batch] = batches_of(loader)
    step = next(planned_shares(loader))
    nbytes = sum(m.nbytes - m.target_positions_L.nbytes for m in batch.microbatches)
    assert loader._decoder.step_bytes(step) == nbytes


def test_background_process_plans_the_same_images(make, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(step_process, "MIN_BACKGROUND_MS", 0.0)
    monkeypatch.setattr(background_steps, "TIMEOUT_S", 300.0)
    received, expected = batches_of(make(1, workers=1), 4), batches_of(make(1), 4)
    assert "reordering a step takes" in caplog.text
    for ours, theirs in zip(received, expected, strict=True):
        assert ours.rank_images == theirs.rank_images and ours.state == theirs.state
        assert ours.imbalance == theirs.imbalance
        assert set(ours.imbalance) == {"image_imbalance", "image_imbalance_before"}
        for background, foreground in zip(ours.microbatches, theirs.microbatches, strict=True):
            assert background.task_meta == foreground.task_meta
            for module in ALTERNATE.names:
                pairs = (values_per_image(read_of(m, module)) for m in (background, foreground))
                assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
