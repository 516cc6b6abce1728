"""Voxtral, Qwen2-Audio and Audio Flamingo 3 equal Hugging Face on samples with audio."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from likeliest_text import as_prompt, written, written_by
from model_cases import (
    AUDIO_TOKEN_ID,
    COMPOSITES,
    SPEECH,
    build,
    composite_config,
    pair_config,
    relative_error,
    worst_gradient,
)
from proofs import proves
from speech_cases import three_samples
from test_multimodal import hf_model, hf_weight_name
from torch import Tensor
from torch.nn import functional

from torchmm.common.batch import Microbatch
from torchmm.common.errors import ConfigError
from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.models.families.encoders.family import image_starts
from torchmm.models.hf.export import export_hf
from torchmm.models.layers.attention import Segments


def first_audio_sample(batch: Microbatch) -> Microbatch:
    """Return the first sample, which has two audio files, as a separate microbatch."""
    length = batch.cu_seqlens[1]
    return replace(
        batch,
        input_ids_T=batch.input_ids_T[:length],
        targets_T=batch.targets_T[:length],
        target_positions_L=None,
        position_ids=batch.position_ids[:length],
        cu_seqlens=[0, length],
        encoders={"audio": batch.encoders["audio"].select(range(2))},
    )


@proves("equal", COMPOSITES)
@proves("packed", COMPOSITES)
@proves("sounds", COMPOSITES)
@pytest.mark.parametrize("name", SPEECH)
def test_audio_matches_hugging_face_loss_and_gradients(name: str) -> None:
    """Compare three packed samples, one of them without audio, and the first sample separately."""
    model = build(composite_config(name))
    plain = hf_model(model)
    batch, samples = three_samples(name)
    theirs = [plain(**sample).logits[0] for sample in samples]
    for sample_batch, logits in (
        (batch, torch.cat(theirs)),
        (first_audio_sample(batch), theirs[0]),
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
        assert worst_gradient(model, plain, lambda fqn: hf_weight_name(model, fqn)) < 1e-5


@pytest.mark.parametrize("name", SPEECH)
def test_audio_chunk_and_end_errors_change_logits(name: str, monkeypatch) -> None:
    model = build(composite_config(name))
    batch, _ = three_samples(name)
    all_positions = torch.arange(len(batch.input_ids_T))
    inputs = batch.encoders["audio"]

    def logits() -> Tensor:
        with torch.no_grad():
            return model.llm.logits(batch, model.encode(batch), all_positions)

    right = logits()
    family_class = type(model.encoders["audio"].family)
    windows = family_class.context
    starts = image_starts(inputs.grids_thw)
    wrong = starts if name != "qwen2_audio" else [0, starts[-1]]

    def too_wide(*arguments: object) -> object:
        actual = windows(*arguments)
        return actual._replace(segments=Segments.from_starts(wrong, torch.device("cpu")))

    with monkeypatch.context() as patch:
        patch.setattr(family_class, "context", too_wide)
        assert relative_error(logits(), right) > 1e-4, "chunks attend to each other"
    pixels = inputs.pixels
    inputs.pixels = pixels.clone()
    if name == "voxtral":
        inputs.pixels[80:100] = 0
        assert relative_error(logits(), right) > 1e-4, "silence is ignored"
    else:
        inputs.pixels[:, 2 * 8 :] = 0
        assert relative_error(logits(), right) > 1e-4, "features after the audio are ignored"
    inputs.pixels = pixels
    assert relative_error(logits(), right) == 0


@proves("generation", COMPOSITES)
@pytest.mark.parametrize("name", SPEECH)
def test_exported_speech_model_generates_same_tokens(name: str, tmp_path: Path, tokenizer) -> None:
    model = build(composite_config(name))
    export_hf(model, tmp_path, tokenizer)
    model_class = FAMILIES[COMPOSITES[name]["model_type"]].kind
    plain = model_class.from_pretrained(tmp_path, attn_implementation="eager")
    batch, samples = three_samples(name)
    sample = {key: value for key, value in samples[0].items() if key != "use_cache"}
    ours = written(model, as_prompt(first_audio_sample(batch)), AUDIO_TOKEN_ID)
    assert ours == written_by(plain, sample, AUDIO_TOKEN_ID)


@pytest.mark.parametrize("name", SPEECH)
def test_selected_audio_has_same_features(name: str) -> None:
    """Check also an odd number of positions, whose last position is in no token."""
    inputs = three_samples(name)[0].encoders["audio"]
    model = build(composite_config(name))
    full = model.encoders["audio"](inputs)
    selections = [inputs.select(range(i, i + 1)) for i in range(len(inputs.grids_thw))]
    assert torch.equal(torch.cat([part.positions_K for part in selections]), inputs.positions_K)
    actual = [model.encoders["audio"](part) for part in selections]
    assert [len(features) for features in actual] == [len(part.positions_K) for part in selections]
    assert relative_error(torch.cat(actual), full) < 1e-5


@pytest.mark.parametrize("name", SPEECH)
def test_pixel_shuffle_drops_incomplete_audio_tokens(name: str) -> None:
    encoder = build(pair_config("llama", name, connector="pixel_shuffle_mlp")).encoders["eye"]
    inputs = three_samples(name)[0].encoders["audio"]
    group = encoder.patches_per_token
    assert group == (4 if name == "voxtral" else 8)
    actual = encoder(inputs)
    assert len(actual) == sum(grid[2] // group for grid in inputs.grids_thw)
    last = encoder(inputs.select(range(2, 3)))
    assert relative_error(actual[-len(last) :], last) < 1e-5


@pytest.mark.parametrize("name", SPEECH)
def test_batch_without_audio_has_zero_encoder_gradients(name: str) -> None:
    model = build(composite_config(name))
    batch, _ = three_samples(name)
    batch.encoders = {}
    model(batch).backward()
    grads = [p.grad for p in model.encoders["audio"].parameters() if p.requires_grad]
    assert all(grad is not None and not grad.any() for grad in grads)


def test_speech_model_heads_are_not_tied() -> None:
    """Check that the LLM config cannot tie them, as in Hugging Face classes."""
    text = {**COMPOSITES["qwen2_audio"]["text_config"], "tie_word_embeddings": True}
    model = build(composite_config("qwen2_audio", text_config=text))
    assert model.llm.tied_parameters() == {}
    plain = hf_model(model)
    assert not torch.equal(plain.lm_head.weight, plain.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("voxtral", {"intermediate_size": 64}, "intermediate_size = 64 must be the size of"),
        ("voxtral", {"max_source_positions": 50}, "max_source_positions = 50 is not a multiple of"),
        (
            "qwen2_audio",
            {"max_source_positions": 30},
            "positions = 30: the feature extractor of qwen2_audio_",
        ),
        ("audioflamingo3", {"dropout": 0.1}, r"dropout = 0\.1 is not supported"),
        (
            "qwen2_audio",
            {"model_type": "audioflamingo3_encoder"},
            "audio encoder 'audioflamingo3_encoder'",
        ),
    ],
)
def test_invalid_audio_encoders_are_rejected(name: str, changes: dict, message: str) -> None:
    audio = {**COMPOSITES[name]["audio_config"], **changes}
    if "intermediate_size" in changes:
        del audio["encoder_ffn_dim"]
    with pytest.raises(ConfigError, match=message):
        build(composite_config(name, audio_config=audio))


def test_unsupported_llm_of_speech_model_is_rejected() -> None:
    text = {**COMPOSITES["voxtral"]["text_config"], "model_type": "granite", "logits_scaling": 2.0}
    with pytest.raises(ConfigError, match="'granite' scales or caps its logits"):
        build(composite_config("voxtral", text_config=text))
    with pytest.raises(ConfigError, match="audio_token_id is missing"):
        build(composite_config("voxtral", audio_token_id=None))
