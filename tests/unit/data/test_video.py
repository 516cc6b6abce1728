"""Videos: selection of frames, file formats, and frame processing."""

from __future__ import annotations

import importlib.util
import io
import struct
import tarfile
from functools import partial
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from data_cases import CLIP, NAFLEX, QWEN, caption, data_config, png, training, write_jsonl
from data_cases import write_parquet as write_rows
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from torchmm.common.batch import ImageSpec, TextSpec
from torchmm.common.errors import ConfigError
from torchmm.data.build import build_loader
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.media.images import ImagePreprocessor
from torchmm.data.media.text import VisionBlock, mrope_positions
from torchmm.data.media.video import VideoFile, VideoMedia, sample_frame_indices
from torchmm.data.media.video_writer import VIDEO_FORMATS, encode_video
from torchmm.recipe.data_section import SourceConfig, VideoConfig

PIXELS = 10_000


def pictures(count: int, width: int = 48, height: int = 32) -> list[Image.Image]:
    """Return gray frames of increasing brightness with a white left half."""
    grays = np.linspace(10, 200, count).round().astype(np.uint8)
    frames = np.broadcast_to(grays[:, None, None, None], (count, height, width, 3)).copy()
    frames[:, :, : width // 2] = 250
    return [Image.fromarray(frame) for frame in frames]


def gray_value(image: Image.Image) -> int:
    return int(np.asarray(image)[-4, -4].mean())


def make_video(count: int, fps: int = 10, suffix: str = "mp4", **size: int) -> bytes:
    return encode_video(pictures(count, **size), fps, suffix)


@pytest.mark.parametrize("suffix", VIDEO_FORMATS)
def test_decoded_frames_match_written_frames(suffix: str) -> None:
    video = VideoFile(make_video(20, suffix=suffix), PIXELS)
    assert (video.frames, video.width_px, video.height_px) == (20, 48, 32)
    assert video.duration_s == pytest.approx(2.0, abs=0.02)
    assert video.frame_time_s(5) == pytest.approx(0.5, abs=0.01)
    actual = [gray_value(image) for image in video.select([3, 4, 19]).images()]
    expected = [gray_value(image) for image in pictures(20)]
    tolerance = 40 if suffix == "gif" else 5  # 256 colors
    assert np.abs(np.subtract(actual, [expected[i] for i in (3, 4, 19)])).max() < tolerance


def test_seeking_decodes_same_frames_as_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    options = VIDEO_FORMATS["mp4"]._replace(options={"g": "30", "preset": "veryfast"})
    monkeypatch.setitem(VIDEO_FORMATS, "mp4", options)
    data = make_video(400)
    video, frames = VideoFile(data, PIXELS), [0, 7, 150, 151, 290, 399]
    assert len(video._keys) > 10
    assert video._keyframe_before(video._times[0], video._times[150]) > video._times[100]
    seeking = [np.asarray(image) for image in video.decode(frames)]
    monkeypatch.setattr(VideoFile, "_keyframe_before", lambda *_: -1)
    assert all(
        (a == np.asarray(b)).all() for a, b in zip(seeking, video.decode(frames), strict=True)
    )


def test_rotated_video_is_upright() -> None:
    data = make_video(4)
    matrix = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    clockwise = struct.pack(">9i", 0, 0x10000, 0, -0x10000, 0, 0, 32 << 16, 0, 0x40000000)
    assert data.count(matrix) == 2  # of the movie and of the track
    at = data.rindex(matrix)
    video = VideoFile(data[:at] + clockwise + data[at + len(matrix) :], PIXELS)
    assert (video.width_px, video.height_px) == (32, 48)
    top, bottom = (np.asarray(video.decode([0])[0])[row, 16].mean() for row in (4, 44))
    assert top > 200 > 100 > bottom  # left became top


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://%s\n#EXT-X-ENDLIST\n"


def test_invalid_video_is_corrupt(tmp_path: Path) -> None:
    other = tmp_path / "other.ts"
    other.write_bytes(make_video(4))
    full_data = make_video(20, width=64, height=64)
    for data, message in [
        (b"", "not a video file"),
        (png(8, 8)[:20], "not a video file"),
        (PLAYLIST % str(other).encode(), "not a video file"),  # refers to another file
        (full_data[: len(full_data) // 3], "video"),
    ]:
        with pytest.raises(CorruptSampleError, match=message):
            VideoFile(data, PIXELS)
    with pytest.raises(
        CorruptSampleError, match=r"64x64 pixels is larger than data\.max_image_pixels = 4000"
    ):
        VideoFile(full_data, 4000)


def test_video_that_ends_early_is_corrupt() -> None:
    video = VideoFile(make_video(20), PIXELS)
    video._times[-1] += 10_000
    with pytest.raises(CorruptSampleError, match="ends before one of its 20 expected frames"):
        video.decode([3, 19])


def test_sampled_frames_are_evenly_spaced() -> None:
    config = VideoConfig(fps=2.0, min_frames=4, max_frames=8)
    assert sample_frame_indices(40, 4.0, config) == list(range(0, 40, 5))
    assert sample_frame_indices(10, 1.0, config) == [0, 2, 5, 7]
    assert sample_frame_indices(3, 0.3, config) == [0, 1, 2]
    assert sample_frame_indices(3, 0.3, config, group=2) == [0, 1]
    assert sample_frame_indices(1, 0.1, config, group=2) == [0]
    assert len(sample_frame_indices(9000, 300.0, config)) == 8
    assert len(sample_frame_indices(9000, 300.0, config, frame_limit=5)) == 5


class FakeFrames:
    """Uncompressed frames."""

    def __init__(self, images: list[Image.Image]) -> None:
        self.images = lambda: images


def media(spec: ImageSpec, **settings: object) -> VideoMedia:
    config = VideoConfig(**settings)  # type: ignore[arg-type]
    return VideoMedia(ImagePreprocessor(spec), config, TextSpec(64, 63))


def test_patches_span_two_frames() -> None:
    medium, images = media(QWEN), pictures(5, 24, 16)
    meta = medium.parts(VideoFile(make_video(5, fps=2, width=24, height=16), PIXELS))[0].meta
    assert (meta.frames, meta.patches, meta.tokens, meta.duration_ms) == (2, 48, 12, 2500)
    assert medium.grid_thw(meta) == (2, 4, 6) and medium.token_grid(meta) == (2, 2, 3)
    actual = medium.pixels(FakeFrames(images[:3]), meta)  # type: ignore[arg-type]
    assert actual.shape == medium.blank(meta).shape == (48, 3 * 2 * 16)
    single = [ImagePreprocessor(QWEN).stored_pixels(image) for image in images]
    halves = actual.reshape(2, 24, 3, 2, 16)
    for frame, source in enumerate([0, 1, 2, 2]):  # the last frame is repeated
        expected = single[source].reshape(24, 3, 2, 16)[:, :, 0]
        assert (halves[frame // 2, :, :, frame % 2] == expected).all()


def test_frames_with_times_become_images() -> None:
    video = VideoFile(make_video(20), PIXELS)
    parts = media(CLIP).parts(video)
    assert [part.before for part in parts] == [
        f"<{t} seconds>" for t in ("0.0", "0.5", "1.0", "1.5")
    ]
    assert {(p.meta.frames, p.meta.tokens, p.meta.duration_ms) for p in parts} == {(1, 4, 500)}
    assert media(CLIP).pixels(parts[1].file, parts[1].meta).shape == (3, 16, 16)
    assert {part.before for part in media(CLIP, timestamps=False).parts(video)} == {""}
    single = ImagePreprocessor(CLIP).stored_pixels(video.decode([10])[0])
    assert (media(CLIP).pixels(parts[2].file, parts[2].meta) == single).all()


@pytest.mark.parametrize("spec", [CLIP, NAFLEX, QWEN], ids=lambda s: s.processor_class)
def test_pixel_budget_reduces_frames_or_size(spec: ImageSpec) -> None:
    video = VideoFile(make_video(20), PIXELS)
    sizes = []
    for max_pixels in (100_000, 1024):
        medium = media(spec, max_pixels=max_pixels, fps=4.0)
        parts = medium.parts(video)
        for part in parts:
            assert medium.pixels(part.file, part.meta).shape == medium.blank(part.meta).shape
        group = 2 if spec is QWEN else 1
        sizes.append(sum(part.meta.patches for part in parts) * group * spec.patch_size_px**2)
    assert sizes[1] <= 1024 < sizes[0]
    if spec is CLIP:
        assert len(parts) == 4


@pytest.mark.parametrize("seconds", [2.0, 1.0, 0.5, 1.3, 2 / 3])
def test_video_positions_match_hugging_face(seconds: float) -> None:
    """Compare with transformers 5.23 or newer. Older versions truncate seconds to integers."""
    config = AutoConfig.for_model("qwen2_5_vl")
    config.text_config.update({"num_hidden_layers": 1})
    config.vision_config.depth = 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    if "int(next" in Path(importlib.import_module(model.__module__).__file__).read_text():
        pytest.skip("this version of transformers truncates seconds")
    video_grid, image_grid = (7, 4, 6), (1, 4, 2)
    token_types = [0] * 3 + [2] * 42 + [0] * 4 + [1] * 2 + [0] * 2 + [2] * 42 + [0]
    per_second = config.vision_config.tokens_per_second
    steps = per_second * seconds, per_second * 3 * seconds
    blocks = [
        VisionBlock(3, 7, 2, 3, steps[0]),
        VisionBlock(49, 1, 2, 1),
        VisionBlock(53, 7, 2, 3, steps[1]),
    ]
    expected, _ = model.get_rope_index(
        input_ids=torch.zeros(1, len(token_types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([token_types]),
        image_grid_thw=torch.tensor([image_grid]),
        video_grid_thw=torch.tensor([video_grid, video_grid]),
        second_per_grid_ts=torch.tensor([seconds, 3 * seconds]),
    )
    assert mrope_positions(len(token_types), blocks).tolist() == expected[:, 0].tolist()


def test_missing_video_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_video(4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[video\]'"):
        VideoFile(data, PIXELS)


# Complete samples


@pytest.fixture
def load(tmp_path, tokenizer, text_spec):
    """Return a function that builds a loader."""

    def build(*specs, sources, workers=0, text=text_spec, **video):
        return build_loader(
            data_config(tmp_path, *sources, workers=workers, video=VideoConfig(**video)),
            training(sequence_length=256),
            text_spec=text,
            image_specs={spec.encoder: spec for spec in specs},
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
        )

    return build


def rows(count: int) -> list[dict]:
    samples = []
    for i in range(count):
        video = make_video(6 + 3 * i, fps=6, suffix=("mp4", "webm", "gif")[i % 3])
        samples.append(
            {
                "video": video if i % 4 else None,
                "image": png(16, 24, i) if i % 4 == 3 else None,
                "text": caption(i),
            }
        )
    return samples


@pytest.mark.parametrize("spec", [CLIP, NAFLEX, QWEN], ids=lambda s: s.processor_class)
def test_batches_have_videos_images_and_text(load, tmp_path, text_spec, spec) -> None:
    write_rows(tmp_path / "all", rows(8))
    text = TextSpec(**{**vars(text_spec), "video_token_id": 4})
    loader = load(spec, sources=[SourceConfig(path=str(tmp_path / "all"), name="all")], text=text)
    video_count = 0
    for batch in islice(loader, 4):
        assert not batch.skipped
        for microbatch in batch.microbatches:
            inputs = microbatch.encoders.get("vision")
            if inputs is None:
                continue
            images = microbatch.meta.images_of_encoder("vision")
            videos = [image for image in images if image.duration_ms]
            video_count += len(videos)
            assert len(inputs.grids_thw) == len(images)
            assert [g[0] for g in inputs.grids_thw] == [image.frames for image in images]
            assert len(inputs.positions_K) == sum(image.tokens for image in images)
            ids = microbatch.input_ids_T[inputs.positions_K]
            assert set(ids.tolist()) <= {text.image_token_id, 4}
            video_tokens = sum(image.tokens for image in videos) if spec is QWEN else 0
            assert (ids == 4).sum() == video_tokens
    assert video_count > 8
    assert len(loader.images("all", 1)) >= 4


def test_batches_are_independent_of_workers(load, tmp_path) -> None:
    write_rows(tmp_path / "all", rows(6))
    second = ImageSpec(**{**vars(QWEN), "encoder": "second"})
    sources = [SourceConfig(path=str(tmp_path / "all"), name="all")]
    build = partial(load, CLIP, second, sources=sources)
    for one, other in zip(islice(build(), 3), islice(build(workers=2), 3), strict=True):
        for a, b in zip(one.microbatches, other.microbatches, strict=True):
            assert torch.equal(a.input_ids_T, b.input_ids_T) and a.meta == b.meta
            assert a.encoders.keys() == b.encoders.keys()
            for name, inputs in a.encoders.items():
                assert torch.equal(inputs.pixels, b.encoders[name].pixels)


def test_damaged_videos_are_skipped(load, tmp_path) -> None:
    for i in range(4):
        (tmp_path / f"{i}.mp4").write_bytes(make_video(12))
    (tmp_path / "1.mp4").write_bytes(b"nothing")
    samples = [{"video": f"{i}.mp4", "text": caption(i)} for i in range(4)]
    path = write_jsonl(tmp_path / "damaged.jsonl", samples)
    loader = load(CLIP, sources=[SourceConfig(path=str(path), name="damaged")])
    (tmp_path / "2.mp4").write_bytes(b"damaged later")
    skipped = [message for batch in islice(loader, 2) for message in batch.skipped]
    for number in (1, 2):
        assert any(f"damaged[{number}]: " in m and ": not a video file" in m for m in skipped)


def test_video_folders_and_webdatasets_are_read(load, tmp_path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lines = []
    with tarfile.open(tmp_path / "videos.tar", "w") as tar:
        for i in range(3):
            data = make_video(8 + i)
            (folder / f"{i}.mp4").write_bytes(data)
            lines.append({"file_name": f"{i}.mp4", "text": caption(i)})
            for name, content in ((f"{i}.mp4", data), (f"{i}.txt", caption(i).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    write_jsonl(folder / "metadata.jsonl", lines)
    typed = datasets.Features({"video": datasets.Video(), "text": datasets.Value("string")})
    table = {"video": [{"bytes": make_video(8), "path": None}], "text": [caption(3)]}
    datasets.Dataset.from_dict(table, typed).to_parquet(tmp_path / "typed.parquet")
    for source in (folder, tmp_path / "videos.tar", tmp_path / "typed.parquet"):
        for streaming in (False, True):
            config = SourceConfig(path=str(source), streaming=streaming)
            batch = next(iter(load(QWEN, sources=[config])))
            assert not batch.skipped
            metas = [m.meta.images_of_encoder("vision") for m in batch.microbatches]
            assert {image.frames for images in metas for image in images} == {2}


def test_dropped_frames_are_counted() -> None:
    video = VideoFile(make_video(20, fps=10), PIXELS)  # 2 s
    assert media(CLIP, fps=10, max_frames=64).count_dropped_frames(video) == 0
    assert media(CLIP, fps=10, max_frames=6).count_dropped_frames(video) == 14
    assert (
        media(CLIP, fps=100, max_frames=6).count_dropped_frames(video) == 14
    )  # of 20 frames in the file
    frame_px = media(CLIP).parts(video)[0].meta.patches * CLIP.patch_size_px**2
    assert media(CLIP, fps=10, max_pixels=3 * frame_px).count_dropped_frames(video) == 17
    assert media(QWEN, fps=10, max_pixels=1).count_dropped_frames(video) == 0  # smaller frames
