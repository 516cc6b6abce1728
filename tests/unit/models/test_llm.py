"""Each LLM family has the logits, loss and gradients of the unmodified Hugging Face model."""

from itertools import pairwise

import pytest
import torch
import transformers
from model_cases import (
    EXPERTS,
    LLMS,
    build,
    microbatch,
    pair_config,
    plain_causal_lm,
    relative_error,
    text_model,
    worst_gradient,
)
from proofs import proves
from torch import Tensor, nn
from torch.nn import functional

from torchmm.common.batch import EncoderInputs, Microbatch
from torchmm.common.errors import ConfigError
from torchmm.models.layered import StageRange
from torchmm.models.layers.experts import COMPILES_FROM, check_compiles
from torchmm.recipe.model_section import LlmConfig, ModelConfig


def hf_loss_and_logits(plain: nn.Module, batch: Microbatch) -> tuple[Tensor, Tensor]:
    """Return the sum of losses and the logits of the Hugging Face model for separate samples."""
    logits = torch.cat(
        [
            plain(batch.input_ids_T[None, start:stop], use_cache=False).logits[0]
            for start, stop in pairwise(batch.cu_seqlens)
        ]
    )
    return functional.cross_entropy(logits, batch.targets_T, reduction="sum"), logits


@proves("equal", LLMS, lengths=[21])
@proves("packed", LLMS, lengths=[5, 9, 9, 4, 2])
@pytest.mark.parametrize("family", list(LLMS))
@pytest.mark.parametrize("lengths", [[21], [5, 9, 9, 4, 2]], ids=["alone", "packed"])
def test_llm_matches_hugging_face_outputs_and_gradients(family: str, lengths: list[int]) -> None:
    model = text_model(family)
    plain = plain_causal_lm(model)
    batch = microbatch(lengths)
    loss = model(batch)
    expected, expected_logits = hf_loss_and_logits(plain, batch)
    assert relative_error(loss, expected) < 1e-5
    all_positions = torch.arange(sum(lengths))
    assert relative_error(model.llm.logits(batch, {}, all_positions), expected_logits) < 1e-5
    loss.backward()
    expected.backward()
    assert worst_gradient(model.llm.backbone, plain, lambda name: name) < 1e-5


def test_packed_samples_are_independent() -> None:
    model = text_model("llama")
    batch = microbatch([6, 8, 5])
    middle = torch.arange(6, 14)
    before = model.llm.logits(batch, {}, middle)
    batch.input_ids_T[:6] = 7
    batch.input_ids_T[14:] = 9
    assert torch.equal(model.llm.logits(batch, {}, middle), before)


def test_positions_restart_for_scaled_queries() -> None:
    for family, scaled in (("ministral3", True), ("mistral", False)):
        model = text_model(family)
        batch = microbatch([6, 8, 5])
        all_positions = torch.arange(19)
        right = model.llm.logits(batch, {}, all_positions)
        batch.position_ids = all_positions  # rotary positions are relative
        assert (relative_error(model.llm.logits(batch, {}, all_positions), right) > 1e-3) == scaled


@proves("stages", LLMS)
@pytest.mark.parametrize("family", list(LLMS))
def test_three_llm_stages_match_full_llm(family: str) -> None:
    model = build(pair_config(family, "clip"))
    images = EncoderInputs(torch.randn(1, 3, 16, 16), [(1, 4, 4)], torch.arange(3, 19))
    batch = microbatch([22, 7], {"eye": images}, images.positions_K)
    features = {"eye": model.encode(batch)["eye"].detach()}
    loss = model.llm(batch, features)
    loss.backward()
    reference = {n: p.grad for n, p in model.llm.named_parameters()}
    inputs: dict[str, Tensor] | Tensor = features
    stages = []
    for start, stop in ((0, 1), (1, 2), (2, 3)):
        stage = model.llm.rebuild()
        stage.reduce_to_stages([StageRange(start, stop, start == 0, stop == 3)])
        weights = {n: p.detach().clone() for n, p in model.llm.state_dict().items()}
        stage.load_state_dict(weights, strict=False, assign=True)
        stage.requires_grad_()
        inputs = stage(batch, inputs)
        stages.append(stage)
    assert isinstance(inputs, Tensor)
    assert relative_error(inputs, loss) < 1e-6
    inputs.backward()
    grads: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            tied = name == "backbone.lm_head.weight" and name not in reference
            key = "backbone.model.embed_tokens.weight" if tied else name
            grads[key] = parameter.grad + grads.get(key, 0)
    assert set(grads) == set(reference)
    for name, grad in grads.items():
        assert relative_error(grad, reference[name]) < 1e-5, name


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_last_stage_of_tied_llm_replicates_embedding(family: str) -> None:
    head, embedding = "backbone.lm_head.weight", "backbone.model.embed_tokens.weight"
    tie = {head: embedding} if family == "llama_tied" else {}
    llm = text_model(family).llm
    assert (llm.tied_parameters(), llm.tied_replicas()) == (tie, {})
    for start, stop, replicas in ((0, 1, {}), (1, 2, {}), (2, 3, tie)):
        stage = llm.rebuild()
        stage.reduce_to_stages([StageRange(start, stop, start == 0, stop == 3)])
        assert (stage.tied_parameters(), stage.tied_replicas()) == ({}, replicas)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "qwen3_5", "lfm2", "qwen3_moe", "gpt_oss", "deepseek_v3"]
)
def test_layers_compile_as_one_graph(family: str) -> None:
    """Check down to the shapes of operators. `test_compilation` traces all families."""
    model = text_model(family)
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if family in EXPERTS and version < COMPILES_FROM:
        pytest.skip(
            "experts do not compile with this version of transformers (the error reports it)"
        )
    batch = microbatch([10, 20])
    expected = model(batch)
    torch.compiler.reset()  # graphs of other tests count towards one limit
    for layer in model.llm.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert relative_error(model(batch), expected) < 1e-6


def test_experts_that_cannot_compile_are_rejected(monkeypatch) -> None:
    experts, dense_layers = (text_model(family).llm.layers for family in ("qwen3_moe", "qwen3"))
    monkeypatch.setattr("torchmm.models.layers.experts.transformers.__version__", "5.22.1")
    check_compiles("llm", dense_layers, "cpu")
    check_compiles("llm", experts, "cuda")
    with pytest.raises(ConfigError, match=r"experts of 'llm' .* transformers 5\.22\.1; install"):
        check_compiles("llm", experts, "cpu")
    monkeypatch.setattr("torchmm.models.layers.experts.transformers.__version__", "5.23.0")
    check_compiles("llm", experts, "cpu")


def test_microbatch_without_targets_has_zero_loss() -> None:
    model = text_model("qwen2")
    batch = microbatch([4, 3], ignored=4)
    assert batch.target_count == 0
    loss = model(batch)
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_wrong_number_of_features_is_reported() -> None:
    model = build(pair_config("llama", "clip"))
    images = EncoderInputs(torch.randn(1, 3, 16, 16), [(1, 4, 4)], torch.arange(3, 18))
    batch = microbatch([22], {"eye": images}, images.positions_K)
    with pytest.raises(ValueError, match=r"'eye' returned 16 tokens for 15 placeholders"):
        model(batch)


def test_load_balancing_matches_hugging_face_gradients() -> None:
    """Compare with one layer, for which the average over layers is equal."""
    settings = {"num_hidden_layers": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.5}
    config = {**LLMS["qwen3_moe"], **settings, "output_router_logits": True}
    model = build(ModelConfig(llm=LlmConfig(config=config)))
    plain = plain_causal_lm(model)
    batch = microbatch([21], ignored=0)
    labels = batch.input_ids_T[None].clone()
    expected = plain(batch.input_ids_T[None], labels=labels, use_cache=False).loss
    assert model.llm.balance is not None
    model.llm.balance.scale = 1 / 21  # sum over 20 targets, as opposed to the mean
    loss = model(batch) / 20
    loss.backward()
    expected.backward()
    assert worst_gradient(model.llm.backbone, plain, lambda name: name) < 1e-5
    actual = {n: p.grad.clone() for n, p in model.llm.named_parameters()}
    model.zero_grad()
    model.llm.balance.scale = 0.0
    (model(batch) / 20).backward()
    router = "backbone.model.layers.0.mlp.gate.weight"
    assert relative_error(actual[router], model.llm.get_parameter(router).grad) > 0.01
