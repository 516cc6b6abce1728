"""The chunked loss equals the loss and gradients of all logits, without storing all logits."""

import pytest
import torch
from installed import needs_extension
from model_cases import (
    COMPOSITES,
    LLMS,
    build,
    composite_config,
    loss_and_gradients,
    microbatch,
    relative_error,
    text_model,
)
from torch import Tensor, nn
from torch.nn import functional

from torchmm.common.errors import ConfigError
from torchmm.models.layers.loss import (
    CHUNK_TARGETS,
    MIN_CHUNKED_VOCABULARY,
    ChunkHead,
    chunk_rows,
    cross_entropy_in_chunks,
)
from torchmm.planning.recipe_model import recipe_model
from torchmm.recipe.model_section import LlmConfig, ModelConfig
from torchmm.recipe.recipe import Recipe

HIDDEN = 24
VOCABULARY = 300


@pytest.mark.parametrize("name", [*LLMS, *COMPOSITES])
def test_chunked_loss_matches_full_logits(name: str) -> None:
    model = text_model(name) if name in LLMS else build(composite_config(name))
    batch = microbatch([5, 9, 9, 4, 2])
    if model.text.mrope:
        batch.position_ids = batch.position_ids.expand(3, -1)
    head = model.llm.head
    expected = loss_and_gradients(model, batch, 0)
    actual = loss_and_gradients(model, batch, 6)
    assert model.llm.head is head
    assert actual.keys() == expected.keys()
    worst = {k: relative_error(actual[k], v) for k, v in expected.items() if v.norm() > 1e-6}
    assert {k: e for k, e in worst.items() if e > 1e-5} == {}
    # Without gradients nothing is summed, and the result is the same.
    with torch.no_grad():
        assert relative_error(model(batch), expected["loss"]) < 1e-6


def test_missing_logit_scale_changes_chunked_loss() -> None:
    """Check that the operations after the head are those of Hugging Face."""
    model = text_model("gemma2")
    batch = microbatch([5, 9])
    right = loss_and_gradients(model, batch, 6)
    family = model.llm.family
    model.llm.family = type(family)(**{**vars(family), "logits_to_keep": False})
    wrong = loss_and_gradients(model, batch, 6)
    assert relative_error(wrong["loss"], right["loss"]) > 1e-3


def parts(dtype: torch.dtype, rows: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
    rows_LD = torch.randn(rows, HIDDEN, dtype=dtype, requires_grad=True)
    return head, rows_LD, torch.randint(VOCABULARY, (rows,))


def in_chunks(head: nn.Linear, rows_LD: Tensor, targets_L: Tensor, size: int) -> Tensor:
    chunks = ChunkHead(head, size)
    return cross_entropy_in_chunks(chunks, chunks, rows_LD, targets_L)


@pytest.mark.parametrize(("weight", "rows"), [(True, False), (False, True), (False, False)])
def test_frozen_inputs_of_chunked_loss_have_no_gradient(weight: bool, rows: bool) -> None:
    head, rows_LD, targets_L = parts(torch.float32, 10)
    head.weight.requires_grad_(weight)
    rows_LD.requires_grad_(rows)
    loss = in_chunks(head, rows_LD, targets_L, 4)
    expected = functional.cross_entropy(head(rows_LD), targets_L, reduction="sum")
    assert relative_error(loss, expected) < 1e-6
    assert loss.requires_grad == (weight or rows)
    if loss.requires_grad:
        reference = [t for t in (head.weight, rows_LD) if t.requires_grad]
        actual = torch.autograd.grad(loss, reference)
        for ours, theirs in zip(actual, torch.autograd.grad(expected, reference), strict=True):
            assert relative_error(ours, theirs) < 1e-5


def test_chunked_loss_without_targets_is_zero() -> None:
    head, rows_LD, targets_L = parts(torch.float32, 0)
    loss = in_chunks(head, rows_LD, targets_L, 4)
    loss.backward()
    assert loss == 0
    assert head.weight.grad is not None
    assert head.weight.grad.norm() == 0


def test_second_backward_of_chunked_loss_is_rejected() -> None:
    head, rows_LD, targets_L = parts(torch.float32, 10)
    loss = in_chunks(head, rows_LD, targets_L, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


@pytest.mark.parametrize("rows", [700])
def test_half_precision_chunked_loss_is_accurate(rows: int) -> None:
    """Check errors relative to float64. A factor rounded to half precision would be off by 4e-3."""
    head, rows_LD, targets_L = parts(torch.bfloat16, rows)
    factor = 1 / 771
    reference = [head.weight, rows_LD]
    exact = [t.detach().double().requires_grad_() for t in reference]
    loss = functional.cross_entropy(exact[1] @ exact[0].T, targets_L, reduction="sum")
    right = torch.autograd.grad(loss * factor, exact)
    at_once = functional.cross_entropy(head(rows_LD).float(), targets_L, reduction="sum")
    full_grads = torch.autograd.grad(at_once * factor, reference)
    actual = torch.autograd.grad(in_chunks(head, rows_LD, targets_L, 100) * factor, reference)
    for ours, theirs, expected in zip(actual, full_grads, right, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours.double(), expected) < 2 * relative_error(
            theirs.double(), expected
        )


def test_chunk_size_is_bounded() -> None:
    assert chunk_rows(100) == 512
    assert chunk_rows(2**27) == 1
    words, targets = 151_936, 8192
    chunk_bytes = 12 * words * chunk_rows(words)
    rounded_bytes = (
        2 + 2
    ) * words * targets + 8 * words * CHUNK_TARGETS  # for all logits in bfloat16
    assert 0.09 * rounded_bytes < chunk_bytes < 0.1 * rounded_bytes


@needs_extension("extensions.auto_models")
def test_head_with_bias_rejects_chunked_loss() -> None:
    config = {**LLMS["llama"], "model_type": "phi", "num_key_value_heads": 4}
    section = ModelConfig(llm=LlmConfig(config=config), chunked_loss=True)
    with pytest.raises(ConfigError, match="chunked_loss = true: the head of 'phi' is not a linear"):
        build(section)


@needs_extension("extensions.auto_models")
def test_default_chunks_only_large_sharded_vocabulary() -> None:
    """Check bfloat16 with a large vocabulary and a linear head.

    An explicit value has precedence.
    """
    llm = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    llm |= {"num_attention_heads": 1, "vocab_size": MIN_CHUNKED_VOCABULARY}
    for dtype, changes, rows in (
        ("bfloat16", {}, (0, chunk_rows(MIN_CHUNKED_VOCABULARY))),
        ("bfloat16", {"vocab_size": MIN_CHUNKED_VOCABULARY - 1}, (0, 0)),
        ("bfloat16", {"model_type": "phi"}, (0, 0)),
        ("float32", {}, (0, 0)),
        ("bfloat16", {"chunked_loss": False}, (0, 0)),
        ("float32", {"chunked_loss": True}, (chunk_rows(MIN_CHUNKED_VOCABULARY), 0)),
    ):
        config = llm | {key: changes[key] for key in changes if key != "chunked_loss"}
        model: dict = {"llm": {"config": config}, "chunked_loss": changes.get("chunked_loss")}
        recipe = Recipe.model_validate({"name": "a", "model": model, "training": {"dtype": dtype}})
        actual = recipe_model(recipe).llm
        assert (actual.loss_chunk_targets, actual.sharded_loss_chunk_targets) == rows
        assert actual.build_without_adapters().sharded_loss_chunk_targets == rows[1]
