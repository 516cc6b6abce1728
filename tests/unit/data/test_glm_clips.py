"""GLM-4V videos: text, times, frames and pixels match the Hugging Face processors.

`test_video_model` compares loss and gradients of complete batches. The video processor of GLM-4.6V
requires torchvision. Its patches equal those of GLM-4.1V, but it selects frames differently.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_cases import GLM as PICTURE
from data_cases import caption, data_config, training, write_parquet
from model_cases import build, relative_error
from PIL import Image
from test_video import FakeFrames, pictures
from test_video_model import CLIP_END, CLIP_START, END, GLM, IMAGE, START, single, tiny
from test_video_reference import noise
from torch import Tensor
from torch.nn import functional
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor, smart_resize
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.video_utils import VideoMetadata

from torchmm.common.batch import Microbatch, TextSpec
from torchmm.data.build import build_loader
from torchmm.data.media.images import ImagePreprocessor
from torchmm.data.media.uint8_pixels import to_model_inputs
from torchmm.data.media.video import VideoFile, VideoMedia, sample_frame_indices
from torchmm.data.media.video_writer import encode_video
from torchmm.recipe.data_section import SourceConfig, VideoConfig

PROCESSORS = {"glm4v": Glm4vProcessor, "glm4v_moe": Glm4vProcessor, "glm46v": Glm46VProcessor}
MARKERS = {
    "<|begin_of_image|>": START,
    "<|end_of_image|>": END,
    "<|begin_of_video|>": CLIP_START,
    "<|end_of_video|>": CLIP_END,
    "[I]": IMAGE,
}
RATE = 3
VIDEO = VideoConfig(fps=float(RATE), max_pixels=16 * 1024)


@pytest.fixture
def first_sample(tmp_path, tokenizer):
    """Return a function that loads the first sample of identical videos with a caption."""

    def load(model, frames: int, **settings) -> Microbatch:
        video = encode_video(pictures(frames, 24, 16), fps=RATE)
        path = write_parquet(tmp_path / "clips", [{"video": video, "text": caption(1)}] * 4)
        loader = build_loader(
            data_config(
                tmp_path,
                SourceConfig(path=str(path), name="clips"),
                video=VIDEO.model_copy(update=settings),
            ),
            training(sequence_length=256),
            text_spec=model.text_spec(tokenizer),
            image_specs=model.image_specs(),
            tokenizer=tokenizer,
            data_parallel_rank=0,
            data_parallel_size=1,
            state=None,
        )
        return single(next(iter(loader)).microbatches[0], 0)

    return load


def text_of_processor(name: str, shown: list[int], rows: int, columns: int) -> str:
    """Return the text of a video with these frames and its markers, as in the chat template."""
    kind = PROCESSORS[name]
    processor = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), image_token="[I]")
    processor.replace_frame_token_id = partial(kind.replace_frame_token_id, processor)
    metadata = VideoMetadata(total_num_frames=100, fps=RATE, frames_indices=shown)
    sizes = torch.tensor([[len(shown) // 2, rows, columns]])
    inputs = {"video_grid_thw": sizes, "video_metadata": [metadata]}
    return f"<|begin_of_video|>{kind.replace_video_token(processor, inputs, 0)}<|end_of_video|>"


@pytest.mark.parametrize("frames", [8, 7, 14])
@pytest.mark.parametrize("name", GLM)
def test_video_text_matches_hugging_face_processor(
    name: str, frames: int, first_sample, tokenizer
) -> None:
    sample = first_sample(build(tiny(name)), frames)
    frame_indices = sample_frame_indices(frames, frames / RATE, VIDEO, group=2)
    ((_, rows, columns), *remaining) = sample.encoders["vision"].grids_thw
    assert 2 * (1 + len(remaining)) == len(frame_indices) > 2
    expected: list[int] = []
    text = text_of_processor(name, frame_indices, rows, columns)
    for part in filter(None, re.split(r"(<\|\w+\|>|\[I\])", text)):
        is_marker = part in MARKERS
        expected += (
            [MARKERS[part]] if is_marker else tokenizer(part, add_special_tokens=False).input_ids
        )
    ids = sample.input_ids_T.tolist()
    begin = ids.index(CLIP_START)
    assert ids[begin : begin + len(expected)] == expected
    assert IMAGE not in ids[begin + len(expected) :]
    assert set(ids[:begin]) == {tokenizer.bos_token_id}


def test_video_times_are_truncated_or_rounded_by_model(first_sample, tokenizer) -> None:
    written = {}
    for name in ("glm4v", "glm46v"):
        ids = first_sample(build(tiny(name)), 8).input_ids_T.tolist()
        marker_ids = set(MARKERS.values())
        runs = "".join("|" if i in marker_ids else tokenizer.decode([i]) for i in ids)
        written[name] = [run for run in runs.split("|") if run[:1].isdigit()]
    assert written["glm4v"] == ["0", "0", "1", "2"]
    assert written["glm46v"] == [f"{t} seconds" for t in ("0.0", "0.7", "1.3", "2.0")]


def test_video_times_and_markers_change_loss(first_sample) -> None:
    model = build(tiny("glm4v"))
    right = model(first_sample(model, 8))
    text = model.text
    untimed = first_sample(model, 8, timestamps=False)
    assert relative_error(model(untimed), right) > 1e-4
    ids = untimed.input_ids_T.tolist()
    assert ids[ids.index(END) + 1] == START and ids[ids.index(CLIP_END) - 1] == END
    for change in ({"group": "{whole_s}{frames}"}, {"prefix": (), "suffix": ()}):
        model.text = replace(text, clip=replace(text.clip, **change))
        assert relative_error(model(first_sample(model, 8)), right) > 1e-4


@pytest.mark.parametrize(("rate", "seconds"), [(24, 8), (30, 2), (10, 299), (2, 7), (6, 1)])
def test_frames_match_hugging_face_at_integer_rate(rate, seconds) -> None:
    config = VideoConfig(fps=2.0, min_frames=2, max_frames=600)
    metadata = VideoMetadata(total_num_frames=rate * seconds, fps=rate, duration=seconds)
    rule = SimpleNamespace(fps=2, max_duration=300)
    expected = Glm4vVideoProcessor.sample_frames(rule, metadata).tolist()
    assert sample_frame_indices(rate * seconds, seconds, config, group=2) == expected


def test_frames_are_near_hugging_face_otherwise() -> None:
    config = VideoConfig(fps=2.0)
    metadata = VideoMetadata(total_num_frames=200, fps=25, duration=8)
    rule = SimpleNamespace(fps=2, max_duration=300)
    expected = Glm4vVideoProcessor.sample_frames(rule, metadata)
    actual = sample_frame_indices(200, 8.0, config, group=2)
    assert np.abs(expected - actual).max() == 1


def reference_patches(x_FCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Return patches (P, D) of frames with values 0 to 255.

    torchvision calls the same resizing function of torch.
    """
    if size != tuple(x_FCHW.shape[2:]):
        x_FCHW = functional.interpolate(x_FCHW, size, mode="bicubic", antialias=True)
    mean, std = torch.tensor([OPENAI_CLIP_MEAN, OPENAI_CLIP_STD]).view(2, 3, 1, 1)
    x_FCHW = (x_FCHW / 255 - mean) / std
    return Glm4vVideoProcessor.patchify(None, x_FCHW[None], 4, 2, 2)[0][0]


@pytest.mark.parametrize(
    ("frames", "width", "height", "resized"),
    [(2, 24, 16, False), (6, 16, 32, False), (4, 50, 22, True), (7, 30, 90, True)],
)
def test_video_patches_match_hugging_face_processor(
    frames: int, width: int, height: int, resized: bool
) -> None:
    min_pixels, max_pixels = 64, 8400  # an integer number of pixels per frame
    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    spec = replace(PICTURE, splits_clips=True, processor={**PICTURE.processor, "size": size})
    config = VideoConfig(fps=1.0, min_frames=1, max_pixels=max_pixels)
    medium = VideoMedia(ImagePreprocessor(spec), config, TextSpec(64, 63))
    video = encode_video(pictures(frames, width, height), fps=1)
    parts = medium.parts(VideoFile(video, max_pixels=width * height))
    even = frames // 2 * 2
    expected_size = smart_resize(even, height, width, 2, 8, min_pixels, max_pixels)
    assert resized == (expected_size != (height, width))
    rows, columns = (side // 4 for side in expected_size)
    assert [medium.grid_thw(part.meta) for part in parts] == [(1, rows, columns)] * (even // 2)
    x_FCHW = noise(even, width, height)
    images = [Image.fromarray(x_HWC.numpy()) for x_HWC in x_FCHW.permute(0, 2, 3, 1).contiguous()]
    stored = np.concatenate(
        [
            medium.pixels(FakeFrames(images[2 * number :][:2]), part.meta)  # type: ignore[arg-type]
            for number, part in enumerate(parts)
        ]
    )
    actual = to_model_inputs(stored, medium.byte_values)
    expected = reference_patches(x_FCHW, expected_size).numpy()
    assert actual.shape == expected.shape
    # Pillow and torch round differently when they resize, by at most 1 of 256 values.
    allowed = 1.001 / 255 / min(OPENAI_CLIP_STD) if resized else 1e-5
    assert np.abs(actual - expected).max() <= allowed
