"""Frames and patches of clips are those of Hugging Face's Qwen2VLVideoProcessor.

That one needs torchvision. What it does is written down here once more, and compared with ours
everywhere, with Hugging Face's where torchvision is installed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from data_cases import QWEN
from PIL import Image
from test_video import FakeFrames
from torch import Tensor
from torch.nn import functional
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.video_utils import VideoMetadata

from torchmm.common.batch import TextSpec
from torchmm.data.media.images import ImagePreprocessor
from torchmm.data.media.stored_pixels import values_of
from torchmm.data.media.video import ClipMedia, sampled_frames
from torchmm.recipe.data_section import VideoConfig

CONFIG = VideoConfig(fps=2.0, min_frames=4, max_frames=24)
SIZE = {"shortest_edge": 64, "longest_edge": 512}  # pixels, as QWEN has them
RATES = [(frames, rate) for frames in range(4, 300, 7) for rate in (10.0, 24.0, 29.97)]
AS_THEY_ARE, RESIZED = [(5, 24, 16), (6, 16, 32)], [(7, 50, 22), (4, 10, 30), (3, 20, 5)]
"""Frames, width and height."""


def reference_numbers(frames: int, rate: float) -> list[int]:
    """Of the frames that are taken."""
    most = min(CONFIG.max_frames, frames) // 2 * 2
    count = int(min(max(frames / rate * CONFIG.fps, CONFIG.min_frames), most) // 2 * 2)
    return torch.arange(0, frames, frames / count).int().tolist()


def reference_patches(x_FCHW: Tensor) -> Tensor:
    """(P, D) of frames in 256 steps; torch's resizing is what torchvision calls."""
    height, width = x_FCHW.shape[2:]
    size = smart_resize(height, width, 8, SIZE["shortest_edge"], SIZE["longest_edge"])
    if size != (height, width):
        x_FCHW = functional.interpolate(x_FCHW, size, mode="bicubic", antialias=True)
    mean, std = torch.tensor([OPENAI_CLIP_MEAN, OPENAI_CLIP_STD]).view(2, 3, 1, 1)
    x_FCHW = (x_FCHW / 255 - mean) / std
    x_FCHW = torch.cat([x_FCHW, x_FCHW[-1:].expand(len(x_FCHW) % 2, -1, -1, -1)])
    # Pairs of frames, colors, then rows and columns: of what is merged, its patches, their pixels.
    x = x_FCHW.reshape(-1, 2, 3, size[0] // 8, 2, 4, size[1] // 8, 2, 4)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 4 * 4)


def noise(frames: int, width: int, height: int) -> Tensor:
    """(F, C, H, W) in 256 steps."""
    shape = (frames, 3, height, width)
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_frames_are_those_of_the_reference() -> None:
    for frames, rate in RATES:
        found = sampled_frames(frames, frames / rate, CONFIG, group=2)
        assert found == reference_numbers(frames, rate)


@pytest.mark.parametrize("shape", [*AS_THEY_ARE, *RESIZED], ids=str)
def test_patches_are_those_of_the_reference(shape: tuple[int, int, int]) -> None:
    x_FCHW, (count, width, height) = noise(*shape), shape
    preprocessor = ImagePreprocessor(QWEN)
    single, groups = preprocessor.meta(width, height), -(-count // 2)
    meta = replace(single, frames=groups, patches=groups * single.patches)
    frames = [Image.fromarray(x_HWC.numpy()) for x_HWC in x_FCHW.permute(0, 2, 3, 1).contiguous()]
    medium = ClipMedia(preprocessor, CONFIG, TextSpec(64, 63))
    stored = medium.pixels(FakeFrames(frames), meta)  # type: ignore[arg-type]
    found = values_of(stored, medium.byte_values)
    expected = reference_patches(x_FCHW).numpy()
    assert found.shape == expected.shape
    # Pillow's resizing rounds otherwise than torch's, by one of 256 steps.
    most = 1.001 / 255 / min(OPENAI_CLIP_STD) if shape in RESIZED else 1e-5
    assert np.abs(found - expected).max() <= most


def test_the_reference_is_hugging_faces() -> None:
    pytest.importorskip("torchvision")
    theirs = transformers.Qwen2VLVideoProcessor(patch_size=4, min_frames=4, max_frames=24)
    for frames, rate in RATES:
        metadata = VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate)
        expected = theirs.sample_frames(metadata, fps=2.0).tolist()
        assert reference_numbers(frames, rate) == expected
    settings = {"size": SIZE, "merge_size": 2, "do_sample_frames": False, "return_tensors": "pt"}
    for shape in (*AS_THEY_ARE, *RESIZED):
        x_FCHW = noise(*shape)
        expected = theirs(x_FCHW, **settings)["pixel_values_videos"]
        assert (reference_patches(x_FCHW) - expected).abs().max() < 1e-5
