"""Exported configs have the keys that transformers 4 reads."""

import json
from pathlib import Path

import pytest
from model_cases import LLMS, build, composite_config
from transformers import AutoConfig, AutoTokenizer

from torchmm.models.hf.export import export_hf
from torchmm.recipe.model_section import LlmConfig, ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def exported(llm: str, directory: Path, tokenizer, **changes: object) -> dict:
    config = LlmConfig(config={**LLMS[llm], **changes})
    export_hf(build(ModelConfig(llm=config)), directory, tokenizer)
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_export_has_rope_keys_of_transformers_4(scaling, tmp_path: Path, tokenizer) -> None:
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": 5e6}
    settings = exported("qwen3", tmp_path, tokenizer, rope_parameters=rope)
    assert settings["rope_theta"] == 5e6
    assert settings["rope_scaling"] == scaling
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope


def test_partial_rotary_factor_is_top_level_key(tmp_path: Path, tokenizer) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    settings = exported("glm", tmp_path, tokenizer, rope_parameters=rope)
    assert settings["partial_rotary_factor"] == 0.5 and settings["rope_scaling"] is None


def test_rope_by_layer_type_preserves_both_bases(tmp_path: Path, tokenizer) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    settings = exported("gemma3_text", tmp_path, tokenizer, rope_parameters=rope)
    assert settings["rope_theta"] == 1e6 and settings["rope_local_base_freq"] == 2e4
    assert settings["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope


def test_multimodal_text_config_has_rope_keys(tmp_path: Path, tokenizer) -> None:
    model = build(composite_config("qwen2_5_vl"))
    export_hf(model, tmp_path, tokenizer)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    rope = model.llm.text_config.rope_parameters
    assert text["rope_theta"] == rope["rope_theta"]
    assert text["rope_scaling"]["mrope_section"] == rope["mrope_section"]
    assert AutoConfig.from_pretrained(tmp_path).text_config.rope_parameters == rope


def test_tokenizer_class_exists_in_both_versions(tmp_path: Path, tokenizer) -> None:
    exported("llama", tmp_path, tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<image>"]
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    assert reloaded.all_special_ids == tokenizer.all_special_ids
    assert reloaded("w5 <image> w6").input_ids == tokenizer("w5 <image> w6").input_ids
