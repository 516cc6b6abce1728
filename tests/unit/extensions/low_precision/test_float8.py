"""Selection of linear layers for float8, and device support."""

from dataclasses import replace

import pytest
import torch
from model_cases import LLMS, build, pair_config, text_model
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from torchmm.extensions.low_precision import float8
from torchmm.extensions.low_precision.float8 import (
    apply_float8,
    find_float8_linears,
    float8_problems,
)
from torchmm.extensions.low_precision.section import Float8Config
from torchmm.models.build import build_model
from torchmm.models.multimodal import MultimodalModel
from torchmm.parallel.tensor.linears import MULTIPLY
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

EMULATED = Float8Config(scaling="rowwise", emulate=True)
CPU = torch.device("cpu")


def names_of(model: MultimodalModel, config: Float8Config) -> list[str]:
    chosen = find_float8_linears(model.llm, config)
    return [n for n, part in model.llm.named_modules() if any(part is linear for linear in chosen)]


def test_inner_linear_layers_are_replaced_in_place() -> None:
    model = text_model("qwen3")  # of three layers
    names = names_of(model, EMULATED)
    assert len(names) == 7 and all(".layers.1." in name for name in names)
    parameters = {n: id(p) for n, p in model.llm.named_parameters()}
    apply_float8(model.llm, EMULATED)
    replaced = {n for n, part in model.llm.named_modules() if isinstance(part, Float8Linear)}
    assert replaced == set(names)
    assert {n: id(p) for n, p in model.llm.named_parameters()} == parameters


def test_excluded_layers_are_not_replaced() -> None:
    every = Float8Config(scaling="rowwise", emulate=True, first_layers=0, last_layers=0)
    names = names_of(text_model("qwen3"), every)
    assert len(names) == 21
    fewer = every.model_copy(update={"exclude": ["self_attn.*", "*.down_proj"]})
    expected = [name for name in names if name.endswith(("gate_proj", "up_proj"))]
    assert names_of(text_model("qwen3"), fewer) == expected


def test_sizes_not_divisible_by_16_are_not_replaced() -> None:
    """Check multi-head latent attention with ranks of 24 and values of 40 features."""
    every = Float8Config(scaling="rowwise", emulate=True, first_layers=0, last_layers=0)
    chosen = find_float8_linears(text_model("minicpm3").llm, every)
    assert chosen and all(size % 16 == 0 for linear in chosen for size in linear.weight.shape)
    linears = [p for p in text_model("minicpm3").llm.layers[0].modules() if type(p) is nn.Linear]
    assert len(chosen) < 3 * len(linears)


@pytest.mark.parametrize(
    ("device", "config", "expected"),
    [
        (CPU, {}, "requires a GPU; set float8.emulate = true"),
        (CPU, {"emulate": True}, None),
        (CPU, {"emulate": True, "first_layers": 2}, "'llm' has no linear layer for float8"),
        (CPU, {"scaling": "none"}, None),
        (CPU, {"modules": []}, None),
        (torch.device("cuda"), {}, "Ampere does not support float8 matmuls"),
    ],
)
def test_unsupported_devices_are_rejected(
    device, config, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Ampere")
    modules = list(build_model(pair_config("llama", "clip"), FreezeConfig()).modality_modules())
    actual = float8_problems(modules, Float8Config(**{"scaling": "rowwise", **config}), device)
    assert len(actual) == (expected is not None) and all(expected in text for text in actual)


def test_device_with_float8_support_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = Float8Config(scaling="tensorwise")
    assert float8_problems([text_model("llama").llm], config, torch.device("cuda")) == []


def test_tensor_parallel_shards_must_be_multiples_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    module = build(ModelConfig(llm=LlmConfig(config={**LLMS["llama"], **sizes}))).llm
    config, cuda = Float8Config(scaling="tensorwise"), torch.device("cuda")
    assert float8_problems([module], config, cuda, {"llm": 2}) == []
    problems = float8_problems([module], config, cuda, {"llm": 8})
    assert len(problems) == 1 and "splits 64 features" in problems[0]


def test_missing_torchao_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    (problem,) = float8_problems([text_model("llama").llm], EMULATED, CPU)
    assert "pip install -e '.[float8]'" in problem


def linear_results(recipe: str, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of a linear layer, and the gradients of its input and its weight.

    Args:
        recipe: Scaling recipe of torchao.
        tensors: Weight (O, I), input (T, I) and gradient of the output (T, O).
    """
    weight_OI, x_TI, grad_TO = tensors
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False)
    linear.weight.data = weight_OI.clone()
    settings = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    wrapped = convert_to_float8_training(nn.Sequential(linear), config=settings)
    x_TI = x_TI.clone().requires_grad_()
    out_TO = wrapped(x_TI)
    out_TO.backward(grad_TO)
    assert x_TI.grad is not None and wrapped[0].weight.grad is not None
    return out_TO.detach(), x_TI.grad, wrapped[0].weight.grad


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_rowwise_scales_are_independent_of_token_split(recipe: str) -> None:
    torch.manual_seed(0)
    weight_OI, x_TI, grad_TO = torch.randn(32, 48), torch.randn(64, 48), torch.randn(64, 32)
    x_TI *= torch.linspace(0.1, 4, 64)[:, None]
    out_TO, input_grad_TI, weight_grad_OI = linear_results(recipe, weight_OI, x_TI, grad_TO)
    halves = zip(x_TI.chunk(2), grad_TO.chunk(2), strict=True)
    first, second = (linear_results(recipe, weight_OI, *half) for half in halves)
    errors = [
        float((actual - full).norm() / full.norm())
        for actual, full in (
            (torch.cat((first[0], second[0])), out_TO),
            (torch.cat((first[1], second[1])), input_grad_TI),
            (first[2] + second[2], weight_grad_OI),
        )
    ]
    if recipe == "rowwise":
        assert max(errors) < 1e-6
    else:
        assert max(errors) > 1e-3
    exact_OI = grad_TO.T @ x_TI
    assert (weight_grad_OI - exact_OI).norm() > 1e-2 * exact_OI.norm(), "values must be rounded"


def test_slices_of_linear_add_their_bias() -> None:
    llm = text_model("qwen2").llm  # with biases of queries, keys and values
    apply_float8(llm, EMULATED)
    linear = llm.layers[1].self_attn.q_proj
    assert isinstance(linear, Float8Linear) and linear.bias is not None
    weight, bias = torch.randn(linear.weight.shape), torch.randn(len(linear.bias))
    x = torch.randn(5, weight.shape[1])
    multiply = getattr(linear, MULTIPLY)
    torch.testing.assert_close(multiply(x, weight, bias), multiply(x, weight, None) + bias)
