"""The compiled loss equals the eager loss, and replaces the logits by their gradient in place."""

from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from model_cases import LLMS, loss_and_gradients, microbatch, relative_error, text_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from torchmm.common import processes
from torchmm.models.layers import loss as fused
from torchmm.models.layers.loss import (
    CHUNK_TARGETS,
    ChunkHead,
    cross_entropy_in_chunks,
    summed_cross_entropy,
    uses_fused_loss,
)

VOCABULARY = 301
FACTOR = 1 / 771


@pytest.fixture
def fused_on_cpu():
    """Use the compiled kernels on the CPU."""
    torch._dynamo.reset()
    counters.clear()
    with patch.object(fused, "uses_fused_loss", lambda device: True):
        yield


def logits_and_targets(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return (3 * torch.randn(rows, VOCABULARY)).to(dtype), torch.randint(VOCABULARY, (rows,))


def loss_and_gradient(logits_LV: Tensor, targets_L: Tensor) -> tuple[Tensor, Tensor]:
    source_LV = logits_LV.clone().requires_grad_()
    loss = summed_cross_entropy(source_LV * 1.0, targets_L)
    (gradient_LV,) = torch.autograd.grad(loss * FACTOR, source_LV)
    return loss.detach(), gradient_LV


def exact(logits_LV: Tensor, targets_L: Tensor) -> tuple[Tensor, Tensor]:
    source_LV = logits_LV.double().requires_grad_()
    loss = functional.cross_entropy(source_LV, targets_L, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss * FACTOR, source_LV)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_loss_equals_eager_loss(dtype, fused_on_cpu):
    for rows in (700, 2, CHUNK_TARGETS + 3, 1, 0):
        logits_LV, targets_L = logits_and_targets(rows, dtype)
        loss, gradient_LV = loss_and_gradient(logits_LV, targets_L)
        with patch.object(fused, "uses_fused_loss", uses_fused_loss):
            eager_loss, eager_LV = loss_and_gradient(logits_LV, targets_L)
        right_loss, right_LV = exact(logits_LV, targets_L)
        torch.testing.assert_close(loss, eager_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(loss.double(), right_loss, rtol=1e-6, atol=0)
        assert gradient_LV.dtype == dtype
        if not rows:
            continue
        limit = 1e-6 if dtype == torch.float32 else 1.001 * relative_error(eager_LV, right_LV)
        assert relative_error(gradient_LV.double(), right_LV) <= limit
        # Rounded once, as in eager mode: equal bits except for ties of the float32 gradient.
        if dtype == torch.bfloat16:
            assert (gradient_LV == eager_LV).double().mean() > 0.999
    assert counters["stats"]["unique_graphs"] == 2


def test_fused_loss_is_precise_for_confident_logits(fused_on_cpu):
    logits_LV, targets_L = logits_and_targets(40, torch.float32)
    logits_LV += 1000  # in float32, their logsumexp has three decimals
    logits_LV[torch.arange(40), targets_L] += 20
    _, gradient_LV = loss_and_gradient(logits_LV, targets_L)
    _, right_LV = exact(logits_LV, targets_L)
    with patch.object(fused, "uses_fused_loss", uses_fused_loss):
        _, eager_LV = loss_and_gradient(logits_LV, targets_L)
    assert relative_error(gradient_LV, right_LV) < 1.5 * relative_error(eager_LV, right_LV)


def test_fused_loss_allocates_no_second_buffer(fused_on_cpu):
    logits_LV, targets_L = logits_and_targets(40, torch.bfloat16)
    leaf_LV = logits_LV.requires_grad_()
    last_LV = leaf_LV * 1.0
    (gradient_LV,) = torch.autograd.grad(summed_cross_entropy(last_LV, targets_L), last_LV)
    assert gradient_LV.data_ptr() == last_LV.data_ptr()


def test_fused_loss_rejects_second_backward(fused_on_cpu):
    logits_LV, targets_L = logits_and_targets(40, torch.bfloat16)
    loss = summed_cross_entropy(logits_LV.requires_grad_() * 1.0, targets_L)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fused_loss_rejects_saved_logits(fused_on_cpu):
    """Check that an operator that requires the logits in backward does not receive the gradient."""
    logits_LV, targets_L = logits_and_targets(40, torch.float32)
    capped_LV = logits_LV.requires_grad_().tanh()  # saves its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        summed_cross_entropy(capped_LV, targets_L).backward()


def test_validation_preserves_logits(fused_on_cpu):
    logits_LV, targets_L = logits_and_targets(40, torch.bfloat16)
    before_LV = logits_LV.clone()
    with torch.no_grad():
        summed_cross_entropy(logits_LV, targets_L)
    assert torch.equal(logits_LV, before_LV)


def test_fused_loss_runs_below_flop_counter(fused_on_cpu):
    logits_LV, targets_L = logits_and_targets(40, torch.float32)
    expected = loss_and_gradient(logits_LV, targets_L)
    with FlopCounterMode(display=False):
        actual = loss_and_gradient(logits_LV, targets_L)
    assert torch.allclose(actual[0], expected[0], rtol=1e-6)
    assert relative_error(actual[1], expected[1]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 6])
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_fused_models_equal_eager_models(name, rows, fused_on_cpu):
    """Check soft caps and scales of logits, which have a separate backward pass around the loss."""
    model = text_model(name)
    assert name in LLMS
    batch = microbatch([5, 9, 9, 4, 2])

    actual = loss_and_gradients(model, batch, rows)
    assert counters["stats"]["unique_graphs"] == 2
    with patch.object(fused, "uses_fused_loss", uses_fused_loss):
        expected = loss_and_gradients(model, batch, rows)
    assert actual.keys() == expected.keys()
    errors = {k: relative_error(actual[k], v) for k, v in expected.items() if v.norm() > 1e-6}
    assert {k: e for k, e in errors.items() if e > 1e-5} == {}


def test_wrong_gradient_is_detected(fused_on_cpu):
    """Check the tests above with a gradient that does not subtract the target."""
    logits_LV, targets_L = logits_and_targets(40, torch.float32)
    wrong = fused._write_gradient
    with patch.object(
        fused, "_write_gradient", lambda x, t, *remaining: wrong(x, torch.zeros_like(t), *remaining)
    ):
        _, gradient_LV = loss_and_gradient(logits_LV, targets_L)
    assert relative_error(gradient_LV, exact(logits_LV, targets_L)[1]) > 0.1


def test_chunks_use_memory_of_float32_rows(fused_on_cpu):
    """Check that a chunk of bfloat16 logits is as large as a sixth of its rows in float32."""
    head = nn.Linear(24, VOCABULARY, bias=False, dtype=torch.bfloat16)
    chunks = ChunkHead(head, 50)
    assert chunks.rows == 300
    with patch.object(fused, "uses_fused_loss", uses_fused_loss):
        assert ChunkHead(head, 50).rows == 50
    rows_LD = torch.randn(700, 24, dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy_in_chunks(chunks, chunks, rows_LD, torch.randint(VOCABULARY, (700,)))
    loss.backward()
    assert counters["stats"]["unique_graphs"] == 2


def test_fused_loss_requires_cuda_and_compiler(monkeypatch):
    cuda = torch.device("cuda")
    assert not uses_fused_loss(torch.device("cpu"))
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(processes.shutil, "which", lambda name: name if name == "gcc" else None)
    assert uses_fused_loss(cuda)
    monkeypatch.setattr(processes.shutil, "which", lambda name: None)
    assert not uses_fused_loss(cuda)
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(processes.shutil, "which", lambda name: name)
    assert not uses_fused_loss(cuda)
