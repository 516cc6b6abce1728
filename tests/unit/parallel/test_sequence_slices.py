"""Tests of sequence slices of stages without layers."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torchmm.parallel.tensor.sequence import SequenceSlices


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rows_are_added_at_slice_boundaries(rank):
    """Check the first and last position of each of three slices of 4 positions."""
    dist.init_process_group("fake", rank=rank, world_size=3)
    try:
        slices = SequenceSlices.__new__(SequenceSlices)
        slices._mesh, slices._extent = init_device_mesh("cpu", (3,)), torch.empty(11, 0)
        positions_K = torch.tensor([0, 3, 4, 7, 8, 10])
        rows_KD = torch.arange(1.0, 7.0)[:, None].expand(-1, 2)
        full_TD = torch.zeros(12, 2).index_add(0, positions_K, rows_KD)
        added = slices.add_rows(torch.zeros(4, 2), positions_K, rows_KD)
        assert torch.equal(added, full_TD[4 * rank : 4 * rank + 4])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("has_layers", "is_first", "rows"), [(True, True, 8), (False, True, 4), (False, False, 8)]
)
def test_first_stage_without_layers_sends_local_slice(monkeypatch, has_layers, is_first, rows):
    """Hidden states of other stages are slices already."""
    slices = SequenceSlices.__new__(SequenceSlices)
    slices._has_layers, slices._is_first = has_layers, is_first
    monkeypatch.setattr(slices, "take_local_slice", lambda _, args: (args[0][:4],))
    assert len(slices.to_next_stage(torch.zeros(8, 2))) == rows
