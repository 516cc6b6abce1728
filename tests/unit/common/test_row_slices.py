"""Tests of slices of a packed sequence: tokens, images, and routes of features."""

from dataclasses import replace

import pytest
import torch

from torchmm.common.batch import (
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
    split_evenly,
)
from torchmm.common.sequence_slices import (
    SlicedMicrobatch,
    assign_images,
    full_sequence,
    max_images_per_rank,
    slice_meta,
    slice_microbatch,
    slice_ranges,
    task_images,
)

TOKENS = (3, 2, 6, 1)
"""Number of tokens per image. Each token has four patches."""
STARTS = (1, 5, 9, 17)
"""First token of each image. The third image crosses the middle of the sequence."""

WIDTHS = {"vision": 3, "other": 1}


def row(tokens: int = 22) -> Microbatch:
    """Return two samples with images, one of which a separate encoder reads, and padding."""
    images = [ImageMeta(0, 0, 4 * count, count) for count in TOKENS]
    samples = (
        SampleMeta("synthetic", 0, 8, tuple(images[:2]), "vision"),
        SampleMeta("synthetic", 1, 12, (replace(images[2], encoder="vision"), images[3]), "other"),
    )
    positions = [torch.arange(s, s + n) for s, n in zip(STARTS, TOKENS, strict=True)]
    encoders = {}
    for name, indices in (("vision", [0, 1, 2]), ("other", [3])):
        patches = 4 * sum(TOKENS[i] for i in indices)
        grids = [(1, 4, TOKENS[i]) for i in indices]
        positions_K = torch.cat([positions[i] for i in indices])
        encoders[name] = EncoderInputs(torch.randn(patches, 3), grids, positions_K)
    ids_T = torch.arange(tokens)
    targets_T = torch.where(ids_T % 3 == 0, ids_T, -100)
    position_ids = torch.arange(tokens).expand(3, -1)
    meta = MicrobatchMeta(samples, tokens)
    return Microbatch(ids_T, targets_T, position_ids, [0, 8, 20, tokens], encoders, meta)


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_token_slices_are_even_and_complete(count, ranks):
    lengths = [len(r) for r in slice_ranges(count, ranks)]
    assert [i for r in slice_ranges(count, ranks) for i in r] == list(range(count))
    assert len(lengths) == ranks and max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("patches", "ranks", "counts"),
    [
        ([], 2, [0, 0]),
        ([5], 2, [0, 1]),
        ([4, 4, 4, 4], 2, [2, 2]),
        ([12, 2, 2, 2], 2, [1, 3]),
        ([1, 1, 1, 9], 3, [3, 1, 0]),
        ([1] * 9, 4, [2, 2, 3, 2]),
    ],
)
def test_images_are_distributed_by_patches(patches, ranks, counts):
    shares = assign_images(patches, ranks)
    assert [len(share) for share in shares] == counts
    assert [i for share in shares for i in share] == list(range(len(patches)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_features_arrive_on_the_rank_of_their_token(ranks):
    microbatch = row()
    parts = [slice_microbatch(microbatch, rank, ranks, WIDTHS) for rank in range(ranks)]
    assert all(isinstance(part, SlicedMicrobatch) for part in parts)
    for name, inputs in microbatch.encoders.items():
        # Send features in the order of the routes, from the positions on each rank.
        boxes = {(a, b): torch.tensor([]).long() for a in range(ranks) for b in range(ranks)}
        for rank, part in enumerate(parts):
            inputs_ = part.encoders.get(name)
            found_K = inputs_.positions_K if inputs_ else torch.tensor([]).long()
            route = part.slice_context.routes[name]
            for to, sent in enumerate(found_K[route.rows_K].split(route.sent)):
                boxes[rank, to] = sent
        first = 0
        for rank, part in enumerate(parts):
            arrived_K = torch.cat([boxes[source, rank] for source in range(ranks)])
            assert part.slice_context.routes[name].received == [
                len(boxes[s, rank]) for s in range(ranks)
            ]
            assert torch.equal(part.for_llm().encoders[name].positions_K + first, arrived_K)
            first += len(part.input_ids_T)
        received = torch.cat([box for box in boxes.values()])
        assert received.sort().values.tolist() == inputs.positions_K.sort().values.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("widths", [WIDTHS, {"vision": 4, "other": 6}])
def test_merged_route_delivers_features_of_all_encoders(ranks, widths):
    microbatch = row()
    parts = [slice_microbatch(microbatch, rank, ranks, widths) for rank in range(ranks)]
    messages = []
    for part in parts:
        merged = part.slice_context.merged
        units = []
        for name in part.slice_context.routes:
            inputs = part.encoders.get(name)
            positions_K = inputs.positions_K if inputs else torch.tensor([]).long()
            # Unit u of the token at position p is p + u / 10.
            units.append((positions_K[:, None] + torch.arange(merged.units[name]) / 10).flatten())
        messages.append(torch.cat(units)[merged.sent_U].split(merged.sent))
    first = 0
    for rank, part in enumerate(parts):
        merged, encoders = part.slice_context.merged, part.for_llm().encoders
        received = [message[rank] for message in messages]
        assert [len(each) for each in received] == merged.received
        expected = [
            encoders[name].positions_K[:, None] + first + torch.arange(merged.units[name]) / 10
            for name in part.slice_context.routes
        ]
        arrived_U = torch.cat(received)[merged.received_U]
        assert torch.equal(arrived_U, torch.cat([each.flatten() for each in expected]))
        first += len(part.input_ids_T)


def test_slices_join_to_the_sequence():
    microbatch = row()
    parts = [slice_microbatch(microbatch, rank, 3, WIDTHS).to("cpu") for rank in range(3)]
    for name, dim in (("input_ids_T", 0), ("targets_T", 0), ("position_ids", 1)):
        joined = torch.cat([getattr(part, name) for part in parts], dim)
        assert torch.equal(joined, getattr(microbatch, name))
    assert sum(part.target_count for part in parts) == microbatch.target_count
    for part in parts:
        assert torch.equal(part.targets_T[part.target_positions_L] % 3, part.target_positions_L * 0)
        assert torch.equal(full_sequence(part)[0], microbatch.input_ids_T)
        assert part.cu_seqlens == microbatch.cu_seqlens
    assert slice_microbatch(microbatch, 0, 1, WIDTHS) is microbatch


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sliced_metadata_matches_sliced_inputs(ranks):
    microbatch = row()
    for rank in range(ranks):
        meta, part = (
            slice_meta(microbatch.meta, rank, ranks),
            slice_microbatch(microbatch, rank, ranks, WIDTHS),
        )
        assert meta.tokens == len(part.input_ids_T)
        for name in microbatch.encoders:
            inputs = part.encoders.get(name)
            patches = sum(meta.patches(name))
            assert patches == (len(inputs.pixels) if inputs else 0)
            assert len(meta.patches(name)) <= max_images_per_rank(microbatch.meta, name, ranks)


def test_sequence_can_be_shorter_than_ranks():
    short = replace(row(3), encoders={}, cu_seqlens=[0, 3], meta=MicrobatchMeta((), 3))
    assert [len(slice_microbatch(short, rank, 4, WIDTHS).input_ids_T) for rank in range(4)] == [
        0,
        1,
        1,
        1,
    ]


def test_sub_microbatches_of_slices_can_be_empty():
    assert [task_images(2, 3, task, 2) for task in range(3)] == [range(1), range(1, 2), range(2, 2)]
    assert [task_images(5, 3, task, 2) for task in range(3)] == split_evenly(5, 3)
    with pytest.raises(ValueError, match="2 images cannot be split into 3 parts"):
        task_images(2, 3, 0, 1)
