"""Shares of a packed row: tokens, images, and the ways of features."""

from dataclasses import replace

import pytest
import torch

from torchmm.common.batch import (
    EncoderInputs,
    ImageMeta,
    Microbatch,
    MicrobatchMeta,
    SampleMeta,
    even_ranges,
)
from torchmm.common.row_slices import (
    SlicedMicrobatch,
    image_shares,
    most_images,
    slice_meta,
    slice_ranges,
    slice_row,
    task_images,
    whole_row,
)

TOKENS = (3, 2, 6, 1)
"""Of each image; images have four patches for a token."""
STARTS = (1, 5, 9, 17)
"""Their first tokens: the third crosses the middle of the row."""

WIDTHS = {"vision": 3, "other": 1}


def row(tokens: int = 22) -> Microbatch:
    """Two samples with images, one of them read by an encoder of its own, and padding."""
    images = [ImageMeta(0, 0, 4 * count, count) for count in TOKENS]
    samples = (
        SampleMeta("made", 0, 8, tuple(images[:2]), "vision"),
        SampleMeta("made", 1, 12, (replace(images[2], encoder="vision"), images[3]), "other"),
    )
    places = [torch.arange(s, s + n) for s, n in zip(STARTS, TOKENS, strict=True)]
    encoders = {}
    for name, own in (("vision", [0, 1, 2]), ("other", [3])):
        patches = 4 * sum(TOKENS[i] for i in own)
        grids = [(1, 4, TOKENS[i]) for i in own]
        positions_K = torch.cat([places[i] for i in own])
        encoders[name] = EncoderInputs(torch.randn(patches, 3), grids, positions_K)
    ids_T = torch.arange(tokens)
    targets_T = torch.where(ids_T % 3 == 0, ids_T, -100)
    position_ids = torch.arange(tokens).expand(3, -1)
    meta = MicrobatchMeta(samples, tokens)
    return Microbatch(ids_T, targets_T, position_ids, [0, 8, 20, tokens], encoders, meta)


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_slices_are_even_and_complete(count, ranks):
    lengths = [len(own) for own in slice_ranges(count, ranks)]
    assert [i for own in slice_ranges(count, ranks) for i in own] == list(range(count))
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
def test_images_are_shared_by_patches(patches, ranks, counts):
    shares = image_shares(patches, ranks)
    assert [len(own) for own in shares] == counts
    assert [i for own in shares for i in own] == list(range(len(patches)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_feature_arrives_where_its_token_is(ranks):
    whole = row()
    parts = [slice_row(whole, rank, ranks, WIDTHS) for rank in range(ranks)]
    assert all(isinstance(part, SlicedMicrobatch) for part in parts)
    for name, inputs in whole.encoders.items():
        # Sent as the ranks say, from the positions that each has found.
        boxes = {(a, b): torch.tensor([]).long() for a in range(ranks) for b in range(ranks)}
        for rank, part in enumerate(parts):
            own = part.encoders.get(name)
            found_K = own.positions_K if own else torch.tensor([]).long()
            route = part.row.routes[name]
            for to, sent in enumerate(found_K[route.rows_K].split(route.sent)):
                boxes[rank, to] = sent
        first = 0
        for rank, part in enumerate(parts):
            arrived_K = torch.cat([boxes[source, rank] for source in range(ranks)])
            assert part.row.routes[name].received == [len(boxes[s, rank]) for s in range(ranks)]
            assert torch.equal(part.for_llm().encoders[name].positions_K + first, arrived_K)
            first += len(part.input_ids_T)
        every = torch.cat([box for box in boxes.values()])
        assert every.sort().values.tolist() == inputs.positions_K.sort().values.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("widths", [WIDTHS, {"vision": 4, "other": 6}])
def test_merged_route_delivers_features_of_all_encoders(ranks, widths):
    whole = row()
    parts = [slice_row(whole, rank, ranks, widths) for rank in range(ranks)]
    messages = []
    for part in parts:
        merged = part.row.merged
        units = []
        for name in part.row.routes:
            own = part.encoders.get(name)
            positions_K = own.positions_K if own else torch.tensor([]).long()
            # Unit u of the token at position p is p + u / 10.
            units.append((positions_K[:, None] + torch.arange(merged.units[name]) / 10).flatten())
        messages.append(torch.cat(units)[merged.sent_U].split(merged.sent))
    first = 0
    for rank, part in enumerate(parts):
        merged, shown = part.row.merged, part.for_llm().encoders
        received = [message[rank] for message in messages]
        assert [len(each) for each in received] == merged.received
        expected = [
            shown[name].positions_K[:, None] + first + torch.arange(merged.units[name]) / 10
            for name in part.row.routes
        ]
        arrived_U = torch.cat(received)[merged.received_U]
        assert torch.equal(arrived_U, torch.cat([each.flatten() for each in expected]))
        first += len(part.input_ids_T)


def test_parts_of_a_row_make_the_row():
    whole = row()
    parts = [slice_row(whole, rank, 3, WIDTHS).to("cpu") for rank in range(3)]
    for name, dim in (("input_ids_T", 0), ("targets_T", 0), ("position_ids", 1)):
        joined = torch.cat([getattr(part, name) for part in parts], dim)
        assert torch.equal(joined, getattr(whole, name))
    assert sum(part.target_count for part in parts) == whole.target_count
    for part in parts:
        assert torch.equal(part.targets_T[part.target_positions_L] % 3, part.target_positions_L * 0)
        assert torch.equal(whole_row(part)[0], whole.input_ids_T)
        assert part.cu_seqlens == whole.cu_seqlens
    assert slice_row(whole, 0, 1, WIDTHS) is whole


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_metadata_know_what_a_rank_reads(ranks):
    whole = row()
    for rank in range(ranks):
        meta, part = slice_meta(whole.meta, rank, ranks), slice_row(whole, rank, ranks, WIDTHS)
        assert meta.tokens == len(part.input_ids_T)
        for name in whole.encoders:
            own = part.encoders.get(name)
            patches = sum(meta.patches(name))
            assert patches == (len(own.pixels) if own else 0)
            assert len(meta.patches(name)) <= most_images(whole.meta, name, ranks)


def test_rows_shorter_than_their_ranks():
    short = replace(row(3), encoders={}, cu_seqlens=[0, 3], meta=MicrobatchMeta((), 3))
    assert [len(slice_row(short, rank, 4, WIDTHS).input_ids_T) for rank in range(4)] == [0, 1, 1, 1]


def test_tasks_of_a_share_may_have_no_images():
    assert [task_images(2, 3, task, 2) for task in range(3)] == [range(1), range(1, 2), range(2, 2)]
    assert [task_images(5, 3, task, 2) for task in range(3)] == even_ranges(5, 3)
    with pytest.raises(ValueError, match="2 images cannot be split into 3 parts"):
        task_images(2, 3, 0, 1)
