"""Wrong values of configs are rejected with the key that must change."""

import json

import pytest
from model_cases import COMPOSITES, ENCODERS, LLMS, problems_of_model

from torchmm.common.errors import ConfigError
from torchmm.data.media.preprocessors import open_media
from torchmm.models.build import build_model
from torchmm.models.hf.config import load_config
from torchmm.models.hf.config_values import value_problems
from torchmm.recipe.model_section import FreezeConfig, ModelConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "nope"),
        ("hidden_act", None),
        ("hidden_size", -64),
        ("hidden_size", 0),
        ("hidden_size", 32.0),
        ("hidden_size", "32"),
        ("hidden_size", 10**12),
        ("hidden_size", [32]),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -2),
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", 0),
        ("vocab_size", 2**63),
        ("dtype", "float7"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1.0),
        ("pad_token_id", 64),
        ("id2label", {"nope": 1}),
        ("return_dict", False),
    ],
)
def test_llm_config_wrong_value_names_key(name, value):
    (problem,) = problems_of_model({"llm": {"config": {**LLMS["llama"], name: value}}})
    assert "[model.llm] config" in problem
    assert name in problem


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "nope", "rope_theta": 1e4}, "rope_type = 'nope'"),
        ({"rope_type": ["default"]}, "rope_type = ['default']"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": {}}, "rope_parameters"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta = 0"),
        ("default", "rope_parameters"),
    ],
)
def test_llm_config_wrong_rope_names_key(rope, key):
    config = {**LLMS["llama"], "rope_parameters": rope}
    assert key in " ".join(problems_of_model({"llm": {"config": config}}))


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("clip", "patch_size", 0),
        ("clip", "image_size", 10**6),
        ("clip", "hidden_act", "nope"),
        ("dinov2", "layer_norm_eps", -1.0),
        ("qwen2_5_vl", "rope_parameters", {"rope_type": "nope"}),
    ],
)
def test_encoder_config_wrong_value_names_key(family, name, value):
    config = {**ENCODERS[family], name: value}
    section = {"llm": {"config": LLMS["llama"]}, "encoders": {"eye": {"config": config}}}
    (problem,) = problems_of_model(section)
    assert problem.startswith("[model.encoders.eye] config")
    assert name in problem


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("vision_config", "patch_size", 0),
        ("text_config", "hidden_act", "nope"),
        ("text_config", "model_type", 7),
    ],
)
def test_composite_config_wrong_value_names_key(part, name, value):
    config = {**COMPOSITES["llava"], part: {**COMPOSITES["llava"][part], name: value}}
    (problem,) = problems_of_model({"config": config})
    assert f"[model] config: {part}.{name}" in problem


@pytest.mark.parametrize(("name", "value"), [("image_mean", "nope"), ("resample", {})])
def test_processor_wrong_value_is_config_error(name, value):
    encoder = {"config": ENCODERS["clip"], "processor": {name: value}}
    section = {"llm": {"config": LLMS["llama"]}, "encoders": {"eye": encoder}}
    model = build_model(ModelConfig.model_validate(section), FreezeConfig())
    with pytest.raises(ConfigError, match=rf"encoder 'eye'.*{name}"):
        open_media(model.encoder_modules()[0].image_spec(), 10**6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("image_std", [0.5, 0.0, 0.5]), ("rescale_factor", float("inf")), ("size", {"height": 10**6})],
)
def test_processor_setting_out_of_range_names_key(name, value):
    encoder = {"config": ENCODERS["clip"], "processor": {name: value}}
    section = {"llm": {"config": LLMS["llama"]}, "encoders": {"eye": encoder}}
    (problem,) = problems_of_model(section)
    assert problem.startswith("[model.encoders.eye] processor")
    assert name in problem


@pytest.mark.parametrize("depth", [17, 10**5])
def test_deeply_nested_config_is_rejected(depth):
    table: dict = {}
    for _ in range(depth):
        table = {"inner": table}
    (problem,) = value_problems("config.json", table)
    assert "nested objects" in problem


def test_values_of_published_configs_are_accepted():
    settings = {
        "hidden_size_per_layer_input": 0,
        "image_size": [448, 448],
        "n_shared_experts": 0,
        "pad_token_id": -1,
        "q_lora_rank": None,
        "quantization_config": {"group_size": -1, "quant_method": "gptq"},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": None,
        "torch_dtype": "torch.bfloat16",
        "vision_feature_layer": -2,
        "vocab_size": 262144,
    }
    assert value_problems("config.json", settings) == []


def test_source_with_wrong_value_names_config_json(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**LLMS["llama"], "num_hidden_layers": 10**12})
    )
    with pytest.raises(ConfigError, match=r"config\.json: num_hidden_layers = 10+ is out of range"):
        load_config("model.llm", str(tmp_path), None)
