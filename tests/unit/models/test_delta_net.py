"""Gated delta nets on packed sequences: equal to Hugging Face for each sample."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from model_cases import (
    DELTA,
    microbatch,
    plain_causal_lm,
    relative_error,
    text_model,
    worst_gradient,
)
from test_llm import hf_loss_and_logits
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

import torchmm.models.layers.delta_net as delta_net
from torchmm.common.errors import ConfigError
from torchmm.models.layers.attention import Segments
from torchmm.models.layers.delta_ops import ChunkLayout, packed_delta_rule
from torchmm.models.multimodal import MultimodalModel

LENGTHS = [[21], [1, 64, 65, 130, 5], [3, 2, 7], [200], [16, 9], [17, 32, 4]]
SEVERAL_CHUNKS = [70, 5, 140, 1, 64]


def packed(lengths: list[int]) -> Segments:
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return Segments.from_starts(starts, torch.device("cpu"))


def rule_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return queries, keys, values, logarithms of decays, and betas."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, 8), (2, 8), (4, 6), (4,), (4,)]
    inputs = [torch.randn(tokens, *shape, generator=generator) for shape in shapes]
    inputs[3:] = [-functional.softplus(inputs[3]), inputs[4].sigmoid()]
    return [x.to(dtype).requires_grad_() for x in inputs]


def recurrent_rule(inputs: list[Tensor], lengths: list[int]) -> Tensor:
    """Return outputs of the recurrent rule of Hugging Face for each sample separately."""
    outputs = []
    for part in zip(*(x.split(lengths) for x in inputs), strict=True):
        q, k, v, g, beta = (x[None] for x in part)
        options = {"use_qk_l2norm_in_kernel": True}
        outputs.append(torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, **options)[0][0])
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_delta_rule_matches_hugging_face_recurrence(lengths: list[int]) -> None:
    inputs = rule_inputs(sum(lengths))
    out = packed_delta_rule(*inputs, packed(lengths).cu_seqlens_host)
    expected = recurrent_rule(inputs, lengths)
    assert relative_error(out, expected) < 1e-5
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    actual = torch.autograd.grad((out * weights).sum(), inputs)
    reference = torch.autograd.grad((expected * weights).sum(), inputs)
    for name, a, b in zip(
        ("query", "key", "value", "decay", "beta"), actual, reference, strict=True
    ):
        assert relative_error(a, b) < 1e-5, name


@pytest.mark.parametrize(("longest", "length"), [(1, 16), (16, 16), (17, 32), (33, 64), (200, 64)])
def test_chunk_length_follows_longest_sample(longest: int, length: int) -> None:
    layout = ChunkLayout.from_starts(packed([1, longest]).cu_seqlens_host, torch.device("cpu"))
    assert layout.length == length
    assert sum(layout.rounds) == 1 + -(-longest // length)


def test_delta_rule_gradients_match_finite_differences() -> None:
    inputs = rule_inputs(70, torch.float64)
    starts = packed([66, 4]).cu_seqlens_host

    def output_subset(*inputs: Tensor) -> Tensor:
        return packed_delta_rule(*inputs, starts)[::9]

    torch.autograd.gradcheck(output_subset, inputs, fast_mode=True)


def test_delta_rule_passes_opcheck() -> None:
    starts = packed([66, 4]).cu_seqlens_host
    torch.library.opcheck(torch.ops.torchmm.packed_delta_rule.default, (*rule_inputs(70), starts))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_convolution_reads_zeros_before_segment(lengths: list[int]) -> None:
    x = torch.randn(sum(lengths), 6)
    filters = torch.randn(6, 4)
    expected = [
        functional.conv1d(part.T[None], filters[:, None], padding=3, groups=6)[0, :, : len(part)].T
        for part in x.split(lengths)
    ]
    out = delta_net.packed_convolution(x, filters, packed(lengths))
    assert relative_error(out, torch.cat(expected)) < 1e-6


def errors_against_hugging_face(model: MultimodalModel) -> list[float]:
    """Return errors of logits, of the worst gradient, and of decay gradients, for several chunks.

    Decay gradients are small differences of large sums. In float32, the error of Hugging Face
    relative to float64 is 9e-5. The error of torchmm, which sums in float64, is 4e-5.
    """
    plain = plain_causal_lm(model)
    batch = microbatch(SEVERAL_CHUNKS)
    loss = model(batch)
    expected, expected_logits = hf_loss_and_logits(plain, batch)
    logits = model.llm.logits(batch, {}, torch.arange(sum(SEVERAL_CHUNKS)))
    loss.backward()
    expected.backward()
    backbone = model.llm.backbone
    decays = [n for n, _ in backbone.named_parameters() if n.endswith(("A_log", "dt_bias"))]
    results = [backbone.get_parameter(name).grad for name in decays]
    reference = [plain.get_parameter(name).grad for name in decays]
    decay_error = max(map(relative_error, results, reference))
    for name in decays:
        backbone.get_parameter(name).requires_grad_(False)
    worst = worst_gradient(backbone, plain, lambda name: name)
    return [relative_error(logits, expected_logits), worst, decay_error]


@pytest.mark.parametrize("family", DELTA)
def test_delta_net_samples_match_hugging_face(family: str) -> None:
    *errors, decay_error = errors_against_hugging_face(text_model(family))
    assert max(errors) < 1e-5
    assert decay_error < 2e-4


@pytest.mark.parametrize("leak", ["state", "convolution"])
def test_comparison_detects_leak_between_samples(
    leak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the comparison above: one of two functions treats the sequence as one sample."""
    name = {"state": "delta_rule", "convolution": "packed_convolution"}[leak]
    right: Callable[..., Tensor] = getattr(delta_net, name)

    def wrong(*inputs: object) -> Tensor:
        return right(*inputs[:-1], packed([sum(SEVERAL_CHUNKS)]))

    monkeypatch.setattr(delta_net, name, wrong)
    assert min(errors_against_hugging_face(text_model("qwen3_5"))) > 1e-3


def test_delta_net_without_segments_uses_hugging_face_forward() -> None:
    model = text_model("qwen3_next")
    ids = microbatch([21]).input_ids_T[None]
    plain = plain_causal_lm(model)
    assert relative_error(model.llm.backbone(ids).logits, plain(ids).logits) < 1e-6


def test_delta_net_library_receives_sample_starts() -> None:
    """Check with a substitute, because the flash-linear-attention kernels require a GPU."""
    lengths = [1, 9, 4]

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: object):
        starts = options.pop("cu_seqlens")
        assert isinstance(starts, Tensor) and starts.dtype == torch.int64
        assert options == {"use_qk_l2norm_in_kernel": True}
        lengths_seen = [stop - start for start, stop in pairwise(starts.tolist())]
        return recurrent_rule([x[0] for x in (q, k, v, g, beta)], lengths_seen)[None], None

    inputs = rule_inputs(sum(lengths))
    out = delta_net.call_fla_kernel(kernel, tuple(inputs), packed(lengths))
    assert relative_error(out, recurrent_rule(inputs, lengths)) < 1e-6


def test_delta_net_library_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = text_model("qwen3_5").llm.layers
    attention_layers = text_model("qwen3").llm.layers
    delta_net.check_compiles("llm", layers, "cuda")
    monkeypatch.setattr(delta_net, "_fla_kernel", lambda: print)
    delta_net.check_compiles("llm", layers, "cpu")
    delta_net.check_compiles("llm", attention_layers, "cuda")
    with pytest.raises(ConfigError, match=r"delta nets of 'llm' .* flash-linear-attention"):
        delta_net.check_compiles("llm", layers, "cuda")
