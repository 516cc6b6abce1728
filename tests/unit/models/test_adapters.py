"""Low-rank adapters: comparison with PEFT, file format, selection of layers, and frozen weights."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import (
    ENCODERS,
    LLMS,
    composite_config,
    make_inputs,
    microbatch,
    pair_config,
    randomize,
    relative_error,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.models.build import build_model
from torchmm.models.hf import adapter_files
from torchmm.models.hf.adapter_files import WEIGHTS_FILE, load_adapters, save_adapters
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.layers.lora import adapted_linears, is_adapter_parameter, merge_lora
from torchmm.models.multimodal import MultimodalModel, materialize, module_of
from torchmm.recipe.model_section import AdapterConfig, FreezeConfig, LlmConfig, ModelConfig

EXACT = 1e-5
PEFT_NAMES = {"down": "lora_A", "up": "lora_B", "magnitude": "lora_magnitude_vector"}


def build(config: ModelConfig, move: bool = True, **adapters: dict[str, Any]) -> MultimodalModel:
    """Build a model on the CPU with adapters by name.

    Args:
        config: Model section of a recipe.
        move: Whether to set all weights to random values, including second factors and biases.
        adapters: Adapter sections by name.
    """
    sections = {name: AdapterConfig.model_validate(a) for name, a in adapters.items()}
    model = build_model(config, FreezeConfig(), adapters=sections)
    materialize(model, "cpu")
    init_weights(model, 0, skip=load_weights(model))
    if move:
        randomize(model)
    return model


def text_config(family: str) -> ModelConfig:
    return ModelConfig(llm=LlmConfig(config=LLMS[family]))


def without_adapters(
    config: ModelConfig, model: MultimodalModel, *, added: bool = True
) -> MultimodalModel:
    """Return a model with merged adapter weights, or without adapters if `added` is False."""
    plain = build(config)
    values = {n: v for n, v in model.state_dict().items() if not is_adapter_parameter(n)}
    for prefix, module in model.named_modality_modules():
        for name, linear, lora in adapted_linears(module) if added else ():
            factors = dict(lora.named_parameters())
            values[f"{prefix}.{name}.weight"] = merge_lora(linear.weight, factors, lora.spec)
    plain.load_state_dict(values)
    return plain


def logits(model: MultimodalModel) -> torch.Tensor:
    batch = microbatch([7, 5])
    with torch.no_grad():
        return model.llm.logits(batch, {}, batch.target_positions_L)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("family", list(LLMS))
def test_llm_adapters_of_all_layers_match_merged_weights(family: str, method: str) -> None:
    """Check that no forward pass uses a weight without its adapter."""
    config = text_config(family)
    model = build(config, a={"modules": ["llm"], "rank": 2, "alpha": 1.0, "method": method})
    actual = logits(model)
    assert relative_error(actual, logits(without_adapters(config, model))) < 3 * EXACT
    assert relative_error(actual, logits(without_adapters(config, model, added=False))) > 1e-3


@pytest.mark.parametrize("family", list(ENCODERS))
def test_encoder_adapters_match_merged_weights(family: str) -> None:
    config = pair_config("llama", family)
    model = build(config, a={"modules": ["eye"], "rank": 2, "alpha": 1.0})
    inputs = make_inputs(family)
    with torch.no_grad():
        features = model.encoders["eye"](inputs)
        expected = without_adapters(config, model).encoders["eye"](inputs)
    assert relative_error(features, expected) < 3 * EXACT


def saved_llm(directory: Path, family: str = "qwen3") -> ModelConfig:
    """Save a model to disk and return its config."""
    plain = AutoModelForCausalLM.from_config(build(text_config(family)).llm.config)
    randomize(plain)
    plain.save_pretrained(directory)
    return ModelConfig(llm=LlmConfig(source=str(directory)))


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
def test_peft_loads_adapter_files_with_equal_gradients(method: str, tmp_path: Path) -> None:
    config = saved_llm(tmp_path / "llm")
    section = {"modules": ["llm"], "targets": ["q_proj", "down_proj"], "rank": 3, "method": method}
    model = build(config, move=False, mine=section)
    for _, _, lora in adapted_linears(model):
        torch.nn.init.normal_(lora.up, std=0.1)
        if lora.magnitude is not None:
            lora.magnitude.data *= 1 + 0.1 * torch.randn(len(lora.magnitude))
    save_adapters(model, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llm", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / "mine", is_trainable=True)
    batch = microbatch([9])
    ids, retained = batch.input_ids_T[None], batch.target_positions_L
    actual = theirs(ids, use_cache=False).logits[0, retained]
    ours = model.llm.logits(batch, {}, retained)
    assert relative_error(ours, actual) < EXACT
    actual.square().sum().backward()
    ours.square().sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    compared = 0
    for name, _, lora in adapted_linears(model.llm.backbone):
        path = f"base_model.model.{name}"
        for part, parameter in lora.named_parameters():
            peft_grad = gradients[f"{path}.{PEFT_NAMES[part]}.default.weight"]
            assert relative_error(parameter.grad, peft_grad) < EXACT
            compared += 1
    assert compared == len(gradients)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llava", "lora"),
        ("qwen2_5_vl", "lora"),
        ("qwen3_vl_moe", "lora"),
        ("gemma3", "lora"),
        ("qwen2_5_vl", "dora"),
    ],
)
def test_peft_merge_matches_export_of_multimodal_model(
    name: str, method: str, tmp_path: Path, tokenizer
) -> None:
    plain = AutoModelForImageTextToText.from_config(build(composite_config(name)).composite)
    plain.save_pretrained(tmp_path / "base")
    config = ModelConfig(source=str(tmp_path / "base"))
    modules = ["llm", "vision", *(["vision.connector"] if name != "gemma3" else [])]
    model = build(config, both={"modules": modules, "rank": 2, "method": method})
    frozen = plain.state_dict()
    with torch.no_grad():  # the base weights that PEFT loads
        model_of_source = build(config, move=False).state_dict()
        for fqn, value in model.state_dict().items():
            if not is_adapter_parameter(fqn):
                value.copy_(model_of_source[fqn])
    save_adapters(model, tmp_path)
    export_hf(model, tmp_path / "merged", tokenizer)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "both").merge_and_unload().state_dict()
    ours = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").state_dict()
    assert ours.keys() == theirs.keys()
    changed = 0
    for key, value in ours.items():
        assert torch.allclose(value, theirs[key], rtol=0, atol=1e-6), key
        changed += not torch.equal(value, frozen[key])
    assert changed == sum(len(m.adapters) for m in model.modality_modules())


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_peft_adapter_files_load(method: str, tmp_path: Path) -> None:
    config = saved_llm(tmp_path / "llm")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llm")
    settings = LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", use_dora=method == "dora")
    theirs = get_peft_model(base, settings)
    randomize(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    section = {"modules": ["llm"], "rank": 2, "alpha": 6.0, "method": method}
    model = build(config, move=False, mine=section)
    names = load_adapters(model, {"mine": str(tmp_path / "theirs")})
    assert names == {n for n, _ in model.named_parameters() if is_adapter_parameter(n)}
    save_adapters(model, tmp_path / "again")
    first, second = (load_file(tmp_path / d / WEIGHTS_FILE) for d in ("theirs", "again/mine"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    written = json.loads((tmp_path / "again/mine/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "llm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 3}, r"r = 2, but \[adapters\.mine\] requires 3"),
        ({"alpha": 5.0}, "lora_alpha = 6.0"),
        ({"method": "rslora"}, "use_rslora = False"),
        ({"method": "dora"}, "use_dora = False"),
        ({"targets": ["q_proj"]}, "also has"),
        ({"targets": ["all-linear"], "modules": ["llm", "eye"]}, "cannot be read"),
    ],
)
def test_files_of_different_adapter_are_rejected(
    change: dict, message: str, tmp_path: Path
) -> None:
    section = {"modules": ["llm"], "targets": ["q_proj", "v_proj"], "rank": 2, "alpha": 6.0}
    config = pair_config("llama", "clip")
    save_adapters(build(config, mine=section), tmp_path)
    other = build(config, mine={**section, **change})
    with pytest.raises(CheckpointError, match=message):
        load_adapters(other, {"mine": str(tmp_path / "mine")})


def lora_file(directory: Path, **settings: Any) -> Path:
    """Write an adapter with PEFT and return its directory."""
    base = AutoModelForCausalLM.from_pretrained(directory / "llm")
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"], **settings)
    get_peft_model(base, config).save_pretrained(directory / "theirs")
    return directory / "theirs"


UNSUPPORTED = [
    ({"alpha_pattern": {"q_proj": 12}}, 'alpha_pattern = {"q_proj": 12}'),
    ({"rank_pattern": {"q_proj": 4}}, 'rank_pattern = {"q_proj": 4}'),
    ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa"'),
    ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights = "pissa_niter_4"'),
    ({"init_lora_weights": "olora"}, 'init_lora_weights = "olora"'),
    ({"bias": "lora_only"}, 'bias = "lora_only"'),
    ({"lora_bias": True}, "lora_bias = true"),
    ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"]'),
    ({"trainable_token_indices": [1, 2]}, "trainable_token_indices = "),
    ({"layer_replication": [(0, 1), (0, 2)]}, "layer_replication = [[0, 1], [0, 2]]"),
]


@pytest.mark.parametrize(("settings", "message"), UNSUPPORTED)
def test_unsupported_peft_settings_are_rejected(settings, message: str, tmp_path: Path) -> None:
    config = saved_llm(tmp_path / "llm")
    source = lora_file(tmp_path, **settings)
    section = {"modules": ["llm"], "targets": ["q_proj", "v_proj"], "rank": 2, "alpha": 6.0}
    model = build(config, move=False, mine=section)
    with pytest.raises(CheckpointError) as error:
        load_adapters(model, {"mine": str(source)})
    assert f"{message}" in str(error.value) and "is not supported; " in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
        {"alpha_pattern": {"q_proj": 6}, "rank_pattern": {"v_proj": 2}},
        {"init_lora_weights": "orthogonal"},
    ],
)
def test_peft_settings_without_effect_load(settings, tmp_path: Path) -> None:
    config = saved_llm(tmp_path / "llm")
    source = lora_file(tmp_path, **settings)
    section = {"modules": ["llm"], "targets": ["q_proj", "v_proj"], "rank": 2, "alpha": 6.0}
    model = build(config, move=False, mine=section)
    load_adapters(model, {"mine": str(source)})
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llm", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, source)
    batch = microbatch([9])
    actual = theirs(batch.input_ids_T[None], use_cache=False).logits[0, batch.target_positions_L]
    assert relative_error(model.llm.logits(batch, {}, batch.target_positions_L), actual) < EXACT


def test_every_peft_setting_has_rule() -> None:
    """Check that a new field of PEFT fails until it has a rule."""
    supported = {*adapter_files._RUN_SETTINGS, *adapter_files._ACCEPTED, *adapter_files._PATTERNS}
    supported |= {"r", "lora_alpha", "use_rslora", "use_dora"}
    assert {field.name for field in dataclasses.fields(LoraConfig)} == supported
    defaults = LoraConfig().to_dict()
    assert not list(adapter_files._unsupported_settings(defaults))


def test_unknown_peft_setting_and_wrong_shape_are_rejected(tmp_path: Path) -> None:
    config = pair_config("llama", "clip")
    section = {"modules": ["llm"], "targets": ["q_proj"], "rank": 2, "alpha": 6.0}
    model = build(config, mine=section)
    save_adapters(model, tmp_path)
    file = tmp_path / "mine/adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "use_new_idea": True, "peft_type": "LOHA"}))
    with pytest.raises(CheckpointError, match=r"use_new_idea = true is not supported") as error:
        load_adapters(model, {"mine": str(tmp_path / "mine")})
    assert 'peft_type = "LOHA" is not supported' in str(error.value)
    file.write_text(json.dumps({**settings, "use_new_idea": None}))
    weights = load_file(tmp_path / "mine" / WEIGHTS_FILE)
    name = next(name for name in weights if "lora_A" in name)
    weights[name] = weights[name].repeat(2, 1)
    save_file(weights, tmp_path / "mine" / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"has shape \[4, \d+\], but rank = 2"):
        load_adapters(model, {"mine": str(tmp_path / "mine")})
    weights[name] = weights[name][:2, :5].contiguous()
    save_file(weights, tmp_path / "mine" / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"has shape \[2, 5\], but the model requires \[2, "):
        load_adapters(model, {"mine": str(tmp_path / "mine")})


def test_adapters_of_modules_have_separate_directories(tmp_path: Path) -> None:
    config = pair_config("llama", "clip")
    sections = {"one": {"modules": ["llm"]}, "two": {"modules": ["eye"], "targets": ["q_proj"]}}
    save_adapters(build(config, **sections), tmp_path / "separate")
    save_adapters(build(config, all={"modules": ["llm", "eye"]}), tmp_path / "joint")
    actual = sorted(str(f.parent.relative_to(tmp_path)) for f in tmp_path.rglob("*.json"))
    assert actual == ["joint/all/eye", "joint/all/llm", "separate/one", "separate/two"]


def test_only_adapters_of_their_modules_are_trained() -> None:
    model = build(pair_config("llama", "clip"), a={"modules": ["llm"]})
    trained = {module_of(n) for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"llm", "eye", "eye.connector"}
    llm_flags = {n: p.requires_grad for n, p in model.llm.named_parameters()}
    assert all(flag == is_adapter_parameter(name) for name, flag in llm_flags.items())
    description = model.llm.describe()
    assert not description.trainable
    assert all(len(layer.adapters) == 7 for layer in description.layers)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapted_model_starts_with_base_outputs(method: str) -> None:
    config = text_config("llama")
    plain = build(config, move=False)
    adapted = build(config, move=False, a={"modules": ["llm"], "method": method})
    assert relative_error(logits(plain), logits(adapted)) <= EXACT * (method == "dora")
    for _, _, lora in adapted_linears(adapted):
        assert not lora.up.any()
        assert 0.5 < float(lora.down.abs().max()) * lora.down.shape[1] ** 0.5 <= 1


def test_connector_adapter_freezes_connector_weights() -> None:
    section = {"modules": ["eye.connector"], "targets": ["linear_1"], "rank": 2}
    model = build(pair_config("llama", "clip"), a=section)
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "connector" in n}
    assert trained == {f"encoders.eye.connector.linear_1.lora.{n}" for n in ("down", "up")}
    description = model.encoders["eye"].describe()
    assert description.trainable and description.connector_trainable
    first, second = description.connector_adapters
    assert first is not None and first.rank == 2 and second is None


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        (["layers.0.*"], 7),
        (["layers.?.self_attn.[qv]_proj"], 6),
        (["*_proj"], 21),
        (["0.mlp.up_proj"], 1),
        (["q_proj", "layers.1.*.q_proj"], 3),
    ],
)
def test_target_patterns_match_ends_of_names(targets, chosen: int) -> None:
    model = build(text_config("llama"), a={"modules": ["llm"], "targets": targets})
    assert len(model.llm.adapters) == chosen


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"a": {"modules": ["llm"], "targets": ["_proj"]}}, "'_proj': the modules have no linear"),
        ({"a": {"modules": ["llm"], "targets": ["layers.7.*"]}}, "no linear layer of this name"),
        ({"a": {"modules": ["llm"], "targets": ["q_porj"]}}, "did you mean 'q_proj'"),
        (
            {"a": {"modules": ["ear"]}},
            r"\['ear'\]: modules without adapter support; use any of: eye, eye\.connector, llm",
        ),
        (
            {"a": {"modules": ["llm", "eye"], "targets": ["fc2"]}},
            "'llm' contains none of the targets",
        ),
        (
            {"a": {"modules": ["llm"]}, "b": {"modules": ["llm"], "targets": ["q_proj"]}},
            r"q_proj of 'llm' is already in \[adapters.a\]",
        ),
    ],
)
def test_unknown_adapter_targets_are_rejected(sections: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(pair_config("llama", "clip"), **sections)
