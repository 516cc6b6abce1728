"""Audio from files to gradients: torchmm prepares the same inputs as Hugging Face processors.

The Voxtral processor requires mistral-common, which the test environment does not have. Features
are compared with Hugging Face, and text with the output of mistral-common 1.13.1.
"""

from __future__ import annotations

import io
from itertools import islice, pairwise
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from data_cases import data_config, training, write_jsonl
from model_cases import COMPOSITES, LLMS, SPEECH, build, relative_error, worst_gradient
from speech_cases import FRAMES, MASKS, MELS, PER_TOKEN, patches_of
from test_multimodal import hf_model, hf_weight_name
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AudioFlamingo3Processor,
    PreTrainedTokenizerFast,
    Qwen2AudioProcessor,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)

from torchmm.common.batch import IGNORE_TARGET
from torchmm.data.build import build_loader
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.loader import Loader
from torchmm.data.media.audio import AudioPreprocessor
from torchmm.data.record_formats.sample import Record, SampleOptions
from torchmm.data.sources.reader import SampleReader
from torchmm.models.multimodal import MultimodalModel
from torchmm.recipe.data_section import DataConfig, SourceConfig
from torchmm.recipe.model_section import ModelConfig

RATE, SECONDS = 16_000, 2
"""Sampling rate in Hz, and seconds per audio chunk."""
TOKENS = {
    "voxtral": ["[AUDIO]", "[BEGIN_AUDIO]"],
    "qwen2_audio": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>"],
    "audioflamingo3": ["<sound>"],
}
"""Special tokens. The first of each model is the placeholder of audio."""
WRITTEN = {
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "audioflamingo3": "<sound>",
}
"""Placeholder text of an audio file in the documentation of each model."""
LENGTHS = [1000, 2 * RATE, 2 * RATE + 321, 3 * RATE + 7]
"""Audio lengths in samples."""
CAPTIONS = [" a red dog", " two cats", " the small green bird", " in the sun"]


def wave(number: int) -> np.ndarray:
    noise_S = np.random.default_rng(number).normal(0, 0.1, LENGTHS[number])
    return noise_S.astype(np.float32)


def wave_file(wave_S: np.ndarray) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, wave_S, RATE, format="WAV", subtype="FLOAT")
    return stream.getvalue()


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with some merges and the special tokens of the family."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CAPTIONS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=TOKENS[name],
    )
    if name == "qwen2_audio":
        tokenizer.chat_template = Qwen2AudioProcessor.default_chat_template.fget(None)
    return tokenizer


def make_model(name: str, tokenizer: PreTrainedTokenizerFast) -> MultimodalModel:
    key = "audio_token_index" if name == "qwen2_audio" else "audio_token_id"
    llm = LLMS["llama" if name == "voxtral" else "qwen2"]
    config = {
        **COMPOSITES[name],
        "text_config": {**llm, "vocab_size": 320},
        key: tokenizer.convert_tokens_to_ids(TOKENS[name][0]),
    }
    return build(ModelConfig(config=config))


def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(
        feature_size=MELS, chunk_length=SECONDS, return_attention_mask=True
    )


def processed(name: str, tokenizer: Any, waves: list[np.ndarray], text: str) -> dict[str, Any]:
    """Return the outputs of the Hugging Face processor for audio and text with placeholders."""
    if name == "voxtral":
        return voxtral_processed(tokenizer, waves, text)
    settings = {"sampling_rate": RATE, "return_tensors": "pt"}
    if name == "qwen2_audio":
        processor = Qwen2AudioProcessor(extractor(), tokenizer)
        results = processor(text=[text], audio=waves, **settings)
    else:
        processor = AudioFlamingo3Processor(extractor(), tokenizer)
        results = processor(text=[text], audio=waves, **settings)
    return {key: value for key, value in results.items() if key != "attention_mask"}


def voxtral_processed(tokenizer: Any, waves: list[np.ndarray], text: str) -> dict[str, Any]:
    of_class = SimpleNamespace(feature_extractor=extractor())
    features_NMF = VoxtralProcessor._retrieve_input_features(
        of_class,
        waves,
        FRAMES,
        sampling_rate=RATE,
        padding=True,
        truncation=False,
        pad_to_multiple_of=SECONDS * RATE,
        return_tensors="pt",
    )
    parts = text.split(WRITTEN["voxtral"])
    written = parts[0]
    for wave_S, after in zip(waves, parts[1:], strict=True):
        written += "[BEGIN_AUDIO]" + "[AUDIO]" * voxtral_tokens(len(wave_S)) + after
    ids = tokenizer(written, return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "input_features": features_NMF}


def voxtral_tokens(samples: int) -> int:
    """Return the token count of mistral-common: 12.5 tokens/s of padded audio."""
    return 25 * ceil(samples / (SECONDS * RATE))


def documents(name: str) -> list[list[str | int]]:
    """Return text and audio indices.

    The Audio Flamingo 3 processor accepts one audio file per text.
    """
    first = [3, CAPTIONS[0]] if name == "audioflamingo3" else [0, CAPTIONS[0], 1, CAPTIONS[1]]
    return [first, [CAPTIONS[3]], [CAPTIONS[2], 2, CAPTIONS[1]]]


def open_documents(name: str, tmp_path: Path) -> tuple[MultimodalModel, Any, Loader]:
    """Return the model, the tokenizer and a loader of the documents."""
    tokenizer = make_tokenizer(name)
    model = make_model(name, tokenizer)
    for number in range(len(LENGTHS)):
        (tmp_path / f"{number}.wav").write_bytes(wave_file(wave(number)))
    rows = [
        {
            "texts": [part if isinstance(part, str) else None for part in document],
            "audios": [f"{part}.wav" if isinstance(part, int) else None for part in document],
        }
        for document in documents(name)
    ]
    path = write_jsonl(tmp_path / "documents.jsonl", rows)
    loader = build_loader(
        data_config(tmp_path, SourceConfig(path=str(path), name="documents"), shuffle=False),
        training(global_batch_size=1, sequence_length=512),
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
        **model.sample_specs(tokenizer),
    )
    return model, tokenizer, loader


@pytest.mark.parametrize("name", SPEECH)
def test_speech_files_match_hugging_face_model(name: str, tmp_path) -> None:
    model, tokenizer, loader = open_documents(name, tmp_path)
    (batch,) = islice(loader, 1)
    assert not batch.skipped
    (microbatch,) = batch.microbatches
    plain = hf_model(model)
    losses = []
    for meta, (start, stop) in zip(
        microbatch.meta.samples, pairwise(microbatch.cu_seqlens), strict=False
    ):
        document = documents(name)[meta.index]
        text = "".join(part if isinstance(part, str) else WRITTEN[name] for part in document)
        waves = [wave(part) for part in document if isinstance(part, int)]
        if waves:
            sample = processed(name, tokenizer, waves, text + "</s>")
        else:
            sample = {"input_ids": tokenizer(text + "</s>", return_tensors="pt")["input_ids"]}
        assert torch.equal(microbatch.input_ids_T[start:stop], sample["input_ids"][0])
        targets = microbatch.targets_T[start:stop]
        assert (targets != IGNORE_TARGET).any()
        logits = plain(**sample, use_cache=False).logits[0]
        losses.append(functional.cross_entropy(logits, targets, reduction="sum"))
    assert {meta.index for meta in microbatch.meta.samples} == {0, 1, 2}
    expected, loss = torch.stack(losses).sum(), model(microbatch)
    assert relative_error(loss, expected) < 1e-5
    loss.backward()
    expected.backward()
    assert worst_gradient(model, plain, lambda fqn: hf_weight_name(model, fqn)) < 1e-5


def medium_of(name: str) -> AudioPreprocessor:
    return AudioPreprocessor(make_model(name, make_tokenizer(name)).image_specs()["audio"])


@pytest.mark.parametrize("name", SPEECH)
@pytest.mark.parametrize(
    "samples", [641, 960, 961, 31_700, 32_000, 32_001, 32_320, 32_321, 33_000, 96_000, 111_111]
)
def test_audio_matches_hugging_face_tokens_and_frames(name: str, samples: int) -> None:
    tokenizer = make_tokenizer(name)
    medium = medium_of(name)
    wave_S = np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)
    data = wave_file(wave_S)
    if name == "qwen2_audio" and samples > 33_600:  # 2 s and the tolerance; Hugging Face truncates
        with pytest.raises(BeyondLimitError, match="limit of 2 s"):
            medium.meta(data)
        return
    meta = medium.meta(data)
    theirs = processed(name, tokenizer, [wave_S], WRITTEN[name])
    token = tokenizer.convert_tokens_to_ids(TOKENS[name][0])
    assert meta.tokens == meta.patches // PER_TOKEN[name] == (theirs["input_ids"] == token).sum()
    mels_NFM = theirs["input_features"].mT
    masks = theirs.get(MASKS.get(name, ""), torch.ones(len(mels_NFM), FRAMES))
    expected = patches_of(name, mels_NFM, masks.sum(1).int().tolist())
    actual = torch.from_numpy(medium.pixels(data, meta))
    assert torch.equal(actual, expected)
    assert medium.blank(meta).shape == actual.shape
    longest = 32_000 if name == "qwen2_audio" else samples
    assert meta.duration_ms == round(min(samples, longest) / 16)


@pytest.mark.parametrize("name", ["qwen2_audio", "audioflamingo3"])
def test_audio_shorter_than_token_is_corrupt(name: str) -> None:
    """Check audio for which the Hugging Face processors would write no placeholder."""
    medium = medium_of(name)
    with pytest.raises(CorruptSampleError, match="audio of 320 samples is too short for one token"):
        medium.meta(wave_file(np.zeros(320, np.float32)))
    assert medium.meta(wave_file(np.zeros(321, np.float32))).tokens == 1


def test_audio_beyond_processor_limit_is_filtered() -> None:
    tokens = {name: medium_of(name) for name in SPEECH}
    data = wave_file(np.zeros(41 * RATE, np.float32))
    for name, limit_s in (("qwen2_audio", 2), ("audioflamingo3", 40)):
        with pytest.raises(BeyondLimitError, match=rf"audio of 41\.0 s .* limit of {limit_s} s"):
            tokens[name].meta(data)
    data_40s = wave_file(np.zeros(40 * RATE, np.float32))
    assert tokens["audioflamingo3"].meta(data_40s).tokens == 1000
    assert tokens["voxtral"].meta(data).tokens == 21 * 25


def test_published_chunks_have_published_token_counts() -> None:
    """Check 30 s chunks. The expected Voxtral counts are outputs of mistral-common 1.13.1."""
    config = {**COMPOSITES["voxtral"]["audio_config"], "max_source_positions": 1500}
    model = build(ModelConfig(config={**COMPOSITES["voxtral"], "audio_config": config}))
    medium = AudioPreprocessor(model.image_specs()["audio"])
    actual = [
        medium.meta(wave_file(np.zeros(samples, np.float32))).tokens
        for samples in (1, 160, 7000, 479_999, 480_000, 480_001, 1_000_000)
    ]
    assert actual == [375, 375, 375, 375, 375, 750, 1125]


def test_audio_in_chats_is_numbered_like_qwen2_audio() -> None:
    tokenizer = make_tokenizer("qwen2_audio")
    specs = make_model("qwen2_audio", tokenizer).sample_specs(tokenizer)
    specs.pop("generator_spec")
    reader = SampleReader(DataConfig(), 400, **specs)
    contents = [[0, 1, "which dog?"], ["the red one"], ["and here? ", 2], ["two"]]
    turns, theirs = [], []
    for number, parts in enumerate(contents):
        role = ("user", "assistant")[number % 2]
        audio_indices = [part for part in parts if isinstance(part, int)]
        ours = [
            {"type": "audio", "audio": {"bytes": wave_file(wave(part)), "path": None}}
            if isinstance(part, int)
            else {"type": "text", "text": part}
            for part in parts
        ]
        turns.append({"role": role, "content": ours})
        content = [
            {"type": "audio"} if isinstance(part, int) else {"type": "text", "text": part}
            for part in parts
        ]
        theirs.append({"role": role, "content": content if audio_indices else parts[0]})
    record = Record({"messages": turns}, None, SampleOptions(), "chats[0]")
    actual = reader.read(record)
    processor = Qwen2AudioProcessor(extractor(), tokenizer)
    text = processor.apply_chat_template(theirs, tokenize=False)
    assert "Audio 3: " in text
    waves = [wave(number) for number in range(3)]
    expected = processor(text=[text], audio=waves, sampling_rate=RATE, return_tensors="pt")
    assert actual.text.ids == expected["input_ids"][0].tolist()
    loss_ids = [i for i, loss in zip(actual.text.ids, actual.text.loss, strict=True) if loss]
    assert tokenizer.decode(loss_ids) == "the red one<|im_end|>two<|im_end|>"
