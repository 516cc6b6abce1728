"""Float32 tensors of Hugging Face models stay float32 when built, loaded, trained and exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import COMPOSITES, LLMS, build, composite_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from torchmm.models.build import build_model
from torchmm.models.families.composites.registry import COMPOSITES as COMPOSITE_FAMILIES
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.recipe.model_section import FreezeConfig, LlmConfig, ModelConfig

NARROW = (torch.bfloat16, torch.float16)
BIAS = "e_score_correction_bias"


def hugging_face(name: str) -> PreTrainedModel:
    """Return the Hugging Face model of a case on the meta device."""
    with torch.device("meta"):
        if name in LLMS:
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLMS[name]))
        config = AutoConfig.for_model(**COMPOSITES[name])
        config = getattr(config, "thinker_config", config)
        model_class: Any = COMPOSITE_FAMILIES[config.model_type].kind
        return model_class._from_config(config)


def config_of(name: str) -> ModelConfig:
    if name in LLMS:
        return ModelConfig(llm=LlmConfig(config=LLMS[name]))
    return composite_config(name)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", [*LLMS, *COMPOSITES])
def test_model_has_float32_tensors_of_from_pretrained(name: str, dtype: torch.dtype) -> None:
    plan = hugging_face(name)._get_dtype_plan(dtype)
    model = build_model(config_of(name), FreezeConfig(), dtype)
    tensors = model.state_dict()
    for key in plan:
        assert {tensor.dtype for fqn, tensor in tensors.items() if key in fqn} == {torch.float32}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write bfloat16 files with float32 expert biases near 5, as published."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLMS["deepseek_v3"]))
    plain.to(torch.bfloat16)
    for name, buffer in list(plain.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        if leaf == BIAS:
            setattr(plain.get_submodule(owner), leaf, 5 + torch.rand(buffer.shape))
    plain.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def biases_in(directory: Path) -> dict[str, Tensor]:
    stored = load_file(directory / "model.safetensors")
    results = {name: value for name, value in stored.items() if BIAS in name}
    assert results and all(value.dtype == torch.float32 for value in results.values())
    return results


def load_model(source: Path) -> MultimodalModel:
    config = ModelConfig(llm=LlmConfig(source=str(source)))
    model = build_model(config, FreezeConfig(), torch.bfloat16)
    materialize(model, "cpu")
    init_weights(model, 0, skip=load_weights(model))
    return model


def test_expert_biases_are_loaded_and_exported_unchanged(
    source: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = load_model(source)
    export_hf(model, tmp_path / "export", tokenizer)
    expected, exported = biases_in(source), biases_in(tmp_path / "export")
    for name, value in expected.items():
        assert not torch.equal(value.bfloat16().float(), value)
        assert torch.equal(model.llm.backbone.state_dict()[name], value)
        assert torch.equal(exported[name], value)


def test_bfloat16_router_selects_experts_of_hugging_face(source: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 400, 32, generator=generator).bfloat16()
    ours, theirs = (
        part.layers[-1].mlp.gate(hidden)[-1]
        for part in (load_model(source).llm.text_model, plain.model)
    )
    assert torch.equal(ours, theirs)


def test_frozen_positions_of_voxtral_are_buffers() -> None:
    """Check this because FSDP2 casts parameters and requires one dtype per layer."""
    tower = build(composite_config("voxtral")).encoders["audio"].tower
    assert "embed_positions.weight" in dict(tower.named_buffers())
    assert "embed_positions.weight" in tower.state_dict()
