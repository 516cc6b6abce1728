"""Unsupported settings and settings of wrong sizes are rejected with their names."""

import copy
import re
from typing import Any

import pytest
from model_cases import COMPOSITES, ENCODERS, LLMS, composite_config, pair_config
from transformers import CONFIG_MAPPING, PreTrainedConfig

from torchmm.common.errors import ConfigError
from torchmm.models.build import build_model
from torchmm.models.families.composites.registry import COMPOSITES as COMPOSITE_FAMILIES
from torchmm.models.families.encoders.registry import ENCODER_FAMILIES
from torchmm.models.families.llms.registry import LLM_FAMILIES
from torchmm.models.hf.config_checks import setting_problems
from torchmm.recipe.model_section import EncoderConfig, FreezeConfig, LlmConfig, ModelConfig

RANDOM = re.compile(r"drop|jitter|noise|mask_time|mask_feature|augment|stochastic|pos_embed_")
HARMLESS = {
    "apply_spec_augment": "rejected by load_config, or off with a warning",
    "mask_feature_prob": "no effect without apply_spec_augment",
    "mask_time_prob": "no effect without apply_spec_augment",
    "feat_quantizer_dropout": "quantizer of wav2vec2 pretraining, not built",
    "final_dropout": "CTC head of wav2vec2, not built",
    "mask_feature_length": "no effect without apply_spec_augment",
    "mask_feature_min_masks": "no effect without apply_spec_augment",
    "mask_time_length": "no effect without apply_spec_augment",
    "mask_time_min_masks": "no effect without apply_spec_augment",
    "pos_embed_jitter": "off in Dinov3Family.build",
    "pos_embed_rescale": "off in Dinov3Family.build",
    "pos_embed_shift": "off in Dinov3Family.build",
}
FAMILIES = [*LLM_FAMILIES, *ENCODER_FAMILIES, *COMPOSITE_FAMILIES]


def configs_of(model_type: str) -> dict[type, PreTrainedConfig]:
    """Return the default config of a family and the configs of its components."""
    queue = [CONFIG_MAPPING[model_type]()]
    results: dict[type, PreTrainedConfig] = {}
    while queue:
        config = queue.pop()
        results.setdefault(type(config), config)
        parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
        queue += [part for part in parts if type(part) not in results]
    return results


@pytest.mark.parametrize("model_type", FAMILIES)
def test_random_fields_are_rejected_or_harmless(model_type: str) -> None:
    for config in configs_of(model_type).values():
        for name in filter(RANDOM.search, vars(config)):
            changed = copy.copy(config)
            default = getattr(config, name)
            value = True if isinstance(default, bool) else 3 if isinstance(default, int) else 0.3
            setattr(changed, name, value)
            rejected = any(f"] {name} = " in p for p in setting_problems("x", changed))
            assert rejected == (name not in HARMLESS), (type(config).__name__, name)


def test_default_spec_augment_is_off_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = encoder_of("wav2vec2")
    del model.encoders["eye"].config["apply_spec_augment"]
    build_model(model, FreezeConfig())
    assert "apply_spec_augment = true has no effect" in caplog.text


def test_unread_keys_of_published_configs_are_accepted() -> None:
    config = CONFIG_MAPPING["llama"](embd_pdrop=0.1)
    assert config.embd_pdrop == 0.1
    assert setting_problems("x", config) == []


def llm_of(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig(llm=LlmConfig(config={**LLMS[name], **changes}))


def encoder_of(name: str, **changes: Any) -> ModelConfig:
    config = pair_config("llama", name)
    section = config.encoders["eye"]
    changed = section.model_copy(update={"config": {**ENCODERS[name], **changes}})
    return config.model_copy(update={"encoders": {"eye": changed}})


def text_of(name: str, **changes: Any) -> ModelConfig:
    return composite_config(name, text_config={**COMPOSITES[name]["text_config"], **changes})


def vision_of(name: str, **changes: Any) -> ModelConfig:
    return composite_config(name, vision_config={**COMPOSITES[name]["vision_config"], **changes})


REJECTED = {
    "jitter": (
        llm_of("mixtral", router_jitter_noise=0.1),
        r"\[model\.llm\] router_jitter_noise = 0\.1 is not supported; override it with 0\.0",
    ),
    "spec augment": (
        encoder_of("wav2vec2", apply_spec_augment=True),
        "apply_spec_augment = true is not supported; override it with false",
    ),
    "full attention": (
        encoder_of("qwen2_5_vl", fullatt_block_indexes=[1, 7]),
        "layer 7 does not exist with depth = 3",
    ),
    "full attention, composite": (
        vision_of("qwen2_5_vl", fullatt_block_indexes=[1, 7]),
        r"\[model\] fullatt_block_indexes = \[1, 7\]: layer 7 does not exist with depth = 3",
    ),
    "deepstack": (
        vision_of("qwen3_vl", deepstack_visual_indexes=[0, 8]),
        r"deepstack_visual_indexes = \[0, 8\] must be increasing indices",
    ),
    "dense layers": (
        llm_of("qwen3_moe", mlp_only_layers=[9]),
        r"mlp_only_layers = \[9\]: layer 9 does not exist with num_hidden_layers = 3",
    ),
    "first dense layers": (
        llm_of("deepseek_v3", first_k_dense_replace=3),
        "first_k_dense_replace = 3 leaves no layer with experts",
    ),
    "layers without rope": (
        llm_of("smollm3", no_rope_layers=[1, 1, 1, 0]),
        "no_rope_layers has 4 entries, but num_hidden_layers = 3",
    ),
    "layer types": (llm_of("gemma3_text", layer_types=["full_attention"] * 4), "layer_types"),
    "windows": (
        llm_of("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=28),
        "max_window_layers = 28 leaves no layer with sliding attention if",
    ),
    "feature layer": (
        composite_config("llava", vision_feature_layer=-9),
        "vision_feature_layer = -9: the vision encoder has",
    ),
    "feature layer from the start": (
        composite_config("llava", vision_feature_layer=9),
        "vision_feature_layer = 9: the vision encoder has",
    ),
    "experts": (
        llm_of("qwen3_moe", num_experts_per_tok=7),
        "num_experts_per_tok = 7 is above the number of experts, 6; use at most 6",
    ),
    "experts of Mixtral": (llm_of("mixtral", num_experts_per_tok=99), "num_experts_per_tok = 99"),
    "experts of DeepSeek": (
        llm_of("deepseek_v3", num_experts_per_tok=99),
        "num_experts_per_tok = 99 is above the",
    ),
    "groups of experts": (llm_of("deepseek_v3", n_group=5), "n_group = 5 must divide"),
    "chosen groups": (llm_of("deepseek_v3", topk_group=9), "topk_group = 9 is above n_group"),
    "experts, composite": (text_of("qwen3_vl_moe", num_experts_per_tok=99), "per_tok = 99"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_setting_of_wrong_size_is_rejected(case: str) -> None:
    config, message = REJECTED[case]
    with pytest.raises(ConfigError, match=message):
        build_model(config, FreezeConfig())


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_router_loss_of_unsupported_family_is_rejected(name: str, tmp_path: Any) -> None:
    config = CONFIG_MAPPING[LLMS[name]["model_type"]](**LLMS[name])
    config.output_router_logits = True  # a key that the class does not list
    config.save_pretrained(tmp_path)
    model = ModelConfig(llm=LlmConfig(source=str(tmp_path)))
    with pytest.raises(ConfigError, match=f"output_router_logits = true: '{name}' has no load"):
        build_model(model, FreezeConfig())


@pytest.mark.parametrize("name", LLMS)
def test_llm_settings_of_valid_size_are_accepted(name: str) -> None:
    build_model(llm_of(name), FreezeConfig())


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_settings_of_valid_size_are_accepted(name: str) -> None:
    build_model(pair_config("llama", name), FreezeConfig())


def test_encoder_setting_error_names_section() -> None:
    section = EncoderConfig(config={**ENCODERS["clip"], "attention_dropout": 0.1})
    config = ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders={"ear": section})
    with pytest.raises(ConfigError, match=r"\[model.encoders.ear\] attention_dropout = 0.1"):
        build_model(config, FreezeConfig())
