"""Tests of context-parallel groups that share complete segments of a packed sequence."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_row_slices import STARTS, TOKENS, WIDTHS, row

from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.layers import LayerDescription, ModuleDescription
from torchmm.common.sequence_slices import (
    MAX_IMBALANCE,
    SequenceGroup,
    full_sequence,
    group_segments,
    segment_lengths,
    slice_meta,
    slice_microbatch,
)
from torchmm.costs.flops import sample_costs

GROUPS = [SequenceGroup(range(2), [1]), SequenceGroup(range(2, 3), [0, 2])]
"""Two ranks share the second sample of `row`. The third rank has the first sample and padding."""


def group(first: int, stop: int, *segments: int) -> SequenceGroup:
    return SequenceGroup(range(first, stop), [*segments])


@pytest.mark.parametrize(
    ("tokens", "ranks", "groups"),
    [
        ([16] * 4, 4, [group(0, 1, 0), group(1, 2, 1), group(2, 3, 2), group(3, 4, 3)]),
        ([16, 32, 16], 4, [group(0, 2, 1), group(2, 3, 0), group(3, 4, 2)]),
        ([33, 31], 4, [group(0, 2, 0), group(2, 4, 1)]),
        ([9, 7, 8, 8, 16, 16], 4, [*(group(i, i + 1, 4 + i) for i in range(2)),
                                   group(2, 3, 0, 1), group(3, 4, 2, 3)]),
        ([40, 12, 12], 4, [group(0, 4, 0, 1, 2)]),  # the first segment requires three ranks
        ([12, 10, 10], 2, [group(0, 2, 0, 1, 2)]),  # 20 tokens are too many for a rank
        ([64], 4, [group(0, 4, 0)]),
        ([1, 1], 4, [group(0, 4, 0, 1)]),  # fewer tokens than ranks
    ],
)  # fmt: skip
def test_smallest_balanced_groups_are_selected(tokens, ranks, groups):
    assert group_segments(tokens, tokens, ranks) == groups


def test_groups_balance_costs_as_well_as_tokens():
    assert len(group_segments([8] * 4, [5, 5, 5, 5], 4)) == 4
    assert len(group_segments([8] * 4, [8, 5, 5, 5], 4)) == 1  # 8 is above 1.05 x 5.75


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_random_groups_are_balanced_partitions(ranks):
    generator = random.Random(ranks)
    sizes = set()
    for _ in range(300):
        count = generator.randint(1, 60)
        tokens = [round(generator.lognormvariate(6, 1)) + 1 for _ in range(count)]
        costs = [n * (1 + n / 4000) for n in tokens]
        groups = group_segments(tokens, costs, ranks)
        assert [rank for each in groups for rank in each.ranks] == list(range(ranks))
        assert sorted(i for each in groups for i in each.segments) == list(range(count))
        for each in groups:
            size = len(each.ranks)
            assert size & (size - 1) == 0 and each.ranks.start % size == 0
            assert each.segments == sorted(each.segments)
            sizes.add(size)
            for values in (tokens, costs) if len(groups) > 1 else ():
                mean = sum(values) / ranks
                load = sum(values[i] for i in each.segments) / size
                assert load <= mean * (1 + MAX_IMBALANCE) * (1 + 1e-12)
    assert sizes == {2**i for i in range(ranks.bit_length())}


def test_padding_is_a_segment():
    samples = (SampleMeta("s", 0, 5), SampleMeta("s", 1, 3))
    assert segment_lengths(MicrobatchMeta(samples, 10)) == [5, 3, 2]
    assert segment_lengths(MicrobatchMeta(samples, 8)) == [5, 3]
    assert segment_lengths(MicrobatchMeta((), 8)) == [8]
    microbatch = row()
    lengths = [stop - start for start, stop in pairwise(microbatch.cu_seqlens)]
    assert segment_lengths(microbatch.meta) == lengths


def test_sample_costs_equal_flops_by_hand():
    layer = LayerDescription(32, 4, 2, 8, 48, gated_ffn=True, causal=True)
    llm = ModuleDescription("llm", "llm", (layer,) * 3, 64, 64, parameters=0)
    linears = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
    expected = [3 * (n * linears + 4 * 4 * 8 * n * n / 2) for n in (1, 10, 700)]
    assert sample_costs(llm, [1, 10, 700]) == expected


def test_group_has_complete_samples():
    microbatch = row()
    sample = slice(8, 20)
    parts = [slice_microbatch(microbatch, rank, 3, WIDTHS, GROUPS).to("cpu") for rank in range(3)]
    for part in parts[:2]:
        assert part.cu_seqlens == [0, 12] and part.slice_context.ranks == 2
        assert torch.equal(full_sequence(part)[0], microbatch.input_ids_T[sample])
        assert torch.equal(full_sequence(part)[1], microbatch.targets_T[sample])
    assert [part.slice_context.start for part in parts] == [0, 6, 0]
    for name, dim in (("input_ids_T", 0), ("targets_T", 0), ("position_ids", 1)):
        joined = torch.cat([getattr(part, name) for part in parts[:2]], dim)
        assert torch.equal(joined, getattr(microbatch, name)[..., sample])
    alone = parts[2]
    assert alone.cu_seqlens == [0, 8, 10] and alone.slice_context.ranks == 1
    assert alone.input_ids_T.tolist() == [*range(8), 20, 21]
    assert sum(part.target_count for part in parts) == microbatch.target_count
    assert microbatch.cu_seqlens == [0, 8, 20, 22]  # unchanged


def test_features_arrive_at_tokens_of_groups():
    microbatch = replace(row(), sources_T=torch.arange(22) // 8)
    parts = [slice_microbatch(microbatch, rank, 3, WIDTHS, GROUPS) for rank in range(3)]
    # Token IDs of `row` are positions, so that features can be compared by token ID.
    for name, images in (("vision", (0, 1, 2)), ("other", (3,))):
        tokens = [t for i in images for t in range(STARTS[i], STARTS[i] + TOKENS[i])]
        sent = iter(tokens)
        boxes = {}
        for source, part in enumerate(parts):
            inputs = part.encoders.get(name)
            count = 0 if inputs is None else len(inputs.positions_K)
            local = torch.tensor([next(sent) for _ in range(count)], dtype=torch.int64)
            route = part.slice_context.routes[name]
            for rank, box in enumerate(local[route.rows_K].split(route.sent)):
                boxes[source, rank] = box
        assert next(sent, None) is None
        for rank, part in enumerate(parts):
            arrived_K = torch.cat([boxes[source, rank] for source in range(3)])
            positions_K = part.for_llm().encoders[name].positions_K
            assert torch.equal(part.input_ids_T[positions_K], arrived_K)
    for part in parts:
        assert torch.equal(part.sources_T, part.input_ids_T // 8)


def test_group_metadata_matches_inputs():
    microbatch = row()
    for rank in range(3):
        meta = slice_meta(microbatch.meta, rank, 3, GROUPS)
        part = slice_microbatch(microbatch, rank, 3, WIDTHS, GROUPS)
        assert meta.tokens == len(part.input_ids_T) == [6, 6, 10][rank]
        for name in microbatch.encoders:
            inputs = part.encoders.get(name)
            assert sum(meta.patches(name)) == (len(inputs.pixels) if inputs else 0)


def test_one_group_equals_even_slices():
    microbatch = row()
    groups = [SequenceGroup(range(4), [0, 1, 2])]
    for rank in range(4):
        part, even = (slice_microbatch(microbatch, rank, 4, WIDTHS, g) for g in (groups, ()))
        assert torch.equal(part.input_ids_T, even.input_ids_T)
        assert part.slice_context.ranks == even.slice_context.ranks == 4
        metas = [slice_meta(microbatch.meta, rank, 4, g) for g in (groups, ())]
        assert metas[0] == metas[1]
