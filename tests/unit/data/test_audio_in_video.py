"""Videos with their audio tracks for Qwen Omni models, compared with transformers."""

from __future__ import annotations

import io
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import av
import numpy as np
import pytest
import soundfile
import torch
from data_cases import (
    QWEN,
    caption,
    data_config,
    planned_shares,
    training,
    write_parquet,
)
from model_cases import AUDIO_TOKEN_ID, build, composite_config, relative_error
from omni_cases import (
    AUDIO_END,
    AUDIO_START,
    MELS,
    SECONDS,
    VIDEO_TOKEN_ID,
    VISION_END,
    VISION_START,
    OmniSample,
    Read,
    packed,
)
from test_audio import SPEECH
from test_multimodal import version
from test_omni import NAMES, audio_token_count, hf_thinker
from test_video import make_video, pictures
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from torchmm.common.batch import IGNORE_TARGET
from torchmm.data.build import build_loader
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.text import VisionBlock, interleave_audio
from torchmm.data.media.video import VideoFile
from torchmm.data.record_formats.sample import Record
from torchmm.data.sources.reader import SampleReader
from torchmm.recipe.data_section import DataConfig, SourceConfig, VideoConfig

pytestmark = pytest.mark.skipif(version < (5, 21), reason="thinkers have different modules")
PROCESSORS = {"qwen2_5_omni": Qwen2_5OmniProcessor, "qwen3_omni": Qwen3OmniMoeProcessor}
CHUNK_TOKENS = {"qwen2_5_omni": 50, "qwen3_omni": 0}
PER_SECOND = {"qwen2_5_omni": 25, "qwen3_omni": 13}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("grid", "seconds", "audio_tokens"),
    [((4, 4, 6), 1.0, 100), ((4, 4, 6), 1.0, 7), ((3, 2, 2), 4.0, 90), ((9, 4, 4), 0.7, 300)],
)
def test_token_order_matches_processor(name, grid, seconds, audio_tokens) -> None:
    cls = PROCESSORS[name]
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        **{f"{kind}_token": letter for kind, letter in (("video", "V"), ("audio", "A"))},
        audio_bos_token="",
        audio_eos_token="",
        get_chunked_index=lambda times, size: cls.get_chunked_index(None, times, size),
    )
    written = cls.replace_video_with_audio_token(
        processor,
        {"video_grid_thw": torch.tensor([grid]), "video_second_per_grid": [seconds]},
        0,
        {"num_audio_tokens": [audio_tokens]},
        0,
        position_id_per_seconds=PER_SECOND[name],
        seconds_per_chunk=2.0,
    )
    block = VisionBlock(0, grid[0], grid[1] // 2, grid[2] // 2, seconds, PER_SECOND[name])
    is_audio = interleave_audio(block, audio_tokens, CHUNK_TOKENS[name])
    assert "".join("A" if is_one else "V" for is_one in is_audio) == written
    assert "AV" in written or audio_tokens == 7


class AudioVideoSample(OmniSample):
    """Text with a video and its audio track."""

    def __init__(self, name: str, number: int, generator: torch.Generator) -> None:
        super().__init__(name, "", number, generator)
        length = (130, 24)[number]
        grid = (6 - 2 * number, 4, 4)
        frames = self._sizes.frames_of(length)
        mels_FM = torch.randn(frames, MELS, generator=generator)
        pixels = torch.randn(prod(grid), 96, generator=generator)
        self.read["audio"].append(Read(self._sizes.patches_of(mels_FM), (1, 1, length)))
        self.read["vision"].append(Read(pixels, grid))
        tokens = length // self._sizes.pooled
        assert tokens == audio_token_count(name, frames)
        per_second = self._text.tokens_per_second
        block = VisionBlock(len(self.ids) + 2, grid[0], 2, 2, SECONDS, per_second)
        is_audio = interleave_audio(block, tokens, self._text.audio_chunk_tokens)
        assert (np.diff(is_audio.astype(int)) != 0).sum() > 1
        self.blocks.append(block._replace(is_audio=is_audio))
        placeholders = [AUDIO_TOKEN_ID if a else VIDEO_TOKEN_ID for a in is_audio]
        self.ids += [VISION_START, AUDIO_START, *placeholders, AUDIO_END, VISION_END]
        self.ids += self._words(6)
        self._hf_inputs |= {
            "pixel_values_videos": pixels,
            "video_grid_thw": torch.tensor([grid]),
            "video_second_per_grid": torch.tensor([SECONDS]),
            "input_features": mels_FM.T[None],
            "feature_attention_mask": torch.ones(1, frames, dtype=torch.long),
            "use_audio_in_video": True,
        }


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_hugging_face(name: str) -> None:
    model = build(composite_config(name))
    plain = hf_thinker(model)
    generator = torch.Generator().manual_seed(3)
    samples = [AudioVideoSample(name, number, generator) for number in (0, 1)]
    with torch.no_grad():
        theirs = [plain(**sample.theirs(), use_cache=False).logits[0] for sample in samples]
        batch = packed(samples)
        rows = torch.arange(len(batch.input_ids_T))

        def logits() -> torch.Tensor:
            return model.llm.logits(batch, model.encode(batch), rows)

        assert relative_error(logits(), torch.cat(theirs)) < 1e-5
        for sample in samples:  # consecutive positions, as of separate files
            sample.blocks = [block._replace(is_audio=None) for block in sample.blocks]
        batch.position_ids = packed(samples).position_ids
        assert relative_error(logits(), torch.cat(theirs)) > 1e-4


def film(seconds: float, rate: int = 16_000, channels: int = 1) -> tuple[bytes, np.ndarray]:
    """Return a Matroska file with uncompressed audio, and its samples (channels, S)."""
    rng = np.random.default_rng(0)
    samples = rng.integers(-9000, 9000, (channels, int(seconds * rate)), np.int16)
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        video = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 48, 32, "yuv420p"
        audio = container.add_stream(
            "pcm_s16le", rate=rate, layout=["mono", "stereo"][channels - 1]
        )
        for image in pictures(int(seconds * 10)):
            container.mux(video.encode(av.VideoFrame.from_image(image)))
        packed_samples = samples.T.reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed_samples, "s16", audio.layout.name)
        frame.rate = rate
        container.mux(audio.encode(frame))
        for stream in (video, audio):
            container.mux(stream.encode(None))
    return file.getvalue(), samples / 32768


@pytest.mark.parametrize("channels", [1, 2])
def test_audio_track_is_decoded(channels: int) -> None:
    data, expected_CS = film(2.0, 44_100, channels)
    video = VideoFile(data, 10_000)
    wave_S, rate = soundfile.read(io.BytesIO(video.audio(None, None)))
    assert rate == 44_100 and wave_S == pytest.approx(expected_CS.mean(0), abs=1e-6)
    part_S, _ = soundfile.read(io.BytesIO(video.audio(0.5, 1.5)))
    assert part_S == pytest.approx(wave_S[22_050:66_150])
    assert VideoFile(make_video(8), 10_000).audio(None, None) is None


OMNI = {
    "positions": "mrope",
    "tokens_per_second": 25.0,
    "clip_times": "whole",
    "image_prefix": (430,),
    "image_suffix": (431,),
    "video_token_id": 432,
    "sound_token_id": 433,
    "sound_prefix": (434,),
    "sound_suffix": (435,),
    "audio_chunk_tokens": 50,
}
SPECS = {"vision": QWEN, "audio": replace(SPEECH, encoder="audio", max_patches=600)}


def records(data: bytes) -> list[dict]:
    parts = [{"type": "video", "video": data, "use_audio_in_video": True, "fps": 2.0}]
    texts = [{"type": "text", "text": caption(1)}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": caption(2)}]}
    return [{"messages": [{"role": "user", "content": parts + texts}, answer]}] * 4


@pytest.mark.parametrize("streaming", [False, True])
def test_batches_have_alternating_tokens(streaming, tmp_path, tokenizer, text_spec) -> None:
    data, _ = film(3.0)
    text = replace(text_spec, **OMNI)
    path = write_parquet(tmp_path / "films", records(data))
    loader = build_loader(
        data_config(
            tmp_path,
            SourceConfig(path=str(path), streaming=streaming),
            video=VideoConfig(max_frames=8),
        ),
        training(sequence_length=512),
        text_spec=text,
        image_specs=SPECS,
        tokenizer=tokenizer,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
    )
    batch = next(iter(loader))
    assert not batch.skipped
    microbatch = batch.microbatches[0]
    video, audio = microbatch.meta.samples[0].images
    assert (video.encoder, audio.encoder) == ("vision", "audio")
    assert video.duration_ms == audio.duration_ms == 3000
    vision, ear = (microbatch.encoders[name] for name in ("vision", "audio"))
    length = microbatch.cu_seqlens[1]
    ids = microbatch.input_ids_T[:length]
    video_K = vision.positions_K[: video.tokens]
    audio_K = ear.positions_K[: audio.tokens]
    assert set(ids[video_K].tolist()) == {432} and set(ids[audio_K].tolist()) == {433}
    assert (ids == 432).sum() == video.tokens and (ids == 433).sum() == audio.tokens
    first, last = int(video_K[0]), int(max(video_K[-1], audio_K[-1]))
    assert ids[first - 2 : first].tolist() == [430, 434]
    assert ids[last + 1 : last + 3].tolist() == [435, 431]
    block = VisionBlock(0, *vision.grids_thw[0], 1.0, 25.0)._replace(
        rows=vision.grids_thw[0][1] // 2, columns=vision.grids_thw[0][2] // 2
    )
    is_audio = interleave_audio(block, audio.tokens, 50)
    assert (ids[first : last + 1] == 433).tolist() == is_audio.tolist()
    positions_3L = microbatch.position_ids[:, :length]
    start = int(positions_3L[0, first])
    assert positions_3L[0, first - 2 : first].tolist() == [start - 1] * 2
    assert positions_3L[0, audio_K].tolist() == list(range(start, start + audio.tokens))
    assert positions_3L[0, video_K].unique().tolist() == [start, start + 25, start + 50]
    assert (microbatch.targets_T[first : last + 1] == IGNORE_TARGET).all()
    pixels = (
        SampleReader(DataConfig(), 512, text, SPECS, tokenizer)
        .media["audio"]
        .pixels(VideoFile(data, 10_000).audio(None, None), audio)
    )
    assert np.array_equal(ear.values().pixels[: audio.patches].numpy(), pixels)
    if streaming:
        return
    packs, decoder = next(planned_shares(loader))[0], loader._decoder
    rebuilt = decoder.rebuild(packs, {}, microbatch)  # as of a producer
    assert torch.equal(rebuilt.position_ids, microbatch.position_ids)
    shape = microbatch.position_ids.shape
    (sample, *_) = microbatch.meta.samples
    masked = decoder.mask_corrupt_samples(microbatch, packs, {f"{sample.source}[{sample.index}]"})
    assert masked.position_ids.shape == shape and not (masked.input_ids_T[:length] == 433).any()


def test_unsupported_audio_tracks_are_rejected(tokenizer, text_spec, root) -> None:
    data, _ = film(1.0)
    text = replace(text_spec, **OMNI)
    for spec, encoders, part, reason in [
        (text_spec, SPECS, {"video": data}, "requires Qwen2.5-Omni or Qwen3-Omni"),
        (text, {"vision": QWEN}, {"video": data}, "with a vision and an audio encoder"),
        (text, SPECS, {"video": ["mllm_demo_data/1.jpg"] * 2}, "a list of frames has no audio"),
        (text, SPECS, {"video": data, "use_audio_in_video": 1}, "use_audio_in_video = 1; use"),
    ]:
        reader = SampleReader(DataConfig(), 512, spec, encoders, tokenizer)
        columns = {"videos": [{"use_audio_in_video": True, **part}], "text": "a"}
        with pytest.raises(CorruptSampleError, match=reason):
            reader.read(Record(columns, root))
    reader = SampleReader(DataConfig(), 512, text, SPECS, tokenizer)
    silent = {"videos": [{"video": make_video(8), "use_audio_in_video": True}], "text": "a"}
    assert [image.encoder for image in reader.read(Record(silent)).images] == ["vision"]
