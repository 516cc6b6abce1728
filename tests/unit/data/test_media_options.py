"""Lists of frames as videos, and size limits and frame rates of single images and videos.

The names and rules are those of `qwen_vl_utils`. Sizes and pixels are compared with the
image processor of Hugging Face, and times with Qwen processors.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from data_cases import (
    CLIP,
    GLM,
    NAFLEX,
    QWEN,
    caption,
    data_config,
    encode,
    png,
    training,
    write_jsonl,
    write_parquet,
    write_shard,
)
from PIL import Image
from test_video import make_video, pictures
from test_video_reference import noise, reference_patches
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from torchmm.common.batch import TextSpec
from torchmm.common.tiles import TileSpec
from torchmm.data.build import build_loader
from torchmm.data.corrupt import CorruptSampleError
from torchmm.data.identity import SamplesDigest
from torchmm.data.media.images import ImagePreprocessor
from torchmm.data.media.preprocessors import ImageMedia
from torchmm.data.media.uint8_pixels import to_model_inputs
from torchmm.data.media.video import FrameFiles, VideoFile, VideoMedia
from torchmm.data.record_formats.sample import NO_OPTIONS, MediaOptions, Record
from torchmm.data.sources.reader import SampleReader
from torchmm.recipe.data_section import DataConfig, SourceConfig, VideoConfig

PIXELS = 1_000_000
SIZES = {"shortest_edge": 64, "longest_edge": 512}
IMAGE_OPTIONS = [
    {"min_pixels": 256},
    {"max_pixels": 128},
    {"max_pixels": 4096},
    {"min_pixels": 1024, "max_pixels": 2048},
    {"min_pixels": 2048},
    {"max_pixels": 32},
]


def frames_of(images: list[Image.Image], frame_rate: float, max_pixels: int = PIXELS) -> FrameFiles:
    files = [encode(image, "PNG") for image in images]
    return FrameFiles(files.__getitem__, len(files), frame_rate, max_pixels)


TEXT = TextSpec(64, 63)


def media(spec=QWEN, text=TEXT, **settings: object) -> VideoMedia:
    return VideoMedia(ImagePreprocessor(spec), VideoConfig(**settings), text)


def indices(medium: VideoMedia, video, options: MediaOptions = NO_OPTIONS) -> list[int]:
    parts = medium.parts(video, options)
    return [number for part in parts for number in part.file.frame_indices]


# Sizes of images


@pytest.mark.parametrize("options", IMAGE_OPTIONS, ids=str)
@pytest.mark.parametrize("size", [(40, 24), (7, 90), (64, 64)])
def test_image_limits_match_hugging_face(options: dict, size: tuple[int, int]) -> None:
    """Compare with the processor that is called with these limits."""
    data, medium = png(*size), ImageMedia(QWEN, PIXELS)
    meta = medium.meta(data, MediaOptions(**options))
    low = options.get("min_pixels", min(64, options.get("max_pixels", 64)))
    high = options.get("max_pixels", max(512, low))
    theirs = Qwen2VLImageProcessorPil(**{**QWEN.processor, "size": SIZES})
    expected = theirs(
        images=[Image.open(io.BytesIO(data))],
        size={"shortest_edge": low, "longest_edge": high},
        return_tensors="np",
    )
    assert medium.grid_thw(meta) == tuple(expected["image_grid_thw"][0])
    actual = to_model_inputs(medium.pixels(data, meta), medium.byte_values)
    assert (actual == expected["pixel_values"]).all()
    assert medium.blank(meta).shape == actual.shape == (meta.patches, 3 * 2 * 16)


def test_image_has_requested_size() -> None:
    data, medium = png(40, 24), ImageMedia(QWEN, PIXELS)
    meta = medium.meta(data, MediaOptions(resized_height=61, resized_width=35, max_pixels=64))
    assert medium.grid_thw(meta) == (1, 64 // 4, 32 // 4)  # multiples of 8 pixels
    resized = Image.open(io.BytesIO(data)).resize((32, 64), Image.Resampling.BICUBIC)
    theirs = Qwen2VLImageProcessorPil(**QWEN.processor)
    expected = theirs(images=[resized], do_resize=False, return_tensors="np")["pixel_values"]
    actual = to_model_inputs(medium.pixels(data, meta), medium.byte_values)
    assert (actual == expected).all()
    unlimited = medium.meta(data)
    assert medium.grid_thw(unlimited) != medium.grid_thw(meta) and unlimited.rows == 0


@pytest.mark.parametrize("spec", [CLIP, NAFLEX, GLM], ids=lambda spec: spec.processor_class)
def test_other_processors_reject_size_options(spec) -> None:
    with pytest.raises(CorruptSampleError, match=r"max_pixels = 9: \w+ of encoder 'vision'"):
        ImageMedia(spec, PIXELS).meta(png(16, 16), MediaOptions(max_pixels=9))
    with pytest.raises(CorruptSampleError, match="total_pixels = 999"):
        media(spec).parts(VideoFile(make_video(8), PIXELS), MediaOptions(total_pixels=999))
    assert media(spec).parts(VideoFile(make_video(8), PIXELS), MediaOptions(nframes=4))


def test_tiled_images_reject_size_options(tokenizer, text_spec, root) -> None:
    processor = {"size": {"height": 16, "width": 16}, "crop_to_patches": True}
    tiles = TileSpec("GotOcr2ImageProcessor", {**processor, "max_patches": 4})
    spec = replace(CLIP, tiles=tiles)
    reader = SampleReader(DataConfig(), 256, text_spec, {"vision": spec}, tokenizer)
    columns = {"image": {"image": png(40, 20), "max_pixels": 99}, "text": "a"}
    with pytest.raises(CorruptSampleError, match=r"max_pixels = 99: .* cuts images into tiles"):
        reader.read(Record(columns, root))


# Frames of videos


def qwen_frame_size(size, frames: int, options: MediaOptions, budget_px: int) -> tuple[int, int]:
    """Return (height, width) of frames by the rule of `qwen_vl_utils`, written out."""
    height, width = size
    low = options.min_pixels or min(64, options.max_pixels or 64)
    budget = budget_px / frames
    if options.total_pixels:
        budget = min(budget, options.total_pixels / frames * 2)
    high = max(min(512, budget), int(low * 1.05))
    if options.max_pixels:
        high = min(options.max_pixels, max(budget, int(low * 1.05)))
    rows, columns = round(height / 8) * 8, round(width / 8) * 8
    if rows * columns > high:
        scale = (height * width / high) ** 0.5
        rows, columns = (max(8, int(side / scale / 8) * 8) for side in size)
    elif rows * columns < low:
        scale = (low / (height * width)) ** 0.5
        rows, columns = (int(-(-(side * scale) // 8)) * 8 for side in size)
    return rows, columns


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 256},
        {"min_pixels": 400, "max_pixels": 900},
        {"total_pixels": 800},
        {"total_pixels": 800, "max_pixels": 128},
        {"min_pixels": 300, "total_pixels": 400},
        {"max_pixels": 2000},
    ],
    ids=str,
)
def test_frame_limits_match_qwen_rule(options: dict) -> None:
    medium, video = media(max_pixels=12_000), VideoFile(make_video(20), PIXELS)
    limits = MediaOptions(**options, nframes=8)
    (part,) = medium.parts(video, limits)
    rows, columns = qwen_frame_size((32, 48), 8, limits, 12_000)
    assert medium.grid_thw(part.meta) == (4, rows // 4, columns // 4)
    assert part.meta.patches == 4 * (rows // 4) * (columns // 4) == 4 * part.meta.tokens
    assert medium.pixels(part.file, part.meta).shape == medium.blank(part.meta).shape


def test_frame_options_override_recipe() -> None:
    video, medium = VideoFile(make_video(40), PIXELS), media(fps=2.0, min_frames=4, max_frames=16)
    even = {count: [n * 40 // count for n in range(count)] for count in (2, 4, 6, 8, 10, 12, 16)}
    for options, count in [
        ({}, 8),  # 4 s at 2 fps
        ({"fps": 1.0}, 4),
        ({"fps": 3}, 12),
        ({"fps": 0.1, "min_frames": 6}, 6),
        ({"fps": 10.0, "max_frames": 10}, 10),
        ({"nframes": 10}, 10),
        ({"nframes": 5}, 4),  # round(5 / 2) pairs
        ({"nframes": 3}, 4),
        ({"fps": 0.1, "min_frames": 2}, 2),
        ({"nframes": 40}, 16),  # limit of the recipe
    ]:
        assert indices(medium, video, MediaOptions(**options)) == even[count], options
    assert medium.count_dropped_frames(video, MediaOptions(nframes=40)) == 24
    assert medium.count_dropped_frames(video, MediaOptions(fps=10, max_frames=8)) == 0
    for count in (1, 42):
        with pytest.raises(CorruptSampleError, match=f"nframes = {count} is .* the video has 40"):
            medium.parts(video, MediaOptions(nframes=count))


def test_number_of_frames_matches_hugging_face_rule() -> None:
    """Compare with `Qwen2VLVideoProcessor.sample_frames`, which requires torchvision to import."""
    video, medium = VideoFile(make_video(30), PIXELS), media(max_frames=64)
    for requested in range(2, 30):
        count = round(requested / 2) * 2
        expected = torch.arange(0, 30, 30 / count).int().tolist()[:count]
        assert indices(medium, video, MediaOptions(nframes=requested)) == expected


@pytest.mark.parametrize(("start", "end"), [(1.0, 2.0), (0.05, 3.99), (None, 1.55), (2.5, None)])
def test_time_range_matches_qwen_rule(start: float | None, end: float | None) -> None:
    video, medium = VideoFile(make_video(40), PIXELS), media(CLIP, fps=5.0, min_frames=1)
    first = 0 if start is None else int(-(-start * 10 // 1))
    last = 39 if end is None else min(39, int(end * 10))
    count = int((last - first + 1) / 10 * 5)
    expected = [first + number * (last - first + 1) // count for number in range(count)]
    parts = medium.parts(video, MediaOptions(video_start=start, video_end=end))
    assert [number for part in parts for number in part.file.frame_indices] == expected
    assert parts[0].before == f"<{expected[0] / 10:.1f} seconds>"  # time in the file


def test_empty_time_range_is_corrupt() -> None:
    video, options = VideoFile(make_video(8), PIXELS), MediaOptions(video_start=1.5)
    with pytest.raises(CorruptSampleError, match=r"no frame between video_start = 1\.5"):
        media().parts(video, options)


# Lists of frames


@pytest.mark.parametrize("count", [4, 5, 1])
def test_frame_list_matches_hugging_face_patches(count: int) -> None:
    """Check that the last frame is repeated in an incomplete patch, as in Qwen."""
    x_FCHW = noise(count, 24, 16)
    images = [Image.fromarray(x_HWC.numpy()) for x_HWC in x_FCHW.permute(0, 2, 3, 1).contiguous()]
    medium = media(min_frames=8)
    (part,) = medium.parts(frames_of(images, 3.0))
    assert part.file.frame_indices == tuple(range(count))
    assert part.meta.duration_ms == pytest.approx((count + count % 2) / 3 * 1000, abs=1)
    actual = to_model_inputs(medium.pixels(part.file, part.meta), medium.byte_values)
    assert np.abs(actual - reference_patches(x_FCHW).numpy()).max() < 1e-5


def test_long_frame_list_is_sampled() -> None:
    video, medium = frames_of(pictures(20), 10.0), media(fps=2.0, max_frames=8)
    assert indices(medium, video) == [n * 20 // 8 for n in range(8)]
    assert medium.count_dropped_frames(video) == 12
    options = MediaOptions(fps=2.0, sample_fps=10.0)  # 2 s at 2 fps
    assert indices(medium, video, options) == [0, 5, 10, 15]
    assert indices(medium, video, MediaOptions(nframes=6)) == [0, 3, 6, 10, 13, 16]


@pytest.mark.parametrize(("count", "rate"), [(6, 2.0), (5, 3.0), (7, 0.5)])
def test_frame_times_match_qwen3_processor(count: int, rate: float) -> None:
    medium = media(replace(QWEN, splits_clips=True))
    parts = medium.parts(frames_of(pictures(count), rate))
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), rate, 2)
    assert [part.before for part in parts] == [f"<{time:.1f} seconds>" for time in times]


@pytest.mark.parametrize("rate", [2.0, 3.0, 1.0, 0.3, 24.0])
def test_frame_positions_match_qwen2_5(rate: float, tmp_path, tokenizer, text_spec) -> None:
    config = AutoConfig.for_model("qwen2_5_vl")
    config.text_config.update({"num_hidden_layers": 1})
    config.vision_config.depth = 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    frames = [encode(image, "PNG") for image in pictures(19, 24, 16)]
    entry = {"type": "video", "video": [base64_url(f) for f in frames], "sample_fps": rate}
    path = write_jsonl(tmp_path / "a.jsonl", [chat([entry, words("what is it")])] * 4)
    per_second = config.vision_config.tokens_per_second
    text = replace(text_spec, positions="mrope", tokens_per_second=per_second)
    microbatch = load_one(tmp_path, tokenizer, text, path)
    ids = microbatch.input_ids_T[None]
    grid = torch.tensor(microbatch.encoders["vision"].grids_thw[:1])
    length = microbatch.cu_seqlens[1]
    image_id = text.image_token_id
    expected, _ = model.get_rope_index(
        input_ids=ids[:, :length],
        mm_token_type_ids=2 * (ids[:, :length] == image_id).int(),
        video_grid_thw=grid,
        second_per_grid_ts=torch.tensor([2 / rate]),
    )
    assert grid.tolist()[0][0] == 10
    assert microbatch.position_ids[:, :length].tolist() == expected[:, 0].tolist()


def test_damaged_frame_is_reported() -> None:
    files = [encode(image, "PNG") for image in pictures(4)]
    for bad, reason in [
        (png(16, 16), r"frame 3 of a video has 16x16 pixels, but frame 1 has 48x32"),
        (b"nothing", "frame 3 of a video: not an image"),
    ]:
        video = FrameFiles([*files[:2], bad, files[3]].__getitem__, 4, 2.0, PIXELS)
        media().parts(video)
        with pytest.raises(CorruptSampleError, match=reason):
            video.check_files()
        with pytest.raises(CorruptSampleError, match=reason):
            video.decode([0, 2])
    with pytest.raises(CorruptSampleError, match=r"larger than data\.max_image_pixels = 100"):
        frames_of(pictures(2), 2.0, max_pixels=100)


# Records


def base64_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def words(text: str) -> dict:
    return {"type": "text", "text": text}


def chat(content: list, **columns: object) -> dict:
    answer = {"role": "assistant", "content": "two red dogs"}
    return {"messages": [{"role": "user", "content": content}, answer], **columns}


def load_one(tmp_path, tokenizer, text, path, streaming: bool = False, specs=(QWEN,), **video):
    source = SourceConfig(path=str(path), files=str(tmp_path), streaming=streaming)
    if path.suffix == ".tar":
        source = SourceConfig(path=str(path), streaming=streaming)
    loader = build_loader(
        data_config(tmp_path, source, video=VideoConfig(**video)),
        training(sequence_length=512),
        text_spec=text,
        image_specs={spec.encoder: spec for spec in specs},
        tokenizer=tokenizer,
        data_parallel_rank=0,
        data_parallel_size=1,
        state=None,
    )
    (batch,) = islice(loader, 1)
    assert not batch.skipped
    return batch.microbatches[0]


FRAMES = {f"clip/{n} a.png": encode(image, "PNG") for n, image in enumerate(pictures(5))}
NAMES = list(FRAMES)
LIMITS = {"sample_fps": 1.0, "max_pixels": 256}
QWEN_PART = {"type": "video", "video": NAMES, **LIMITS}
RECORDS = {
    # QwenLM/Qwen3-VL, README: a list of images as a video
    "qwen": chat([QWEN_PART, words("what is it")]),
    "qwen_urls": chat(
        [
            {**QWEN_PART, "video": ["file://{root}/" + n.replace(" ", "%20") for n in NAMES]},
            words("what is it"),
        ]
    ),
    "qwen_without_type": chat(
        [{"video": [base64_url(f) for f in FRAMES.values()], **LIMITS}, words("what is it")]
    ),
    # Hugging Face: the part has the options, the column the file
    "hugging_face": chat([{"type": "video", **LIMITS}, words("what is it")], videos=[NAMES]),
    # verl: objects in the column
    "verl": chat(
        [{"type": "video"}, words("what is it")],
        videos=[{"video": NAMES, "type": "video"} | LIMITS],
    ),
    # ms-swift and LLaMA-Factory: lists in the column. These formats have no options.
    "ms_swift": {
        "messages": [
            {"role": "user", "content": "<video>what is it"},
            {"role": "assistant", "content": "two red dogs"},
        ],
        "videos": [NAMES],
    },
    "llama_factory": {
        "conversations": [
            {"from": "human", "value": "<video>what is it"},
            {"from": "gpt", "value": "two red dogs"},
        ],
        "videos": [NAMES],
    },
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("streaming", [False, True])
def test_published_records_have_same_clip(name, streaming, tmp_path, tokenizer, text_spec) -> None:
    for frame, data in FRAMES.items():
        (tmp_path / frame).parent.mkdir(exist_ok=True)
        (tmp_path / frame).write_bytes(data)
    record = json.loads(json.dumps(RECORDS[name]).replace("{root}", str(tmp_path)))
    path = write_jsonl(tmp_path / "records.jsonl", [record] * 4)
    text = replace(text_spec, video_token_id=6)
    microbatch = load_one(tmp_path, tokenizer, text, path, streaming, fps=1.0)
    images = microbatch.meta.images_of_encoder("vision")
    (grid,) = {*microbatch.encoders["vision"].grids_thw}
    assert grid == (3, 4, 6) if name in ("ms_swift", "llama_factory") else grid == (3, 2, 4)
    assert {image.duration_ms for image in images} == {6000}  # 5 frames and the repeated one
    ids = microbatch.input_ids_T[: microbatch.cu_seqlens[1]].tolist()
    tokens = grid[0] * grid[1] * grid[2] // 4
    assert ids.count(6) == tokens == images[0].tokens
    user, answer = (tokenizer(t).input_ids for t in ("<|user|>", "<|assistant|>two red dogs</s>"))
    end = tokenizer("</s>", add_special_tokens=False).input_ids
    question = tokenizer("what is it").input_ids
    assert ids == [*user, *[6] * tokens, *question, *end, *answer]
    halves = microbatch.encoders["vision"].values().pixels[: grid[0] * grid[1] * grid[2]]
    halves = halves.reshape(3, grid[1] * grid[2], 3, 2, 16)
    assert torch.equal(halves[2, :, :, 0], halves[2, :, :, 1])  # repeated frame
    assert not torch.equal(halves[1, :, :, 0], halves[1, :, :, 1])


def test_tables_and_tars_have_lists_of_frames(tmp_path, tokenizer, text_spec) -> None:
    frames = list(FRAMES.values())
    rows = [{"videos": [[{"bytes": f, "path": None} for f in frames]], "text": caption(1)}] * 4
    write_parquet(tmp_path / "structs", rows)
    write_parquet(tmp_path / "bytes", [{**row, "videos": [frames]} for row in rows])
    record = {"video": {"video": [base64_url(f) for f in frames], "nframes": 2}, "text": caption(1)}
    write_shard(tmp_path / "a.tar", [("0.json", json.dumps(record).encode())])
    for name, groups in (("structs", 3), ("bytes", 3), ("a.tar", 1)):
        for streaming in (False, True):
            microbatch = load_one(tmp_path, tokenizer, text_spec, tmp_path / name, streaming)
            metas = microbatch.meta.images_of_encoder("vision")
            assert {image.frames for image in metas} == {groups}
            assert microbatch.encoders["vision"].grids_thw[0] == (groups, 4, 6)


def test_several_encoders_read_frames(tmp_path, tokenizer, text_spec) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [RECORDS["qwen_without_type"]] * 4)
    second = replace(QWEN, encoder="second")
    microbatch = load_one(tmp_path, tokenizer, text_spec, path, specs=(QWEN, second))
    first, other = (microbatch.encoders[name] for name in ("vision", "second"))
    assert first.grids_thw == other.grids_thw and torch.equal(first.pixels, other.pixels)


def test_images_of_a_record_have_different_limits(tmp_path, tokenizer, text_spec) -> None:
    """Check that planning and decoding use the limits: a batch fails if sizes differ."""
    parts = [
        {"type": "image", "image": base64_url(png(64, 32)), "max_pixels": 128},
        {"type": "image", "image": base64_url(png(64, 32))},
        {"image": base64_url(png(64, 32)), "resized_height": 40, "resized_width": 24.0},
        words("what is it"),
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [chat(parts)] * 4)
    for streaming in (False, True):
        microbatch = load_one(tmp_path, tokenizer, text_spec, path, streaming)
        assert microbatch.encoders["vision"].grids_thw[:3] == [(1, 2, 4), (1, 4, 8), (1, 10, 6)]
        assert [i.rows for i in microbatch.meta.samples[0].images] == [2, 0, 10]


def test_digest_depends_on_frames_and_sizes(tokenizer, text_spec, root) -> None:
    reader = SampleReader(DataConfig(), 512, text_spec, {"vision": QWEN}, tokenizer)

    def digest(part: dict) -> str:
        total = SamplesDigest()
        total.add(reader.read(Record(chat([part, words("a")]), root)))
        return total.hexdigest()

    files = [base64_url(f) for f in FRAMES.values()]
    sized = partial(dict, type="image", image=files[0])
    digests = {
        digest({"type": "video", "video": files}),
        digest({"type": "video", "video": files[::-1]}),
        digest({"type": "video", "video": files, "nframes": 4}),
        digest(sized(resized_height=16, resized_width=32)),
        digest(sized(resized_height=32, resized_width=16)),
    }
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"fps": "2"}, r"video has fps = '2'; use a number"),
        ({"fps": 0}, "video has fps = 0; use a number"),
        ({"fps": True}, "video has fps = True"),
        ({"nframes": 2.5}, r"video has nframes = 2\.5; use an integer of at least 1"),
        ({"max_pixels": -1}, "video has max_pixels = -1"),
        ({"min_pixels": 1e99}, "video has min_pixels"),
        ({"fps": 1.0, "nframes": 4}, "video has fps and nframes; keep one"),
        ({"min_frames": 8, "max_frames": 4}, "min_frames = 8 and max_frames = 4; swap"),
        ({"min_pixels": 99, "max_pixels": 9}, "min_pixels = 99 and max_pixels = 9; swap"),
        ({"resized_height": 28}, "resized_height = 28 and resized_width = None; set both"),
        ({"resized_height": 9999, "resized_width": 2}, "aspect ratio of at most 200"),
        ({"raw_fps": 5.0}, r"video part of a user message has raw_fps = 5\.0, which is not"),
        ({"type": "image", "video": None, "path": "a.png", "fps": 1}, "image part .* has fps = 1,"),
    ],
)
def test_invalid_option_is_rejected(part: dict, reason: str, read) -> None:
    with pytest.raises(CorruptSampleError, match=reason):
        read(chat([{"type": "video", "video": NAMES, **part}, words("a")]))


def test_equal_limits_are_accepted() -> None:
    limits = {"min_frames": 8, "max_frames": 8, "min_pixels": 99, "max_pixels": 99}
    assert MediaOptions.read("video", limits) == MediaOptions(**limits)


def test_missing_options_are_ignored() -> None:
    values = {"fps": None, "nframes": float("nan"), "max_pixels": 100.0}
    assert MediaOptions.read("video", values) == MediaOptions(max_pixels=100)
    with pytest.raises(CorruptSampleError, match="audio has fps = 1, which is not supported"):
        MediaOptions.read("audio", {"fps": 1})


def test_columns_reject_unknown_keys_and_lists_of_images(read) -> None:
    for column, reason in [
        ({"videos": [{"video": NAMES, "speed": 2}]}, "video has speed = 2, which is not supported"),
        ({"videos": [[1, 2]]}, "image is int, not bytes or a path"),
        ({"videos": [["a.png", None]]}, "image is NoneType"),
        ({"images": [["a.png", "b.png"]]}, "image is list, not bytes or a path"),
    ]:
        with pytest.raises(CorruptSampleError, match=reason):
            read({**column, "text": "a"})
