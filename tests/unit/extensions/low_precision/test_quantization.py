"""NF4 weights: codes, errors, memory, files, and recipes that are rejected."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_cases import LLMS, microbatch, pair_config, randomize, relative_error
from nf4_reference import NF4_LEVELS, nf4_codes, round_to_nf4
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from torchmm.costs.layers import stage_parameters
from torchmm.extensions.low_precision.nf4 import CHUNK, Nf4Format, Nf4Linear, decode, multiply
from torchmm.extensions.low_precision.quantization import QuantizationConverter
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.planning.executions import parameter_states
from torchmm.planning.recipe_model import recipe_model
from torchmm.planning.run_length import checkpoint_bytes
from torchmm.recipe.model_section import LlmConfig, ModelConfig
from torchmm.recipe.read import check_recipe
from torchmm.recipe.recipe import Recipe

FORM = Nf4Format(torch.float32)
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
SECTIONS = {
    "adapters": {"low": {"modules": ["llm"], "rank": 2}},
    "quantization": {"quant_type": "nf4"},
}
WORST = float((NF4_LEVELS[1:] - NF4_LEVELS[:-1]).max()) / 2
"""Largest distance from a level, in units of the scale."""


def text_recipe(family: str = "qwen3", source: str | None = None, **sections: object) -> Recipe:
    config = None if source else {**LLMS[family], **WIDE}
    model = ModelConfig(llm=LlmConfig(config=config, source=source))
    return Recipe.model_validate({"model": model.model_dump(), **SECTIONS, **sections})


def build(recipe: Recipe, dtype: torch.dtype = torch.float32) -> MultimodalModel:
    """Return the converted model of a recipe on the CPU."""
    model = recipe_model(recipe, dtype)
    converter = QuantizationConverter(recipe)
    for module in model.modality_modules():
        converter.convert(module)
    materialize(model, "cpu")
    init_weights(model, 0, skip=load_weights(model))
    return model


def random_weight(rows: int = 96, columns: int = 192) -> Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight[3] *= 100
    weight[5, 64:128] = 0
    return weight


def test_codes_match_paper_and_torchao() -> None:
    weight = random_weight()
    codes, scales = nf4_codes(weight)
    blocks = FORM.encode(weight).view(96, 3, 36)
    pairs = blocks[..., :32]
    actual = torch.stack((pairs >> 4, pairs & 15), -1).view_as(weight)
    assert torch.equal(actual.long(), codes)
    assert torch.equal(blocks[..., 32:].contiguous().view(torch.float32).view_as(scales), scales)
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    filled = weight[6:]  # torchao divides by the scale, which must not be 0
    theirs = nf4.NF4Tensor.convert_to_norm_float_weight(
        filled, filled.numel() // 64, 64, NF4_LEVELS
    )
    assert torch.equal(pairs[6:].flatten(), theirs.flatten())


def test_decoded_weights_are_nearest_levels() -> None:
    weight = random_weight()
    decoded = FORM.decode(FORM.encode(weight))
    assert torch.equal(decoded, round_to_nf4(weight))
    _, scales = nf4_codes(weight)
    errors = (decoded - weight).view(-1, 64).abs() / scales.clamp(min=1e-30)
    assert 0.8 * WORST < float(errors.max()) <= WORST * (1 + 1e-6)
    assert torch.equal(FORM.encode(decoded), FORM.encode(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_shards_have_bytes_of_full_weight(dtype: torch.dtype, monkeypatch) -> None:
    weight = random_weight().to(dtype)
    full = FORM.encode(weight)
    assert torch.equal(torch.cat([FORM.encode(rows) for rows in weight.tensor_split(5)]), full)
    halves = [FORM.encode(columns) for columns in weight.split([64, 128], 1)]
    assert torch.equal(torch.cat(halves, 1), full)
    whole = decode(full, dtype)
    monkeypatch.setattr("torchmm.extensions.low_precision.nf4.CHUNK", 1000)
    assert torch.equal(FORM.encode(weight), full)
    assert torch.equal(decode(full, dtype), whole)
    assert CHUNK % 64 == 0


@pytest.mark.parametrize("compiles", [False, True])
def test_multiply_has_gradients_of_decoded_weight(compiles: bool) -> None:
    weight = random_weight()
    bias = torch.randn(96)
    run = torch.compile(multiply, backend="aot_eager") if compiles else multiply
    x = torch.randn(2, 5, 192, requires_grad=True)
    out = run(x, FORM.encode(weight), bias)
    reference = torch.nn.functional.linear(x, round_to_nf4(weight), bias)
    assert torch.equal(out, reference)
    grad = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, x, grad)
    (expected,) = torch.autograd.grad(reference, x, grad)
    assert relative_error(actual, expected) < 1e-6
    with pytest.raises(TypeError, match="not floating-point"):
        multiply(x.detach().int(), FORM.encode(weight), None)


def test_autograd_saves_only_codes() -> None:
    saved: list[Tensor] = []
    x = torch.randn(4, 192, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        multiply(x, FORM.encode(random_weight()), None)
    assert [tensor.dtype for tensor in saved] == [torch.uint8]


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "starcoder2", "qwen3_5"])
def test_quantized_llm_equals_decoded_weights(family: str) -> None:
    """Check that no forward pass reads a weight without decoding it."""
    recipe = text_recipe(family)
    model = build(recipe)
    quantized = [n for n, m in model.llm.named_modules() if isinstance(m, Nf4Linear)]
    assert set(quantized) == set(model.llm.weight_formats)
    plain = recipe_model(text_recipe(family, quantization={}))
    materialize(plain, "cpu")
    init_weights(plain, 0)
    full = {name: p.clone() for name, p in plain.named_parameters()}
    batch = microbatch([7, 5])

    def logits(model: MultimodalModel) -> Tensor:
        with torch.no_grad():
            return model.llm.logits(batch, {}, batch.target_positions_L)

    assert relative_error(logits(model), logits(plain)) > 1e-3
    with torch.no_grad():
        for name in quantized:
            parameter = plain.llm.get_parameter(f"{name}.weight")
            parameter.copy_(round_to_nf4(parameter))
    assert relative_error(logits(model), logits(plain)) < 1e-5
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            assert torch.equal(parameter, full[name]), name


def test_memory_of_dry_run_matches_parameters() -> None:
    recipe = text_recipe(training={"parameter_dtype": "bfloat16", "dtype": "bfloat16"})
    module = recipe_model(recipe, torch.bfloat16).llm.describe()
    parameters = stage_parameters(module, 0, 3, states=parameter_states(recipe))
    model = build(recipe, torch.bfloat16)
    stored = {id(p): p.nbytes for p in model.parameters()}
    assert parameters.weight_bytes == sum(stored.values())
    assert parameters.compute_bytes(2) == parameters.weight_bytes
    codes = [p for p in model.parameters() if p.dtype == torch.uint8]
    assert parameters.quantized_bytes == sum(p.nbytes for p in codes)
    assert parameters.quantized_bytes == parameters.quantized * 36 / 64 > 0
    states = 2 * 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert checkpoint_bytes(recipe, recipe_model(recipe)) == sum(stored.values()) + states


def saved_llm(directory: Path) -> str:
    # With other seeds, a weight can be in the middle of two levels and be rounded to either.
    torch.manual_seed(1)
    plain = AutoModelForCausalLM.from_config(recipe_model(text_recipe()).llm.config)
    randomize(plain)
    plain.save_pretrained(directory)
    return str(directory)


def test_source_weights_are_quantized_and_exported_decoded(tmp_path: Path, real_data: Path) -> None:
    source = saved_llm(tmp_path / "source")
    model = build(text_recipe(source=source))
    files = load_file(tmp_path / "source" / "model.safetensors")
    for name in model.llm.weight_formats:
        stored = model.llm.get_parameter(f"{name}.weight")
        hf_name = f"{name}.weight".removeprefix("backbone.")
        assert torch.equal(FORM.decode(stored), round_to_nf4(files[hf_name]))


RECIPES: dict[str, tuple[dict, str]] = {
    "trained": ({"adapters": {}}, "is trained, but only frozen weights can be quantized"),
    "unknown": ({"quantization": {"quant_type": "nf4", "modules": ["eye"]}}, "unknown module"),
    "dora": (
        {"adapters": {"low": {"modules": ["llm"], "method": "dora"}}},
        "requires full weights",
    ),
    "async": (
        {
            "parallel": {
                "tensor": 2,
                "sequence_parallel": True,
                "async_tensor_parallel": True,
            }
        },
        "is not supported for the quantized linear layers",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_unsupported_recipe_is_rejected(name: str) -> None:
    changes, expected = RECIPES[name]
    problems = [p for p in check_recipe(text_recipe(**changes), 2) if "quanti" in p]
    assert any(expected in p for p in problems), problems


def test_supported_recipe_has_no_quantization_problems() -> None:
    assert not [p for p in check_recipe(text_recipe(), 1) if "quanti" in p]
    frozen = text_recipe(adapters={}, freeze={"modules": ["llm"]})
    assert not [p for p in check_recipe(frozen, 1) if "quanti" in p]


MODELS: dict[str, tuple[Callable[[], Recipe], int, str]] = {
    "experts": (lambda: text_recipe("qwen3_moe"), 1, "stacked weights cannot be quantized"),
    "narrow": (
        lambda: Recipe.model_validate(
            {"model": pair_config("llama", "clip").model_dump(), **SECTIONS}
        ),
        1,
        "has no linear layer whose number of input features",
    ),
    "tensor": (text_recipe, 4, "tensor = 4 splits 128 input features"),
    "supported": (text_recipe, 2, ""),
}


@pytest.mark.parametrize("name", MODELS)
def test_unsupported_model_is_rejected(name: str) -> None:
    make, tensor, expected = MODELS[name]
    recipe = make()
    modules = list(recipe_model(recipe).modality_modules())
    sizes = {module.name: tensor for module in modules}
    problems = QuantizationConverter(recipe).find_problems(modules, torch.device("cpu"), sizes)
    assert len(problems) == bool(expected)
    assert all(expected in problem for problem in problems)
