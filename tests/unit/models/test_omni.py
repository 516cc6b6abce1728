"""Omni thinkers equal those of Hugging Face on images, audio, videos and text."""

import io
import json
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from likeliest_text import as_prompt, written, written_by
from model_cases import (
    AUDIO_TOKEN_ID,
    COMPOSITES,
    IMAGE_TOKEN_ID,
    build,
    composite_config,
    relative_error,
    worst_gradient,
)
from omni_cases import (
    AUDIO_END,
    AUDIO_START,
    EARS,
    MELS,
    VIDEO_TOKEN_ID,
    VISION_END,
    VISION_START,
    packed,
    text_of,
    two_samples,
)
from proofs import proves
from safetensors.torch import load_file, save_file
from test_multimodal import hf_model, hf_weight_name, version
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, PreTrainedModel, WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from torchmm.common.errors import ConfigError
from torchmm.data.media.audio import AudioPreprocessor
from torchmm.data.media.text import VisionBlock, mrope_positions
from torchmm.models.build import build_model
from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.load import load_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

pytestmark = pytest.mark.skipif(version < (5, 21), reason="thinkers have different modules")
NAMES = ["qwen3_omni", "qwen2_5_omni"]


def audio_token_count(name: str, frames: int) -> int:
    """Return the token count of Hugging Face for audio of a number of mel frames."""
    if name == "qwen3_omni":
        return modeling_qwen3_omni_moe._get_feat_extract_output_lengths(frames)
    _, tokens = Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths(None, frames)
    return tokens


def hf_thinker(model: MultimodalModel) -> PreTrainedModel:
    plain = hf_model(model)
    plain.config.vision_start_token_id = (
        VISION_START  # set in published configs, but not in the class
    )
    return plain


@proves("equal", COMPOSITES)
@proves("packed", COMPOSITES)
@proves("sounds", COMPOSITES, media="sci")
@proves("images", COMPOSITES, media="is")
@pytest.mark.parametrize("media", ["i", "s", "c", "is", "sci"])
@pytest.mark.parametrize("name", NAMES)
def test_omni_media_match_hugging_face(name: str, media: str) -> None:
    """Compare two samples packed, and the first sample separately."""
    model = build(composite_config(name))
    plain = hf_thinker(model)
    samples = two_samples(name, media)
    theirs = [plain(**sample.theirs(), use_cache=False).logits[0] for sample in samples]
    for sample_batch, logits in (
        (packed(samples), torch.cat(theirs)),
        (packed(samples[:1]), theirs[0]),
    ):
        expected = functional.cross_entropy(logits, sample_batch.targets_T, reduction="sum")
        loss = model(sample_batch)
        assert relative_error(loss, expected) < 1e-5
        all_positions = torch.arange(len(logits))
        assert (
            relative_error(
                model.llm.logits(sample_batch, model.encode(sample_batch), all_positions), logits
            )
            < 1e-5
        )
        model.zero_grad()
        plain.zero_grad()
        loss.backward()
        expected.backward(retain_graph=True)
        unused = [module for module in model.encoders if module not in sample_batch.encoders]
        for module in unused:
            for parameter in model.encoders[module].parameters():
                assert parameter.grad is not None and not parameter.grad.any()
                parameter.requires_grad_(False)
        assert worst_gradient(model, plain, lambda fqn: hf_weight_name(model, fqn)) < 1e-5
        model.requires_grad_(True)


@pytest.mark.parametrize("name", NAMES)
def test_omni_window_and_position_errors_change_logits(name: str) -> None:
    model = build(composite_config(name))
    samples = two_samples(name, "sci")
    batch = packed(samples)
    all_positions = torch.arange(len(batch.input_ids_T))

    def logits() -> Tensor:
        with torch.no_grad():
            return model.llm.logits(batch, model.encode(batch), all_positions)

    right = logits()
    config = model.encoders["audio"].tower.config
    window, other = ("n_window_infer", 1000) if name == "qwen3_omni" else ("n_window", 4)
    original = getattr(config, window)
    setattr(config, window, other)
    assert relative_error(logits(), right) > 1e-4, "different windows"
    setattr(config, window, original)
    positions = batch.position_ids
    batch.position_ids = positions + (batch.input_ids_T == AUDIO_TOKEN_ID)
    assert relative_error(logits(), right) > 1e-4, "delayed audio positions"
    for sample in samples:
        sample.blocks = [block._replace(time_step=1.0, per_second=1.0) for block in sample.blocks]
    batch.position_ids = packed(samples).position_ids
    assert relative_error(logits(), right) > 1e-4, "frame groups are counted instead of timed"
    batch.position_ids = positions
    assert relative_error(logits(), right) == 0


@pytest.mark.parametrize("seconds", [0.7, 0.36, 1.16])
@pytest.mark.parametrize("name", NAMES)
def test_omni_video_positions_match_hugging_face(name: str, seconds: float) -> None:
    """Check also seconds whose product with the rate is just below an integer."""
    plain = hf_thinker(build(composite_config(name)))
    groups, length = 60, 10
    video = [VIDEO_TOKEN_ID] * (4 * groups)  # 2 x 2 tokens each
    audio = [AUDIO_TOKEN_ID] * (length // EARS[name].pooled)
    ids = [5, VISION_START, *video, VISION_END, 6, AUDIO_START, *audio, AUDIO_END, 7,
           VISION_START, *[IMAGE_TOKEN_ID] * 6, VISION_END, 8, 9]  # fmt: skip
    expected, _ = plain.model.get_rope_index(
        torch.tensor([ids]),
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        video_grid_thw=torch.tensor([[groups, 4, 4]]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        audio_seqlens=torch.tensor([EARS[name].frames_of(length)]),
        second_per_grids=torch.tensor([seconds]),
    )
    text = text_of(name)
    assert text.tokens_per_second is not None
    blocks = [
        VisionBlock(2, groups, 2, 2, seconds, text.tokens_per_second),
        VisionBlock(ids.index(IMAGE_TOKEN_ID), 1, 2, 3),
    ]
    actual = mrope_positions(len(ids), blocks, text.clip_times)
    assert torch.equal(torch.from_numpy(actual).float(), expected[:, 0].float())


@proves("generation", COMPOSITES)
@pytest.mark.parametrize("name", NAMES)
def test_exported_omni_model_generates_same_tokens(name: str, tmp_path: Path, tokenizer) -> None:
    model = build(composite_config(name))
    export_hf(model, tmp_path, tokenizer)
    kind = FAMILIES[COMPOSITES[name]["model_type"]].kind
    plain = kind.from_pretrained(tmp_path, attn_implementation="eager")
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert {"patch_size", "feature_size"} <= set(settings)
    plain.config.vision_start_token_id = VISION_START
    sample, _ = two_samples(name, "isc")
    assert written(model, as_prompt(packed([sample]))) == written_by(plain, sample.theirs())


@pytest.mark.parametrize("name", NAMES)
def test_complete_omni_config_builds_thinker(name: str) -> None:
    thinker = COMPOSITES[name]["model_type"]
    full_config = {
        "model_type": thinker.removesuffix("_thinker"),
        "thinker_config": COMPOSITES[name],
    }
    model = build(ModelConfig(config=full_config))
    assert list(model.encoders) == ["vision", "audio"]
    assert model.composite.model_type == thinker


def test_invalid_audio_sizes_are_rejected() -> None:
    for name, window in (("qwen3_omni", 25), ("qwen2_5_omni", 17)):
        audio = COMPOSITES[name]["audio_config"]
        with pytest.raises(ConfigError, match="output_dim = 48 differs"):
            build(composite_config(name, audio_config={**audio, "output_dim": 48}))
        with pytest.raises(ConfigError, match=f"n_window = {window}"):
            build(composite_config(name, audio_config={**audio, "n_window": window}))


@pytest.mark.parametrize("samples", [1, 15_400, 16_000, 16_001, 16_320, 16_321, 40_123])
@pytest.mark.parametrize("name", NAMES)
def test_omni_audio_has_frames_of_extractor(name: str, samples: int) -> None:
    """Check frames in chunks, and the token count of Hugging Face with a minimum of one token."""
    medium = AudioPreprocessor(build(composite_config(name)).image_specs()["audio"])
    wave_S = np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)
    stream = io.BytesIO()
    soundfile.write(stream, wave_S, 16_000, format="WAV", subtype="FLOAT")
    meta = medium.meta(stream.getvalue())
    ear = EARS[name]
    assert meta.tokens == max(1, audio_token_count(name, ceil(samples / 160)))
    assert meta.patches == ear.pooled * meta.tokens
    frames = ear.frames_of(meta.patches)
    lost = 0 if ear.pooled == 1 else ear.frames  # at most a position
    assert samples / 160 - lost <= frames < samples / 160 + ear.pooled * ear.frames
    covered_S = np.zeros(160 * frames, np.float32)
    covered_S[:samples] = wave_S[: len(covered_S)]
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=300)
    theirs = extractor(covered_S, sampling_rate=16_000, padding="longest", return_tensors="np")
    expected = ear.patches_of(torch.from_numpy(theirs["input_features"][0].T))
    assert torch.equal(torch.from_numpy(medium.pixels(stream.getvalue(), meta)), expected)
    assert medium.blank(meta).shape == expected.shape


@pytest.mark.parametrize("name", NAMES)
def test_omni_files_load_into_thinker(name: str, tmp_path: Path) -> None:
    thinker = COMPOSITES[name]["model_type"]
    model_class: Any = FAMILIES[thinker].kind
    config = AutoConfig.for_model(**COMPOSITES[name])
    torch.manual_seed(0)
    plain = model_class._from_config(config)
    plain.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    full_weights = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    full_weights["talker.model.norm.weight"] = torch.ones(2)
    save_file(full_weights, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {
        "model_type": thinker.removesuffix("_thinker"),
        "thinker_config": config.to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = build_model(ModelConfig(source=str(tmp_path)), FreezeConfig())
    materialize(model, "cpu")
    load_weights(model)
    theirs = plain.state_dict()
    for fqn, value in model.state_dict().items():
        assert torch.equal(value, theirs[hf_weight_name(model, fqn)]), fqn


def test_modalities_select_encoders_of_hub_source() -> None:
    assert ModelConfig(source="a/hub").encoder_names == ["vision"]
    with_audio = ModelConfig(source="a/hub", modalities=["vision", "audio"])
    assert with_audio.encoder_names == ["vision", "audio"]
    wrong = ModelConfig(config=COMPOSITES["qwen3_omni"], modalities=["vision"])
    with pytest.raises(ConfigError, match="set towers = "):
        build(wrong)
