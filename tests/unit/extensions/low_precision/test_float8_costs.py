"""Costs of linear layers in float8: casts as in real layers, and the matmul rate of the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from counting import CountLive, CountTraffic
from model_cases import LLMS
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from torchmm.balance.costs.profiles import load_profile
from torchmm.common.batch import MicrobatchMeta, SampleMeta
from torchmm.common.layers import LayerDescription
from torchmm.costs.component import cast_bytes
from torchmm.costs.components import layer_components
from torchmm.costs.execution import CostSetting, Execution
from torchmm.costs.layers import layer_operators
from torchmm.costs.operators import float8_matmul, operator_time_ms
from torchmm.costs.sizes import llm_sizes
from torchmm.extensions.low_precision.float8 import describe_float8_linears
from torchmm.extensions.low_precision.section import Float8Config
from torchmm.models.build import build_model
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

ROWS, INPUTS, OUTPUTS = 480, 640, 1280
SIZES = llm_sizes([MicrobatchMeta((SampleMeta("s", 0, 4096),), 4096)], [4096], padding=False)


def describe_layers(config: Float8Config, **sizes: int) -> list[LayerDescription]:
    """Return layers of a model whose linear layers have different sizes."""
    sizes_of_model = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 160, **sizes}
    section = LlmConfig(config={**LLMS["llama"], **sizes_of_model})
    llm = build_model(ModelConfig(llm=section), FreezeConfig()).llm
    llm.rounded = describe_float8_linears(llm, config)
    return list(llm.describe().layers)


def linear_of(recipe: str, dtype: torch.dtype) -> nn.Module:
    settings = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=dtype)
    return convert_to_float8_training(nn.Sequential(linear), config=settings)


def a_cast(recipe: str) -> Float8Config:
    return Float8Config(scaling=recipe, first_layers=0, last_layers=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_cast_costs_match_real_layers(recipe: str, dtype: torch.dtype) -> None:
    linear = linear_of(recipe, dtype)
    x = torch.randn(ROWS, INPUTS, dtype=dtype, requires_grad=True)
    gradient = torch.randn(ROWS, OUTPUTS, dtype=dtype)
    with CountTraffic() as forward:
        result = linear(x)
    with CountTraffic() as backward:
        result.backward(gradient)
    rounded = describe_layers(a_cast(recipe))[0].rounded
    assert rounded is not None
    setting = CostSetting(Execution(), dtype.itemsize)
    passes = float8_matmul(ROWS, INPUTS, OUTPUTS, rounded, setting)
    for counted, operators in (
        (forward, passes.forward),
        (backward, passes.inputs + passes.weights),
    ):
        casts = [o for o in operators if o.kind == "elementwise"]
        names = [name for name in counted.calls if name != "mm"]
        moved = sum(counted.nbytes[name] for name in names)
        assert sum(o.memory_bytes for o in casts) == pytest.approx(moved, rel=0.03)
        assert sum(o.calls for o in casts) == sum(counted.calls[name] for name in names)


def test_cast_memory_matches_real_layers() -> None:
    class Peak(CountLive):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self.most = max(self.most, self.live_bytes([*linear.parameters()]))
            return out

    (layer, *_) = describe_layers(a_cast("rowwise"), hidden_size=INPUTS, intermediate_size=OUTPUTS)
    linear = linear_of("rowwise", torch.bfloat16)
    x = torch.randn(4096, INPUTS, dtype=torch.bfloat16)
    with Peak() as peak:
        linear(x)
    actual = cast_bytes(layer.rounded, layer_components(layer), SIZES, CostSetting(Execution(), 2))
    largest = 4096 * OUTPUTS  # of a gradient; the forward has the input
    assert float(actual[0]) == 9 * largest
    assert peak.most == pytest.approx(9 * x.numel(), rel=0.01)


def test_float8_matmul_rate_follows_device() -> None:
    setting = CostSetting(Execution(), 2)
    plain = describe_layers(Float8Config(), hidden_size=4096, intermediate_size=14336)[0]
    rounds = describe_layers(a_cast("rowwise"), hidden_size=4096, intermediate_size=14336)[0]
    assert plain.rounded is None
    assert rounds.rounded is not None
    emulated = replace(rounds, rounded=rounds.rounded._replace(has_float8_matmuls=False))

    def matmul_ms(layer: LayerDescription, device: str) -> float:
        operators = layer_operators(layer, SIZES, setting).forward
        profile = load_profile(device)
        actual = [operator_time_ms(o, profile, "bfloat16") for o in operators if o.kind == "matmul"]
        return float(sum(actual)[0])  # type: ignore[index]

    assert matmul_ms(rounds, "h100") == pytest.approx(matmul_ms(plain, "h100") / 2, rel=0.02)
    assert matmul_ms(emulated, "h100") == pytest.approx(matmul_ms(plain, "h100"), rel=0.02)
    assert matmul_ms(rounds, "a100") == pytest.approx(matmul_ms(plain, "a100"), rel=0.02)


def test_float8_costs_apply_to_selected_layers() -> None:
    config = Float8Config(scaling="rowwise", exclude=["mlp.down_proj"], emulate=True)
    first, inner, last = describe_layers(config)
    assert first.rounded is None
    assert last.rounded is None
    assert inner.rounded is not None
    assert (160, 64) not in inner.rounded.linears
    assert (64, 160) in inner.rounded.linears
    casts = 2 * 3  # gate, up, and at least one size of attention
    operators = layer_operators(inner, SIZES, CostSetting(Execution(), 2)).forward
    more = len(operators) - len(layer_operators(first, SIZES, CostSetting(Execution(), 2)).forward)
    assert more >= casts / 2
