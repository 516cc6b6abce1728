"""Frames and patches of videos, compared with the Hugging Face Qwen2VLVideoProcessor.

The processor requires torchvision. This module reimplements it, compares torchmm with the
reimplementation, and compares the reimplementation with Hugging Face if torchvision is installed.
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
from torchmm.data.media.uint8_pixels import to_model_inputs
from torchmm.data.media.video import VideoMedia, sample_frame_indices
from torchmm.recipe.data_section import VideoConfig

CONFIG = VideoConfig(fps=2.0, min_frames=4, max_frames=24)
SIZE = {"shortest_edge": 64, "longest_edge": 512}  # pixels, as in QWEN
RATES = [(frames, rate) for frames in range(4, 300, 7) for rate in (10.0, 24.0, 29.97)]
UNCHANGED, RESIZED = [(5, 24, 16), (6, 16, 32)], [(7, 50, 22), (4, 10, 30), (3, 20, 5)]
"""Number of frames, width and height."""


def reference_frames(frames: int, rate: float) -> list[int]:
    """Return the indices of the sampled frames."""
    limit = min(CONFIG.max_frames, frames) // 2 * 2
    count = int(min(max(frames / rate * CONFIG.fps, CONFIG.min_frames), limit) // 2 * 2)
    return torch.arange(0, frames, frames / count).int().tolist()


def reference_patches(x_FCHW: Tensor) -> Tensor:
    """Return patches (P, D) of frames with values 0 to 255.

    torchvision calls the same resizing function of torch.
    """
    height, width = x_FCHW.shape[2:]
    size = smart_resize(height, width, 8, SIZE["shortest_edge"], SIZE["longest_edge"])
    if size != (height, width):
        x_FCHW = functional.interpolate(x_FCHW, size, mode="bicubic", antialias=True)
    mean, std = torch.tensor([OPENAI_CLIP_MEAN, OPENAI_CLIP_STD]).view(2, 3, 1, 1)
    x_FCHW = (x_FCHW / 255 - mean) / std
    x_FCHW = torch.cat([x_FCHW, x_FCHW[-1:].expand(len(x_FCHW) % 2, -1, -1, -1)])
    # Frame pairs, colors, then rows and columns of merged patches, of patches, and of pixels.
    x = x_FCHW.reshape(-1, 2, 3, size[0] // 8, 2, 4, size[1] // 8, 2, 4)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * 4 * 4)


def noise(frames: int, width: int, height: int) -> Tensor:
    """Return random frames (F, C, H, W) with values 0 to 255."""
    shape = (frames, 3, height, width)
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_sampled_frames_match_reference() -> None:
    for frames, rate in RATES:
        actual = sample_frame_indices(frames, frames / rate, CONFIG, group=2)
        assert actual == reference_frames(frames, rate)


@pytest.mark.parametrize("shape", [*UNCHANGED, *RESIZED], ids=str)
def test_video_patches_match_reference(shape: tuple[int, int, int]) -> None:
    x_FCHW, (count, width, height) = noise(*shape), shape
    preprocessor = ImagePreprocessor(QWEN)
    single, groups = preprocessor.meta(width, height), -(-count // 2)
    meta = replace(single, frames=groups, patches=groups * single.patches)
    frames = [Image.fromarray(x_HWC.numpy()) for x_HWC in x_FCHW.permute(0, 2, 3, 1).contiguous()]
    medium = VideoMedia(preprocessor, CONFIG, TextSpec(64, 63))
    stored = medium.pixels(FakeFrames(frames), meta)  # type: ignore[arg-type]
    actual = to_model_inputs(stored, medium.byte_values)
    expected = reference_patches(x_FCHW).numpy()
    assert actual.shape == expected.shape
    # Pillow and torch round differently when they resize, by at most 1 of 256 values.
    tolerance = 1.001 / 255 / min(OPENAI_CLIP_STD) if shape in RESIZED else 1e-5
    assert np.abs(actual - expected).max() <= tolerance


def test_reference_matches_hugging_face() -> None:
    pytest.importorskip("torchvision")
    theirs = transformers.Qwen2VLVideoProcessor(patch_size=4, min_frames=4, max_frames=24)
    for frames, rate in RATES:
        metadata = VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate)
        expected = theirs.sample_frames(metadata, fps=2.0).tolist()
        assert reference_frames(frames, rate) == expected
    settings = {"size": SIZE, "merge_size": 2, "do_sample_frames": False, "return_tensors": "pt"}
    for shape in (*UNCHANGED, *RESIZED):
        x_FCHW = noise(*shape)
        expected = theirs(x_FCHW, **settings)["pixel_values_videos"]
        assert (reference_patches(x_FCHW) - expected).abs().max() < 1e-5
