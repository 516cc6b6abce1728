"""Model types of 2026: published configs of Qwen3.6 and Qwen3.8, and rejected mechanisms."""

import json
from pathlib import Path

import pytest
import torch
from model_cases import (
    COMPOSITES,
    LLMS,
    microbatch,
    problems_of_model,
    relative_error,
)
from test_hf_io import load, save
from test_multimodal import mrope_positions, two_samples_with_images
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from torchmm.models.families.introspection import find_mechanisms
from torchmm.recipe.model_section import LlmConfig, ModelConfig

PUBLISHED_KEYS = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
}
"""Keys of the text config of Qwen3.8 that Qwen3.5 models of transformers do not read."""


def add_published_keys(directory: Path) -> None:
    file = directory / "config.json"
    settings = json.loads(file.read_text())
    text = settings.get("text_config", settings)
    text |= PUBLISHED_KEYS
    text["rope_parameters"]["mrope_interleaved"] = True
    file.write_text(json.dumps(settings))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_config_of_qwen3_8_matches_hugging_face(name: str, tmp_path: Path) -> None:
    save(AutoModelForImageTextToText, COMPOSITES[name], tmp_path)
    add_published_keys(tmp_path)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    model = load(ModelConfig(source=str(tmp_path)))
    batch, samples = two_samples_with_images(name)
    batch.position_ids = mrope_positions(plain, samples)
    with torch.no_grad():
        expected = torch.cat([plain(**sample).logits[0] for sample in samples])
        positions = torch.arange(len(expected))
        assert relative_error(model.llm.logits(batch, model.encode(batch), positions), expected) < (
            1e-5
        )


def test_text_config_of_qwen3_8_matches_hugging_face(tmp_path: Path) -> None:
    """The largest Qwen3.8 is published as a causal LM."""
    save(AutoModelForCausalLM, LLMS["qwen3_5_moe"], tmp_path)
    add_published_keys(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = load(ModelConfig(llm=LlmConfig(source=str(tmp_path))))
    batch = microbatch([11])
    with torch.no_grad():
        expected = plain(batch.input_ids_T[None], use_cache=False).logits[0]
        assert relative_error(model.llm.logits(batch, {}, torch.arange(11)), expected) < 1e-5


@pytest.mark.parametrize(
    ("model_type", "mechanism"),
    [
        ("gemma4_unified", "patches and audio samples that enter the LLM without encoder layers"),
        ("glm5_next", "several residual streams between layers, linear attention, an indexer"),
        ("glm_ocr", "an encoder with norms of queries and keys"),
        ("glmga", "image sizes that are multiples of patch_expand_factor"),
        ("minicpm_ocr", "a merger of patches between encoder layers"),
        ("minicpmv4_6", "a merger of patches between encoder layers"),
        ("minicpmv4_7", "a merger of patches between encoder layers"),
        ("nemotron_h_omni", "state-space (Mamba) layers, video patches of several frames"),
        ("step3p7", "gated attention heads whose number differs between layers"),
    ],
)
def test_mechanism_of_rejected_family_is_known(model_type: str, mechanism: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have the model type")
    (found,) = find_mechanisms(CONFIG_MAPPING[model_type]())
    assert found.startswith(mechanism)


def test_rejected_family_error_names_mechanism_and_components() -> None:
    (problem,) = problems_of_model({"config": {"model_type": "minicpmv4_6"}})
    assert "is not supported; it has a merger of patches between encoder layers" in problem
    assert "its text_config is 'qwen3_5_text' (supported)" in problem


@pytest.mark.parametrize("model_type", ["moss_vl", "step3_vl"])
def test_type_without_transformers_class_is_unknown(model_type: str) -> None:
    (problem,) = problems_of_model({"config": {"model_type": model_type}})
    assert f"model_type = {model_type!r} is unknown" in problem
