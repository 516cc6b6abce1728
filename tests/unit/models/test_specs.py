"""Specifications of models for data: image processors and special tokens."""

import io
from math import prod
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers
from model_cases import AUDIO, COMPOSITES, ENCODERS, LLMS, build, composite_config, pair_config
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from torchmm.common.batch import EncoderInputs
from torchmm.common.errors import ConfigError
from torchmm.data.media.audio import AudioPreprocessor
from torchmm.models.build import build_model
from torchmm.models.hf.load import load_weights
from torchmm.models.multimodal import materialize, module_of
from torchmm.recipe.model_section import EncoderConfig, FreezeConfig, LlmConfig, ModelConfig


def word_tokenizer(words: int, **special: str) -> PreTrainedTokenizerFast:
    vocabulary = {**{f"w{i}": i for i in range(words - 1)}, "<image>": words - 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, "w0")), **special
    )


def processed(spec, images: list[Image.Image]) -> EncoderInputs:
    processor = getattr(transformers, f"{spec.processor_class}Pil")(**spec.processor)
    out = processor(images, return_tensors="pt")
    no_positions = torch.empty(0)
    if "image_grid_thw" in out:
        grids = [tuple(grid) for grid in out["image_grid_thw"].tolist()]
        return EncoderInputs(out["pixel_values"], grids, no_positions)
    if "spatial_shapes" in out:
        grids = [(1, *shape) for shape in out["spatial_shapes"].tolist()]
        pixels = [p[: prod(g)] for p, g in zip(out["pixel_values"], grids, strict=True)]
        return EncoderInputs(torch.cat(pixels), grids, no_positions)
    if "image_sizes" in out:
        side, retained = spec.patch_size_px, []
        grids = [(1, high // side, wide // side) for high, wide in out["image_sizes"].tolist()]
        for image, (_, rows, columns) in zip(out["pixel_values"], grids, strict=True):
            valid = image[:, : rows * side, : columns * side]
            retained.append(torch.nn.functional.unfold(valid[None], side, stride=side)[0].T)
        return EncoderInputs(torch.cat(retained), grids, no_positions)
    if "image_position_ids" in out:
        valid = [place[(place >= 0).all(-1)] for place in out["image_position_ids"]]
        pixels = [p[: len(at)] for p, at in zip(out["pixel_values"], valid, strict=True)]
        grids = [(1, *(at.flip(-1).max(0).values + 1).tolist()) for at in valid]
        return EncoderInputs(torch.cat(pixels), grids, no_positions)
    rows = out["pixel_values"].shape[-1] // spec.patch_size_px
    return EncoderInputs(out["pixel_values"], [(1, rows, rows)] * len(images), no_positions)


@pytest.mark.parametrize("family", [name for name in ENCODERS if name not in AUDIO])
def test_processor_output_is_valid_encoder_input(family: str) -> None:
    encoder = build(pair_config("llama", family)).encoders["eye"]
    spec = encoder.image_spec()
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels), Image.fromarray(pixels[:40, :30])]
    inputs = processed(spec, images)
    tokens = sum(prod(grid) for grid in inputs.grids_thw) // spec.merge**2
    assert encoder(inputs).shape == (tokens, 32)
    assert (inputs.pixels.ndim == 4) == (spec.inputs == "fixed")


def test_recipe_settings_override_source_processor(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**ENCODERS["clip"])
    AutoModel.from_config(config).save_pretrained(tmp_path)
    size = {"shortest_edge": 16}
    processor = transformers.CLIPImageProcessorPil(
        size=size, crop_size=16, image_mean=[0.1, 0.2, 0.3]
    )
    processor.save_pretrained(tmp_path)
    section = EncoderConfig(source=str(tmp_path), processor={"do_convert_rgb": False})
    model = build(ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders={"eye": section}))
    settings = model.image_specs()["eye"].processor
    assert settings["image_mean"] == [0.1, 0.2, 0.3]
    assert settings["do_convert_rgb"] is False


def test_processor_of_wrong_size_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"processor\.crop_size = 32, but the model requires"):
        build(pair_config("llama", "clip", processor={"crop_size": 32}))


def test_placeholder_must_be_in_tokenizer_and_embedding() -> None:
    model = build(pair_config("llama", "clip"))
    spec = model.text_spec(word_tokenizer(64, eos_token="w2"))
    assert (spec.image_token_id, spec.eos_token_id, spec.vocab_size) == (63, 2, 64)
    assert spec.positions == "1d"
    with pytest.raises(ConfigError, match="65 tokens but the LLM has only 64"):
        model.text_spec(word_tokenizer(65))
    unknown = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"w0": 0}, "w0")))
    with pytest.raises(ConfigError, match="'<image>' is not in the tokenizer"):
        model.text_spec(unknown)


def test_qwen_has_image_markers_and_mrope_positions() -> None:
    spec = build(composite_config("qwen2_5_vl")).text_spec(word_tokenizer(64))
    assert spec.image_prefix == (COMPOSITES["qwen2_5_vl"]["vision_start_token_id"],)
    assert spec.image_suffix == (COMPOSITES["qwen2_5_vl"]["vision_end_token_id"],)
    assert spec.positions == "mrope"


def test_every_parameter_has_a_module_name() -> None:
    model = build(composite_config("llava"))
    names = {module_of(name) for name, _ in model.named_parameters()}
    assert names == {"llm", "vision", "vision.connector"} == set(model.parameter_counts())


@pytest.mark.parametrize("family", list(ENCODERS))
def test_tensor_parallel_patterns_match_linear_layers(family: str) -> None:
    for module in build(pair_config("qwen3", family)).modality_modules():
        plan = module.tensor_parallel_plan()
        assert plan and set(module.tensor_parallel_scopes())
        for pattern in plan:
            module.get_submodule(pattern.replace("*", "0"))


@pytest.mark.parametrize("name", list(COMPOSITES))
def test_tensor_parallel_patterns_match_connectors(name: str) -> None:
    """Check that no pattern of a merger is ignored because it has no submodule."""
    for encoder in build(composite_config(name)).encoder_modules():
        if encoder.spec.connector == "merger":
            patterns = {f"connector.{part}" for part in encoder.family.merger_styles}
            assert patterns <= encoder.tensor_parallel_plan().keys()


def test_window_layers_of_qwen_are_described() -> None:
    encoder = build(pair_config("llama", "qwen2_5_vl")).encoders["eye"]
    assert [layer.window for layer in encoder.describe().layers] == [16, None, 16]


@pytest.mark.parametrize(("family", "positions"), [("whisper", 12), ("wav2vec2", 16)])
def test_audio_encoder_accepts_extractor_output(family: str, positions: int) -> None:
    config = pair_config("llama", family, connector="pixel_shuffle_mlp")
    encoder = build(config).encoders["eye"]
    ours = AudioPreprocessor(encoder.image_spec())
    stream = io.BytesIO()
    samples = 3000 if family == "whisper" else 160
    wave_S = np.random.default_rng(0).normal(0, 0.1, samples)
    soundfile.write(stream, wave_S, 16_000, format="WAV")
    meta = ours.meta(stream.getvalue())
    pixels = torch.from_numpy(ours.pixels(stream.getvalue(), meta))
    inputs = EncoderInputs(pixels, [ours.grid_thw(meta)], torch.empty(0))
    assert (meta.patches, meta.tokens) == (positions, positions // 4)
    assert encoder(inputs).shape == (positions // 4, 32)
    assert encoder.dummy_image().patches == 4 and encoder.dummy_image().tokens == 1


def test_modality_must_match_family() -> None:
    with pytest.raises(ConfigError, match='whisper reads audio; set modality = "audio"'):
        build(pair_config("llama", "whisper", modality="image"))
    with pytest.raises(ConfigError, match="clip_vision_model reads image"):
        build(pair_config("llama", "clip", modality="audio"))


def test_unsupported_audio_encoder_settings_are_rejected() -> None:
    for name, change, message in (
        (
            "wav2vec2_stable",
            {"adapter_attn_dim": 4},
            "adapter_attn_dim = 4: adapter layers .* not supp",
        ),
        ("wav2vec2_stable", {"layerdrop": 0.1}, r"layerdrop = 0\.1 is not supported; override"),
        ("whisper", {"dropout": 0.1}, r"dropout = 0\.1 is not supported; override"),
        ("whisper", {"encoder_layerdrop": 0.1}, r"encoder_layerdrop = 0\.1 is not supported"),
        ("qwen3_omni_sound", {"dropout": 0.1}, r"dropout = 0\.1 is not supported; override"),
    ):
        settings = {**ENCODERS[name], **change}
        section = EncoderConfig(config=settings, modality="audio")
        config = ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders={"ear": section})
        with pytest.raises(ConfigError, match=message):
            build_model(config, FreezeConfig())


def test_encoder_loads_from_complete_whisper_files(tmp_path: Path) -> None:
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    tokens = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = {**ENCODERS["whisper"], **sizes, **tokens, "decoder_start_token_id": 1}
    full_model = AutoModel.from_config(AutoConfig.for_model(**settings))
    full_model.save_pretrained(tmp_path)
    section = EncoderConfig(source=str(tmp_path), modality="audio")
    model = build_model(
        ModelConfig(llm=LlmConfig(config=LLMS["llama"]), encoders={"ear": section}), FreezeConfig()
    )
    materialize(model, "cpu")
    assert "encoders.ear.tower.conv1.weight" in load_weights(model)
    for name, value in full_model.get_encoder().state_dict().items():
        assert torch.equal(model.encoders["ear"].tower.state_dict()[name], value), name


def test_radio_receives_unnormalized_pixels() -> None:
    encoder = build(pair_config("llama", "radio")).encoders["eye"]
    inputs = processed(encoder.image_spec(), [Image.new("RGB", (40, 24), (64, 128, 192))])
    color = torch.tensor([64, 128, 192]) / 255
    torch.testing.assert_close(inputs.pixels[0, :, 0, 0], color)
    mean, std = (torch.tensor(values) for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    normalized = encoder.tower.input_conditioner(inputs.pixels)
    torch.testing.assert_close(normalized[0, :, 0, 0], (color - mean) / std)
