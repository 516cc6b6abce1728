"""Exported Hugging Face classes compute the logits of the trained model, or are rejected."""

import pytest
import torch
from model_cases import ENCODERS, LLMS, build, composite_config, pair_config
from transformers import AutoConfig

from torchmm.common.errors import ConfigError
from torchmm.models.families.llms.logit_scaling import describe_logit_change
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.hf import pair_classes, pair_parity
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.pair_classes import PairClass, describe_export_class, pair_class
from torchmm.recipe.model_section import EncoderConfig, LlmConfig, ModelConfig

SCALED = {
    "minicpm3": ({}, "dim_model_base = 256"),
    "gemma3_text": ({"final_logit_softcapping": 3.0}, "final_logit_softcapping = 3.0"),
    "granite": ({}, "logits_scaling = 2.0"),
    "cohere2": ({}, "logit_scale = 0.0625"),
    "gemma2": ({}, "final_logit_softcapping = 3.0"),
}
"""LLMs that scale or cap logits: changes of the test config, and the reported setting."""
PLAIN = {
    "minicpm3": {"dim_model_base": 32},
    "granite": {"logits_scaling": 1.0},
    "gemma2": {"final_logit_softcapping": None},
}
"""The same LLMs with settings that have no effect."""


def pair(llm: str, **changes: object) -> ModelConfig:
    section = LlmConfig(config={**LLMS[llm], **changes})
    return ModelConfig(llm=section, encoders={"eye": EncoderConfig(config=ENCODERS["clip"])})


@pytest.mark.parametrize("llm", SCALED)
def test_llm_with_scaled_logits_is_exported_separately(
    llm: str, tmp_path, tokenizer, caplog
) -> None:
    changes, setting = SCALED[llm]
    model = build(pair(llm, **changes))
    actual = pair_class(model)
    assert isinstance(actual, str) and f"scales or caps its logits ({setting})" in actual
    assert setting in describe_export_class(model)
    export_hf(model, tmp_path, tokenizer)
    assert (tmp_path / "torchmm.json").exists()
    assert f"exporting encoders and LLM separately: {actual}" in caplog.text


@pytest.mark.parametrize("llm", PLAIN)
def test_neutral_logit_scale_exports_as_llava(llm: str) -> None:
    assert isinstance(pair_class(build(pair(llm, **PLAIN[llm]))), PairClass)


@pytest.mark.parametrize("llm", SCALED)
def test_proof_detects_scaled_logits_without_rule(llm: str, monkeypatch) -> None:
    monkeypatch.setattr(pair_classes, "describe_logit_change", lambda *_: "")
    actual = pair_class(build(pair(llm, **SCALED[llm][0])))
    assert isinstance(actual, str) and "logits of LlavaForConditionalGeneration differ by" in actual


@pytest.mark.parametrize(
    ("key", "value"),
    [("vision_feature_layer", -1), ("vision_feature_select_strategy", "full")],
)
def test_proof_detects_different_features(key: str, value: object, monkeypatch) -> None:
    build_config = pair_classes._llava_config

    def changed(*arguments):
        config = build_config(*arguments)
        setattr(config, key, value)
        return config

    config = pair_config("llama", "clip", feature_layer=-2)
    assert isinstance(pair_class(build(config)), PairClass)
    pair_parity._compare.cache_clear()
    monkeypatch.setattr(pair_classes, "_llava_config", changed)
    actual = pair_class(build(config))
    pair_parity._compare.cache_clear()
    assert isinstance(actual, str) and "LlavaForConditionalGeneration" in actual


def test_proof_runs_once_and_preserves_rng_state(monkeypatch) -> None:
    model = build(pair_config("qwen2", "siglip"))
    pair_parity._compare.cache_clear()
    state = torch.get_rng_state()
    pair_class(model)
    pair_class(model)
    describe_export_class(model)
    assert pair_parity._compare.cache_info().misses == 1
    assert torch.equal(torch.get_rng_state(), state)


def multimodal_config(name: str, llm: str, **changes: object) -> ModelConfig:
    text = {**LLMS[llm], **changes}
    return composite_config(name, text_config=text)


@pytest.mark.parametrize(
    ("name", "llm"),
    [*((name, llm) for name in ("llava", "internvl") for llm in SCALED), ("gemma3", "gemma3_text")],
)
def test_multimodal_model_with_scaled_logits_is_rejected(name: str, llm: str) -> None:
    changes, setting = SCALED[llm]
    with pytest.raises(ConfigError, match=r"scales or caps its logits") as error:
        build(multimodal_config(name, llm, **changes))
    assert setting in str(error.value)


def test_model_that_caps_logits_rejects_scales_only() -> None:
    capped = LLM_FAMILIES["gemma2"], LLM_FAMILIES["cohere2"]
    gemma, cohere = (AutoConfig.for_model(**LLMS[name]) for name in ("gemma2", "cohere2"))
    assert describe_logit_change(gemma, capped[0]) and not describe_logit_change(
        gemma, capped[0], caps=True
    )
    assert describe_logit_change(cohere, capped[1], caps=True)
    build(composite_config("paligemma2"))
