"""Samples with images, audio and videos for our Omni models and those of Hugging Face."""

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from model_cases import AUDIO_TOKEN_ID, COMPOSITES, IMAGE_TOKEN_ID
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig

from torchmm.common.batch import IGNORE_TARGET, EncoderInputs, Microbatch, MicrobatchMeta
from torchmm.data.media.text import VisionBlock, mrope_positions
from torchmm.models.families.composites.registry import COMPOSITES as FAMILIES
from torchmm.models.families.text_conventions import TextConventions

VISION_START, VISION_END, AUDIO_START, AUDIO_END = 61, 60, 58, 57
VIDEO_TOKEN_ID = 62
MELS = 8
GRIDS = [(1, 4, 6), (1, 6, 2)]
"""Grid of the image in each of two samples."""
VIDEO_GRID = (3, 4, 4)
SECONDS = 0.7
"""Time from one group of video frames to the next."""


@dataclass(frozen=True)
class Ear:
    """Chunk sizes of an audio tower of `model_cases`."""

    frames: int
    """Mel frames of a position."""
    chunk: int
    """Positions of a chunk."""
    chunk_frames: int
    """Mel frames of a chunk."""
    pooled: int
    """Positions of a token."""
    lengths: list[int]
    """Positions of the audio in each of two samples; the first has two complete chunks."""

    def frames_of(self, positions: int) -> int:
        """Return the mel frames of an audio input."""
        chunks, rest = divmod(positions, self.chunk)
        return self.chunk_frames * chunks + self.frames * rest

    def patches_of(self, mels_FM: Tensor) -> Tensor:
        """Return patches as data loading prepares them; zeros fill the last position of a chunk."""
        chunks = []
        for chunk_FM in mels_FM.split(self.chunk_frames):
            is_complete = len(chunk_FM) == self.chunk_frames
            padding = self.frames * self.chunk - self.chunk_frames if is_complete else 0
            chunks.append(functional.pad(chunk_FM, (0, 0, 0, padding)))
        return torch.cat(chunks).reshape(-1, self.frames * MELS)


EARS = {
    "qwen3_omni": Ear(8, 13, 100, 1, [30, 4]),
    "qwen2_5_omni": Ear(2, 5, 10, 2, [12, 4]),
}


class Read(NamedTuple):
    """Encoder input of an image, a video or an audio input."""

    patches_PV: Tensor
    grid_thw: tuple[int, int, int]


def text_of(name: str) -> TextConventions:
    """Return the text conventions of a model of `COMPOSITES` for media."""
    config = AutoConfig.for_model(**COMPOSITES[name])
    return FAMILIES[config.model_type].get_components(config).text


class OmniSample:
    """Text with media.

    Args:
        name: Name of the model in `COMPOSITES`.
        media: Media in their order: i is an image, s an audio input, c a video.
        number: 0 or 1, which determines sizes.
    """

    def __init__(self, name: str, media: str, number: int, generator: torch.Generator) -> None:
        self._text = text_of(name)
        self._sizes = EARS[name]
        self._generator = generator
        self.blocks: list[VisionBlock] = []
        self._hf_inputs: dict[str, Any] = {}
        self.read: dict[str, list[Read]] = {"vision": [], "audio": []}
        """By encoder."""
        self.ids = self._words(3)
        for kind in media:
            if kind == "s":
                self._add_audio(self._sizes.lengths[number])
            else:
                self._add_frames(kind == "c", VIDEO_GRID if kind == "c" else GRIDS[number])
            self.ids += self._words(2)
        self.ids += self._words(5)

    def positions(self) -> Tensor:
        """Return positions of our model, (3, L)."""
        positions = mrope_positions(len(self.ids), self.blocks, self._text.clip_times)
        return torch.from_numpy(positions)

    def theirs(self) -> dict[str, Any]:
        """Return the arguments of the model of Hugging Face."""
        ids = torch.tensor([self.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._hf_inputs}

    def _words(self, count: int) -> list[int]:
        return torch.randint(3, 50, (count,), generator=self._generator).tolist()

    def _add_audio(self, length: int) -> None:
        frames = self._sizes.frames_of(length)
        mels_FM = torch.randn(frames, MELS, generator=self._generator)
        self.read["audio"].append(Read(self._sizes.patches_of(mels_FM), (1, 1, length)))
        self._hf_inputs["input_features"] = mels_FM.T[None]
        self._hf_inputs["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.long)
        self.ids += [AUDIO_START, *[AUDIO_TOKEN_ID] * (length // self._sizes.pooled), AUDIO_END]

    def _add_frames(self, is_video: bool, grid: tuple[int, int, int]) -> None:
        pixels = torch.randn(prod(grid), 96, generator=self._generator)
        self.read["vision"].append(Read(pixels, grid))
        sizes = (grid[0], grid[1] // 2, grid[2] // 2)
        block = VisionBlock(len(self.ids) + 1, *sizes)
        if is_video:
            assert self._text.tokens_per_second is not None
            block = block._replace(time_step=SECONDS, per_second=self._text.tokens_per_second)
            self._hf_inputs["pixel_values_videos"] = pixels
            self._hf_inputs["video_grid_thw"] = torch.tensor([grid])
            self._hf_inputs["video_second_per_grid"] = torch.tensor([SECONDS])
        else:
            self._hf_inputs["pixel_values"] = pixels
            self._hf_inputs["image_grid_thw"] = torch.tensor([grid])
        self.blocks.append(block)
        placeholder = VIDEO_TOKEN_ID if is_video else IMAGE_TOKEN_ID
        self.ids += [VISION_START, *[placeholder] * prod(sizes), VISION_END]


def two_samples(name: str, media: str = "is") -> list[OmniSample]:
    """Return two samples with the same kinds of media, of different sizes."""
    generator = torch.Generator().manual_seed(5)
    return [OmniSample(name, media, number, generator) for number in (0, 1)]


def packed(samples: list[OmniSample]) -> Microbatch:
    """Return a microbatch of the samples, with all words as targets."""
    starts = [0, *accumulate(len(sample.ids) for sample in samples)]
    ids_T = torch.tensor([token for sample in samples for token in sample.ids])
    audio_T = ids_T == AUDIO_TOKEN_ID
    vision_T = (ids_T == IMAGE_TOKEN_ID) | (ids_T == VIDEO_TOKEN_ID)
    targets_T = ids_T.roll(-1)
    targets_T[audio_T | vision_T] = IGNORE_TARGET
    targets_T[torch.tensor(starts[1:]) - 1] = IGNORE_TARGET
    encoders = {}
    for encoder, placeholders_T in (("vision", vision_T), ("audio", audio_T)):
        inputs = [part for sample in samples for part in sample.read[encoder]]
        if inputs:
            pixels = torch.cat([part.patches_PV for part in inputs])
            grids = [part.grid_thw for part in inputs]
            encoders[encoder] = EncoderInputs(pixels, grids, placeholders_T.nonzero().flatten())
    positions = torch.cat([sample.positions() for sample in samples], dim=1)
    meta = MicrobatchMeta((), len(ids_T))
    return Microbatch(ids_T, targets_T, positions, starts, encoders, meta)


def images_and_audio(name: str) -> Microbatch:
    """Return two samples, each with an image followed by audio."""
    return packed(two_samples(name))
