"""Checkpoints: load and save Hugging Face files, and reject invalid files."""

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import (
    AUDIO,
    COMPOSITES,
    ENCODERS,
    LLMS,
    build,
    microbatch,
    pair_config,
    randomize,
    relative_error,
)
from proofs import proves
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPConfig,
    CLIPModel,
    GenerationConfig,
    LlavaForConditionalGeneration,
    MetaClip2Config,
    MetaClip2Model,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Wav2Vec2ForCTC,
)

from torchmm.common import log
from torchmm.common.batch import EncoderInputs
from torchmm.common.errors import CheckpointError, ConfigError
from torchmm.models.build import build_model
from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.models.hf import load as loading
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.legacy_keys import without_legacy_keys
from torchmm.models.hf.load import load_weights
from torchmm.models.initialize import init_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.recipe.model_section import EncoderConfig, FreezeConfig, LlmConfig, ModelConfig


def load(config: ModelConfig) -> MultimodalModel:
    model = build_model(config, FreezeConfig())
    materialize(model, "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    loaded = load_weights(model)
    init_weights(model, 0, skip=loaded)
    assert all(p.isfinite().all() for p in model.parameters())
    return model


def save(kind: Any, config: dict, directory: Path, **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    make = getattr(kind, "from_config", None) or kind._from_config
    plain = make(AutoConfig.for_model(**config))
    randomize(plain)
    plain.save_pretrained(directory, **settings)
    return plain


def same_files(ours: Path, theirs: Path) -> None:
    """Assert that all files of Hugging Face exist and are equal, except for added keys."""
    for path in theirs.iterdir():
        if path.name in ("config.json", "generation_config.json"):
            ours_settings, hf_settings = (
                json.loads((d / path.name).read_text()) for d in (ours, theirs)
            )
            if path.name == "generation_config.json":
                hf_settings.setdefault("eos_token_id", 2)  # from the tokenizer
            assert without_legacy_keys(ours_settings) == without_legacy_keys(hf_settings)
            continue
        assert (ours / path.name).read_bytes() == path.read_bytes(), path.name


@proves("files", LLMS)
@pytest.mark.parametrize("family", list(LLMS))
def test_llm_files_round_trip_unchanged(family: str, tmp_path: Path, tokenizer) -> None:
    save(AutoModelForCausalLM, LLMS[family], tmp_path / "first", max_shard_size="20KB")
    assert (tmp_path / "first" / "model.safetensors.index.json").exists()
    GenerationConfig(
        temperature=0.3, do_sample=True, bos_token_id=1, eos_token_id=2, pad_token_id=0
    ).save_pretrained(tmp_path / "first")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "theirs")
    model = load(ModelConfig(llm=LlmConfig(source=str(tmp_path / "first"))))
    export_hf(model, tmp_path / "ours", tokenizer)
    same_files(tmp_path / "ours", tmp_path / "theirs")
    assert len(PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")) == 64


def test_multi_token_prediction_layers_are_skipped(tmp_path: Path) -> None:
    """Check weights in published Qwen3.5 and Qwen3-Next files, which Hugging Face also skips."""
    save(AutoModelForCausalLM, LLMS["qwen3_5"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    load(ModelConfig(llm=LlmConfig(source=str(tmp_path))))
    weights["others.fc.weight"] = torch.ones(2, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"not part of the model: others\.fc\.weight"):
        load(ModelConfig(llm=LlmConfig(source=str(tmp_path))))


def test_conflicting_generation_settings_are_exported(tmp_path: Path, tokenizer, caplog) -> None:
    """Hugging Face accepts such a file, for example with a temperature but without sampling."""
    save(AutoModelForCausalLM, LLMS["llama"], tmp_path / "first")
    settings = {"do_sample": False, "temperature": 0.6, "top_k": 20, "eos_token_id": [5, 2]}
    (tmp_path / "first/generation_config.json").write_text(json.dumps(settings))
    model = load(ModelConfig(llm=LlmConfig(source=str(tmp_path / "first"))))
    with caplog.at_level("WARNING"):
        export_hf(model, tmp_path / "ours", tokenizer)
    assert "reports as conflicts" in caplog.text and "temperature" in caplog.text
    exported = json.loads((tmp_path / "ours/generation_config.json").read_text())
    assert {key: exported.get(key) for key in settings} == settings
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert plain.generation_config.temperature == 0.6


def test_rejected_generation_settings_are_reported(tmp_path: Path, tokenizer, caplog) -> None:
    save(AutoModelForCausalLM, LLMS["llama"], tmp_path / "first")
    settings = {"num_return_sequences": 3, "do_sample": False}
    (tmp_path / "first/generation_config.json").write_text(json.dumps(settings))
    model = load(ModelConfig(llm=LlmConfig(source=str(tmp_path / "first"))))
    with caplog.at_level("WARNING"):
        export_hf(model, tmp_path / "ours", tokenizer)
    assert "without generation_config.json" in caplog.text
    assert "num_return_sequences" in caplog.text
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generation_config.eos_token_id == 2
    )


@proves("files", COMPOSITES)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llava", {"vision_feature_layer": -2}),
        ("llava", {"tie_word_embeddings": True}),
        ("qwen2_5_vl", {"tie_word_embeddings": True}),
        *((name, {}) for name in COMPOSITES if name != "llava"),
    ],
)
def test_multimodal_model_files_round_trip_unchanged(
    name: str, changes: dict, tmp_path: Path, tokenizer
) -> None:
    config = {**COMPOSITES[name], **changes}
    model_class = FAMILIES[config["model_type"]].kind
    save(model_class, config, tmp_path / "first")
    again = model_class.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "theirs")
    model = load(ModelConfig(source=str(tmp_path / "first")))
    export_hf(model, tmp_path / "ours", tokenizer)
    same_files(tmp_path / "ours", tmp_path / "theirs")


def test_transposed_experts_are_read(tmp_path: Path) -> None:
    """Read the weights as Qwen published them."""
    save(AutoModelForImageTextToText, COMPOSITES["qwen3_vl_moe"], tmp_path)
    expected = load(ModelConfig(source=str(tmp_path))).state_dict()
    weights = load_file(tmp_path / "model.safetensors")
    stacked = [name for name in weights if ".experts." in name]
    assert len(stacked) == 4
    for name in stacked:
        weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    actual = load(ModelConfig(source=str(tmp_path))).state_dict()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    weights[stacked[0]] = weights[stacked[0]].transpose(0, 1).contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has shape"):
        load(ModelConfig(source=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("internvl", {"crop_to_patches": True, "max_patches": 5}),
        ("smolvlm", {"do_image_splitting": True, "size": {"longest_edge": 32}}),
        ("llava_onevision", {}),
        ("internvl", {}),
        ("idefics3", {}),
    ],
)
def test_export_preserves_tile_settings(
    name: str, settings: dict, tmp_path: Path, tokenizer
) -> None:
    model = build(ModelConfig(config=COMPOSITES[name], processor=settings))
    export_hf(model, tmp_path, tokenizer)
    first = model.image_specs()["vision"]
    again = load(ModelConfig(source=str(tmp_path))).image_specs()["vision"]
    if first.tiles is None:
        # The InternVL processor always creates tiles, but not more than its limit.
        assert again.tiles is None or again.tiles.processor["max_patches"] == 1
    else:
        assert again.tiles is not None
        assert first.tiles.processor.items() <= again.tiles.processor.items()
        assert again.tiles.most_tiles == first.tiles.most_tiles


def test_old_name_of_newline_is_read(tmp_path: Path) -> None:
    plain = save(AutoModelForImageTextToText, COMPOSITES["llava_next"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("image_newline"))
    weights["image_newline"] = weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors")
    model = load(ModelConfig(source=str(tmp_path)))
    actual = model.encoders["vision"].connector.image_newline
    assert torch.equal(actual, plain.model.image_newline)


def test_old_names_of_llava_weights_are_read(tmp_path: Path) -> None:
    plain = save(AutoModelForImageTextToText, COMPOSITES["llava"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in weights.items()}
    old["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    assert set(old) != set(weights)
    save_file(old, tmp_path / "model.safetensors")
    model = load(ModelConfig(source=str(tmp_path)))
    theirs = plain.model.vision_tower.state_dict()
    for name, value in model.encoders["vision"].tower.state_dict().items():
        assert torch.equal(value, theirs[name])


@pytest.mark.parametrize("family", ["clip", "metaclip_2"])
def test_dual_encoder_checkpoint_loads_as_encoder(family: str, tmp_path: Path) -> None:
    text = {k: v for k, v in LLMS["llama"].items() if k != "model_type"}
    kind, config = (
        (CLIPModel, CLIPConfig) if family == "clip" else (MetaClip2Model, MetaClip2Config)
    )
    vision = {k: v for k, v in ENCODERS[family].items() if k != "model_type"}
    plain = kind(config(vision_config=vision, text_config=text))
    plain.save_pretrained(tmp_path)
    encoder = EncoderConfig(source=str(tmp_path), feature_layer=-2)
    model = load(ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders={"eye": encoder}))
    theirs = plain.vision_model.state_dict()
    for name, value in model.encoders["eye"].tower.state_dict().items():
        assert torch.equal(value, theirs[name])


@pytest.mark.parametrize(
    ("encoder", "layer", "llm"),
    [
        ("clip", -2, "llama_tied"),
        ("clip", -2, "qwen3"),
        ("siglip", -1, "llama_tied"),
        ("siglip", -1, "qwen3"),
        ("dinov2", -2, "mistral"),
        ("dinov2", -1, "gemma3_text"),
        ("internvl", -1, "olmo2"),
        ("idefics3", -1, "qwen3_moe"),
        ("aimv2", -1, "qwen3"),
        ("metaclip_2", -2, "llama"),  # the same encoder as CLIP
    ],
)
def test_separate_modules_export_as_llava(
    encoder: str, layer: int, llm: str, tmp_path: Path, tokenizer
) -> None:
    settings = {"feature_layer": layer, "processor": {"image_mean": [0.1, 0.2, 0.3]}}
    model = build(pair_config(llm, encoder, **settings))
    export_hf(model, tmp_path, tokenizer)
    plain = LlavaForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager")
    images = EncoderInputs(torch.randn(1, 3, 16, 16), [(1, 4, 4)], torch.arange(3, 19))
    batch = microbatch([22], {"eye": images}, images.positions_K)
    theirs = plain(batch.input_ids_T[None], pixel_values=images.pixels, use_cache=False).logits[0]
    ours = model.llm.logits(batch, model.encode(batch), torch.arange(22))
    assert relative_error(ours, theirs) < 1e-5
    processor = AutoProcessor.from_pretrained(tmp_path)
    assert processor.image_token_id == 63
    pixels = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8)
    inputs = processor(images=pixels, text="w5 <image> w6", return_tensors="pt")
    assert (inputs["input_ids"] == 63).sum() == 16
    mean = model.image_specs()["eye"].processor["image_mean"]
    model = load(ModelConfig(source=str(tmp_path)))
    assert model.image_specs()["vision"].processor["image_mean"] == mean
    export_hf(model, tmp_path / "again", tokenizer)
    for name in ("model.safetensors", "config.json", "processor_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("siglip2", {}),
        ("pixtral", {}),
        ("gemma4", {}),
        ("dinov3", {}),
        ("radio", {}),
        ("qwen2_vl", {}),
        ("qwen2_5_vl", {}),
        ("qwen3_vl", {}),
        ("glm4v", {}),
        ("clip", {"connector": "pixel_shuffle_mlp"}),
        ("whisper", {"connector": "pixel_shuffle_mlp"}),
        ("wav2vec2", {"connector": "pixel_shuffle_mlp"}),
        ("wav2vec2_stable", {}),
        ("qwen2_5_omni_sound", {"connector": "pixel_shuffle_mlp"}),
    ],
)
def test_separate_modules_export_to_loadable_directories(
    family: str, settings: dict, tmp_path: Path, tokenizer
) -> None:
    model = build(pair_config("qwen2", family, **settings))
    export_hf(model, tmp_path, tokenizer)
    AutoModelForCausalLM.from_pretrained(tmp_path / "llm")
    if family not in ("qwen2_vl", "qwen2_5_vl", "whisper", "qwen2_5_omni_sound"):
        plain = AutoModel.from_pretrained(tmp_path / "eye")
        for name, value in model.encoders["eye"].tower.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
    config = ModelConfig(source=str(tmp_path))
    assert config.encoder_names == ["eye"] and config.tokenizer_source == str(tmp_path / "llm")
    again = load(config)
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    ours, theirs = again.image_specs()["eye"], model.image_specs()["eye"]
    assert ours.processor.items() >= theirs.processor.items()
    assert replace(ours, processor={}) == replace(theirs, processor={})


READ_ELSEWHERE = (
    *("qwen2_vl", "qwen2_5_vl", "metaclip_2"),
    *("qwen3_omni_vision", "qwen3_omni_sound", "qwen2_5_omni_vision", "qwen2_5_omni_sound"),
)
"""Families without separate files.

Qwen encoders are in multimodal checkpoints, and MetaCLIP 2 is in the files of the dual model.
"""


def damaged(directory: Path, change) -> ModelConfig:
    save(AutoModelForCausalLM, LLMS["llama"], directory)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    return ModelConfig(llm=LlmConfig(source=str(directory)))


@pytest.mark.parametrize("llm", ["gemma2", "granite"])
def test_scaled_logits_prevent_llava_export(llm: str, tmp_path: Path, tokenizer) -> None:
    """Check LLMs whose logit caps and scales LLaVA would omit."""
    export_hf(build(pair_config(llm, "clip")), tmp_path, tokenizer)
    assert (tmp_path / "torchmm.json").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "llm")
    composite = {**COMPOSITES["llava"], "text_config": LLMS[llm]}
    with pytest.raises(ConfigError, match="scales or caps its logits"):
        build_model(ModelConfig(config=composite), FreezeConfig())


@proves("files", ENCODERS)
@pytest.mark.parametrize("family", [name for name in ENCODERS if name not in READ_ELSEWHERE])
def test_encoder_loads_from_its_files(family: str, tmp_path: Path) -> None:
    """Check also names of weights that differ from the names in the module."""
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 2} if family == "whisper" else {}
    plain = save(AutoModel, {**ENCODERS[family], **decoder}, tmp_path)
    section = EncoderConfig(source=str(tmp_path), modality="audio" if family in AUDIO else "image")
    model = load(ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders={"eye": section}))
    theirs = (plain.encoder if family == "whisper" else plain).state_dict()
    for name, value in model.encoders["eye"].tower.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_radio_files_with_fused_qkv_load(tmp_path: Path) -> None:
    """Check files as published. Missing layer scales are initialized to 1."""
    config = {**ENCODERS["radio"], "video_temporal_patch_size": 2}
    plain = save(AutoModel, config, tmp_path).state_dict()
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    assert "radio_model.model.blocks.0.attn.qkv.weight" in weights
    assert "radio_model.model.patch_generator.video_embedder.weight" in weights
    save_file({n: x for n, x in weights.items() if "layer_scale" not in n}, path)
    pair = {"eye": EncoderConfig(source=str(tmp_path))}
    config = ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders=pair)
    model = load(config)
    for name, value in model.encoders["eye"].tower.state_dict().items():
        scale = "layer_scale" in name
        assert torch.equal(value, torch.ones_like(value) if scale else plain[name]), name
    weights["radio_model.model.blocks.0.attn.qkv.weight"] = torch.ones(64, 32)
    save_file(weights, path)
    with pytest.raises(CheckpointError, match=r"qkv\.weight has shape \[64, 32\], .* \[96, 32\]"):
        load(config)


def test_old_names_of_speech_recognition_model_are_read(tmp_path: Path) -> None:
    """Read Wav2Vec2 checkpoints with a prefix, a head, and weights in two factors."""
    torch.manual_seed(0)
    plain = Wav2Vec2ForCTC(AutoConfig.for_model(**ENCODERS["wav2vec2"]))
    plain.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {
        n.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): t
        for n, t in weights.items()
    }
    assert any(n.endswith("conv.weight_g") for n in old) and "lm_head.weight" in old
    save_file(old, tmp_path / "model.safetensors")
    section = EncoderConfig(source=str(tmp_path), modality="audio")
    model = load(ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders={"eye": section}))
    theirs = plain.wav2vec2.state_dict()
    for name, value in model.encoders["eye"].tower.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_mismatched_weights_are_listed_and_rejected(tmp_path: Path) -> None:
    def change(weights: dict) -> None:
        del weights["model.norm.weight"]
        weights["model.extra.weight"] = torch.zeros(2)
        weights["lm_head.weight"] = torch.zeros(64, 8)

    model = build_model(damaged(tmp_path, change), FreezeConfig())
    materialize(model, "cpu")
    with pytest.raises(CheckpointError) as caught:
        load_weights(model)
    text = str(caught.value)
    assert "missing for 'llm': backbone.model.norm.weight" in text
    assert "not part of the model: model.extra.weight" in text
    assert (
        "lm_head.weight has shape [64, 8], but llm.backbone.lm_head.weight of the model has "
        "shape [64, 32]"
    ) in text


def test_separate_head_is_not_replaced_by_tied_weights(tmp_path: Path) -> None:
    """Check Mistral 3: the Hugging Face default ties weights, but published files have a head."""
    untied = {**COMPOSITES["mistral3"], "tie_word_embeddings": False}
    save(AutoModelForImageTextToText, untied, tmp_path)
    load(ModelConfig(source=str(tmp_path)))
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["tie_word_embeddings"], settings["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="set tie_word_embeddings = false"):
        load(ModelConfig(source=str(tmp_path)))
    load(ModelConfig(source=str(tmp_path), config={"tie_word_embeddings": False}))


def test_equal_tensors_can_be_tied(tmp_path: Path) -> None:
    save(AutoModelForCausalLM, {**LLMS["llama"], "tie_word_embeddings": True}, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    load(ModelConfig(llm=LlmConfig(source=str(tmp_path))))


def test_pickled_weights_are_rejected(tmp_path: Path) -> None:
    save(AutoModelForCausalLM, LLMS["llama"], tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    model = build_model(ModelConfig(llm=LlmConfig(source=str(tmp_path))), FreezeConfig())
    materialize(model, "cpu")
    with pytest.raises(CheckpointError, match="convert the weights to safetensors"):
        load_weights(model)


def test_damaged_weight_file_is_reported(tmp_path: Path) -> None:
    save(AutoModelForCausalLM, LLMS["llama"], tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    model = build_model(ModelConfig(llm=LlmConfig(source=str(tmp_path))), FreezeConfig())
    materialize(model, "cpu")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_weights(model)


def test_download_progress_is_logged_in_megabytes(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "models--owner--model" / "blobs"

    def fetch(name: str, **_: Any) -> str:
        folder.mkdir(parents=True)
        (folder / "complete").write_bytes(bytes(3_000_000))
        (folder / "other.incomplete").write_bytes(bytes(1_500_000))
        time.sleep(0.2)
        return str(folder)

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    monkeypatch.setattr(loading.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(log, "QUIET_S", 0.02)
    monkeypatch.setattr(log, "POLL_S", 0.01)
    with caplog.at_level(logging.INFO, "torchmm"):
        assert loading._local_directory("owner/model") == folder
    assert "fetching owner/model: 4 MB, 0 s" in caplog.text
