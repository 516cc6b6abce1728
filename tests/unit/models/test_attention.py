"""The attention function compared with softmax attention in float64."""

from itertools import pairwise

import pytest
import torch
from model_cases import relative_error
from torch import Tensor, nn
from transformers import AutoModel, CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, masking_utils

from torchmm.models.layers.attention import PACKED, Segments, attention

CPU = torch.device("cpu")


class Layer(nn.Module):
    is_causal = True


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    blocks: Tensor | None = None,
) -> Tensor:
    """Return attention (1, H, T, D) computed by its definition in float64."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for i in range(scores.shape[-2]):
        for j in range(scores.shape[-1]):
            joint = blocks is not None and blocks[i] == blocks[j] >= 0
            if (causal and j > i and not joint) or (window and i - j >= window):
                scores[..., i, j] = -torch.inf
    return scores.softmax(-1) @ v.double()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "starts", [[0, 12], [0, 4, 8, 12], [0, 1, 2, 7, 12], [0, 4, 8, 9, 12]], ids=str
)
def test_attention_output_and_gradients_match_reference(
    starts: list[int], kv_heads: int, causal: bool
) -> None:
    torch.manual_seed(0)
    # Not contiguous, as in layers: (B, T, H, D) transposed.
    q, k, v = (
        torch.randn(1, 12, heads, 8).transpose(1, 2).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    segments = Segments.from_starts(starts, CPU)
    ours, _ = attention(
        Layer(), q, k, v, None, scaling=0.3, cu_seq_lens_q=segments, is_causal=causal
    )
    parts = [
        reference_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], causal, 0.3)
        for a, b in pairwise(starts)
    ]
    theirs = torch.cat(parts, dim=2).transpose(1, 2)
    assert ours.shape == (1, 12, 4, 8)
    assert relative_error(ours, theirs) < 1e-6
    weights = torch.randn_like(ours)
    grads = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((theirs * weights).sum(), (q, k, v))
    for grad, reference in zip(grads, expected, strict=True):
        assert relative_error(grad, reference) < 1e-6


BLOCKS = torch.tensor([-1, 0, 0, 0, -1, 3, 3, -1, 3, 3, 3, -1])


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(
    ("rules", "blocks"),
    [
        ({"sliding_window": 3}, None),
        ({"sliding_window": 7}, None),
        ({"softcap": 0.3}, None),
        ({"softcap": 0.3, "sliding_window": 2}, None),
        ({}, BLOCKS),
        ({"sliding_window": 2}, BLOCKS),
        ({"softcap": 0.5}, BLOCKS),
    ],
    ids=str,
)
@pytest.mark.parametrize("starts", [[0, 12], [0, 3, 6, 8, 12]], ids=str)
def test_attention_windows_caps_and_blocks_match_reference(
    starts: list[int], rules: dict, blocks: Tensor | None, kv_heads: int
) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 12, heads, 8).transpose(1, 2).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    segments = Segments.from_starts(starts, CPU, blocks)
    ours, _ = attention(Layer(), q, k, v, None, scaling=0.3, cu_seq_lens_q=segments, **rules)
    parts = [
        reference_attention(
            *(x[:, :, a:b] for x in (q, k, v)),
            causal=True,
            scale=0.3,
            window=rules.get("sliding_window"),
            softcap=rules.get("softcap"),
            blocks=None if blocks is None else blocks[a:b],
        )
        for a, b in pairwise(starts)
    ]
    theirs = torch.cat(parts, dim=2).transpose(1, 2)
    assert relative_error(ours, theirs) < 1e-6
    weights = torch.randn_like(ours)
    grads = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((theirs * weights).sum(), (q, k, v))
    for grad, reference in zip(grads, expected, strict=True):
        assert relative_error(grad, reference) < 1e-6


def test_attention_accepts_expanded_gradient() -> None:
    q = torch.randn(1, 2, 6, 8, requires_grad=True)
    segments = Segments.from_starts([0, 2, 6], CPU)
    out, _ = attention(Layer(), q, q, q, None, cu_seq_lens_q=segments)
    (ones,) = torch.autograd.grad(out.sum(), q)
    assert ones.isfinite().all()


def test_attention_operators_pass_opcheck() -> None:
    q = torch.randn(6, 2, 8, requires_grad=True)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    blocks = torch.tensor([0, 0, -1, 1, 1, -1])
    packed = torch.ops.torchmm.packed_attention.default
    torch.library.opcheck(packed, (q, q, q, starts, 0.3, True))
    torch.library.opcheck(packed, (q, q, q, starts, 0.3, True, 3, blocks))
    capped = torch.ops.torchmm.capped_attention.default
    torch.library.opcheck(capped, ([q, q, q], starts, 0.3, 2.0, True, 3, blocks))
    sinks = torch.randn(2, requires_grad=True)
    narrow = torch.randn(6, 2, 4, requires_grad=True)
    torch.library.opcheck(capped, ([q, q, narrow, sinks], starts, 0.3, None, True, 0, None))
    torch.library.opcheck(packed, (q, q, narrow, starts, 0.3, True))


@pytest.mark.parametrize("causal", [True, False])
def test_capped_attention_matches_packed_attention(causal: bool) -> None:
    """Check the operator for compiled layers on devices without a kernel for all segments."""
    torch.manual_seed(0)
    inputs = [torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    starts = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    capped = torch.ops.torchmm.capped_attention(inputs, starts, 0.3, None, causal, 0, None)
    kernel, _ = torch.ops.torchmm.packed_attention(*inputs, starts, 0.3, causal)
    assert relative_error(capped, kernel) < 1e-6
    actual = torch.autograd.grad(capped.sin().sum(), inputs)
    for grad, expected_grad in zip(
        actual, torch.autograd.grad(kernel.sin().sum(), inputs), strict=True
    ):
        assert relative_error(grad, expected_grad) < 1e-6
    opposite_mask = torch.ops.torchmm.capped_attention(
        inputs, starts, 0.3, None, not causal, 0, None
    )
    assert relative_error(opposite_mask, kernel) > 1e-2


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_supports_narrow_values_and_sinks(sinks: bool, window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 9, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, 8), (2, 8), (2, 5))
    )
    sinks_H = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    segments = Segments.from_starts([0, 4, 9], torch.device("cpu"))
    options = {"sliding_window": window} | ({"s_aux": sinks_H} if sinks else {})
    out, _ = attention(Layer(), q, k, v, None, cu_seq_lens_q=segments, **options)
    parts = []
    for start, stop in ((0, 4), (4, 9)):
        keys = k[0, :, start:stop].repeat_interleave(2, 0)
        scores = q[0, :, start:stop] @ keys.mT * 8**-0.5
        at = torch.arange(stop - start)
        behind = at[:, None] - at
        scores = scores.masked_fill((behind < 0) | (behind >= (window or 9)), -torch.inf)
        if sinks:
            scores = torch.cat([scores, sinks_H[:, None, None].expand(4, len(at), 1)], -1)
        weights = scores.softmax(-1)[..., : len(at)]
        parts.append((weights @ v[0, :, start:stop].repeat_interleave(2, 0)).transpose(0, 1))
    expected = torch.cat(parts)[None]
    reference = [q, k, v, *([sinks_H] if sinks else [])]
    assert relative_error(out, expected) < 1e-12
    grads = torch.autograd.grad(out.sin().sum(), reference)
    for grad, expected_grad in zip(
        grads, torch.autograd.grad(expected.sin().sum(), reference), strict=True
    ):
        assert relative_error(grad, expected_grad) < 1e-12


@pytest.mark.parametrize("implementation", [PACKED, "sdpa"])
def test_packed_attention_does_not_read_positions(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that mask creation does not synchronize with the device in every forward pass."""
    looks = []
    find = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda ids: looks.append(1) or find(ids)
    )
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=32,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    ids = torch.randint(3, 32, (1, 9))
    model(ids, position_ids=torch.arange(9)[None], use_cache=False)
    assert bool(looks) == (implementation == "sdpa")


def test_batch_without_segments_matches_eager_attention() -> None:
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    ours = AutoModel.from_config(config, attn_implementation=PACKED)
    pixels = torch.randn(2, 3, 8, 8)
    got = ours(pixels).last_hidden_state
    ours.set_attn_implementation("eager")
    assert relative_error(got, ours(pixels).last_hidden_state) < 1e-5


@pytest.mark.parametrize("option", ["softcap", "sliding_window", "s_aux"])  # without segments
def test_unsupported_attention_option_is_rejected(option: str) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=f"Layer uses {option}"):
        attention(Layer(), q, q, q, None, **{option: 5.0})


def test_attention_dropout_is_rejected() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="Layer uses attention_dropout"):
        attention(Layer(), q, q, q, None, dropout=0.1)


@pytest.mark.parametrize("starts", [[0], [1, 4], [0, 4, 4], [0, 4, 2]], ids=str)
def test_segment_starts_must_increase_from_zero(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="must increase from 0"):
        Segments.from_starts(starts, CPU)
