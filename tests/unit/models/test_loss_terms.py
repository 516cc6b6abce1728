"""Label smoothing and z-loss have the gradients of torch, and losses remain cross entropies."""

from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from model_cases import loss_and_gradients, microbatch, relative_error, text_model
from torch import Tensor, nn
from torch.nn import functional

from torchmm.models.layered import StageRange
from torchmm.models.layers import loss as fused
from torchmm.models.layers.loss import (
    CHUNK_TARGETS,
    ChunkHead,
    LossTerms,
    cross_entropy_in_chunks,
    summed_cross_entropy,
)

VOCABULARY = 301
FACTOR = 1 / 771
TERMS = [(0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)]
CPU = torch.device("cpu")


def expected_terms(
    logits_LV: Tensor, targets_L: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross entropy, smoothed cross entropy and z-loss, summed over targets, by torch."""
    entropy = functional.cross_entropy(logits_LV, targets_L, reduction="sum")
    smoothed = functional.cross_entropy(
        logits_LV, targets_L, reduction="sum", label_smoothing=label_smoothing
    )
    return entropy, smoothed, z_loss * logits_LV.logsumexp(-1).square().sum()


def exact(
    logits_LV: Tensor, targets_L: Tensor, label_smoothing: float, z_loss: float
) -> tuple[list[float], Tensor]:
    """Return the sums, and the gradient of the training loss, in float64."""
    source_LV = logits_LV.detach().double().requires_grad_()
    sums = expected_terms(source_LV, targets_L, label_smoothing, z_loss)
    (gradient_LV,) = torch.autograd.grad((sums[1] + sums[2]) * FACTOR, source_LV)
    return [value.item() for value in sums], gradient_LV


def logits_and_targets(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return (3 * torch.randn(rows, VOCABULARY)).to(dtype), torch.randint(VOCABULARY, (rows,))


@pytest.fixture
def kernels(request):
    """Use eager or compiled kernels on the CPU."""
    torch._dynamo.reset()
    with patch.object(fused, "uses_fused_loss", lambda device: request.param):
        yield request.param


@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("label_smoothing", "z_loss"), TERMS)
def test_terms_equal_torch(kernels, dtype, label_smoothing, z_loss):
    for rows in (40, CHUNK_TARGETS + 3, 1, 0):
        logits_LV, targets_L = logits_and_targets(rows, dtype)
        terms = LossTerms(label_smoothing, z_loss)
        losses = []
        source_LV = logits_LV.clone().requires_grad_()
        loss = summed_cross_entropy(source_LV * 1.0, targets_L, losses, terms)
        (gradient_LV,) = torch.autograd.grad(loss * FACTOR, source_LV)
        (entropy, smoothed, square), right_LV = exact(logits_LV, targets_L, label_smoothing, z_loss)
        assert loss.item() == pytest.approx(entropy, rel=1e-6)
        assert torch.cat(losses).sum().item() == pytest.approx(entropy, rel=1e-6)
        assert terms.pop_sums(CPU).tolist() == pytest.approx([smoothed, square, rows], rel=1e-5)
        assert terms.pop_sums(CPU).tolist() == [0.0, 0.0, 0.0]
        assert gradient_LV.dtype == dtype
        if rows:
            limit = 1e-5 if dtype == torch.float32 else 4e-3  # rounded once
            assert relative_error(gradient_LV.double(), right_LV) < limit


@pytest.mark.parametrize("parts", [("label_smoothing",), ("z_loss",), ()])
def test_missing_term_is_detected(parts):
    """Check the test above with a term that is not in the gradient."""
    logits_LV, targets_L = logits_and_targets(40, torch.float32)
    terms = {"label_smoothing": 0.1, "z_loss": 1e-2}
    source_LV = logits_LV.clone().requires_grad_()
    active = LossTerms(**{name: terms[name] for name in parts})
    loss = summed_cross_entropy(source_LV, targets_L, None, active)
    (gradient_LV,) = torch.autograd.grad(loss * FACTOR, source_LV)
    assert relative_error(gradient_LV.double(), exact(logits_LV, targets_L, **terms)[1]) > 0.01


def test_terms_are_precise_for_confident_logits():
    logits_LV, targets_L = logits_and_targets(40, torch.float32)
    logits_LV += 1000
    logits_LV[torch.arange(40), targets_L] += 20
    source_LV = logits_LV.clone().requires_grad_()
    loss = summed_cross_entropy(source_LV, targets_L, None, LossTerms(label_smoothing=0.1))
    (gradient_LV,) = torch.autograd.grad(loss * FACTOR, source_LV)
    assert relative_error(gradient_LV.double(), exact(logits_LV, targets_L, 0.1, 0.0)[1]) < 1e-3


@pytest.mark.parametrize(("label_smoothing", "z_loss"), TERMS)
@pytest.mark.parametrize(("weight", "rows"), [(True, True), (True, False), (False, True)])
def test_terms_in_chunks_equal_torch(label_smoothing, z_loss, weight, rows):
    torch.manual_seed(0)
    head = nn.Linear(24, VOCABULARY, bias=False)
    head.weight.requires_grad_(weight)
    rows_LD = torch.randn(10, 24, requires_grad=rows)
    targets_L = torch.randint(VOCABULARY, (10,))
    chunks, terms = ChunkHead(head, 4), LossTerms(label_smoothing, z_loss)
    loss = cross_entropy_in_chunks(chunks, chunks, rows_LD, targets_L, None, terms)
    sums = expected_terms(head(rows_LD), targets_L, label_smoothing, z_loss)
    assert relative_error(loss, sums[0]) < 1e-6
    torch.testing.assert_close(terms.pop_sums(CPU)[:2], torch.stack(sums[1:]).detach())
    sources = [tensor for tensor in (head.weight, rows_LD) if tensor.requires_grad]
    found = torch.autograd.grad(loss * FACTOR, sources)
    expected = torch.autograd.grad((sums[1] + sums[2]) * FACTOR, sources)
    for actual, right in zip(found, expected, strict=True):
        assert relative_error(actual, right) < 1e-5


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "granite"])
def test_terms_of_models_are_equal_in_chunks(name):
    """Check families with soft caps and scales of logits, and tied embeddings."""
    model = text_model(name)
    batch = microbatch([5, 9, 9, 4, 2])
    plain = loss_and_gradients(model, batch, 0)
    model.llm.loss_terms = LossTerms(0.1, 1e-2)
    expected = loss_and_gradients(model, batch, 0)
    sums = model.llm.loss_terms.pop_sums(CPU)
    actual = loss_and_gradients(model, batch, 6)
    torch.testing.assert_close(model.llm.loss_terms.pop_sums(CPU), sums)
    assert relative_error(expected.pop("loss"), plain.pop("loss")) < 1e-6
    errors = {k: relative_error(actual[k], v) for k, v in expected.items() if v.norm() > 1e-6}
    assert max(errors.values()) < 1e-5
    changes = {k: relative_error(plain[k], v) for k, v in expected.items() if v.norm() > 1e-6}
    assert min(changes.values()) > 1e-3


def test_validation_adds_no_terms():
    logits_LV, targets_L = logits_and_targets(40, torch.float32)
    terms = LossTerms(0.1, 1e-2)
    with torch.no_grad():
        loss = summed_cross_entropy(logits_LV, targets_L, None, terms)
    assert loss.item() == pytest.approx(exact(logits_LV, targets_L, 0.1, 1e-2)[0][0], rel=1e-6)
    assert terms.pop_sums(CPU).tolist() == [0.0, 0.0, 0.0]


def test_means_have_active_terms_only():
    assert LossTerms(0.1).means([6.0, 0.0, 3.0]) == {"loss_smoothed": 2.0, "loss_z": None}
    assert LossTerms(z_loss=1.0).means([6.0, 9.0, 3.0]) == {"loss_smoothed": None, "loss_z": 3.0}
    assert LossTerms(0.1, 1.0).means([0.0, 0.0, 0.0]) == {"loss_smoothed": 0.0, "loss_z": 0.0}
    assert LossTerms().means([1.0, 2.0]) == {"loss_smoothed": None, "loss_z": None}
    assert LossTerms().pop_sums(CPU).tolist() == []


def test_stages_use_settings_of_full_module():
    """Check a rank with two stages, whose last stage is a view with the loss."""
    model = text_model("llama")
    llm = model.llm
    ranges = [StageRange(0, 1, True, False), StageRange(1, 3, False, True)]
    first, last = (llm.stage_view(stage) for stage in ranges)
    llm.loss_terms = LossTerms(0.1, 1e-2)
    batch = microbatch([5, 9])
    expected = loss_and_gradients(model, batch, 0)
    sums = llm.loss_terms.pop_sums(CPU)
    model.zero_grad()
    loss = last(batch, first(batch, {}))
    (loss / 7).backward()
    torch.testing.assert_close(llm.loss_terms.pop_sums(CPU), sums)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys() - {"loss"}
    assert max(relative_error(gradients[k], expected[k]) for k in gradients) < 1e-5
