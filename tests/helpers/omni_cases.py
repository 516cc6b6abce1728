"""Samples with images, sounds and clips, as our Omni models and as Hugging Face's take them."""

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
"""Of the image in each of two samples."""
CLIP = (3, 4, 4)
SECONDS = 0.7
"""From one group of the clip's frames to the next."""


@dataclass(frozen=True)
class Ear:
    """How a tower of `model_cases` cuts sounds."""

    frames: int
    """Mel frames of a position."""
    chunk: int
    """Positions of a chunk."""
    chunk_frames: int
    """Its mel frames."""
    pooled: int
    """Positions of a token."""
    lengths: list[int]
    """Positions of the sound in each of two samples; the first has two whole chunks."""

    def frames_of(self, positions: int) -> int:
        """Mel frames of a sound."""
        whole, rest = divmod(positions, self.chunk)
        return self.chunk_frames * whole + self.frames * rest

    def patches_of(self, mels_FM: Tensor) -> Tensor:
        """As data prepare them: the last position of a chunk is filled with zeros."""
        chunks = []
        for piece_FM in mels_FM.split(self.chunk_frames):
            whole = len(piece_FM) == self.chunk_frames
            missing = self.frames * self.chunk - self.chunk_frames if whole else 0
            chunks.append(functional.pad(piece_FM, (0, 0, 0, missing)))
        return torch.cat(chunks).reshape(-1, self.frames * MELS)


EARS = {
    "qwen3_omni": Ear(8, 13, 100, 1, [30, 4]),
    "qwen2_5_omni": Ear(2, 5, 10, 2, [12, 4]),
}


class Read(NamedTuple):
    """An image, clip or sound as its encoder reads it."""

    patches_PV: Tensor
    grid_thw: tuple[int, int, int]


def text_of(name: str) -> TextConventions:
    """How images, clips and sounds appear in the text of a model of `COMPOSITES`."""
    config = AutoConfig.for_model(**COMPOSITES[name])
    return FAMILIES[config.model_type].take(config).text


class OmniSample:
    """Text with media in it.

    Args:
        name: of the model, in `COMPOSITES`.
        media: what stands in the text: i an image, s a sound, c a clip.
        number: 0 or 1, which decides sizes.
    """

    def __init__(self, name: str, media: str, number: int, generator: torch.Generator) -> None:
        self._text = text_of(name)
        self._ear = EARS[name]
        self._generator = generator
        self.blocks: list[VisionBlock] = []
        self._theirs: dict[str, Any] = {}
        self.read: dict[str, list[Read]] = {"vision": [], "audio": []}
        """By encoder."""
        self.ids = self._words(3)
        for kind in media:
            if kind == "s":
                self._add_sound(self._ear.lengths[number])
            else:
                self._add_frames(kind == "c", CLIP if kind == "c" else GRIDS[number])
            self.ids += self._words(2)
        self.ids += self._words(5)

    def positions(self) -> Tensor:
        """Ours: (3, L)."""
        found = mrope_positions(len(self.ids), self.blocks, self._text.clip_times)
        return torch.from_numpy(found)

    def theirs(self) -> dict[str, Any]:
        """Arguments of Hugging Face's model."""
        ids = torch.tensor([self.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._theirs}

    def _words(self, count: int) -> list[int]:
        return torch.randint(3, 50, (count,), generator=self._generator).tolist()

    def _add_sound(self, length: int) -> None:
        frames = self._ear.frames_of(length)
        mels_FM = torch.randn(frames, MELS, generator=self._generator)
        self.read["audio"].append(Read(self._ear.patches_of(mels_FM), (1, 1, length)))
        self._theirs["input_features"] = mels_FM.T[None]
        self._theirs["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.long)
        self.ids += [AUDIO_START, *[AUDIO_TOKEN_ID] * (length // self._ear.pooled), AUDIO_END]

    def _add_frames(self, is_clip: bool, grid: tuple[int, int, int]) -> None:
        pixels = torch.randn(prod(grid), 96, generator=self._generator)
        self.read["vision"].append(Read(pixels, grid))
        sizes = (grid[0], grid[1] // 2, grid[2] // 2)
        block = VisionBlock(len(self.ids) + 1, *sizes)
        if is_clip:
            assert self._text.tokens_per_second is not None
            block = block._replace(time_step=SECONDS, per_second=self._text.tokens_per_second)
            self._theirs["pixel_values_videos"] = pixels
            self._theirs["video_grid_thw"] = torch.tensor([grid])
            self._theirs["video_second_per_grid"] = torch.tensor([SECONDS])
        else:
            self._theirs["pixel_values"] = pixels
            self._theirs["image_grid_thw"] = torch.tensor([grid])
        self.blocks.append(block)
        placeholder = VIDEO_TOKEN_ID if is_clip else IMAGE_TOKEN_ID
        self.ids += [VISION_START, *[placeholder] * prod(sizes), VISION_END]


def two_samples(name: str, media: str = "is") -> list[OmniSample]:
    """With the same kinds of media, of other sizes."""
    generator = torch.Generator().manual_seed(5)
    return [OmniSample(name, media, number, generator) for number in (0, 1)]


def packed(samples: list[OmniSample]) -> Microbatch:
    """Samples one after another; all their words are to be predicted."""
    starts = [0, *accumulate(len(sample.ids) for sample in samples)]
    ids_T = torch.tensor([token for sample in samples for token in sample.ids])
    heard_T = ids_T == AUDIO_TOKEN_ID
    seen_T = (ids_T == IMAGE_TOKEN_ID) | (ids_T == VIDEO_TOKEN_ID)
    targets_T = ids_T.roll(-1)
    targets_T[heard_T | seen_T] = IGNORE_TARGET
    targets_T[torch.tensor(starts[1:]) - 1] = IGNORE_TARGET
    encoders = {}
    for encoder, slots_T in (("vision", seen_T), ("audio", heard_T)):
        read = [part for sample in samples for part in sample.read[encoder]]
        if read:
            pixels = torch.cat([part.patches_PV for part in read])
            grids = [part.grid_thw for part in read]
            encoders[encoder] = EncoderInputs(pixels, grids, slots_T.nonzero().flatten())
    positions = torch.cat([sample.positions() for sample in samples], dim=1)
    meta = MicrobatchMeta((), len(ids_T))
    return Microbatch(ids_T, targets_T, positions, starts, encoders, meta)


def images_and_audio(name: str) -> Microbatch:
    """Two samples, with an image and then a sound in each."""
    return packed(two_samples(name))
