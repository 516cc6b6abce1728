"""Exported configs have the keys that transformers 4 reads."""

import copy
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_cases import COMPOSITES, LLMS, build, composite_config
from transformers import AutoConfig, AutoTokenizer
from transformers_4_tokenizers import transformers_4_tokenizer

from torchmm.models.hf.export import export_hf
from torchmm.models.hf.legacy_keys import (
    OLDEST_VERSION,
    add_legacy_keys,
    describe_versions,
    without_legacy_keys,
)
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


def tables(settings: dict) -> Iterator[dict]:
    yield settings
    for value in settings.values():
        if isinstance(value, dict):
            yield from tables(value)


@pytest.mark.parametrize("config", [*LLMS.values(), *COMPOSITES.values()])
def test_both_spellings_have_equal_values(config: dict, tmp_path: Path, tokenizer) -> None:
    AutoConfig.for_model(**copy.deepcopy(config)).save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    add_legacy_keys(tmp_path, tokenizer)
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert without_legacy_keys(after) == without_legacy_keys(before)
    settings = json.loads((tmp_path / "config.json").read_text())
    count = 0
    for part in tables(settings):
        rope = part.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)
        if "rope_theta" in rope and part.get("model_type") != "gemma4_text":
            assert part["rope_theta"] == rope["rope_theta"], part
            count += 1
        if "num_local_experts" in part:
            assert part["num_experts"] == part["num_local_experts"]
    assert count or config["model_type"].startswith("gemma4")
    if "text_config" in settings and "tie_word_embeddings" in settings:
        tied = settings["text_config"]["tie_word_embeddings"]
        assert tied == settings["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("qwen3", "Use transformers 4.57, or 5.17 or later."),
        ("qwen2_5_vl", "Use transformers 4.57, or 5.17 or later."),
        ("qwen3_omni", "Use transformers 5.21 or later."),
        ("paligemma2", "Use transformers 5.23 or later."),
        (
            "minicpm3",
            "Use transformers 5.17 or later. Transformers 4.57 is not supported for minicpm3.",
        ),
        (
            "gpt_oss",
            "Use transformers 5.17 or later. Transformers 4.57 is not supported for swiglu_limit "
            "of gpt_oss.",
        ),
    ],
)
def test_versions_depend_on_model_types(
    name: str, versions: str, tmp_path: Path, tokenizer
) -> None:
    config = copy.deepcopy({**LLMS, **COMPOSITES}[name])
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    add_legacy_keys(tmp_path, tokenizer)
    assert describe_versions(tmp_path) == versions


def test_versions_require_legacy_keys(tmp_path: Path) -> None:
    AutoConfig.for_model(**LLMS["qwen3"]).save_pretrained(tmp_path)
    assert describe_versions(tmp_path).endswith("not supported for rope_parameters of qwen3.")


def test_oldest_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert f"transformers>={OLDEST_VERSION},<5.24" in project["project"]["dependencies"]


def test_bases_ignored_by_version_4_are_omitted(tmp_path: Path, tokenizer) -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    settings = exported("olmo3", tmp_path, tokenizer, rope_parameters=rope)
    assert "rope_theta" not in settings
    assert "not supported for rope_parameters of olmo3" in describe_versions(tmp_path)


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


@pytest.mark.parametrize("adds_bos", [True, False])
def test_begin_and_end_tokens_are_explicit(adds_bos: bool, tmp_path: Path) -> None:
    """Classes such as LlamaTokenizer add the BOS token by default in transformers 4."""
    made = transformers_4_tokenizer("LlamaTokenizer", adds_bos)
    made.save_pretrained(tmp_path)
    add_legacy_keys(tmp_path, made)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "LlamaTokenizer"
    assert settings["add_bos_token"] is adds_bos and settings["add_eos_token"] is False
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded("a <image> b").input_ids == made("a <image> b").input_ids
