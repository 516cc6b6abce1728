"""Gated delta nets on packed rows: equal to Hugging Face's, sample by sample."""

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
from test_llm import separate_loss
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
    """Query, key, value, logarithms of decays, shares."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, 8), (2, 8), (4, 6), (4,), (4,)]
    inputs = [torch.randn(tokens, *shape, generator=generator) for shape in shapes]
    inputs[3:] = [-functional.softplus(inputs[3]), inputs[4].sigmoid()]
    return [x.to(dtype).requires_grad_() for x in inputs]


def token_by_token(inputs: list[Tensor], lengths: list[int]) -> Tensor:
    """Hugging Face's version that has no chunks, for every sample by itself."""
    outputs = []
    for part in zip(*(x.split(lengths) for x in inputs), strict=True):
        q, k, v, g, beta = (x[None] for x in part)
        options = {"use_qk_l2norm_in_kernel": True}
        outputs.append(torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, **options)[0][0])
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_rule_equals_hugging_faces_token_by_token(lengths: list[int]) -> None:
    inputs = rule_inputs(sum(lengths))
    out = packed_delta_rule(*inputs, packed(lengths).cu_seqlens_host)
    expected = token_by_token(inputs, lengths)
    assert relative_error(out, expected) < 1e-5
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((out * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for name, a, b in zip(("query", "key", "value", "decay", "beta"), found, wanted, strict=True):
        assert relative_error(a, b) < 1e-5, name


@pytest.mark.parametrize(("longest", "length"), [(1, 16), (16, 16), (17, 32), (33, 64), (200, 64)])
def test_chunks_are_as_long_as_the_longest_sample_needs(longest: int, length: int) -> None:
    layout = ChunkLayout.from_starts(packed([1, longest]).cu_seqlens_host, torch.device("cpu"))
    assert layout.length == length
    assert sum(layout.rounds) == 1 + -(-longest // length)


def test_gradients_of_the_rule_are_those_of_finite_differences() -> None:
    inputs = rule_inputs(70, torch.float64)
    starts = packed([66, 4]).cu_seqlens_host

    def some(*inputs: Tensor) -> Tensor:
        return packed_delta_rule(*inputs, starts)[::9]

    torch.autograd.gradcheck(some, inputs, fast_mode=True)


def test_the_rule_is_an_operator_that_torch_can_handle() -> None:
    starts = packed([66, 4]).cu_seqlens_host
    torch.library.opcheck(torch.ops.torchmm.packed_delta_rule.default, (*rule_inputs(70), starts))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_convolution_sees_zeros_before_its_segment(lengths: list[int]) -> None:
    x = torch.randn(sum(lengths), 6)
    filters = torch.randn(6, 4)
    expected = [
        functional.conv1d(part.T[None], filters[:, None], padding=3, groups=6)[0, :, : len(part)].T
        for part in x.split(lengths)
    ]
    out = delta_net.packed_convolution(x, filters, packed(lengths))
    assert relative_error(out, torch.cat(expected)) < 1e-6


def errors_against_hugging_face(model: MultimodalModel) -> list[float]:
    """Of logits, of the worst gradient, and of the decays' gradients; samples of several chunks.

    The latter are small differences of large sums: in float32 Hugging Face's own are off by 9e-5
    of those in float64, ours, which sum in float64, by 4e-5.
    """
    plain = plain_causal_lm(model)
    batch = microbatch(SEVERAL_CHUNKS)
    loss = model(batch)
    expected, expected_logits = separate_loss(plain, batch)
    logits = model.llm.logits(batch, {}, torch.arange(sum(SEVERAL_CHUNKS)))
    loss.backward()
    expected.backward()
    backbone = model.llm.backbone
    decays = [n for n, _ in backbone.named_parameters() if n.endswith(("A_log", "dt_bias"))]
    found = [backbone.get_parameter(name).grad for name in decays]
    wanted = [plain.get_parameter(name).grad for name in decays]
    of_decays = max(map(relative_error, found, wanted))
    for name in decays:
        backbone.get_parameter(name).requires_grad_(False)
    worst = worst_gradient(backbone, plain, lambda name: name)
    return [relative_error(logits, expected_logits), worst, of_decays]


@pytest.mark.parametrize("family", DELTA)
def test_samples_of_several_chunks_equal_hugging_faces(family: str) -> None:
    *errors, of_decays = errors_against_hugging_face(text_model(family))
    assert max(errors) < 1e-5
    assert of_decays < 2e-4


@pytest.mark.parametrize("leak", ["state", "convolution"])
def test_what_passes_from_sample_to_sample_is_noticed(
    leak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the comparison above: one of the two works as if the row were one sample."""
    name = {"state": "delta_rule", "convolution": "packed_convolution"}[leak]
    right: Callable[..., Tensor] = getattr(delta_net, name)

    def wrong(*inputs: object) -> Tensor:
        return right(*inputs[:-1], packed([sum(SEVERAL_CHUNKS)]))

    monkeypatch.setattr(delta_net, name, wrong)
    assert min(errors_against_hugging_face(text_model("qwen3_5"))) > 1e-3


def test_without_segments_hugging_faces_forward_runs() -> None:
    model = text_model("qwen3_next")
    ids = microbatch([21]).input_ids_T[None]
    plain = plain_causal_lm(model)
    assert relative_error(model.llm.backbone(ids).logits, plain(ids).logits) < 1e-6


def test_the_library_gets_the_starts_of_samples() -> None:
    """With a stand-in: flash-linear-attention's kernels need a GPU."""
    lengths = [1, 9, 4]

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: object):
        starts = options.pop("cu_seqlens")
        assert isinstance(starts, Tensor) and starts.dtype == torch.int64
        assert options == {"use_qk_l2norm_in_kernel": True}
        own = [stop - start for start, stop in pairwise(starts.tolist())]
        return token_by_token([x[0] for x in (q, k, v, g, beta)], own)[None], None

    inputs = rule_inputs(sum(lengths))
    out = delta_net.call_fla_kernel(kernel, tuple(inputs), packed(lengths))
    assert relative_error(out, token_by_token(inputs, lengths)) < 1e-6


def test_the_library_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = text_model("qwen3_5").llm.layers
    others = text_model("qwen3").llm.layers
    delta_net.check_compiles("llm", layers, "cuda")
    monkeypatch.setattr(delta_net, "_library", lambda: print)
    delta_net.check_compiles("llm", layers, "cpu")
    delta_net.check_compiles("llm", others, "cuda")
    with pytest.raises(ConfigError, match=r"delta nets of 'llm' .* flash-linear-attention"):
        delta_net.check_compiles("llm", layers, "cuda")
