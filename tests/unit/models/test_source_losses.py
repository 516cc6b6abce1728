"""Losses by data source equal the losses of the samples of each source alone."""

import pytest
import torch
from model_cases import loss_and_gradients, microbatch, relative_error, text_model
from torch.nn import functional

from torchmm.common.batch import Microbatch
from torchmm.models.layers.loss import summed_cross_entropy
from torchmm.models.source_losses import SourceLosses

LENGTHS = [7, 9, 6]
SOURCES = [1, 0, 1]


def part_of(batch: Microbatch, start: int, stop: int) -> Microbatch:
    """Return one sample of a packed sequence."""
    tokens = slice(start, stop)
    return Microbatch(
        batch.input_ids_T[tokens], batch.targets_T[tokens], batch.position_ids[tokens],
        [0, stop - start], {}, batch.meta,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 5])
def test_source_losses_equal_those_of_single_samples(rows):
    model = text_model("llama")
    batch = microbatch(LENGTHS)
    expected = loss_and_gradients(model, batch, rows)
    batch.sources_T = torch.repeat_interleave(torch.tensor(SOURCES), torch.tensor(LENGTHS))
    model.llm.source_losses = SourceLosses("abc")
    found = loss_and_gradients(model, batch, rows)
    errors = {name: relative_error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) < 1e-5
    sums_S2 = model.llm.source_losses.pop_sums(torch.device("cpu"))
    model.llm.source_losses = SourceLosses()
    alone_S2 = torch.zeros(3, 2)
    start = 0
    for source, length in zip(SOURCES, LENGTHS, strict=True):
        part = part_of(batch, start, start + length)
        with torch.no_grad():
            alone_S2[source] += torch.tensor([model(part).item(), part.target_count])
        start += length
    torch.testing.assert_close(sums_S2, alone_S2)
    assert sums_S2[2].tolist() == [0.0, 0.0]


def test_backward_recomputation_adds_no_losses():
    logits_LV = torch.randn(3000, 11, dtype=torch.bfloat16, requires_grad=True)
    targets_L = torch.randint(11, (3000,))
    rows = []
    loss = summed_cross_entropy(logits_LV, targets_L, rows)
    count = sum(map(len, rows))
    loss.backward()
    assert count == sum(map(len, rows)) == 3000
    expected_L = functional.cross_entropy(logits_LV.float(), targets_L, reduction="none")
    torch.testing.assert_close(torch.cat(rows), expected_L)


def test_pop_sums_resets_sums():
    losses = SourceLosses("ab")
    losses.add(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]))
    losses.add(torch.tensor([8.0]), torch.tensor([0]))
    device = torch.device("cpu")
    assert losses.pop_sums(device).tolist() == [[13.0, 3.0], [2.0, 1.0]]
    assert losses.pop_sums(device).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_means_omit_sources_without_targets():
    assert SourceLosses(["a", "b"]).means([6.0, 3.0, 0.0, 0.0]) == {"a": 2.0}
    assert SourceLosses(["a"]).means([]) is None
