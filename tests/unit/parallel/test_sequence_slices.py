"""Tests of sequence slices of stages without layers."""

import pytest
import torch

from torchmm.parallel.tensor.sequence import SequenceSlices


@pytest.mark.parametrize(
    ("has_layers", "is_first", "rows"), [(True, True, 8), (False, True, 4), (False, False, 8)]
)
def test_first_stage_without_layers_sends_local_slice(monkeypatch, has_layers, is_first, rows):
    """Hidden states of other stages are slices already."""
    slices = SequenceSlices.__new__(SequenceSlices)
    slices._has_layers, slices._is_first = has_layers, is_first
    monkeypatch.setattr(slices, "take_local_slice", lambda _, args: (args[0][:4],))
    assert len(slices.to_next_stage(torch.zeros(8, 2))) == rows
