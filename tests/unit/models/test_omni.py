"""Qwen3-Omni's thinker on samples with images, sounds and text equals Hugging Face's own."""

import io
import json
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from generation import as_prompt, written, written_by
from model_cases import (
    COMPOSITES,
    IMAGE_TOKEN_ID,
    SOUND_TOKEN_ID,
    build,
    composite_config,
    relative_error,
    worst_gradient,
)
from proofs import proves
from safetensors.torch import load_file, save_file
from test_multimodal import our_hf_name, plain_composite, version
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, PreTrainedModel, WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    _get_feat_extract_output_lengths,
)

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.common.errors import ConfigError
from torchmm.data.media.audio import AudioPreprocessor
from torchmm.data.media.text import VisionBlock, mrope_positions
from torchmm.models.families.composites.table import COMPOSITES as FAMILIES
from torchmm.models.hf.export import export_hf
from torchmm.models.hf.load import load_weights
from torchmm.models.multimodal import MultimodalModel, materialize
from torchmm.models.registry import build_model
from torchmm.recipe.model_section import FreezeConfig, ModelConfig

pytestmark = pytest.mark.skipif(version < (5, 21), reason="thinkers were built in another way")
NAMES = ["qwen3_omni"]
VISION_START, VISION_END, SOUND_START, SOUND_END = 61, 60, 58, 57
MELS, CHUNK, FRAMES = 8, 13, 100
GRIDS = [(1, 4, 6), (1, 6, 2)]
SOUNDS = [30, 4]
"""Positions; the first has two whole chunks."""


def frames_of(positions: int) -> int:
    whole, rest = divmod(positions, CHUNK)
    return FRAMES * whole + 8 * rest


def patches_of(mels_FM: Tensor) -> Tensor:
    """As data prepare them: the last position of a chunk is filled with zeros."""
    chunks = []
    for piece_FM in mels_FM.split(FRAMES):
        missing = 8 * CHUNK - FRAMES if len(piece_FM) == FRAMES else 0
        chunks.append(functional.pad(piece_FM, (0, 0, 0, missing)))
    return torch.cat(chunks).reshape(-1, 8 * MELS)


def two_samples() -> tuple[Microbatch, list[dict[str, Any]]]:
    """An image, then a sound in each; what Hugging Face's model takes of each sample."""
    generator = torch.Generator().manual_seed(5)
    samples, ids, positions, starts, seen, heard = [], [], [], [0], [], []
    images: list[Tensor] = []
    sounds: list[Tensor] = []
    for grid, length in zip(GRIDS, SOUNDS, strict=True):
        words = torch.randint(3, 50, (12,), generator=generator)
        shown = torch.full((prod(grid) // 4,), IMAGE_TOKEN_ID)
        sound = torch.full((length,), SOUND_TOKEN_ID)
        marks = torch.tensor([VISION_START, VISION_END, SOUND_START, SOUND_END])
        own = torch.cat([words[:3], marks[:1], shown, marks[1:2], words[3:5], marks[2:3], sound,
                         marks[3:], words[5:]])  # fmt: skip
        block = VisionBlock(4, 1, grid[1] // 2, grid[2] // 2)
        pixels = torch.randn(prod(grid), 96, generator=generator)
        mels_FM = torch.randn(frames_of(length), MELS, generator=generator)
        begin = starts[-1]
        seen += (begin + (own == IMAGE_TOKEN_ID).nonzero().flatten()).tolist()
        heard += (begin + (own == SOUND_TOKEN_ID).nonzero().flatten()).tolist()
        ids.append(own)
        positions.append(torch.from_numpy(mrope_positions(len(own), [block], "fractional")))
        starts.append(begin + len(own))
        images.append(pixels)
        sounds.append(mels_FM)
        samples.append(
            {
                "input_ids": own[None],
                "attention_mask": torch.ones_like(own)[None],
                "pixel_values": pixels,
                "image_grid_thw": torch.tensor([grid]),
                "input_features": mels_FM.T[None],
                "feature_attention_mask": torch.ones(1, len(mels_FM), dtype=torch.long),
                "use_cache": False,
            }
        )
    ids_T = torch.cat(ids)
    targets_T = ids_T.roll(-1)
    targets_T[torch.tensor([*seen, *heard, *(stop - 1 for stop in starts[1:])])] = IGNORE_TARGET
    encoders = {
        "vision": EncoderInputs(torch.cat(images), GRIDS, torch.tensor(seen)),
        "audio": EncoderInputs(
            torch.cat([patches_of(mels) for mels in sounds]),
            [(1, 1, length) for length in SOUNDS],
            torch.tensor(heard),
        ),
    }
    meta = MicrobatchMeta((), len(ids_T))
    batch = Microbatch(ids_T, targets_T, torch.cat(positions, dim=1), starts, encoders, meta)
    return batch, samples


def alone(batch: Microbatch) -> Microbatch:
    """The first sample."""
    length = batch.cu_seqlens[1]
    return replace(
        batch,
        input_ids_T=batch.input_ids_T[:length],
        targets_T=batch.targets_T[:length],
        target_positions_L=None,
        position_ids=batch.position_ids[:, :length],
        cu_seqlens=[0, length],
        encoders={name: inputs.select(range(1)) for name, inputs in batch.encoders.items()},
    )


def plain_thinker(model: MultimodalModel) -> PreTrainedModel:
    plain = plain_composite(model)
    plain.config.vision_start_token_id = VISION_START  # in published configs, not in the class
    return plain


@proves("equal", COMPOSITES)
@proves("packed", COMPOSITES)
@proves("sounds", COMPOSITES)
@pytest.mark.parametrize("name", NAMES)
def test_images_and_sounds_give_hugging_faces_loss_and_gradients(name: str) -> None:
    model = build(composite_config(name))
    plain = plain_thinker(model)
    batch, samples = two_samples()
    theirs = [plain(**sample).logits[0] for sample in samples]
    for own, logits in ((batch, torch.cat(theirs)), (alone(batch), theirs[0])):
        expected = functional.cross_entropy(logits, own.targets_T, reduction="sum")
        loss = model(own)
        assert relative_error(loss, expected) < 1e-5
        everywhere = torch.arange(len(logits))
        assert relative_error(model.llm.logits(own, model.encode(own), everywhere), logits) < 1e-5
        model.zero_grad()
        plain.zero_grad()
        loss.backward()
        expected.backward(retain_graph=True)
        assert worst_gradient(model, plain, lambda fqn: our_hf_name(model, fqn)) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_mistakes_in_windows_and_positions_are_measurably_off(name: str) -> None:
    model = build(composite_config(name))
    batch, _ = two_samples()
    everywhere = torch.arange(len(batch.input_ids_T))

    def logits() -> Tensor:
        with torch.no_grad():
            return model.llm.logits(batch, model.encode(batch), everywhere)

    right = logits()
    tower = model.encoders["audio"].tower
    tower.config.n_window_infer = 1000
    assert relative_error(logits(), right) > 1e-4, "one window"
    tower.config.n_window_infer = 200
    positions = batch.position_ids
    batch.position_ids = positions + (batch.input_ids_T == SOUND_TOKEN_ID)
    assert relative_error(logits(), right) > 1e-4, "sounds later than they are"
    batch.position_ids = positions
    assert relative_error(logits(), right) == 0


@pytest.mark.parametrize("name", NAMES)
def test_time_positions_of_clips_beside_sounds_equal_hugging_faces(name: str) -> None:
    plain = plain_thinker(build(composite_config(name)))
    length, seconds = 10, 0.7
    video = [62] * 12  # three groups of frames, 2 x 2 tokens
    ids = [5, VISION_START, *video, VISION_END, 6, SOUND_START, *[SOUND_TOKEN_ID] * length,
           SOUND_END, 7, VISION_START, *[IMAGE_TOKEN_ID] * 6, VISION_END, 8, 9]  # fmt: skip
    expected, _ = plain.model.get_rope_index(
        torch.tensor([ids]),
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        video_grid_thw=torch.tensor([[3, 4, 4]]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        audio_seqlens=torch.tensor([frames_of(length)]),
        second_per_grids=torch.tensor([seconds]),
    )
    text = model_text(name)
    step = text.tokens_per_second * seconds
    blocks = [VisionBlock(2, 3, 2, 2, step), VisionBlock(ids.index(IMAGE_TOKEN_ID), 1, 2, 3)]
    found = mrope_positions(len(ids), blocks, text.clip_times)
    torch.testing.assert_close(torch.from_numpy(found).float(), expected[:, 0].float())


def model_text(name: str) -> Any:
    return build(composite_config(name)).text


@proves("generation", COMPOSITES)
@pytest.mark.parametrize("name", NAMES)
def test_exports_write_what_was_trained(name: str, tmp_path: Path, tokenizer) -> None:
    model = build(composite_config(name))
    export_hf(model, tmp_path, tokenizer)
    kind = FAMILIES[COMPOSITES[name]["model_type"]].kind
    plain = kind.from_pretrained(tmp_path, attn_implementation="eager")
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert {"patch_size", "feature_size"} <= set(settings)
    plain.config.vision_start_token_id = VISION_START
    batch, samples = two_samples()
    sample = {key: value for key, value in samples[0].items() if key != "use_cache"}
    assert written(model, as_prompt(alone(batch))) == written_by(plain, sample)


def test_a_whole_models_config_gives_the_thinker() -> None:
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": COMPOSITES["qwen3_omni"]}
    model = build(ModelConfig(config=whole))
    assert list(model.encoders) == ["vision", "audio"]
    assert model.composite.model_type == "qwen3_omni_moe_thinker"


def test_impossible_sizes_of_sounds_are_refused() -> None:
    audio = COMPOSITES["qwen3_omni"]["audio_config"]
    with pytest.raises(ConfigError, match="output_dim = 48 differs"):
        build(composite_config("qwen3_omni", audio_config={**audio, "output_dim": 48}))
    with pytest.raises(ConfigError, match="n_window = 25"):
        build(composite_config("qwen3_omni", audio_config={**audio, "n_window": 25}))


@pytest.mark.parametrize("samples", [1, 16_000, 16_001, 15_400, 40_123])
def test_sounds_become_the_frames_of_the_extractor(samples: int) -> None:
    """In chunks of a second, and as many tokens as Hugging Face counts for the sound."""
    medium = AudioPreprocessor(build(composite_config("qwen3_omni")).image_specs()["audio"])
    wave_S = np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)
    stream = io.BytesIO()
    soundfile.write(stream, wave_S, 16_000, format="WAV", subtype="FLOAT")
    meta = medium.meta(stream.getvalue())
    assert meta.tokens == meta.patches == _get_feat_extract_output_lengths(ceil(samples / 160))
    frames = frames_of(meta.patches)
    assert samples / 160 <= frames < samples / 160 + 8
    padded_S = np.pad(wave_S, (0, 160 * frames - samples))
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=300)
    theirs = extractor(padded_S, sampling_rate=16_000, padding="longest", return_tensors="np")
    expected = patches_of(torch.from_numpy(theirs["input_features"][0].T))
    assert torch.equal(torch.from_numpy(medium.pixels(stream.getvalue(), meta)), expected)
    assert medium.blank(meta).shape == expected.shape


def test_a_silent_microbatch_gives_the_tower_of_sounds_zeros() -> None:
    model = build(composite_config("qwen3_omni"))
    batch, _ = two_samples()
    del batch.encoders["audio"]
    model(batch).backward()
    heard = [p.grad for p in model.encoders["audio"].parameters()]
    assert all(grad is not None and not grad.any() for grad in heard)


def test_files_of_whole_models_are_read_for_their_thinkers(tmp_path: Path) -> None:
    kind: Any = FAMILIES["qwen3_omni_moe_thinker"].kind
    config = AutoConfig.for_model(**COMPOSITES["qwen3_omni"])
    torch.manual_seed(0)
    plain = kind._from_config(config)
    plain.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    whole = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    whole["talker.model.norm.weight"] = torch.ones(2)
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {"model_type": "qwen3_omni_moe", "thinker_config": config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = build_model(ModelConfig(source=str(tmp_path)), FreezeConfig())
    materialize(model, "cpu")
    load_weights(model)
    theirs = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[our_hf_name(model, name)]), name


def test_a_source_on_a_hub_says_which_towers_it_has() -> None:
    assert ModelConfig(source="a/hub").encoder_names == ["vision"]
    told = ModelConfig(source="a/hub", towers=["vision", "audio"])
    assert told.encoder_names == ["vision", "audio"]
    wrong = ModelConfig(config=COMPOSITES["qwen3_omni"], towers=["vision"])
    with pytest.raises(ConfigError, match="write towers = "):
        build(wrong)
