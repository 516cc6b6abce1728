"""Audio: lengths from headers, features of the Hugging Face extractor, and several encoders."""

from __future__ import annotations

import io
from itertools import islice

import numpy as np
import pytest
import soundfile
import torch
from data_cases import CLIP, caption, data_config, png, training, write_jsonl, write_parquet
from transformers import Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from torchmm.common.batch import ImageSpec
from torchmm.common.errors import ConfigError
from torchmm.data.build import build_loader
from torchmm.data.corrupt import BeyondLimitError, CorruptSampleError
from torchmm.data.media.audio import AudioPreprocessor
from torchmm.data.media.preprocessors import ImageMedia, open_media
from torchmm.data.record_formats.columns import file_segment
from torchmm.data.record_formats.detect import parse_record
from torchmm.data.record_formats.sample import AudioSegment, TextSegment
from torchmm.data.sources.map_sources import open_map_source
from torchmm.recipe.data_section import SourceConfig

SPEECH = ImageSpec(
    encoder="speech",
    inputs="patches",
    processor_class="WhisperFeatureExtractor",
    processor={"feature_size": 8},
    patch_size_px=320,
    merge=2,
    modality="audio",
    max_patches=30,
)


def audio_file(seconds: float, rate: int = 16_000, channels: int = 1, fmt: str = "WAV") -> bytes:
    """Return an audio file with a falling tone and noise."""
    time_S = np.arange(round(seconds * rate)) / rate
    noise_S = np.random.default_rng(0).normal(0, 0.01, len(time_S))
    wave_S = 0.3 * np.sin(2 * np.pi * (900 - 400 * time_S) * time_S) + noise_S
    stream = io.BytesIO()
    soundfile.write(stream, np.stack([wave_S] * channels, axis=1), rate, format=fmt)
    return stream.getvalue()


def test_audio_features_match_hugging_face_extractor() -> None:
    ours = AudioPreprocessor(SPEECH)
    data = audio_file(0.31)  # 4960 samples: 15.5 patches, in groups of four
    meta = ours.meta(data)
    assert (meta.patches, meta.tokens, meta.duration_ms) == (16, 4, 310)
    wave_S, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    padded_S = np.pad(wave_S, (0, 16 * 320 - len(wave_S)))
    extractor = WhisperFeatureExtractor(feature_size=8)
    expected = extractor(padded_S, sampling_rate=16_000, padding="longest", return_tensors="np")
    mel_MF = expected["input_features"][0]
    actual_PD = ours.pixels(data, meta)
    assert actual_PD.shape == (16, 16) == ours.blank(meta).shape
    assert (mel_MF == actual_PD.reshape(32, 8).T).all()


@pytest.mark.parametrize(("rate", "fmt"), [(44_100, "OGG"), (8_000, "FLAC"), (48_000, "WAV")])
def test_audio_of_any_rate_has_planned_shape(rate: int, fmt: str) -> None:
    ours = AudioPreprocessor(SPEECH)
    data = audio_file(0.3, rate, channels=2, fmt=fmt)
    meta = ours.meta(data)
    assert meta.patches == 16 and meta.duration_ms == pytest.approx(300, abs=1)
    actual, reference = ours.pixels(data, meta), ours.pixels(audio_file(0.3), meta)
    assert np.abs(actual - reference).mean() < (0.3 if rate < 16_000 else 0.1)


def test_waveforms_are_normalized_then_padded() -> None:
    spec = ImageSpec("ear", "patches", "Wav2Vec2FeatureExtractor", {}, 320, modality="audio")
    ours = AudioPreprocessor(spec)
    data = audio_file(0.31)  # 15.5 patches
    meta = ours.meta(data)
    assert (meta.patches, meta.tokens, meta.duration_ms) == (16, 16, 310)
    wave_S, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    features = Wav2Vec2FeatureExtractor()(wave_S, sampling_rate=16_000, return_tensors="np")
    actual_S = ours.pixels(data, meta).flatten()
    assert (actual_S[: len(wave_S)] == features["input_values"][0]).all()
    assert len(actual_S) == 16 * 320 and not actual_S[len(wave_S) :].any()
    assert ours.blank(meta).shape == (16, 320)
    assert ours.meta(audio_file(90.0)).duration_ms == 90_000  # this encoder has no limit


def test_audio_longer_than_encoder_is_filtered() -> None:
    ours = AudioPreprocessor(SPEECH)  # reads 0.6 s
    with pytest.raises(BeyondLimitError, match=r"audio of 20\.0 s .* limit of 0\.6 s") as raised:
        ours.meta(audio_file(20.0))
    assert raised.value.limit == "audio longer than the limit of 0.6 s of encoder 'speech'"
    with pytest.raises(BeyondLimitError):
        ours.meta(audio_file(0.72))
    data = audio_file(0.69)  # within the tolerance
    meta = ours.meta(data)
    assert (meta.patches, meta.duration_ms) == (28, 560)  # complete groups below 30 patches
    assert ours.pixels(data, meta).shape == (28, 16)


@pytest.mark.parametrize("data", [b"", b"RIFF", png(8, 8), audio_file(0.0)])
def test_invalid_audio_file_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptSampleError, match="audio"):
        AudioPreprocessor(SPEECH).meta(data)


def test_unsupported_feature_extractor_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no feature extractor 'WhisperX'"):
        open_media(ImageSpec("a", "patches", "WhisperX", {}, 320, modality="audio"), 100)
    with pytest.raises(ConfigError, match=r"not a multiple of processor\.hop_length = 160"):
        AudioPreprocessor(ImageSpec("a", "patches", "WhisperFeatureExtractor", {}, 200))


@pytest.fixture
def make(tmp_path, tokenizer, text_spec):
    """Return a function that builds loaders of samples with an image, audio, both or neither."""
    rows = []
    for i in range(12):
        row = {"text": caption(i)}
        if i % 4 in (0, 1):
            row["image"] = {"bytes": png(16, 24, i), "path": None}
        if i % 4 in (1, 2):
            row["audio"] = {"bytes": audio_file(0.1 + 0.05 * i), "path": None}
        rows.append({"image": None, "audio": None, **row})
    write_parquet(tmp_path / "all", rows)

    def build(*specs, sources=None, workers=0):
        configs = sources or [SourceConfig(path=str(tmp_path / "all"), name="all")]
        return build_loader(
            data_config(tmp_path, *configs, workers=workers),
            training(sequence_length=96),
            text_spec=text_spec,
            image_specs={spec.encoder: spec for spec in specs},
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
        )

    return build


SECOND = ImageSpec(**{**vars(CLIP), "encoder": "second", "patch_size_px": 4})


def test_each_encoder_receives_its_modality(make, text_spec) -> None:
    observed = {"vision": 0, "second": 0, "speech": 0}
    loader = make(CLIP, SECOND, SPEECH)
    for batch in islice(loader, 6):
        for microbatch in batch.microbatches:
            placeholders = (microbatch.input_ids_T == text_spec.image_token_id).nonzero().flatten()
            actual = torch.cat(
                [e.positions_K for e in microbatch.encoders.values()] or [torch.empty(0)]
            )
            assert sorted(actual.tolist()) == placeholders.tolist()
            for name, inputs in microbatch.encoders.items():
                images = [i for s in microbatch.meta.samples for i in s.images_of_encoder(name)]
                assert (
                    len(images) == len(inputs.grids_thw) == microbatch.meta.module_image_count(name)
                )
                assert len(inputs.positions_K) == sum(i.tokens for i in images)
                assert [i.patches for i in images] == microbatch.meta.patches(name)
                observed[name] += len(images)
    assert observed["vision"] == observed["second"] > 0 and observed["speech"] > 0
    assert loader.next_metas() is not None


def test_document_preserves_order_of_text_images_audio(make, tmp_path, text_spec) -> None:
    """Check that each placeholder has the position of its image or audio in the document."""
    (tmp_path / "a.png").write_bytes(png(16, 24))
    (tmp_path / "b.wav").write_bytes(audio_file(0.2))
    order = ["text", "audio", "text", "image", "audio", "text"]
    values = {"text": caption(1), "image": "a.png", "audio": "b.wav"}
    record = {
        f"{kind}s": [value if part == kind else None for part in order]
        for kind, value in values.items()
    }
    path = write_jsonl(tmp_path / "triples.jsonl", [record] * 8)
    loader = make(CLIP, SPEECH, sources=[SourceConfig(path=str(path), name="triples")])
    (microbatch, *_) = next(iter(loader)).microbatches
    sample = microbatch.meta.samples[0]
    assert [i.encoder for i in sample.images] == ["speech", "vision", "speech"]
    positions = {n: e.positions_K.tolist() for n, e in microbatch.encoders.items()}
    owner = {p: name for name, places in positions.items() for p in places}
    row = [owner.get(p, "text") for p in range(sample.tokens)]
    runs = [kind for i, kind in enumerate(row) if i == 0 or row[i - 1] != kind]
    assert runs == ["text", "speech", "text", "vision", "speech", "text"]
    is_placeholder_T = (microbatch.input_ids_T == text_spec.image_token_id)[: sample.tokens]
    assert is_placeholder_T.tolist() == [kind != "text" for kind in row]
    assert (microbatch.targets_T[: sample.tokens] != text_spec.image_token_id).all()


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
@pytest.mark.parametrize("form", ["mono", "rows", "columns", "numpy", "array and path"])
def test_decoded_audio_has_features_of_its_file(rate, form) -> None:
    stream = io.BytesIO()
    wave_SC = np.random.default_rng(0).uniform(-1, 1, (rate // 2, 2)).astype(np.float32)
    if form == "mono":
        wave_SC = wave_SC[:, :1]
    soundfile.write(stream, wave_SC, rate, format="WAV", subtype="FLOAT")
    array = {
        "mono": wave_SC[:, 0].tolist(),
        "rows": wave_SC.T.tolist(),
        "columns": wave_SC.tolist(),
        "numpy": wave_SC,
        "array and path": wave_SC.T,
    }[form]
    decoded = {"array": array, "sampling_rate": rate}
    if form == "array and path":
        decoded |= {"path": "gone.wav", "bytes": None}
    actual = file_segment("audio", decoded, None).read(10**9)
    ours = AudioPreprocessor(SPEECH)
    meta = ours.meta(stream.getvalue())
    assert ours.meta(actual) == meta
    assert meta.duration_ms == 500
    assert (ours.pixels(actual, meta) == ours.pixels(stream.getvalue(), meta)).all()


def test_decoded_audio_in_parquet_is_read(tmp_path) -> None:
    column = {"array": [0.5, -0.5] * 2000, "sampling_rate": 8000, "path": None}
    rows = [{"audio": column, "text": "a"}, {"audio": dict.fromkeys(column), "text": "b"}]
    source = open_map_source(SourceConfig(path=str(write_parquet(tmp_path / "decoded", rows))))
    first, second = (parse_record(source.read(i), None).segments for i in range(2))
    assert isinstance(first[0], AudioSegment) and first[0].data is not None
    wave_S, rate = soundfile.read(io.BytesIO(first[0].data))
    assert rate == 8000 and wave_S.tolist() == column["array"]
    assert second == (TextSegment("b", True),)


def test_audio_without_encoder_is_skipped(make) -> None:
    names = {name for b in islice(make(CLIP), 4) for m in b.microbatches for name in m.encoders}
    assert names == {"vision"}
    names = {name for b in islice(make(SPEECH), 4) for m in b.microbatches for name in m.encoders}
    assert names == {"speech"}


def test_audio_damaged_after_indexing_is_skipped(make, tmp_path) -> None:
    corrupt = audio_file(0.4, fmt="FLAC")
    rows = [{"audio": f"{i}.flac", "text": caption(i)} for i in range(4)]
    for i in range(4):
        (tmp_path / f"{i}.flac").write_bytes(corrupt)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    loader = make(SPEECH, sources=[SourceConfig(path=str(path), name="torn")])
    (tmp_path / "2.flac").write_bytes(corrupt[:60])
    batch = next(iter(loader))
    assert any("torn[2]: " in m and ": not an audio file" in m for m in batch.skipped)


def test_loader_images_exclude_audio(make) -> None:
    loader = make(CLIP, SECOND, SPEECH)
    assert [len(loader.images("all", i)) for i in range(4)] == [1, 1, 0, 0]


def test_image_media_match_their_preprocessor() -> None:
    medium = open_media(CLIP, 10_000)
    assert isinstance(medium, ImageMedia) and medium.is_stacked
    meta = medium.meta(png(20, 30))
    assert medium.grid_thw(meta) == (1, 2, 2) and medium.token_grid(meta) == (1, 2, 2)
    assert medium.pixels(png(20, 30), meta).shape == medium.blank(meta).shape == (3, 16, 16)
